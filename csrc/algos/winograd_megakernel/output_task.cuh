// OTrans: Y = A^T M A of some tiles and 64 filters, the scales undone, then the epilogue.
#pragma once

#include "algos/winograd/output_transform.cuh"
#include "algos/winograd_megakernel/params.cuh"
#include "algos/winograd_megakernel/stream_task.h"

namespace fastconv::algos::winograd_megakernel {

// The exponent to which a tile's products were brought: that of its largest channels, so the least. All lanes.
template <typename T>
__device__ __forceinline__ int tile_exponent(const Params<T>& params, int tile) {
  const int* exponents = params.tile_exponents + static_cast<std::int64_t>(tile) * params.chunks;
  int least = 127;
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < params.chunks; i += 32) least = min(least, __ldcg(exponents + i));
  return __reduce_min_sync(0xffffffffu, least);
}

// A warp; a lane has two filters.
template <typename T, bool vectors>
__device__ __forceinline__ void transform_output(const Params<T>& params, const StreamTask& task) {
  using winograd::Pack;
  const int lane = threadIdx.x % 32, k = task.channel + 2 * lane;
  const bool first = k < params.k, second = k + 1 < params.k;
  const float bias[2] = {first ? params.epilogue.bias_of(k) : 0.0f, second ? params.epilogue.bias_of(k + 1) : 0.0f};
  const int filter_exponents[2] = {first ? params.filter_exponents[k] : 0,
                                   second ? params.filter_exponents[k + 1] : 0};
#pragma unroll 1
  for (int i = 0; i < task.tiles; ++i) {
    PROF_BEGIN;
    // Written by other multiprocessors since this place was last read: past the first cache.
    const float* source = params.products + task.place * params.m_place() +
                          static_cast<std::int64_t>(task.row + i) * params.k_pad + k;
    int frequency = unit_tiles * params.k_pad, pixel = params.k;  // strides
    asm volatile("" : "+r"(frequency), "+r"(pixel));  // their multiples are not to be kept in registers over the loop
    Pack<2> m[36];
#pragma unroll
    for (int f = 0; f < 36; ++f) {
      const float2 pair = __ldcg(reinterpret_cast<const float2*>(source));
      m[f] = {pair.x, pair.y};
      source += frequency;
    }
#ifdef PROFILE
    { float all = 0; for (int f = 0; f < 36; ++f) all += m[f].e[0]; if (all == 1.2345e20f) params.y[0] = all; }
#endif
    PROF(4);
    const int exponent = tile_exponent(params, task.tile + i);
    const Unscale scale0(exponent, filter_exponents[0]), scale1(exponent, filter_exponents[1]);
    unsigned rest = static_cast<unsigned>(task.tile + i);
    const int q0 = static_cast<int>(params.by_tiles_q.peel(rest)) * 4;
    const int p0 = static_cast<int>(params.by_tiles_p.peel(rest)) * 4;
    const std::int64_t corner = ((static_cast<std::int64_t>(rest) * params.p + p0) * params.q + q0) * params.k + k;
    winograd::transform_output_tile<4, Pack<2>>(
        [&](int f) { return m[f]; },
        [&](int r, const Pack<2>(&row)[4]) {
          if (p0 + r >= params.p) return;
          const std::int64_t index = corner + static_cast<std::int64_t>(r * params.q) * pixel;
#pragma unroll
          for (int s = 0; s < 4; ++s) {
            if (q0 + s >= params.q || !first) continue;
            const std::int64_t at = index + s * pixel;
            winograd::Aligned<T, 2> result;
            result.e[0] = params.epilogue.finish(scale0(row[s].e[0]) + bias[0], at);
            if constexpr (vectors) {
              result.e[1] = params.epilogue.finish(scale1(row[s].e[1]) + bias[1], at + 1);
              *reinterpret_cast<winograd::Aligned<T, 2>*>(params.y + at) = result;
            } else {
              params.y[at] = result.e[0];
              if (second) params.y[at + 1] = params.epilogue.finish(scale1(row[s].e[1]) + bias[1], at + 1);
            }
          }
        });
    PROF(5);
  }
}

}  // namespace fastconv::algos::winograd_megakernel
