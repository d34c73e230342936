// From a plan to a launch, for both kernels of this folder.
#pragma once

#include <algorithm>
#include <cstdint>

#include "algos/winograd_fused/shared/layout.cuh"
#include "core/kernels.h"
#include "device/indexing.h"
#include "device/launch.h"
#include "device/shared_memory.h"
#include "hopper/tensor_map.h"

namespace fastconv::algos::winograd_fused {

template <typename T>
ParamsOf<T> make_params(const ConvArgs& args, const Config& config, WaitReport* report) {
  const ConvProblem& problem = args.problem;
  const Strides4 in = dense_strides(args.x_layout, problem.x_pitch(), problem.h, problem.w);
  const Strides4 out = output_strides(problem);
  const auto* packed = static_cast<const char*>(args.weight);
  ParamsOf<T> params{.x = static_cast<const T*>(args.x),
                     .u = reinterpret_cast<const uint4*>(packed),
                     .exponents = reinterpret_cast<const int*>(packed + config.u_bytes()),
                     .y = static_cast<T*>(args.y),
                     .epilogue = make_epilogue<T>(args),
                     .report = report,
                     .x_image = in.n,
                     .x_row = in.h,
                     .x_column = in.w,
                     .x_channel = in.c,
                     .y_image = out.n,
                     .y_row = out.h,
                     .y_column = out.w,
                     .y_channel = out.c,
                     .stages = as_int(config.stages),
                     .first_work_tile = 0,
                     .end_work_tile = 0,
                     .by_filters = ceil_div(config.filter_tiles, config.work_tile_filter_tiles * config.v_reuse),
                     .by_columns = config.column_tiles,
                     .by_rows = config.split ? config.pitch : config.row_tiles};
  set_sizes(params, problem);
  return params;
}

// In launches of as many work tiles as the blocks, or clusters, of all multiprocessors can keep repetition bits for.
template <auto kernel, int threads = single::block_threads, typename T, typename... Maps>
void launch_work_tiles(ParamsOf<T> params, const Config& config, std::size_t shared_bytes, int processors,
                       cudaStream_t stream, const Maps&... maps) {
  allow_shared_memory<kernel, true>(static_cast<int>(shared_bytes), "winograd_fused: shared memory");
  const std::int64_t clusters = processors / config.blocks, most = clusters * max_work_tiles;
  for (std::int64_t first = 0; first < config.work_tiles; first += most) {
    const std::int64_t work_tiles = std::min(most, config.work_tiles - first);
    params.first_work_tile = static_cast<unsigned>(first);
    params.end_work_tile = static_cast<unsigned>(first + work_tiles);
    const auto blocks = static_cast<unsigned>(std::min(clusters, work_tiles) * config.blocks);
    LaunchPlan{blocks, threads, shared_bytes, config.blocks}.launch(kernel, stream, "winograd_fused", params, maps...);
  }
}

}  // namespace fastconv::algos::winograd_fused
