// ITrans: V = B^T d B of some tiles and 64 channels, scaled by a power of two per tile, split into two halves.
#pragma once

#include "algos/winograd/tile_math.cuh"
#include "algos/winograd_megakernel/params.cuh"
#include "algos/winograd_megakernel/stream_task.h"

namespace fastconv::algos::winograd_megakernel {

// Two neighbouring elements; `vectors`: they may be moved by one instruction, and both are there or none.
template <bool vectors, typename T>
__device__ __forceinline__ winograd::Pack<2> load_two(const T* source, bool first, bool second) {
  winograd::Pack<2> pack{};
  if constexpr (vectors) {
    if (first) pack = winograd::load_pack<2>(source);
  } else {
    if (first) pack.e[0] = to_float(source[0]);
    if (second) pack.e[1] = to_float(source[1]);
  }
  return pack;
}

// A warp; a lane has two channels.
template <typename T, bool vectors>
__device__ __forceinline__ void transform_input(const Params<T>& params, const StreamTask& task) {
  const int lane = threadIdx.x % 32, c = task.channel + 2 * lane, chunk = task.channel / chunk_channels;
  const bool first = c < params.c, second = c + 1 < params.c;
  char* const block = params.v + task.place * params.v_place_bytes() + static_cast<std::int64_t>(chunk) * chunk_bytes;
#pragma unroll 1
  for (int i = 0; i < task.tiles; ++i) {
    PROF_BEGIN;
    unsigned rest = static_cast<unsigned>(task.tile + i);
    const int w0 = static_cast<int>(params.by_tiles_q.peel(rest)) * 4 - params.pad_w;
    const int h0 = static_cast<int>(params.by_tiles_p.peel(rest)) * 4 - params.pad_h;
    const T* corner =
        params.x + ((static_cast<std::int64_t>(rest) * params.h + h0) * params.w + w0) * params.c + c;
    int pixel = params.c, frequency = params.chunks * chunk_bytes;  // strides
    asm volatile("" : "+r"(pixel), "+r"(frequency));  // their multiples are not to be kept in registers over the loop
    winograd::Pack<2> d[6][6];
#pragma unroll
    for (int r = 0; r < 6; ++r) {
      const bool row_inside = static_cast<unsigned>(h0 + r) < static_cast<unsigned>(params.h);
#pragma unroll
      for (int s = 0; s < 6; ++s) {
        const bool inside = row_inside && static_cast<unsigned>(w0 + s) < static_cast<unsigned>(params.w);
        d[r][s] = load_two<vectors>(corner + s * pixel, inside && first, inside && second);
      }
      corner += pixel * params.w;
    }
    float largest = 0.0f;
#pragma unroll
    for (int r = 0; r < 6; ++r) {
#pragma unroll
      for (int s = 0; s < 6; ++s) largest = fmaxf(largest, fmaxf(fabsf(d[r][s].e[0]), fabsf(d[r][s].e[1])));
    }
    // Bits of floats that are not negative are in the order of the floats.
    largest = __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(largest)));
    const int exponent = scale_exponent(largest, winograd::input_target_exponent<4>);
    if (lane == 0) params.tile_exponents[static_cast<std::int64_t>(task.tile + i) * params.chunks + chunk] = exponent;
    PROF(0);
    const float scale = power_of_two(exponent);
#pragma unroll
    for (int r = 0; r < 6; ++r) {
#pragma unroll
      for (int s = 0; s < 6; ++s) d[r][s] = d[r][s] * scale;
    }
    winograd::transform_input_tile<4>(d);

    const int row = task.row + i;
    char* target = block + row * 128 + hopper::swizzle_128(row, lane / 4) * 16 + lane % 4 * 4;
#pragma unroll
    for (int r = 0; r < 6; ++r) {
#pragma unroll
      for (int s = 0; s < 6; ++s) {
        const half2 hi = __floats2half2_rn(d[r][s].e[0], d[r][s].e[1]);
        const float2 back = __half22float2(hi);
        const half2 lo = __floats2half2_rn(d[r][s].e[0] - back.x, d[r][s].e[1] - back.y);
        *reinterpret_cast<half2*>(target) = lo;
        *reinterpret_cast<half2*>(target + part_bytes) = hi;
        target += frequency;
      }
    }
    PROF(1);
  }
}

}  // namespace fastconv::algos::winograd_megakernel
