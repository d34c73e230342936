// FTrans as a task: U = G g G^T of 64 filters and the 16 channels of a stage, by a team. What pack_filters() does
// beforehand (pack.cuh), for measurements of the source's fourth kind of task.
#pragma once

#include "algos/winograd_megakernel/ffma/params.cuh"
#include "winograd/matrices.h"

namespace fastconv::algos::winograd_megakernel::ffma {

// A lane has a filter: stores are whole lines of U. Zeros beyond K and C.
__device__ __forceinline__ void transform_filters(const Params& params, const WorkTile& work_tile) {
  const int thread = static_cast<int>(threadIdx.x) % team_threads, filter = thread % block_filters;
  const std::int64_t point = std::int64_t{params.stages} * stage_u;  // floats from one to the next
  auto* const block = const_cast<float*>(params.u) + work_tile.tile / block_filters * (36 * point) +
                      work_tile.channel / stage_channels * stage_u + (filter ^ 1);
#pragma unroll 1
  for (int channel = thread / block_filters; channel < stage_channels; channel += team_threads / block_filters) {
    const bool exists = filter < work_tile.tiles && channel < work_tile.count;
    const float* const source =
        params.weight + (std::int64_t{work_tile.tile + filter} * params.c + work_tile.channel + channel) * 9;
    float g[3][3], value[6][6];
#pragma unroll
    for (int i = 0; i < 9; ++i) g[i / 3][i % 3] = exists ? source[i] : 0.0f;
    winograd::transform_filter<4>(g, value);
    float* target = block + place_of(channel) * block_filters;
#pragma unroll
    for (int i = 0; i < 36; ++i, target += point) *target = value[i / 6][i % 6];
  }
}

}  // namespace fastconv::algos::winograd_megakernel::ffma
