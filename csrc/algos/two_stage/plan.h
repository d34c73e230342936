// Tiles and batch chunks of two_stage: shared by the planner, the kernels and their launch.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/cost.h"
#include "core/device_info.h"
#include "core/problem.h"
#include "device/indexing.h"
#include "host/register_tile.h"

namespace fastconv::algos::two_stage {

// Most that the partial planes may take; the batch is cut into chunks that respect it.
inline constexpr std::int64_t max_workspace_bytes = std::int64_t{1} << 30;

// FP32 partial planes of one image: [R*S][K, P, Q]
constexpr std::int64_t planes_bytes_per_image(const ConvProblem& problem) {
  return 4 * problem.r * problem.s * problem.k * problem.p() * problem.q();
}

constexpr bool single_stage(const ConvProblem& problem) { return problem.r * problem.s == 1; }

// Images per pass. A 1x1 filter has no planes to bound.
constexpr std::int64_t images_per_chunk(const ConvProblem& problem) {
  if (single_stage(problem)) return problem.n;
  return std::clamp<std::int64_t>(max_workspace_bytes / planes_bytes_per_image(problem), 1, problem.n);
}

constexpr std::int64_t planes_bytes(const ConvProblem& problem) {
  return single_stage(problem) ? 0 : images_per_chunk(problem) * planes_bytes_per_image(problem);
}

// ---- CUDA ----

// A block is 8 warps of 32 lanes. Lanes run along the dimension of y that is contiguous in memory, n_per_thread times;
// warps along the other, m_per_thread elements each. One of the two is filters, the other outputs.
inline constexpr int warps = 8, lanes = 32, threads = warps * lanes;
inline constexpr int chunk = 16;  // channels staged in shared memory at a time: a z-row piece of one 64-byte read

struct Tile {
  int m_per_thread, n_per_thread;
  double rate;  // share of the FP32 rate in the inner loop: multiply-adds against shared-memory loads

  constexpr int m() const { return warps * m_per_thread; }
  constexpr int n() const { return lanes * n_per_thread; }
};

inline constexpr Tile tiles[] = {
    {8, 4, 0.40},  // 32 multiply-adds for 6 loads
    {4, 2, 0.20},  // batch 1, small maps: four times the blocks
    {1, 1, 0.04},  // a few filters per group: 8 x 32
};
inline constexpr int tile_count = 3;

struct Config {
  int tile = 0;
  bool lanes_on_filters = false;  // else on outputs
  int k_tile = 1, pixel_tile = 1;
  std::int64_t k_tiles = 1;  // per group
  double cost_us = 0.0;
};

inline Config configure(const ConvProblem& problem, const DeviceInfo& device, int index) {
  const Tile& tile = tiles[index];
  Config config;
  config.tile = index;
  // With few filters per group the lanes would idle: then they take outputs in NHWC as well.
  config.lanes_on_filters = problem.layout == Layout::nhwc && problem.k_per_group() >= lanes;
  config.k_tile = config.lanes_on_filters ? tile.n() : tile.m();
  config.pixel_tile = config.lanes_on_filters ? tile.m() : tile.n();
  config.k_tiles = ceil_div<std::int64_t>(problem.k_per_group(), config.k_tile);

  const std::int64_t pixels = problem.n * problem.p() * problem.q(), taps = problem.r * problem.s;
  const std::int64_t blocks =
      taps * problem.groups * config.k_tiles * ceil_div<std::int64_t>(pixels, config.pixel_tile);
  const double flops = 2.0 * static_cast<double>(std::max<std::int64_t>(blocks, device.processors)) * tile.m() *
                       tile.n() * static_cast<double>(ceil_div<std::int64_t>(problem.c_per_group(), chunk) * chunk);
  // Every plane is written once and read once.
  const double plane_bytes = single_stage(problem) ? 0.0
                                                   : 2.0 * static_cast<double>(problem.n) *
                                                         static_cast<double>(planes_bytes_per_image(problem));
  config.cost_us =
      (single_stage(problem) ? 8.0 : 17.0) +
      (single_stage(problem) ? 1.6 : 1.25) *
          std::max(fp32_us(flops, tile.rate, device), memory_us(problem.compulsory_bytes() + plane_bytes, 1.0, device));
  return config;
}

inline Config choose_config(const ConvProblem& problem, const DeviceInfo& device) {
  Config best = configure(problem, device, 0);
  for (int index = 1; index < tile_count; ++index) {
    const Config config = configure(problem, device, index);
    if (config.cost_us < best.cost_us) best = config;
  }
  return best;
}

// ---- CPU: a task computes one plane's 64 outputs for up to 32 filters of one group ----

inline constexpr std::int64_t cpu_pixel_tile = 64, cpu_chunk = 128;

struct CpuConfig {
  std::int64_t k_tile, k_tiles, channels;
  std::int64_t x_floats, filter_floats, sum_floats;
  int filters;  // of a register tile

  // of one thread: x, filters, sums, offsets (32-bit, one per channel), origins and targets (64-bit, one per output)
  std::int64_t scratch_bytes() const {
    return (4 * (x_floats + filter_floats + sum_floats + channels) + 8 * 2 * cpu_pixel_tile + 63) / 64 * 64;
  }
};

inline CpuConfig choose_cpu_config(const ConvProblem& problem) {
  CpuConfig config;
  config.filters = register_tile::filters_for(problem.k_per_group());
  config.k_tile =
      std::min<std::int64_t>(4, ceil_div<std::int64_t>(problem.k_per_group(), config.filters)) * config.filters;
  config.k_tiles = ceil_div<std::int64_t>(problem.k_per_group(), config.k_tile);
  config.channels = std::min(cpu_chunk, problem.c_per_group());
  config.x_floats = config.channels * cpu_pixel_tile;
  config.filter_floats = config.channels * config.k_tile;
  config.sum_floats = config.k_tile * cpu_pixel_tile;
  return config;
}

}  // namespace fastconv::algos::two_stage
