// Tiles of direct_tiled: shared by the planner, the kernels and their launch.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "core/cost.h"
#include "core/device_info.h"
#include "core/problem.h"
#include "device/indexing.h"
#include "host/register_tile.h"

namespace fastconv::algos::direct_tiled {

// ---- CUDA ----

inline constexpr int threads = 256;

// A block computes p x q outputs for k_threads * k_per_thread filters.
struct Tile {
  int p, q;
  int k_threads;     // threads along the filters; the other threads / k_threads lie along the outputs
  int k_per_thread;  // filters of one thread, all of one group
  double rate;       // share of the FP32 rate in the inner loop: multiply-adds against shared-memory loads

  constexpr int filters() const { return k_threads * k_per_thread; }
  constexpr int pixel_threads() const { return threads / k_threads; }
  constexpr int pixels_per_thread() const { return p * q / pixel_threads(); }
  constexpr int filter_pitch() const { return filters() + 4; }  // + 4: fewer bank conflicts, rows stay 16-byte aligned
};

inline constexpr Tile tiles[] = {
    {8, 32, 4, 8, 0.35},  // large maps: 32 multiply-adds for 6 loads, rows as long as a warp
    {8, 8, 16, 4, 0.25},  // maps of 7..14: a quarter of the outputs, twice the filters, so less is padding
    {8, 8, 16, 1, 0.08},  // depthwise and few filters per group: a thread has one; least memory for large kernels
};
inline constexpr int tile_count = 3;

constexpr bool tiles_are_consistent() {
  for (const Tile& tile : tiles) {
    if (threads % tile.k_threads != 0 || tile.p * tile.q % tile.pixel_threads() != 0) return false;
    if (tile.k_per_thread != 1 && tile.k_per_thread % 4 != 0) return false;  // filters are loaded four at a time
  }
  return true;
}
static_assert(tiles_are_consistent());

// Up to here a block needs no opt-in, and four blocks share a multiprocessor.
inline constexpr std::int64_t preferred_shared_bytes = 48 * 1024;
// The most that any GPU so far grants one block. The kernel's index arithmetic relies on it.
inline constexpr std::int64_t max_shared_bytes = 227 * 1024;

inline std::int64_t max_bytes(const DeviceInfo& device) {
  return std::min<std::int64_t>(max_shared_bytes, static_cast<std::int64_t>(device.shared_memory_bytes));
}

struct Config {
  int tile = 0;               // index into tiles
  int threads_per_group = 1;  // of the tile's k_threads, those that share a group
  int group_tile = 1;         // groups of a block
  int k_tile = 1;             // filters of one group in a block
  int channels = 1;           // of each group, staged in shared memory at a time
  int patch_h = 1, patch_w = 1;
  int plane = 1;  // floats from one staged channel to the next: odd, so that channels differ in bank
  std::int64_t k_tiles = 1, group_tiles = 1, p_tiles = 1, q_tiles = 1, blocks = 1;
  std::int64_t shared_bytes = 0;
  double cost_us = 0.0;
};

inline std::int64_t patch_extent(int outputs, std::int64_t stride, std::int64_t taps, std::int64_t dilation) {
  return (outputs - 1) * stride + (taps - 1) * dilation + 1;
}

// Whether a patch can fit so many floats at all. What follows multiplies extents: larger ones would overflow.
inline bool is_moderate(const ConvProblem& problem, std::int64_t floats) {
  return std::max({problem.stride_h, problem.stride_w, (problem.r - 1) * problem.dilation_h,
                   (problem.s - 1) * problem.dilation_w}) <= floats;
}

// Shared memory for one staged channel of every group in the block: patches and filters.
inline std::int64_t channel_bytes(const ConvProblem& problem, const Tile& tile, std::int64_t group_tile) {
  const std::int64_t plane = (patch_extent(tile.p, problem.stride_h, problem.r, problem.dilation_h) *
                              patch_extent(tile.q, problem.stride_w, problem.s, problem.dilation_w)) |
                             1;
  return 4 * (group_tile * plane + problem.r * problem.s * tile.filter_pitch());
}

// The tile `index` on this problem, or nothing if not even one channel fits shared memory.
inline std::optional<Config> configure(const ConvProblem& problem, const DeviceInfo& device, int index) {
  const Tile& tile = tiles[index];
  Config config;
  config.tile = index;
  const std::int64_t per_group = ceil_div<std::int64_t>(problem.k_per_group(), tile.k_per_thread);
  config.threads_per_group = static_cast<int>(std::min<std::int64_t>(tile.k_threads, per_group));
  config.group_tile =
      static_cast<int>(std::min<std::int64_t>(tile.k_threads / config.threads_per_group, problem.groups));
  config.k_tile = config.threads_per_group * tile.k_per_thread;

  const std::int64_t most = max_bytes(device);
  std::int64_t bytes = channel_bytes(problem, tile, config.group_tile);
  if (bytes > most && config.group_tile > 1) {  // groups share a block for coalescing only: give that up first
    config.group_tile = 1;
    bytes = channel_bytes(problem, tile, 1);
  }
  if (bytes > most) return std::nullopt;
  const std::int64_t fit = (bytes <= preferred_shared_bytes ? std::min(preferred_shared_bytes, most) : most) / bytes;
  const std::int64_t chunks = ceil_div(problem.c_per_group(), std::min(fit, problem.c_per_group()));
  config.channels = static_cast<int>(ceil_div(problem.c_per_group(), chunks));
  config.shared_bytes = config.channels * bytes;
  config.patch_h = static_cast<int>(patch_extent(tile.p, problem.stride_h, problem.r, problem.dilation_h));
  config.patch_w = static_cast<int>(patch_extent(tile.q, problem.stride_w, problem.s, problem.dilation_w));
  config.plane = (config.patch_h * config.patch_w) | 1;

  config.k_tiles = ceil_div<std::int64_t>(problem.k_per_group(), config.k_tile);
  config.group_tiles = ceil_div<std::int64_t>(problem.groups, config.group_tile);
  config.p_tiles = ceil_div<std::int64_t>(problem.p(), tile.p);
  config.q_tiles = ceil_div<std::int64_t>(problem.q(), tile.q);
  config.blocks = problem.n * config.group_tiles * config.k_tiles * config.p_tiles * config.q_tiles;

  // Padded multiply-adds; fewer blocks than multiprocessors leave some idle.
  const double flops = 2.0 * static_cast<double>(std::max<std::int64_t>(config.blocks, device.processors)) * tile.p *
                       tile.q * tile.filters() * static_cast<double>(problem.c_per_group() * problem.r * problem.s);
  // A patch is used by few products where kernels have one tap, and is wider than its outputs with a stride.
  const double slowness = problem.r * problem.s == 1 ? 3.4 : problem.stride_h * problem.stride_w > 1 ? 1.6 : 1.0;
  config.cost_us =
      7.0 + slowness * std::max(fp32_us(flops, tile.rate, device), memory_us(problem.compulsory_bytes(), 1.0, device));
  return config;
}

// The cheapest tile that fits.
inline std::optional<Config> choose_config(const ConvProblem& problem, const DeviceInfo& device) {
  std::optional<Config> best;
  for (int index = 0; index < tile_count; ++index) {
    const std::optional<Config> config = configure(problem, device, index);
    if (config && (!best || config->cost_us < best->cost_us)) best = config;
  }
  return best;
}

// ---- CPU: a task computes p x 8 outputs for k_tile filters of one group ----

inline constexpr std::int64_t cpu_chunk_bytes = 96 * 1024;       // staged per task: stays in L2, next to the input
inline constexpr std::int64_t cpu_max_scratch_bytes = 64 << 20;  // per thread, in the workspace

struct CpuConfig {
  std::int64_t p_tile, k_tile, channels;
  // A staged row is cut into stride_w phases, [stride_w, phase_w]: the outputs' inputs at one tap lie side by side.
  std::int64_t patch_h, phase_w, patch_pitch;
  std::int64_t k_tiles, p_tiles, q_tiles, tasks;
  std::int64_t patch_floats, filter_floats, sum_floats, offset_count;
  int filters;  // of a register tile

  std::int64_t scratch_bytes() const {
    return (4 * (patch_floats + filter_floats + sum_floats + offset_count) + 63) / 64 * 64;
  }
};

inline CpuConfig choose_cpu_config(const ConvProblem& problem) {
  constexpr std::int64_t q_tile = register_tile::pixels;
  CpuConfig config;
  config.filters = register_tile::filters_for(problem.k_per_group());
  config.p_tile = std::min<std::int64_t>(8, problem.p());
  config.k_tile =
      std::min<std::int64_t>(4, ceil_div<std::int64_t>(problem.k_per_group(), config.filters)) * config.filters;
  config.patch_h = patch_extent(static_cast<int>(config.p_tile), problem.stride_h, problem.r, problem.dilation_h);
  config.phase_w = q_tile + (problem.s - 1) * problem.dilation_w / problem.stride_w;
  config.patch_pitch = problem.stride_w * config.phase_w;
  const std::int64_t taps = problem.r * problem.s;
  const std::int64_t channel = 4 * (config.patch_h * config.patch_pitch + taps * (config.k_tile + 1));
  config.channels = std::clamp<std::int64_t>(cpu_chunk_bytes / channel, 1, problem.c_per_group());
  config.patch_floats = config.channels * config.patch_h * config.patch_pitch;
  config.filter_floats = config.channels * taps * config.k_tile;
  config.sum_floats = config.p_tile * config.k_tile * q_tile;
  config.offset_count = config.channels * taps;
  config.k_tiles = ceil_div<std::int64_t>(problem.k_per_group(), config.k_tile);
  config.p_tiles = ceil_div<std::int64_t>(problem.p(), config.p_tile);
  config.q_tiles = ceil_div<std::int64_t>(problem.q(), q_tile);
  config.tasks = problem.n * problem.groups * config.k_tiles * config.p_tiles * config.q_tiles;
  return config;
}

}  // namespace fastconv::algos::direct_tiled
