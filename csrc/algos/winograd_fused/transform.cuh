// The producers: raw input by tensor copies (or by element), V = B^T d along W, scaled and split into halves.
#pragma once

#include "algos/winograd_fused/elements.cuh"
#include "device/winograd_matrices.h"

namespace fastconv::algos::winograd_fused {

// |V| of a tile column must reach 2 somewhere (else lo would lose bits to float16's subnormals) and stay finite. The
// guess brings the largest of a sample to [2^3, 2^4): the rest may be 2^9 times as large. The correction is exact.
constexpr int guessed_target = 3, exact_target = 12, unknown_exponent = 126;
constexpr float least_high = 2.0f;
static_assert(winograd::Transform<4>::input_gain * (2 << exact_target) < 65504.0f);

struct ProducerState {
  hopper::RingPosition issue, raw, v;
  int item_slot = 0;
};

// Issues tensor copies ahead of the stage that is transformed. One thread.
struct Loader {
  Walk<Params> walk;
  Item item{};
  int stage = 0;
  bool more = false;

  __device__ __forceinline__ void next_item(const Params& params) {
    more = walk.next();
    if (more) item = find_item<tile_rows, tile_width>(params, walk.number());
    stage = 0;
  }
  __device__ __forceinline__ void issue(const Params& params, const CUtensorMap& map, Shared& shared,
                                        hopper::RingPosition& position) {
    if (!more) return;
    const std::uint32_t full = shared_address(&shared.raw_full[position.slot]);
    wait_bounded(shared_address(&shared.raw_empty[position.slot]), position.parity ^ 1, params.report, role_load);
    hopper::arrive_expecting(full, raw_stage_bytes);
    hopper::copy_box(shared_address(shared.raw[position.slot]), map, stage * channels, item.q0 - params.pad_w,
                     item.p0 - params.pad_h, item.n, full);
    position.advance(raw_stages);
    if (++stage == params.stages) next_item(params);
  }
};

// A lane's part of a pass: 2 rows x 4 tiles x 16 channels of a warp are one tile by four channels of a lane.
struct Lane {
  int row, column;  // of the pair; of the block's eight
  int raw, v;       // offsets in a stage

  __device__ __forceinline__ Lane(int warp, int lane) {
    const int quad = lane & 3;
    row = lane >> 2 & 1;
    column = (warp & 1) * (tile_columns / 2) + (lane >> 3);
    raw = row * raw_row_bytes + column * tile_outputs * raw_column_bytes + quad * 16;
    v = row * v_row_bytes + (quad >> 1) * core_bytes + column * 16 + (quad & 1) * 8;
  }
};

__device__ __forceinline__ float largest_of(float4 a) {
  return fmaxf(fmaxf(fabsf(a.x), fabsf(a.y)), fmaxf(fabsf(a.z), fabsf(a.w)));
}

// The exponent of a lane's column from a sample of its first stage; that of its neighbours where the sample is zero.
__device__ __forceinline__ int guess_exponent(const unsigned char* raw, const Lane& lane) {
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    largest = fmaxf(largest, largest_of(*reinterpret_cast<const float4*>(raw + lane.raw + (1 + 3 * i) * raw_row_bytes +
                                                                         (1 + i) * raw_column_bytes)));
  }
#pragma unroll
  for (int lanes = 1; lanes < 8; lanes *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lanes));
  float neighbours = fmaxf(largest, __shfl_xor_sync(~0u, largest, 8));
  neighbours = fmaxf(neighbours, __shfl_xor_sync(~0u, neighbours, 16));
  if (largest == 0.0f) largest = neighbours;
  // Nothing but zeros seen: a scale at which anything else overflows, and is noticed.
  return largest == 0.0f ? unknown_exponent : scale_exponent(largest, guessed_target);
}

// The exponents of all columns from the whole input of an item.
__device__ __forceinline__ void find_exact_largest(const Params& params, Shared& shared, const Item& item, int warp) {
  const float* image = params.x + item.n * params.x_image;
  for (int column = warp; column < tile_columns; column += producer_warps) {
    float largest = 0.0f;
    for (int pixel = 0; pixel < input_rows * frequencies; ++pixel) {
      const int h = item.p0 - params.pad_h + pixel / frequencies;
      const int w = item.q0 - params.pad_w + column * tile_outputs + pixel % frequencies;
      if (static_cast<unsigned>(h) >= static_cast<unsigned>(params.h) ||
          static_cast<unsigned>(w) >= static_cast<unsigned>(params.w)) {
        continue;
      }
      for (int c = threadIdx.x % 32; c < params.c; c += 32) {
        const float value = fabsf(__ldg(image + h * params.x_row + w * params.x_column + c * params.x_channel));
        largest = fmaxf(largest, isinf(value) ? 0.0f : value);
      }
    }
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lanes));
    if (threadIdx.x % 32 == 0) shared.column_largest[column] = largest;
  }
}

// hi and lo of two values; notes the largest |hi|, NaN included.
__device__ __forceinline__ void split(float a, float b, std::uint32_t& high, std::uint32_t& low, __half2& largest) {
  const __half2 hi = __floats2half2_rn(a, b);
  const float2 back = __half22float2(hi);
  const __half2 lo = __floats2half2_rn(a - back.x, b - back.y);
  largest = __hmax2_nan(largest, __habs2(hi));
  high = *reinterpret_cast<const std::uint32_t*>(&hi);
  low = *reinterpret_cast<const std::uint32_t*>(&lo);
}

// One tile, four channels: six columns to six frequencies.
__device__ __forceinline__ void transform_tile(const unsigned char* raw, unsigned char* v, float scale,
                                               __half2& largest) {
  float values[frequencies][4];
#pragma unroll
  for (int j = 0; j < frequencies; ++j) {
    const float4 d = *reinterpret_cast<const float4*>(raw + j * raw_column_bytes);
    values[j][0] = d.x * scale, values[j][1] = d.y * scale, values[j][2] = d.z * scale, values[j][3] = d.w * scale;
  }
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    float d[frequencies], result[frequencies];
#pragma unroll
    for (int j = 0; j < frequencies; ++j) d[j] = values[j][c];
    winograd::Transform<4>::input(d, result);
#pragma unroll
    for (int j = 0; j < frequencies; ++j) values[j][c] = result[j];
  }
#pragma unroll
  for (int f = 0; f < frequencies; ++f) {
    uint2 high, low;
    split(values[f][0], values[f][1], high.x, low.x, largest);
    split(values[f][2], values[f][3], high.y, low.y, largest);
    *reinterpret_cast<uint2*>(v + (2 * f) * v_plane_bytes) = high;
    *reinterpret_cast<uint2*>(v + (2 * f + 1) * v_plane_bytes) = low;
  }
}

// One pass over the items. boxes: x is loaded by tensor copies.
template <bool boxes>
__device__ __forceinline__ void produce(const Params& params, const CUtensorMap& map, Shared& shared, bool repeated,
                                        ProducerState& state) {
  const int thread = static_cast<int>(threadIdx.x) - consumer_threads, warp = thread / 32;
  const Lane lane(warp, thread % 32);
  constexpr int sharing = producer_warps / 2;  // warps of the same columns share the row pairs
  constexpr int row_pairs = input_rows / 2;
  const unsigned* repeat = repeated ? shared.repeat : nullptr;
  Loader loader{{params, repeat}};
  if (boxes && thread == 0) {
    loader.next_item(params);
    for (int i = 0; i < raw_stages - 2; ++i) loader.issue(params, map, shared, state.issue);
  }
  Walk<Params> walk{params, repeat};
  while (walk.next()) {
    const Item item = find_item<tile_rows, tile_width>(params, walk.number());
    int exponent = 0;
    if (repeated) {
      find_exact_largest(params, shared, item, warp);
      synchronise<producer_barrier, producer_threads>();
      const float largest = shared.column_largest[lane.column];
      exponent = largest > 0.0f ? scale_exponent(largest, exact_target) : exact_target;
      synchronise<producer_barrier, producer_threads>();
    }
    __half2 largest = __float2half2_rn(0.0f);
    float scale = power_of_two(exponent);
#pragma unroll 1
    for (int stage = 0; stage < params.stages; ++stage) {
      unsigned char* raw = shared.raw[state.raw.slot];
      if constexpr (boxes) {
        // A stage ahead: the slot was last read two stages ago, so no warp waits for the others here.
        if (thread == 0) loader.issue(params, map, shared, state.issue);
        __syncwarp();
        wait_bounded(shared_address(&shared.raw_full[state.raw.slot]), state.raw.parity, params.report, role_transform);
      } else {
        load_elements<input_rows, raw_columns, channels>(params, raw, item, stage * channels, thread);
        synchronise<producer_barrier, producer_threads>();
      }
      if (stage == 0 && !repeated) {
        exponent = guess_exponent(raw, lane);
        scale = power_of_two(exponent);
      }
      wait_bounded(shared_address(&shared.v_empty[state.v.slot]), state.v.parity ^ 1, params.report, role_transform);
      if (stage == 0 && warp < 2 && (thread & 7) == 0) shared.exponents[state.item_slot][lane.column] = exponent;
      unsigned char* v = shared.v[state.v.slot];
#pragma unroll 1
      for (int pair = (warp / 2 + (sharing - row_pairs % sharing) * stage) % sharing; pair < row_pairs;
           pair += sharing) {
        transform_tile(raw + lane.raw + 2 * pair * raw_row_bytes, v + lane.v + 2 * pair * v_row_bytes, scale, largest);
      }
      if (stage == params.stages - 1) {
        float high = __low2float(__hmax2_nan(largest, __lowhigh2highlow(largest)));
#pragma unroll
        for (int lanes = 1; lanes < 8; lanes *= 2) {
          const float other = __shfl_xor_sync(~0u, high, lanes);
          high = !(other <= high) ? other : high;  // NaN wins
        }
        if ((thread & 7) == 0) shared.largest[state.item_slot][warp][lane.column % (tile_columns / 2)] = high;
      }
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      __syncwarp();
      if (thread % 32 == 0) {
        hopper::arrive(shared_address(&shared.v_full[state.v.slot]));
        if (boxes) hopper::arrive(shared_address(&shared.raw_empty[state.raw.slot]));
      }
      state.raw.advance(raw_stages);
      state.v.advance(v_stages);
    }
    state.item_slot = (state.item_slot + 1) % item_slots;
  }
}

}  // namespace fastconv::algos::winograd_fused
