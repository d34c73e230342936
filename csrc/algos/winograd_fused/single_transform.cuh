// The producers of the one-product classes: raw input by tensor copies (or by element), V = B^T d along W in FP16.
#pragma once

#include "algos/winograd_fused/elements.cuh"
#include "algos/winograd_fused/single_layout.cuh"
#include "device/winograd_matrices.h"

namespace fastconv::algos::winograd_fused::single {

// A scale for an item. The guess brings the largest of a sample to [2^6, 2^7): the rest may be 2^6 times as large, and
// what is 2^20 times smaller is still a normal float16. Input is left as it is if the sample allows that.
constexpr int guessed_target = 6, exact_target = 12, unknown_exponent = 126;
constexpr float least_unscaled = 0x1p-6f, most_unscaled = 0x1p10f;
static_assert(winograd::Transform<4>::input_gain * (2 << exact_target) < 65504.0f);

template <typename T>
struct ProducerState {
  unsigned stage = 0;              // all of them so far; says where V is in its two slots
  hopper::RingPosition three_raw;  // where raw input is, if it has more than two
  int item_slot = 0;

  static_assert(Stage<T>::v_stages == 2);
  __device__ __forceinline__ int v_slot() const { return stage & 1; }
  __device__ __forceinline__ unsigned v_parity() const { return stage >> 1 & 1; }
  __device__ __forceinline__ int raw_slot() const { return Stage<T>::raw_stages == 2 ? v_slot() : three_raw.slot; }
  __device__ __forceinline__ unsigned raw_parity() const {
    return Stage<T>::raw_stages == 2 ? v_parity() : three_raw.parity;
  }
  __device__ __forceinline__ void advance() {
    ++stage;
    if constexpr (Stage<T>::raw_stages != 2) three_raw.advance(Stage<T>::raw_stages);
  }
};

// The next tensor copy, ahead of the stage that is transformed. One thread.
template <typename T>
__device__ __forceinline__ void issue_copy(const Params<T>& params, const CUtensorMap& map, Shared<T>& shared,
                                           const unsigned* repeat) {
  LoaderState state = shared.loader;
  Walk<Params<T>> walk{params, repeat, state.ordinal};
  if (walk.number() >= params.end_item) return;
  const Item item = find_item<tile_rows, tile_width>(params, walk.number());
  const std::uint32_t full = shared_address(&shared.raw_full[state.raw.slot]);
  wait_bounded(shared_address(&shared.raw_empty[state.raw.slot]), state.raw.parity ^ 1, params.report, role_load);
  hopper::arrive_expecting(full, raw_stage_bytes);
  hopper::copy_box(shared_address(shared.raw[state.raw.slot]), map, state.stage * Stage<T>::channels,
                   item.q0 - params.pad_w, item.p0 - params.pad_h, item.n, full);
  state.raw.advance(Stage<T>::raw_stages);
  if (++state.stage == params.stages) walk.next(), state.stage = 0, state.ordinal = walk.ordinal;
  shared.loader = state;
}

// Bits of the largest absolute value of 16 bytes, as float32. NaN counts as very large.
template <typename T>
__device__ __forceinline__ unsigned largest_bits(const uint4& d) {
  if constexpr (std::is_same_v<T, float>) {
    constexpr unsigned mask = 0x7fffffff;
    return max(max(d.x & mask, d.y & mask), max(d.z & mask, d.w & mask));
  } else {
    constexpr unsigned mask = 0x7fff7fff;
    const unsigned two = __vmaxu2(__vmaxu2(d.x & mask, d.y & mask), __vmaxu2(d.z & mask, d.w & mask));
    const auto one = static_cast<unsigned short>(max(two & 0xffff, two >> 16));
    return __float_as_uint(to_float(*reinterpret_cast<const T*>(&one)));
  }
}

// The scale's exponent from a sample of an item's first stage: 128 times 16 bytes. All warps find the same.
template <typename T>
__device__ __forceinline__ int guess_exponent(const unsigned char* raw, int lane) {
  unsigned largest = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    largest =
        max(largest, largest_bits<T>(*reinterpret_cast<const uint4*>(
                         raw + (lane >> 2) * 2 * raw_row_bytes + (i * 7 + 3) * raw_column_bytes + (lane & 3) * 16)));
  }
  const float value = __uint_as_float(__reduce_max_sync(~0u, largest));
  if (value >= least_unscaled && value < most_unscaled) return 0;
  // Nothing but zeros seen: a scale at which anything else overflows, and is noticed.
  return value == 0.0f ? unknown_exponent : scale_exponent(value, guessed_target);
}

// The exponent from the whole input of an item, infinities and NaN left out.
template <typename T>
__device__ __forceinline__ int find_exact_exponent(const Params<T>& params, Shared<T>& shared, const Item& item,
                                                   int thread) {
  if (thread == 0) shared.largest = 0;
  synchronise<producer_barrier, producer_threads>();
  const T* image = params.x + item.n * params.x_image;
  unsigned largest = 0;
#pragma unroll 1
  for (int pixel = thread / 32; pixel < input_rows * (tile_width + 2); pixel += producer_warps) {
    const int h = item.p0 - params.pad_h + pixel / (tile_width + 2);
    const int w = item.q0 - params.pad_w + pixel % (tile_width + 2);
    if (static_cast<unsigned>(h) >= static_cast<unsigned>(params.h) ||
        static_cast<unsigned>(w) >= static_cast<unsigned>(params.w)) {
      continue;
    }
    for (int c = thread % 32; c < params.c; c += 32) {
      const unsigned bits =
          __float_as_uint(to_float(image[h * params.x_row + w * params.x_column + c * params.x_channel])) & 0x7fffffff;
      largest = max(largest, bits < 0x7f800000 ? bits : 0);
    }
  }
  atomicMax(&shared.largest, largest);
  synchronise<producer_barrier, producer_threads>();
  const float value = __uint_as_float(shared.largest);
  synchronise<producer_barrier, producer_threads>();
  return value > 0.0f ? scale_exponent(value, exact_target) : 0;
}

// B^T d of two channels in FP16 arithmetic: two roundings of V more, of its parts (docs/numerics.md).
__device__ __forceinline__ void transform_halves(const __half2 (&d)[frequencies], __half2 (&v)[frequencies]) {
  using Transform = winograd::Transform<4>;
  const auto constant = [](float value) { return __float2half2_rn(value); };
  const __half2 even_a = __hfma2(d[2], constant(-2.0f), d[4]), odd_a = __hfma2(d[1], constant(-2.0f), d[3]);
  const __half2 even_b = __hfma2(d[2], constant(-0.5f), d[4]), odd_b = __hfma2(d[1], constant(-0.5f), d[3]);
  v[0] = __hfma2(d[2], constant(-2.5f), __hadd2(d[0], d[4]));
  v[1] = __hfma2(odd_a, constant(Transform::a), even_a);
  v[2] = __hfma2(odd_a, constant(-Transform::a), even_a);
  v[3] = __hfma2(odd_b, constant(Transform::b), even_b);
  v[4] = __hfma2(odd_b, constant(-Transform::b), even_b);
  v[5] = __hfma2(d[3], constant(-2.5f), __hadd2(d[1], d[5]));
}

// Halves of 8 bytes of raw input. scaled: multiply by scale.
template <typename T, bool scaled>
__device__ __forceinline__ void convert(const uint2& bits, float scale, __half2 (&halves)[Stage<T>::steps]) {
  if constexpr (std::is_same_v<T, half_t> && !scaled) {
    halves[0] = as_halves(bits.x), halves[1] = as_halves(bits.y);
  } else {
    const auto round = [&](float2 two) {
      if constexpr (scaled) two.x *= scale, two.y *= scale;
      return __floats2half2_rn(two.x, two.y);
    };
    if constexpr (std::is_same_v<T, float>) {
      halves[0] = round(make_float2(__uint_as_float(bits.x), __uint_as_float(bits.y)));
    } else {
      halves[0] = round(as_floats<T>(bits.x)), halves[1] = round(as_floats<T>(bits.y));
    }
  }
}

// A warp's part of a stage: 4 rows by 64 bytes of channels, 8 bytes a thread, along the row: each column is read once.
template <typename T, bool scaled>
__device__ __forceinline__ void transform_stage(const unsigned char* raw, unsigned char* v, int warp, int lane,
                                                float scale) {
  constexpr int words = Stage<T>::steps;  // of two halves
  static_assert(4 * producer_warps == input_rows);
  const int chunk = lane % 8, row = warp * 4 + lane / 8;
  raw += row * raw_row_bytes + chunk * 8;
  v += row * tile_columns * 16;
  if constexpr (words == 1) {
    v += chunk / 4 * Stage<T>::plane_bytes + chunk % 4 * 4;
  } else {
    v += chunk / 4 * Stage<T>::step_bytes + chunk / 2 % 2 * Stage<T>::plane_bytes + chunk % 2 * 8;
  }
  const auto load = [&](int column) { return *reinterpret_cast<const uint2*>(raw + column * raw_column_bytes); };
  constexpr int kept = frequencies - tile_outputs;  // columns that neighbouring tiles share
  __half2 d[frequencies][words];
  uint2 next[tile_outputs];
#pragma unroll
  for (int j = 0; j < kept; ++j) convert<T, scaled>(load(j), scale, d[j]);
#pragma unroll
  for (int j = 0; j < tile_outputs; ++j) next[j] = load(kept + j);
#pragma unroll 1
  for (int tile = 0; tile < tile_columns; ++tile) {
#pragma unroll
    for (int j = 0; j < tile_outputs; ++j) convert<T, scaled>(next[j], scale, d[kept + j]);
    raw += tile_outputs * raw_column_bytes;
    if (tile + 1 < tile_columns) {
#pragma unroll
      for (int j = 0; j < tile_outputs; ++j) next[j] = load(kept + j);
    }
    __half2 out[words][frequencies];
#pragma unroll
    for (int i = 0; i < words; ++i) {
      __half2 in[frequencies];
#pragma unroll
      for (int j = 0; j < frequencies; ++j) in[j] = d[j][i];
      transform_halves(in, out[i]);
    }
#pragma unroll
    for (int f = 0; f < frequencies; ++f) {
      unsigned char* target = v + slot(f) * Stage<T>::frequency_bytes;
      if constexpr (words == 1) {
        *reinterpret_cast<unsigned*>(target) = as_bits(out[0][f]);
      } else {
        *reinterpret_cast<uint2*>(target) = make_uint2(as_bits(out[0][f]), as_bits(out[1][f]));
      }
    }
    v += 16;
#pragma unroll
    for (int j = 0; j < kept; ++j) {
#pragma unroll
      for (int i = 0; i < words; ++i) d[j][i] = d[tile_outputs + j][i];
    }
  }
}

// One pass over the items. boxes: x is loaded by tensor copies.
template <typename T, bool boxes>
__device__ __forceinline__ void produce(const Params<T>& params, const CUtensorMap& map, Shared<T>& shared,
                                        bool repeated, ProducerState<T>& state) {
  const int thread = static_cast<int>(threadIdx.x) - consumer_threads, warp = thread / 32, lane = thread % 32;
  const unsigned* repeat = repeated ? shared.repeat : nullptr;
  if (boxes && thread == 0) {
    Walk<Params<T>> first{params, repeat};
    first.next();
    shared.loader.ordinal = first.ordinal, shared.loader.stage = 0;
    for (int i = 0; i < Stage<T>::raw_stages - 1; ++i) issue_copy(params, map, shared, repeat);
  }
  Walk<Params<T>> walk{params, repeat};
  while (walk.next()) {
    int exponent =
        repeated ? find_exact_exponent(params, shared, find_item<tile_rows, tile_width>(params, walk.number()), thread)
                 : 0;
#pragma unroll 1
    for (int stage = 0; stage < params.stages; ++stage) {
      unsigned char* raw = shared.raw[state.raw_slot()];
      if constexpr (boxes) {
        if (thread == 0) issue_copy(params, map, shared, repeat);
        __syncwarp();
        wait_bounded(shared_address(&shared.raw_full[state.raw_slot()]), state.raw_parity(), params.report,
                     role_transform);
      } else {
        load_elements<input_rows, raw_columns, Stage<T>::channels>(
            params, raw, find_item<tile_rows, tile_width>(params, walk.number()), stage * Stage<T>::channels, thread);
        synchronise<producer_barrier, producer_threads>();
      }
      if (stage == 0 && !repeated) exponent = guess_exponent<T>(raw, lane);
      wait_bounded(shared_address(&shared.v_empty[state.v_slot()]), state.v_parity() ^ 1, params.report,
                   role_transform);
      if (stage == 0 && thread == producer_threads - 32) {  // the first warp has the copies to issue
        shared.items[state.item_slot] = find_item<tile_rows, tile_width>(params, walk.number());
        shared.exponents[state.item_slot] = exponent;
      }
      unsigned char* v = shared.v[state.v_slot()];
      if (exponent == 0) {
        transform_stage<T, false>(raw, v, warp, lane, 1.0f);
      } else {
        transform_stage<T, true>(raw, v, warp, lane, power_of_two(exponent));
      }
      hopper::fence_copies();  // of V before the products that read it
      __syncwarp();
      if (lane == 0) {
        hopper::arrive(shared_address(&shared.v_full[state.v_slot()]));
        if (boxes) hopper::arrive(shared_address(&shared.raw_empty[state.raw_slot()]));
      }
      state.advance();
    }
    state.item_slot = (state.item_slot + 1) % Shared<T>::item_slots;
  }
}

}  // namespace fastconv::algos::winograd_fused::single
