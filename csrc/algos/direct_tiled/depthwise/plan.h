// The third kernel of direct_tiled: depthwise convolution (one channel and one filter a group) with square kernels of
// 3, 5, 7 and stride 1 or 2. A thread walks down a strip of columns and keeps everything in registers: the filter, and
// the sums of the output rows whose windows are open. Shared by the planner, the kernel and its launch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "algos/direct_tiled/plan.h"

namespace fastconv {
struct ConvArgs;
class Runtime;
}  // namespace fastconv

namespace fastconv::algos::direct_tiled::depthwise {

inline constexpr int warps = 8;    // of a block
inline constexpr int columns = 7;  // outputs of a thread along W in NHWC: 7 divides 7, 14, 28, 56, 112

// In NHWC, by registers.
constexpr int blocks_per_processor(std::int64_t r, std::int64_t stride) {
  return r == 3 ? 4 - stride : r == 5 && stride == 1 ? 2 : 1;
}

struct Config {
  int strip = 1;  // output rows of a thread
  std::int64_t strips = 1, column_tiles = 1, channel_tiles = 1;
  std::int64_t blocks = 1;
  double cost_us = 0.0;
};

inline std::optional<Config> choose(const ConvProblem& problem, const DeviceInfo& device) {
  const bool size = problem.r == problem.s && (problem.r == 3 || problem.r == 5 || problem.r == 7);
  const bool stride = problem.stride_h == problem.stride_w && problem.stride_h <= 2;
  if (problem.c_per_group() != 1 || problem.k_per_group() != 1 || !size || !stride || problem.dilation_h != 1 ||
      problem.dilation_w != 1) {
    return std::nullopt;
  }
  if (problem.x_channels != 0 || problem.y_channels != 0) return std::nullopt;  // x and y have the same pixels
  // The kernel numbers rows, columns and the elements of an image with 31 bits.
  constexpr double limit = 1073741824.0;
  const double image = static_cast<double>(problem.c) * static_cast<double>(problem.h + 2 * problem.pad_h) *
                       static_cast<double>(problem.w + 2 * problem.pad_w);
  if (image >= limit) return std::nullopt;

  Config config;
  const bool nhwc = problem.layout == Layout::nhwc;
  config.channel_tiles = nhwc ? ceil_div<std::int64_t>(problem.c, 32) : 1;
  config.column_tiles = nhwc ? ceil_div<std::int64_t>(problem.q(), columns) : problem.q();
  // Long strips read few rows twice; short ones fill the device.
  const std::int64_t per_processor = nhwc ? blocks_per_processor(problem.r, problem.stride_h)
                                          : (problem.r == 3   ? 5
                                             : problem.r == 5 ? 3
                                                              : 2);
  const std::int64_t slots = per_processor * device.processors;
  const std::int64_t more_rows = ceil_div(problem.r, problem.stride_h) - 1;
  std::int64_t least = INT64_MAX;
  for (std::int64_t strips = 1; strips <= problem.p(); ++strips) {
    const std::int64_t strip = ceil_div<std::int64_t>(problem.p(), strips);
    const std::int64_t tasks = problem.n * ceil_div<std::int64_t>(problem.p(), strip) * config.column_tiles;
    const std::int64_t blocks = nhwc ? config.channel_tiles * ceil_div<std::int64_t>(tasks, warps)
                                     : ceil_div<std::int64_t>(tasks * problem.c, warps * 32);
    const std::int64_t turns = ceil_div<std::int64_t>(blocks, slots) * (strip + more_rows + 2);  // 2: to start and end
    if (turns >= least) continue;
    least = turns;
    config.strip = static_cast<int>(strip);
    config.strips = ceil_div<std::int64_t>(problem.p(), strip);
    config.blocks = blocks;
  }
  if (static_cast<double>(config.blocks) * warps * 32 >= 2.0 * limit) return std::nullopt;

  // The issue of instructions decides, whatever the type: rates of multiply-adds, and of elements where these are few,
  // as measured on an H200 (docs/log/50-depthwise.md).
  const double share_of_rate = nhwc ? (problem.r == 3   ? 0.14
                                       : problem.r == 5 ? 0.20
                                                        : 0.34)
                                    : (problem.r == 3   ? 0.10
                                       : problem.r == 5 ? 0.18
                                                        : 0.27);
  const double bytes =
      4.0 * static_cast<double>(problem.n * problem.c * problem.h * problem.w + problem.output_numel());
  // Of the slots of all rounds, those that are taken; the many small blocks of 3x3 kernels do not wait for the last
  // round.
  const double filled =
      static_cast<double>(config.blocks) / static_cast<double>(ceil_div(config.blocks, slots) * slots);
  const double share = problem.r == 3 ? std::min(1.0, 4.0 * filled) : filled;
  const double walk = 0.14 * static_cast<double>(problem.r * problem.s);  // a thread's, over the taps
  config.cost_us =
      6.4 + walk +
      std::max(fp32_us(problem.direct_flops(), share_of_rate * share, device), memory_us(bytes, 0.8, device));
  return config;
}

void run_cuda(const ConvArgs& args, Runtime& runtime, const Config& config);

}  // namespace fastconv::algos::direct_tiled::depthwise
