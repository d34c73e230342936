// The weight gradient of depthwise convolutions (one channel and one filter a group) with square kernels of 3, 5, 7 and
// stride 1 or 2, in FP32 arithmetic. A thread keeps the sums of all taps of its channel in registers while it walks
// over the map. Shared by the planner, the kernel and its launch.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/device_info.h"
#include "core/problem.h"
#include "device/indexing.h"

namespace fastconv::algos::direct_tiled::wgrad {

inline constexpr int warps = 8;            // of a block
inline constexpr int block_channels = 32;  // in NHWC; in NCHW a block has one channel

// Output rows that a thread walks along at a time: together they read fewer input rows, and take more registers.
constexpr int strip_rows(std::int64_t r, std::int64_t stride) { return r == 3 ? 4 : r == 5 || stride == 1 ? 2 : 1; }

// In NHWC, by registers.
constexpr int blocks_per_processor(std::int64_t r, std::int64_t stride) {
  return r == 3 ? 4 - static_cast<int>(stride) : r == 5 && stride == 1 ? 2 : 1;
}

struct Plan {
  std::int64_t strips = 1;         // of an image
  std::int64_t channel_tiles = 1;  // of block_channels, or of one
  std::int64_t split_k = 1;        // of the sum over the pixels, added in order at the end

  // [split][tap][C] float32
  static std::size_t workspace_bytes(const ConvProblem& problem, std::int64_t split_k) {
    return static_cast<std::size_t>(split_k * problem.r * problem.s * problem.c) * sizeof(float);
  }
};

inline Plan make_plan(const ConvProblem& problem, const DeviceInfo& device) {
  const bool nhwc = problem.layout == Layout::nhwc;
  Plan plan;
  plan.strips = ceil_div<std::int64_t>(problem.p(), strip_rows(problem.r, problem.stride_h));
  plan.channel_tiles = nhwc ? ceil_div<std::int64_t>(problem.c, block_channels) : problem.c;
  const std::int64_t tasks = problem.n * plan.strips * (nhwc ? 1 : problem.q());  // of a warp, or of a thread
  const std::int64_t most = ceil_div<std::int64_t>(tasks, nhwc ? warps : warps * 32);
  // Whole rounds of blocks: each walks over as many strips as the others.
  const std::int64_t slots = (nhwc ? blocks_per_processor(problem.r, problem.stride_h) : 4) * device.processors;
  const std::int64_t wanted = std::max<std::int64_t>(slots / plan.channel_tiles, 1);
  plan.split_k = std::min(wanted, most);
  return plan;
}

}  // namespace fastconv::algos::direct_tiled::wgrad
