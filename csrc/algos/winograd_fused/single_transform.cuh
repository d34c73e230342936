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

template <typename T, Shape shape>
struct ProducerState {
  unsigned stage = 0;              // all of them so far; says where V is in its two slots
  hopper::RingPosition three_raw;  // where raw input is, if it has more than two
  int item_slot = 0;

  static_assert(Stage<T, shape>::v_stages == 2);
  __device__ __forceinline__ int v_slot() const { return stage & 1; }
  __device__ __forceinline__ unsigned v_parity() const { return stage >> 1 & 1; }
  __device__ __forceinline__ int raw_slot() const {
    return Stage<T, shape>::raw_stages == 2 ? v_slot() : three_raw.slot;
  }
  __device__ __forceinline__ unsigned raw_parity() const {
    return Stage<T, shape>::raw_stages == 2 ? v_parity() : three_raw.parity;
  }
  __device__ __forceinline__ void advance() {
    ++stage;
    if constexpr (Stage<T, shape>::raw_stages != 2) three_raw.advance(Stage<T, shape>::raw_stages);
  }
};

// On to the next item, if there is one. Only here, since what it takes would delay the first warp at every stage.
template <Shape shape, typename T>
__device__ __forceinline__ void load_next_item(const Params<T>& params, LoaderState& state, const unsigned* repeat) {
  Walk<Params<T>> walk{params, repeat, state.ordinal};
  state.n = -1, state.stage = 0;
  if (!walk.next()) return;
  const Item item = find_item<shape>(params, walk.number());
  state.ordinal = walk.ordinal;
  state.w = item.q0 - params.pad_w, state.h = item.p0 - params.pad_h, state.n = item.n;
}

// The next tensor copy, ahead of the stage that is transformed. One thread.
template <typename T, Shape shape>
__device__ __forceinline__ void issue_copy(const Params<T>& params, const CUtensorMap& map, Shared<T, shape>& shared,
                                           const unsigned* repeat) {
  LoaderState state = shared.loader;
  if (state.n < 0) return;
  const std::uint32_t full = shared_address(&shared.raw_full[state.raw.slot]);
  wait_bounded(shared_address(&shared.raw_empty[state.raw.slot]), state.raw.parity ^ 1, params.report, role_load);
  hopper::arrive_expecting(full, Stage<T, shape>::raw_stage_bytes);
  hopper::copy_box(shared_address(shared.raw[state.raw.slot]), map, state.stage * Stage<T, shape>::channels, state.w,
                   state.h, state.n, full);
  state.raw.advance(Stage<T, shape>::raw_stages);
  if (++state.stage == params.stages) load_next_item<shape>(params, state, repeat);
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

// The scale's exponent from a sample of the first stage of an image of an item: 128 times 16 bytes. All warps find the
// same.
template <typename T, Shape shape>
__device__ __forceinline__ int guess_exponent(const unsigned char* raw, int lane, int image) {
  using Stage = single::Stage<T, shape>;
  raw += (lane >> 2) * (shape.input_rows() / 8) * Stage::raw_row_bytes + shape.tiles / 2 * raw_column_bytes +
         (lane & 3) * 16;
  unsigned found = 0;
#pragma unroll
  for (int i = 0; i < shape.images; ++i) {
    unsigned largest = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const auto& piece =
          *reinterpret_cast<const uint4*>(raw + i * Stage::raw_image_bytes + j * shape.tiles * raw_column_bytes);
      largest = max(largest, largest_bits<T>(piece));
    }
    largest = __reduce_max_sync(~0u, largest);
    if (i == image) found = largest;
  }
  const float value = __uint_as_float(found);
  if (value >= least_unscaled && value < most_unscaled) return 0;
  // Nothing but zeros seen: a scale at which anything else overflows, and is noticed.
  return value == 0.0f ? unknown_exponent : scale_exponent(value, guessed_target);
}

// The exponent from the whole input of an image of an item, infinities and NaN left out.
template <typename T, Shape shape>
__device__ __forceinline__ int find_exact_exponent(const Params<T>& params, Shared<T, shape>& shared, const Item& item,
                                                   int thread, int my_image) {
  if (thread < shape.images) shared.largest[thread] = 0;
  synchronise<producer_barrier, producer_threads>();
  constexpr int columns = shape.width() + 2;
#pragma unroll 1
  for (int i = 0; i < shape.images && item.n + i < params.n; ++i) {
    const T* image = params.x + (item.n + i) * params.x_image;
    unsigned largest = 0;
#pragma unroll 1
    for (int pixel = thread / 32; pixel < shape.input_rows() * columns; pixel += producer_warps) {
      const int h = item.p0 - params.pad_h + pixel / columns, w = item.q0 - params.pad_w + pixel % columns;
      if (static_cast<unsigned>(h) >= static_cast<unsigned>(params.h) ||
          static_cast<unsigned>(w) >= static_cast<unsigned>(params.w)) {
        continue;
      }
      for (int c = thread % 32; c < params.c; c += 32) {
        const unsigned bits =
            __float_as_uint(to_float(image[h * params.x_row + w * params.x_column + c * params.x_channel])) &
            0x7fffffff;
        largest = max(largest, bits < 0x7f800000 ? bits : 0);
      }
    }
    atomicMax(&shared.largest[i], largest);
  }
  synchronise<producer_barrier, producer_threads>();
  const float value = __uint_as_float(shared.largest[my_image]);
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
template <typename T, bool scaled, int words>
__device__ __forceinline__ void convert(const uint2& bits, float scale, __half2 (&halves)[words]) {
  static_assert(4 * words == 16 / sizeof(T));
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

// A thread's rows of the raw input: 64 bytes of channels by 8 threads, so a warp has 4 rows at a time. Of two images,
// two rows each; of four, one row: so that neither reading raw input nor storing V has a bank conflict.
template <Shape shape>
__device__ __forceinline__ int image_of_lane(int lane) {
  return lane / 8 % shape.images;
}
template <Shape shape>
__device__ __forceinline__ int first_row(int warp, int lane) {
  return shape.images == 1   ? warp * 4 + lane / 8
         : shape.images == 2 ? warp * 4 + (lane / 16 ^ lane / 8 % 2)
                             : (warp + 1) % producer_warps;  // a row more for the last warp, not for the first
}

// Tiles of a row in straight-line code: as many as cost no spills. few_registers: in kernels that need them elsewhere.
constexpr int unrolled_tiles(Shape shape, bool few_registers, bool scaled) {
  return shape.images > 1 ? shape.tiles : few_registers || scaled ? 1 : 2;
}

// Along a row: each column is read once, 8 bytes a thread.
template <typename T, Shape shape, bool scaled, int unrolled>
__device__ __forceinline__ void transform_row(const unsigned char* raw, unsigned char* v, float scale) {
  constexpr int words = Stage<T, shape>::steps;  // of two halves
  const auto load = [&](int column) { return *reinterpret_cast<const uint2*>(raw + column * raw_column_bytes); };
  constexpr int kept = frequencies - tile_outputs;  // columns that neighbouring tiles share
  __half2 d[frequencies][words];
  uint2 next[tile_outputs];
#pragma unroll
  for (int j = 0; j < kept; ++j) convert<T, scaled>(load(j), scale, d[j]);
#pragma unroll
  for (int j = 0; j < tile_outputs; ++j) next[j] = load(kept + j);
#pragma unroll unrolled
  for (int tile = 0; tile < shape.tiles; ++tile) {
    // Where a column is missing it is zero. Asked here: behind its load, everything would wait for that.
    if (shape.raw_columns() < shape.width() + 2 && tile + 1 == shape.tiles) next[tile_outputs - 1] = make_uint2(0, 0);
#pragma unroll
    for (int j = 0; j < tile_outputs; ++j) convert<T, scaled>(next[j], scale, d[kept + j]);
    raw += tile_outputs * raw_column_bytes;
    if (tile + 1 < shape.tiles) {
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
      unsigned char* target = v + slot(f) * Stage<T, shape>::frequency_bytes;
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

// A warp's part of a stage.
template <typename T, Shape shape, bool scaled, bool few_registers>
__device__ __forceinline__ void transform_stage(const unsigned char* raw, unsigned char* v, int warp, int lane,
                                                float scale) {
  using Stage = single::Stage<T, shape>;
  constexpr int unrolled = unrolled_tiles(shape, few_registers, scaled);
  static_assert(shape.images == 4 || 4 * producer_warps == shape.input_rows());
  const int chunk = lane % 8, row = first_row<shape>(warp, lane), image = image_of_lane<shape>(lane);
  raw += image * Stage::raw_image_bytes + row * Stage::raw_row_bytes + chunk * 8;
  v += (row * shape.row_positions() + image * shape.tiles) * 16;
  if constexpr (Stage::steps == 1) {
    v += chunk / 4 * Stage::plane_bytes + chunk % 4 * 4;
  } else {
    v += chunk / 4 * Stage::step_bytes + chunk / 2 % 2 * Stage::plane_bytes + chunk % 2 * 8;
  }
  if constexpr (shape.images == 1) return transform_row<T, shape, scaled, unrolled>(raw, v, scale);
  constexpr int step = shape.images == 2 ? 2 : producer_warps;  // to the thread's next row
  int left = shape.images == 2 ? 2 : (shape.input_rows() - 1 - row) / step + 1;
#pragma unroll 1
  do {
    transform_row<T, shape, scaled, unrolled>(raw, v, scale);
    raw += step * Stage::raw_row_bytes, v += step * shape.row_positions() * 16;
  } while (--left > 0);
}

// One pass over the items. boxes: x is loaded by tensor copies.
template <typename T, Shape shape, bool boxes, bool few_registers>
__device__ __forceinline__ void produce(const Params<T>& params, const CUtensorMap& map, Shared<T, shape>& shared,
                                        bool repeated, ProducerState<T, shape>& state) {
  const int thread = static_cast<int>(threadIdx.x) - consumer_threads, warp = thread / 32, lane = thread % 32;
  const int image = image_of_lane<shape>(lane);
  // One thread of each image, of the last warp: the first has the copies to issue.
  const bool tells = shape.images == 1 ? thread == producer_threads - 32
                                       : thread >= producer_threads - 32 && lane % 8 == 0 && lane / 8 < shape.images;
  const unsigned* repeat = repeated ? shared.repeat : nullptr;
  if (boxes && thread == 0) {
    LoaderState state = shared.loader;
    state.ordinal = ~0u;
    load_next_item<shape>(params, state, repeat);
    shared.loader = state;
    for (int i = 0; i < Stage<T, shape>::raw_stages - 1; ++i) issue_copy(params, map, shared, repeat);
  }
  Walk<Params<T>> walk{params, repeat};
  while (walk.next()) {
    int exponent =
        repeated ? find_exact_exponent(params, shared, find_item<shape>(params, walk.number()), thread, image) : 0;
#pragma unroll 1
    for (int stage = 0; stage < params.stages; ++stage) {
      unsigned char* raw = shared.raw[state.raw_slot()];
      if constexpr (boxes) {
        if (thread == 0) issue_copy(params, map, shared, repeat);
        __syncwarp();
        wait_bounded(shared_address(&shared.raw_full[state.raw_slot()]), state.raw_parity(), params.report,
                     role_transform);
      } else {
        load_elements<shape.input_rows(), shape.raw_columns(), Stage<T, shape>::channels>(
            params, raw, find_item<shape>(params, walk.number()), stage * Stage<T, shape>::channels, thread);
        synchronise<producer_barrier, producer_threads>();
      }
      if (stage == 0 && !repeated) exponent = guess_exponent<T, shape>(raw, lane, image);
      wait_bounded(shared_address(&shared.v_empty[state.v_slot()]), state.v_parity() ^ 1, params.report,
                   role_transform);
      if (stage == 0 && tells) {
        if (image == 0) shared.items[state.item_slot] = find_item<shape>(params, walk.number());
        shared.exponents[state.item_slot][image] = exponent;
      }
      unsigned char* v = shared.v[state.v_slot()];
      if (shape.images == 1 ? exponent == 0 : __all_sync(~0u, exponent == 0)) {
        transform_stage<T, shape, false, few_registers>(raw, v, warp, lane, 1.0f);
      } else {
        transform_stage<T, shape, true, few_registers>(raw, v, warp, lane, power_of_two(exponent));
      }
      hopper::fence_copies();  // of V before the products that read it
      __syncwarp();
      if (lane == 0) {
        hopper::arrive(shared_address(&shared.v_full[state.v_slot()]));
        if (boxes) hopper::arrive(shared_address(&shared.raw_empty[state.raw_slot()]));
      }
      state.advance();
    }
    state.item_slot = (state.item_slot + 1) % Shared<T, shape>::item_slots;
  }
}

}  // namespace fastconv::algos::winograd_fused::single
