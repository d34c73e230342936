// Weights into the order in which the Hopper kernel reads them (plan.h), with the filters' scales.
#pragma once

#include "algos/implicit_gemm/persistent/operand.cuh"
#include "device/filter_snapshot.cuh"

namespace fastconv::algos::implicit_gemm::persistent {

constexpr int pack_threads = 256, filter_target_exponent = 13;

__device__ __forceinline__ float round_to_tf32(float value) {
  std::uint32_t result;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(result) : "f"(value));
  return __uint_as_float(result);
}

// A block per filter, those beyond K included: their rows are zeros. With a snapshot: a filter that equals it bit for
// bit is left alone (PackArgs::snapshot). A thread makes pieces of 16 bytes.
template <typename T, Mode mode>
__global__ void __launch_bounds__(pack_threads) pack_filters(
    int c, int k, int taps, int channel_blocks, int filter_tile, FilterStrides strides,
    const T* __restrict__ weight,        // [K, C, R, S]
    unsigned char* __restrict__ packed,  // [filter tile][channel block][tap][filter_tile][row bytes] (plan.h)
    int* __restrict__ exponents,         // [filter tiles * filter_tile]
    std::int64_t
        rounded_offset,          // class tf32: from there to [filter tile][channel block][tap][filter_tile][32] float32
    T* __restrict__ snapshot) {  // [K, C, R, S] or null
  using Half = std::conditional_t<std::is_same_v<T, bfloat16_t>, bfloat16_t, half_t>;
  constexpr bool is_float = std::is_same_v<T, float>;
  constexpr int row_bytes = mode == Mode::single ? 64 : 128, channels = input_row_bytes / sizeof(T);
  constexpr int pieces = channels / 8;  // of a row's halves, not counting lo
  const int filter = static_cast<int>(blockIdx.x), size = c * taps;
  const T* source = filter < k ? weight + static_cast<std::int64_t>(filter) * size : nullptr;
  if (!filter_changed<pack_threads>(source, snapshot, filter, k, size)) return;
  int exponent = 0;
  if constexpr (is_float) {
    const float largest = source == nullptr ? 0.0f : largest_weight<pack_threads>(source, size);
    exponent = scale_exponent(largest, filter_target_exponent);
  }
  const int row = column_of<T>(filter % filter_tile);
  unsigned char* target =
      packed + static_cast<std::int64_t>(filter / filter_tile) * channel_blocks * taps * filter_tile * row_bytes +
      row * row_bytes;
  // Class tf32: the same weights for TF32 products (Weights::rounded_offset).
  [[maybe_unused]] unsigned char* rounded =
      reinterpret_cast<unsigned char*>(exponents) + rounded_offset +
      static_cast<std::int64_t>(filter / filter_tile) * ((c + channels - 1) / channels) * taps * filter_tile * 128 +
      row * 128;
  const auto store = [&](unsigned char* line, int piece, const void* values) {
    const int place = row_bytes == 128 ? hopper::swizzle_128(row, piece) : hopper::swizzle_64(row, piece);
    reinterpret_cast<uint4*>(line)[place] = *static_cast<const uint4*>(values);
  };
#pragma unroll 1
  for (int i = threadIdx.x; i < channel_blocks * taps * pieces; i += pack_threads) {
    const int piece = i % pieces, step = i / pieces, block = step / taps, tap = step % taps;
    const T* of_tap = source + tap * strides.tap;
    const auto load = [&](int within) {
      const int channel = block * channels + within;
      return source != nullptr && channel < c ? of_tap[channel * strides.channel] : from_float<T>(0.0f);
    };
    T raw[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) raw[j] = load(channel_of<is_float>(piece / 2, piece % 2 * 8 + j));
    const int position = mode == Mode::single ? (block / 2 * taps + tap) * 2 + block % 2 : step;
    unsigned char* line = target + static_cast<std::int64_t>(position) * filter_tile * row_bytes;
    if constexpr (is_float) {
      alignas(16) half_t high[8], low[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float value = raw[j] * power_of_two(exponent);
        high[j] = from_float<half_t>(value);
        low[j] = from_float<half_t>(value - to_float(high[j]));
      }
      store(line, piece, high);
      if constexpr (mode == Mode::split) store(line, pieces + piece, low);
      if (mode == Mode::single && block * channels < c) {
        unsigned char* of_row = rounded + static_cast<std::int64_t>(step) * filter_tile * 128;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int natural = 2 * piece + half;  // of four float32
          alignas(16) float values[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) values[j] = round_to_tf32(load(natural * 4 + j));
          reinterpret_cast<uint4*>(of_row)[hopper::swizzle_128(row, natural)] = *reinterpret_cast<const uint4*>(values);
        }
      }
    } else {
      alignas(16) Half values[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) values[j] = raw[j];
      store(line, piece, values);
    }
  }
  if (threadIdx.x == 0) exponents[filter] = exponent;
  renew_snapshot<pack_threads>(source, snapshot, filter, k, size);
}

}  // namespace fastconv::algos::implicit_gemm::persistent
