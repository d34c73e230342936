// Sizes, memory layout and task map of the Winograd megakernel, shared by the planner and the functions that run it.
//
//   V [places][36][t][C_pad]           transformed input, in the workspace; group g of t tiles uses place g % places
//   M [places][36][t][K_pad]           float32 products, in the workspace, likewise
//   U [36][K_pad / 16][C_pad][16]      transformed filters, in the packed weight (CPU)
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/device_info.h"
#include "core/integers.h"
#include "core/problem.h"
#include "winograd/task_map.h"

namespace fastconv::algos::winograd_megakernel::cpu {

constexpr int tile_outputs = 4;  // F(4x4,3x3)
constexpr int points = 36;

// CPU: filters are the lanes of a vector; rows of V and M start at multiples of 32 bytes.
constexpr std::int64_t filter_lanes = 16, channel_multiple = 8;
constexpr std::int64_t cpu_channel_block = 64;  // of a transform task: what fits the L1 cache (winograd/cpu.h)

inline std::int64_t padded_channels(const ConvProblem& problem) { return round_up(problem.c, channel_multiple); }
inline std::int64_t padded_filters(const ConvProblem& problem) { return round_up(problem.k, filter_lanes); }

inline std::size_t u_bytes(const ConvProblem& problem) {
  return static_cast<std::size_t>(points * padded_filters(problem) * padded_channels(problem)) * sizeof(float);
}
// Elements of a group's place in V and in M.
inline std::int64_t v_place(const TaskMap& map, std::int64_t c_pad) {
  return std::int64_t{points} * map.shapes.group_tiles * c_pad;
}
inline std::int64_t m_place(const TaskMap& map, std::int64_t k_pad) {
  return std::int64_t{points} * map.shapes.group_tiles * k_pad;
}

// The map for a pool of threads. Throws InvalidArgument if it has too many tasks.
inline TaskMap make_map(const ConvProblem& problem, const DeviceInfo& device) {
  const std::int64_t per_image = ceil_div(problem.p(), tile_outputs) * ceil_div(problem.q(), tile_outputs);
  const std::int64_t tiles = problem.n * per_image;
  // Few channels: U is small and the transforms take the time, so small groups, whose V and M stay in the caches. Many:
  // the opposite, and two groups share a block of U in the L2 cache. Never more tiles than a thread's share.
  const bool few_channels = padded_channels(problem) + padded_filters(problem) <= 192;
  const std::int64_t share = round_up(ceil_div(tiles, device.processors), 8);
  const auto group_tiles = static_cast<std::int32_t>(std::min<std::int64_t>(share, few_channels ? 32 : 64));
  // A GEMM task of a few million operations: large beside the cost of a ticket, small beside the whole.
  const std::int32_t filters = static_cast<std::int32_t>(std::min<std::int64_t>(64, padded_filters(problem)));
  const double per_point =
      2.0 * group_tiles * static_cast<double>(padded_channels(problem)) * static_cast<double>(filters);
  std::int32_t block = 1;
  for (std::int32_t divisor : {2, 3, 4, 6, 9, 12}) {
    if (per_point * divisor <= 4e6) block = divisor;
  }
  const TaskShapes shapes{.group_tiles = group_tiles,
                          .filter_filters = 0,  // pack_weight() transforms them
                          .filter_channels = 0,
                          .input_tiles = 16,
                          .input_channels = cpu_channel_block,
                          .gemm_points = block,
                          .gemm_filters = filters,
                          .output_tiles = 16,
                          .output_filters = cpu_channel_block};
  // Between parent and child every thread has one task, and one to spare.
  const std::int32_t distance = 2 * static_cast<std::int32_t>(device.processors);
  return make_task_map(tiles, problem.c, problem.k, shapes,
                       {.d_ig = distance, .d_go = distance, .m = few_channels ? 1 : 2, .bounded = true}, points);
}

}  // namespace fastconv::algos::winograd_megakernel::cpu
