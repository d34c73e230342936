// The fifth kernel of direct_tiled: 1x1 layers of small maps in FP32, for latency. A block has a tile of pixels and
// filters and a slice of the channels; the blocks of a cluster share a tile and add their sums through distributed
// shared memory, in a fixed order. Shared by the planner, the kernel and its launch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "core/cost.h"
#include "core/device_info.h"
#include "core/integers.h"
#include "core/problem.h"

namespace fastconv {
struct ConvArgs;
class Runtime;
}  // namespace fastconv

namespace fastconv::algos::direct_tiled::pointwise {

inline constexpr int warps = 8, threads = warps * 32;
inline constexpr int warp_pixels = 32, warp_filters = 32;  // 8 x 4 of them a lane's
inline constexpr int quad = 4;                             // channels, filters or pixels of 16 bytes
inline constexpr int max_shared_bytes = 112 * 1024;        // two blocks fit a multiprocessor
inline constexpr int max_split = 8;                        // blocks of a cluster, as many as any launch may have

struct Config {
  int pixel_warps_log2 = 0, filter_warps_log2 = 0;  // warp tiles of a block's tile; the other warps share the channels
  int split_log2 = 0;                               // blocks of a cluster
  int quads = 1;                                    // of channels, of a block's slice
  int first_part = 1;                               // of these, multiplied while the rest is on its way
  int copy_lanes_log2 = 0;                          // neighbouring threads that copy a row of channels
  int operand_floats = 0;                           // both operands' slices; later the warps' sums
  int shared_bytes = 0;
  std::int64_t pixel_tiles = 1, filter_tiles = 1;
  double cost_us = 0.0;

  constexpr int pixels() const { return warp_pixels << pixel_warps_log2; }
  constexpr int filters() const { return warp_filters << filter_warps_log2; }
  constexpr int tile() const { return pixels() * filters(); }
  constexpr int groups_log2() const { return 3 - pixel_warps_log2 - filter_warps_log2; }  // of warps, with a tile each
  constexpr int split() const { return 1 << split_log2; }
  // Quads of channels from a staged row to the next: odd, so that eight rows differ in bank.
  constexpr int pitch_quads() const { return quads | 1; }
};

// With what the launch is of beside it. Whole vectors: of channels of a filter, of x along its lines, of y likewise.
struct Plan : Config {
  bool vector_weight = false, vector_x = false, vector_y = false;
};

// Lines of a tile of sums: filters of a pixel in NHWC, pixels of a filter in NCHW, there four more, so that the lanes'
// rows differ in bank.
constexpr int sums_pitch(const Config& config, Layout layout) {
  return layout == Layout::nhwc ? config.filters() : config.pixels() + quad;
}

// Two blocks run on a multiprocessor at once. Each round of them waits for its operands, copies them, multiplies
// (alone, eight warps wait for shared memory at times), and adds; fitted to 2000 times of an H100, within 4 %. Clusters
// of four or eight blocks leave multiprocessors out where their number in a group of them is no multiple.
inline double cost_us(const ConvProblem& problem, const DeviceInfo& device, const Config& config) {
  const double blocks = static_cast<double>(config.pixel_tiles * config.filter_tiles * config.split());
  const double processors = device.processors / (config.split() >= 4 ? 1.1 : 1.0);
  const double split = config.split() > 1 ? 1.0 : 0.0;
  const double turns = std::ceil(blocks / processors), rounds = std::max(1.0, std::ceil(blocks / (2.0 * processors)));
  const double slice = static_cast<double>(config.quads * quad), tile = config.tile();
  const double products = 64.0 * quad * static_cast<double>(ceil_div(config.quads, 1 << config.groups_log2()));
  const double copies = sizeof(float) * slice * (config.pixels() + config.filters()) / 50.0;
  return 6.8 + 0.25 * split + (rounds - 1.0) * (0.9 + 1.2 * split) +
         clocks_us(turns * (products * (turns > 1.0 ? 1.15 : 1.25) + copies + 0.21 * tile), device) +
         memory_us(problem.compulsory_bytes(), 1.1, device);
}

inline std::optional<Config> configure(const ConvProblem& problem, const DeviceInfo& device, int pixel_warps_log2,
                                       int filter_warps_log2, int split_log2) {
  Config config{.pixel_warps_log2 = pixel_warps_log2, .filter_warps_log2 = filter_warps_log2, .split_log2 = split_log2};
  const bool nhwc = problem.layout == Layout::nhwc;
  const std::int64_t quads = ceil_div<std::int64_t>(ceil_div<std::int64_t>(problem.c, quad), config.split());
  if (quads * quad > max_shared_bytes / 4 / warp_pixels) return std::nullopt;
  config.quads = static_cast<int>(quads);
  const int groups = 1 << config.groups_log2();
  config.first_part = config.quads < 2 * groups ? config.quads : config.quads / 2 / groups * groups;
  while (config.copy_lanes_log2 < 5 && 2 << config.copy_lanes_log2 <= config.first_part) ++config.copy_lanes_log2;
  config.pixel_tiles = ceil_div<std::int64_t>(problem.n * problem.p() * problem.q(), config.pixels());
  config.filter_tiles = ceil_div<std::int64_t>(problem.k, config.filters());
  // More is a problem of throughput, which this kernel is not made for.
  if (config.pixel_tiles * config.filter_tiles * config.split() > std::int64_t{8} * device.processors) {
    return std::nullopt;
  }
  const int input_rows = nhwc ? quad * config.pitch_quads() : quad * config.quads;
  const int operands = config.filters() * quad * config.pitch_quads() + config.pixels() * input_rows;
  const int lines = nhwc ? config.pixels() : config.filters();
  const int sums = (lines * sums_pitch(config, problem.layout)) << config.groups_log2();
  config.operand_floats = std::max(operands, sums);
  const int owned = config.tile() >> split_log2;
  const int floats = config.operand_floats + (split_log2 > 0 ? config.tile() : 0) + config.filters() +
                     (problem.has_residual() ? owned : 0) + quad;
  config.shared_bytes = 4 * floats;
  if (config.shared_bytes > max_shared_bytes) return std::nullopt;
  config.cost_us = cost_us(problem, device, config);
  return config;
}

inline std::optional<Plan> choose(const ConvProblem& problem, const DeviceInfo& device) {
  if (device.compute_capability != 90) return std::nullopt;  // clusters; measured nowhere else
  if (problem.dtype != DType::f32 || problem.r != 1 || problem.s != 1 || problem.groups != 1 || problem.pad_h != 0 ||
      problem.pad_w != 0) {
    return std::nullopt;
  }
  constexpr double limit = 1073741824.0;  // elements are counted in 32 bits
  const double input = static_cast<double>(problem.n * problem.x_pitch()) * static_cast<double>(problem.h * problem.w);
  const double output =
      static_cast<double>(problem.n * problem.y_pitch()) * static_cast<double>(problem.p() * problem.q());
  if (std::max({input, output, static_cast<double>(problem.c * problem.k)}) >= limit) {
    return std::nullopt;
  }
  std::optional<Config> best;
  for (int pixel_warps = 0; pixel_warps <= 1; ++pixel_warps) {
    for (int filter_warps = 0; filter_warps <= 2; ++filter_warps) {
      for (int split = 0; 1 << split <= max_split; ++split) {
        const auto config = configure(problem, device, pixel_warps, filter_warps, split);
        if (config && (!best || config->cost_us < best->cost_us)) best = config;
      }
    }
  }
  if (!best) return std::nullopt;
  const bool nhwc = problem.layout == Layout::nhwc;
  const bool maps = problem.h * problem.w % quad == 0 && problem.stride_h == 1 && problem.stride_w == 1;
  const bool vector_weight = problem.c % quad == 0;
  return Plan{*best, vector_weight, vector_weight && (nhwc || maps),
              (nhwc ? problem.k : problem.p() * problem.q()) % quad == 0};
}

void run_cuda(const ConvArgs& args, Runtime& runtime, const Plan& plan);

}  // namespace fastconv::algos::direct_tiled::pointwise
