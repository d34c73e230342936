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

// In NHWC with an even number of channels: two channels a thread, whose input rows are on their way through shared
// memory, several rows ahead, where registers would hold one.
namespace pairs {

inline constexpr int threads = 128;

constexpr int stages(std::int64_t stride) { return stride == 1 ? 3 : 2; }  // of the ring
constexpr int inputs(std::int64_t r, std::int64_t stride) { return static_cast<int>((columns - 1) * stride + r); }
constexpr bool filter_in_registers(std::int64_t r) { return r == 3; }
constexpr std::int64_t shared_bytes(std::int64_t r, std::int64_t stride, std::int64_t element_bytes) {
  const std::int64_t ring = stages(stride) * stride * inputs(r, stride) * threads * 2 * element_bytes;
  return ring + (filter_in_registers(r) ? 1 : r * r) * threads * 8;
}
// Of `threads` threads, on a multiprocessor.
constexpr int blocks_by_registers(std::int64_t r) { return r == 3 ? 4 : r == 5 ? 4 : 3; }

}  // namespace pairs

struct Config {
  bool pairs = false;
  int strip = 1;  // output rows of a thread
  std::int64_t strips = 1, column_tiles = 1, channel_tiles = 1;
  std::int64_t blocks = 1;
  std::int64_t turns = 0;  // steps of a strip, over all rounds of blocks
  double cost_us = 0.0;
};

// Rows that a strip reads beyond those of the strips before it, in turns.
inline std::int64_t more_rows(const ConvProblem& problem) { return ceil_div(problem.r, problem.stride_h) - 1; }

// Sets strips, blocks and the turns of all rounds. Long strips read few rows twice; short ones fill the device.
template <typename Blocks>
void choose_strips(Config& config, const ConvProblem& problem, std::int64_t slots, const Blocks& blocks_of) {
  config.turns = INT64_MAX;
  for (std::int64_t strips = 1; strips <= problem.p(); ++strips) {
    const std::int64_t strip = ceil_div<std::int64_t>(problem.p(), strips);
    const std::int64_t blocks = blocks_of(problem.n * ceil_div<std::int64_t>(problem.p(), strip) * config.column_tiles);
    const std::int64_t turns = ceil_div(blocks, slots) * (strip + more_rows(problem) + 2);  // 2: to start and end
    if (turns >= config.turns) continue;
    config.turns = turns;
    config.strip = static_cast<int>(strip);
    config.strips = ceil_div<std::int64_t>(problem.p(), strip);
    config.blocks = blocks;
  }
}

namespace pairs {

inline std::optional<Config> choose(const ConvProblem& problem, const DeviceInfo& device) {
  if (problem.layout != Layout::nhwc || problem.c % 2 != 0) return std::nullopt;
  const auto element = static_cast<std::int64_t>(size_of(problem.dtype));
  const std::int64_t bytes = shared_bytes(problem.r, problem.stride_h, element) + 1024;  // the system's
  const std::int64_t per_processor = std::min<std::int64_t>(
      blocks_by_registers(problem.r), static_cast<std::int64_t>(device.shared_memory_bytes) / bytes);
  if (per_processor == 0) return std::nullopt;
  Config config{.pairs = true, .column_tiles = ceil_div<std::int64_t>(problem.q(), columns)};
  choose_strips(config, problem, per_processor * device.processors,
                [&](std::int64_t tasks) { return ceil_div<std::int64_t>(tasks * (problem.c / 2), threads); });
  // Half as many threads as with one channel each: where these have to be made up by short strips, the rows that are
  // read again cost more than the loads that are saved.
  if (problem.r > 3 && config.strip < more_rows(problem)) return std::nullopt;
  // As measured on an H100 (docs/log/122-depthwise-pairs.md): the issue of a turn's instructions is not hidden behind
  // the bytes, which come at the memory's whole rate.
  const double tensors =
      static_cast<double>((problem.n * problem.c * problem.h * problem.w + problem.output_numel()) * element);
  const double turn = 0.011 * static_cast<double>(problem.r * problem.s * problem.stride_h * per_processor);
  config.cost_us = 5.3 + memory_us(tensors, 1.0, device) + turn * static_cast<double>(config.turns);
  return config;
}

}  // namespace pairs

inline bool has_kernel(const ConvProblem& problem) {
  const bool size = problem.r == problem.s && (problem.r == 3 || problem.r == 5 || problem.r == 7);
  const bool stride = problem.stride_h == problem.stride_w && problem.stride_h <= 2;
  return problem.c_per_group() == 1 && problem.k_per_group() == 1 && size && stride && problem.dilation_h == 1 &&
         problem.dilation_w == 1;
}

inline std::optional<Config> choose(const ConvProblem& problem, const DeviceInfo& device) {
  if (!has_kernel(problem)) return std::nullopt;
  if (problem.x_channels != 0 || problem.y_channels != 0) return std::nullopt;  // x and y have the same pixels
  // The kernel numbers rows, columns and the elements of an image with 31 bits.
  constexpr double limit = 1073741824.0;
  const double image = static_cast<double>(problem.c) * static_cast<double>(problem.h + 2 * problem.pad_h) *
                       static_cast<double>(problem.w + 2 * problem.pad_w);
  if (image >= limit) return std::nullopt;

  if (const auto config = pairs::choose(problem, device)) {
    if (static_cast<double>(config->blocks) * pairs::threads >= 2.0 * limit) return std::nullopt;
    return config;
  }
  const bool nhwc = problem.layout == Layout::nhwc;
  Config config;
  config.channel_tiles = nhwc ? ceil_div<std::int64_t>(problem.c, 32) : 1;
  config.column_tiles = nhwc ? ceil_div<std::int64_t>(problem.q(), columns) : problem.q();
  const std::int64_t per_processor = nhwc ? blocks_per_processor(problem.r, problem.stride_h)
                                          : (problem.r == 3   ? 5
                                             : problem.r == 5 ? 3
                                                              : 2);
  const std::int64_t slots = per_processor * device.processors;
  choose_strips(config, problem, slots, [&](std::int64_t tasks) {
    return nhwc ? config.channel_tiles * ceil_div<std::int64_t>(tasks, warps)
                : ceil_div<std::int64_t>(tasks * problem.c, warps * 32);
  });
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
namespace pairs {
void run_cuda(const ConvArgs& args, Runtime& runtime, const Config& config);
}

}  // namespace fastconv::algos::direct_tiled::depthwise
