// Prefetches into the L2 cache.
#pragma once

#include "algos/winograd_fused/single/layout.cuh"

namespace fastconv::algos::winograd_fused::single {

// U: in the first round of work tiles, the few pieces of U that registers load ahead do not cover memory's latency.
template <typename T, Shape shape>
__device__ __forceinline__ void prefetch_filters(const Params<T>& params) {
  constexpr unsigned piece = u_step * sizeof(uint4) / 8;
  const unsigned tiles = (params.k + filter_tile - 1) / filter_tile;
  hopper::prefetch_pieces<piece>(params.u, tiles * params.stages * (Stage<T, shape>::steps * 8));
}

// A work tile's residual, by one thread during the last products: at the end all blocks would wait for memory at once,
// and during the first ones what comes would be evicted again.
template <Shape shape, typename T>
__device__ __forceinline__ void prefetch_residual(const Params<T>& params, const CUtensorMap* map,
                                                  const WorkTile& work_tile) {
  if (map == nullptr) return;
  const auto prefetch = [&](const WorkTile& segment) {
#pragma unroll 1
    for (int row = 0; row < shape.rows; row += residual_rows) {
      asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(map),
                   "r"(segment.filter_block * filter_tile), "r"(segment.q0), "r"(segment.p0 + row), "r"(segment.n)
                   : "memory");
    }
  };
  prefetch(work_tile);
  if constexpr (shape.packs_columns) {  // with columns that other work tiles ask for
    if (left_tiles(params, work_tile) > 0) prefetch(left_segment(params, work_tile));
  }
}

}  // namespace fastconv::algos::winograd_fused::single
