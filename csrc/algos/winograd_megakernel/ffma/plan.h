// Sizes, task map and workspace of the CUDA kernel of class `ieee`, shared by the planner and ffma.cu. Layouts:
// ffma_params.cuh.
//
// Workspace: V | M | U of filter tasks | ticket and counters
// Packed weight: U
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/device_info.h"
#include "core/integers.h"
#include "core/problem.h"
#include "core/store_mode.h"
#include "winograd/instruments.h"
#include "winograd/task_map.h"

namespace fastconv::algos::winograd_megakernel::ffma {

constexpr int tile_m = 128;         // of a GEMM task
constexpr int block_filters = 64;   // of a GEMM task; they lie together in U and M
constexpr int stage_channels = 16;  // that a product loads at once
constexpr int stage_v = stage_channels * tile_m, stage_u = stage_channels * block_filters;  // floats
constexpr int transform_channels = 64;                           // of an input or output task: channels or filters
constexpr int teams = 3;                                         // of a block
constexpr std::size_t block_bytes = teams * std::size_t{49408};  // of shared memory (kernel.cuh)

// What depends on the weight alone (the rule of packed_weight()).
struct Weights {
  std::int64_t stages, filter_blocks;

  std::size_t u_bytes() const { return align_bytes(36 * filter_blocks * stages * stage_u * 4); }
};
inline Weights make_weights(const ConvProblem& problem) {
  return {ceil_div(problem.c, stage_channels), ceil_div(problem.k, block_filters)};
}

// How x and y are accessed: NHWC by pairs of channels (both even) or elements, NCHW by four columns (Q a multiple of
// four) or elements.
enum class Access { nhwc_pairs, nhwc, nchw_quads, nchw };
inline Access select_access(const ConvProblem& problem) {
  const bool vectors = select_store_mode(problem, 2) != StoreMode::elements;
  if (problem.layout == Layout::nhwc) return vectors && problem.c % 2 == 0 ? Access::nhwc_pairs : Access::nhwc;
  return vectors ? Access::nchw_quads : Access::nchw;
}

struct Plan {
  TaskMap map;
  Weights weights;
  Access access;
  bool plain;  // the epilogue has no residual and no SiLU
  Instruments instruments = {};

  std::int64_t v_place() const { return 36 * weights.stages * stage_v; }                        // floats
  std::int64_t m_place() const { return 36 * weights.filter_blocks * tile_m * block_filters; }  // floats
  std::size_t v_bytes() const { return align_bytes(map.v_groups * v_place() * 4); }
  std::size_t m_bytes() const { return align_bytes(map.m_groups * m_place() * 4); }
  std::size_t counter_bytes() const { return align_bytes((ticket_stride + map.counters()) * std::int64_t{4}); }
  std::size_t u_bytes() const { return map.n_f > 0 ? weights.u_bytes() : 0; }
  std::size_t workspace_bytes() const { return v_bytes() + m_bytes() + u_bytes() + counter_bytes(); }
};

// Throws InvalidArgument if the map has too many tasks.
inline Plan make_plan(const ConvProblem& problem, const DeviceInfo& device, const Instruments& instruments = {}) {
  const std::int64_t tiles = std::max<std::int64_t>(1, problem.n * ceil_div(problem.p(), 4) * ceil_div(problem.q(), 4));
  const Weights weights = make_weights(problem);
  const std::int64_t groups = ceil_div(tiles, tile_m);
  const int rows = groups >= 64 ? 16 : 8;  // tiles of a transform task: few, so that all teams have some
  const TaskShapes shapes{.group_tiles = tile_m,
                          // pack_weight() transforms them, but where a measurement asks for tasks.
                          .filter_filters = instruments.filter != nullptr ? block_filters : 0,
                          .filter_channels = stage_channels,
                          .input_tiles = rows,
                          .input_channels = transform_channels,
                          .gemm_points = 1,
                          .gemm_filters = block_filters,
                          .output_tiles = rows,
                          .output_filters = transform_channels};
  // What three teams of a multiprocessor have at work and ahead, and some more. M: U is read once per batch, but the
  // last batch's end overlaps with nothing. (Measured: docs/log/42-megakernel-ieee.md.)
  const auto processors = static_cast<std::int32_t>(device.processors);
  const Mapping mapping{.d_ig = 2 * processors,
                        .d_go = 16 * processors,
                        .m = groups <= 8    ? 2
                             : groups <= 64 ? 4
                                            : 8,
                        .bounded = true};
  return {.map = make_task_map(tiles, problem.c, problem.k, shapes, instruments.mapping(mapping)),
          .weights = weights,
          .access = select_access(problem),
          .plain = problem.has_plain_epilogue(),
          .instruments = instruments};
}

}  // namespace fastconv::algos::winograd_megakernel::ffma
