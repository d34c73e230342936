// Weights into the order in which the Hopper kernel reads them (plan.h), with the filters' scales.
#pragma once

#include "algos/implicit_gemm/persistent/operand.cuh"
#include "device/filter_snapshot.cuh"

namespace fastconv::algos::implicit_gemm::persistent {

constexpr int pack_threads = 128, filter_target_exponent = 13;

__device__ __forceinline__ float round_to_tf32(float value) {
  std::uint32_t result;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(result) : "f"(value));
  return __uint_as_float(result);
}

// A block per filter, those beyond K included: their rows are zeros. With a snapshot: a filter that equals it bit for
// bit is left alone (PackArgs::snapshot).
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
  const auto store = [&](unsigned char* line, int byte, Half value) {
    const int piece = row_bytes == 128 ? hopper::swizzle_128(row, byte / 16) : hopper::swizzle_64(row, byte / 16);
    *reinterpret_cast<Half*>(line + piece * 16 + byte % 16) = value;
  };
  for (int i = threadIdx.x; i < channel_blocks * taps * channels; i += pack_threads) {
    const int step = i / channels, within = i % channels, product = within / 16, index = within % 16;
    const int channel = step / taps * channels + channel_of<is_float>(product, index), tap = step % taps;
    const T raw =
        source != nullptr && channel < c ? source[channel * strides.channel + tap * strides.tap] : from_float<T>(0.0f);
    const int block = step / taps;
    const int position = mode == Mode::single ? (block / 2 * taps + tap) * 2 + block % 2 : step;
    unsigned char* line = target + static_cast<std::int64_t>(position) * filter_tile * row_bytes;
    if constexpr (is_float) {
      const float value = raw * power_of_two(exponent);
      const half_t high = from_float<half_t>(value);
      store(line, within * 2, high);
      if constexpr (mode == Mode::split) store(line, 64 + within * 2, from_float<half_t>(value - to_float(high)));
      if (mode == Mode::single && block * channels < c) {
        const int natural = step / taps * channels + within;
        const float weight =
            source != nullptr && natural < c ? source[natural * strides.channel + tap * strides.tap] : 0.0f;
        unsigned char* of_row = rounded + static_cast<std::int64_t>(step) * filter_tile * 128;
        *reinterpret_cast<float*>(of_row + hopper::swizzle_128(row, within / 4) * 16 + within % 4 * 4) =
            round_to_tf32(weight);
      }
    } else {
      store(line, within * 2, raw);
    }
  }
  if (threadIdx.x == 0) exponents[filter] = exponent;
  renew_snapshot<pack_threads>(source, snapshot, filter, k, size);
}

}  // namespace fastconv::algos::implicit_gemm::persistent
