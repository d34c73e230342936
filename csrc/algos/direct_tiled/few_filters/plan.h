// The fourth kernel of direct_tiled: few filters (the last layers of decoders, and the input gradients of first layers,
// whose filters are the image's channels): core/few_filters.h says which. The input is read about once and everything
// else stays on chip; the issue of instructions bounds it. Shared by the planner, the kernel and its launch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "algos/direct_tiled/plan.h"
#include "core/few_filters.h"

namespace fastconv {
struct ConvArgs;
class Runtime;
}  // namespace fastconv

namespace fastconv::algos::direct_tiled::few_filters {

inline constexpr int block_threads = 256;
inline constexpr int warps = block_threads / 32;
inline constexpr int blocks_per_processor = 2;                // by registers: 128 a thread
inline constexpr std::int64_t max_filter_bytes = 100 * 1024;  // so that both fit
inline constexpr int chunk_channels = 64;                     // NCHW: of one chain of sums

// NHWC: a warp computes tile_p x tile_q outputs, each lane the sums of its channels; NCHW: a thread tile_p outputs of a
// column. k_tile: 3 or 4 filters, those beyond K are zeros.
inline constexpr int tile_p = 4;
constexpr int tile_q(Layout layout) { return layout == Layout::nhwc ? 4 : 1; }

struct Config {
  int k_tile = 4;
  int c_pad = 32;  // channels of the filters in shared memory
  std::int64_t p_tiles = 1, q_tiles = 1;
  std::int64_t tasks = 1;  // of a warp (NHWC) or of a thread
  std::int64_t blocks = 1, shared_bytes = 0;
  double cost_us = 0.0;
};

inline std::optional<Config> choose(const ConvProblem& problem, const DeviceInfo& device) {
  const bool nhwc = problem.layout == Layout::nhwc;
  if (!is_for_few_filters(problem)) return std::nullopt;
  if (problem.output_numel() == 0) return std::nullopt;  // there would be no blocks
  const std::int64_t lanes = nhwc ? 32 : 1;              // that share the channels
  // The kernel numbers rows, columns and the elements of an image with 31 bits.
  constexpr double limit = 1073741824.0;
  const double image = static_cast<double>(problem.x_pitch()) * static_cast<double>(problem.h + 2 * problem.pad_h) *
                       static_cast<double>(problem.w + 2 * problem.pad_w);
  const double outputs =
      static_cast<double>(problem.n) * static_cast<double>(problem.p() + 32) * static_cast<double>(problem.q() + 32);
  if (image >= limit || outputs >= limit) return std::nullopt;

  Config config;
  config.k_tile = problem.k <= 3 ? 3 : 4;
  const std::int64_t taps = problem.r * problem.s, c_pad = ceil_div(problem.c, lanes) * lanes;
  config.shared_bytes = 4 * taps * c_pad * config.k_tile;
  if (config.shared_bytes > std::min(max_filter_bytes, max_bytes(device))) return std::nullopt;
  config.c_pad = static_cast<int>(c_pad);
  const int columns = tile_q(problem.layout);
  config.p_tiles = ceil_div<std::int64_t>(problem.p(), tile_p);
  config.q_tiles = ceil_div<std::int64_t>(problem.q(), columns);
  config.tasks = problem.n * config.p_tiles * config.q_tiles;
  const std::int64_t slots = blocks_per_processor * device.processors;
  config.blocks = std::min(slots, ceil_div<std::int64_t>(config.tasks, nhwc ? warps : block_threads));

  // Measured on an H200 (docs/log/81-few-filters.md): the issue of instructions decides on large maps, on small ones a
  // warp's own walk over taps and channels; before it come the filters, into every block.
  const double products = static_cast<double>(tile_p * columns * config.k_tile * taps) * static_cast<double>(c_pad);
  constexpr double shares[2][2] = {{0.29, 0.38}, {0.36, 0.41}};  // of the FP32 rate: NCHW, NHWC; 3, 4 filters
  const double step_clocks = nhwc ? 230.0 : 110.0;               // of a tap and 32 channels, or one
  const std::int64_t turns = ceil_div<std::int64_t>(config.tasks, config.blocks * (nhwc ? warps : block_threads));
  const double steps = static_cast<double>(turns * taps * (c_pad / lanes));
  config.cost_us =
      6.0 + clocks_us(0.35 * static_cast<double>(config.shared_bytes), device) +
      std::max({fp32_us(2.0 * products * static_cast<double>(config.tasks), shares[nhwc][config.k_tile == 4], device),
                clocks_us(steps * step_clocks, device), memory_us(problem.compulsory_bytes(), 0.7, device)});
  return config;
}

void run_cuda(const ConvArgs& args, Runtime& runtime, const Config& config);

}  // namespace fastconv::algos::direct_tiled::few_filters
