// The second kernel of direct_tiled: the filters' whole reduction (C R S terms) stays in shared memory, so that blocks
// walk from tile to tile. For the first layers of networks. Shared by the planner, the kernel and its launch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <variant>

#include "algos/direct_tiled/depthwise/plan.h"
#include "algos/direct_tiled/few_filters/plan.h"
#include "algos/direct_tiled/plan.h"
#include "algos/direct_tiled/pointwise/plan.h"

namespace fastconv {
struct ConvArgs;
class Runtime;
}  // namespace fastconv

namespace fastconv::algos::direct_tiled::resident {

// A thread computes 2 rows of 4 neighbouring outputs for 2 times 4 neighbouring filters: 64 multiply-adds for 2
// 16-byte loads of filters and, at most, as many of input. In memory both layouts see 4 neighbours: 16-byte stores.
inline constexpr int quad = 4;
inline constexpr int rows = 2, filter_quads = 2;
inline constexpr int max_k_threads = 8;
// Floats from one term's filters to the next, the same for any tile, so that the inner loop's offsets are constants;
// the 4 make the lanes that transpose the filters while loading differ in bank.
inline constexpr int filter_half = max_k_threads * quad, filter_pitch = filter_quads * filter_half + 4;
inline constexpr int window_taps = 4;           // of a row, taken from one window of at most 8 floats
inline constexpr int warps_per_processor = 16;  // 128 registers a thread
inline constexpr int max_terms = 256;           // summed in one chain: longer ones round more

// How threads lie along the filters and the outputs: k_lanes of a warp along K, q_lanes along Q, the others along P.
struct Tile {
  int k_threads;  // along K in the block, in one warp or in several
  int k_lanes, q_lanes;

  constexpr int p_lanes() const { return 32 / (k_lanes * q_lanes); }
  constexpr int filters() const { return k_threads * quad * filter_quads; }
  constexpr int q() const { return q_lanes * quad; }
  constexpr int p(int warps) const { return warps * k_lanes / k_threads * p_lanes() * rows; }
};

inline constexpr Tile tiles[] = {
    {8, 8, 4},  // 64 filters; a warp's store fills 128 bytes of 4 pixels (NHWC), 64 bytes of 8 filters (NCHW)
    {8, 4, 8},  // 64 filters; the other way round
    {4, 4, 8},  // 32 filters
    {4, 4, 4},  // 32 filters, narrow maps
    {2, 2, 4},  // 16 filters
};
inline constexpr int tile_count = 5;

// Neighbouring taps of a row: `offset` of the first one's input from the output's column in a staged row.
// Taps that are not neighbours there (dilation along W) come one by one, as 0 taps.
struct Chunk {
  int offset, taps;
};
inline constexpr int max_chunks = 16;  // of a row; there are no more unless the kernel is very wide

// Calls visit(chunk) in the order in which the filters' taps are kept; phase_pitch as in Config.
template <typename Visit>
void for_each_chunk(const ConvProblem& problem, std::int64_t phase_pitch, const Visit& visit) {
  const auto at = [](std::int64_t offset, std::int64_t taps) {
    return Chunk{static_cast<int>(offset), static_cast<int>(taps)};
  };
  if (problem.dilation_w != 1) {
    for (std::int64_t s = 0; s < problem.s; ++s) {
      const std::int64_t column = s * problem.dilation_w;
      visit(at(column % problem.stride_w * phase_pitch + column / problem.stride_w, 0));
    }
    return;
  }
  for (std::int64_t phase = 0; phase < std::min(problem.s, problem.stride_w); ++phase) {
    const std::int64_t taps = ceil_div(problem.s - phase, problem.stride_w);
    for (std::int64_t first = 0; first < taps; first += window_taps) {
      visit(at(phase * phase_pitch + first, std::min<std::int64_t>(taps - first, window_taps)));
    }
  }
}

inline int chunk_count(const ConvProblem& problem) {
  int count = 0;
  for_each_chunk(problem, 0, [&](const Chunk&) { ++count; });
  return count;
}

struct Config {
  int tile = 0;  // index into tiles
  int warps = 4;
  int tile_p = 1, tile_q = 1, k_tile = 1, half_filters = 1;
  int patch_h = 1, patch_w = 1;
  // A staged row is cut into stride_w phases: the outputs' inputs at one tap lie side by side.
  int phase_pitch = 4, pitch = 4, plane = 4;  // floats from one phase, row, channel to the next
  std::int64_t k_tiles = 1, p_tiles = 1, q_tiles = 1;
  std::int64_t tiles = 1;   // of outputs: N p_tiles q_tiles
  std::int64_t blocks = 1;  // a multiple of k_tiles: a block keeps its filters
  std::int64_t shared_bytes = 0;
  double cost_us = 0.0;

  constexpr int threads() const { return warps * 32; }
};

// The problems whose taps are constants of the kernel; others read their chunks from the parameters.
inline bool has_own_kernel(const ConvProblem& problem) {
  if (problem.r != problem.s || problem.dilation_w != 1) return false;
  return (problem.s == 3 && problem.stride_w == 1) || (problem.s == 7 && problem.stride_w == 2);
}

// The kernel is bound by the issue of instructions: those of a thread for one tile, counted in the machine code, at the
// rate of multiply-adds; fewer than 4 warps per scheduler leave it idle at times. Within 15 % on an H200.
inline double cost_us(const ConvProblem& problem, const DeviceInfo& device, const Config& config,
                      std::int64_t at_once) {
  constexpr double share_of_rate[] = {0.68, 0.88, 0.92, 1.0};  // with 1, 2, 3, 4 warps per scheduler
  const double lines = static_cast<double>(problem.c * problem.r);
  const double multiply_adds = 64.0 * lines * static_cast<double>(problem.s);
  const double chunks = (has_own_kernel(problem) ? 12.0 : 65.0) * lines * chunk_count(problem);
  // Halves are converted on the way, so a thread waits for each that it stages.
  const bool converts = problem.dtype != DType::f32;
  const double staging = (converts ? 136.0 : 34.0) * static_cast<double>(problem.c) * config.patch_h * config.patch_w /
                         static_cast<double>(config.threads());
  // NCHW: the output is put together from registers, and short rows of it fill fewer lines.
  const bool nhwc = problem.layout == Layout::nhwc;
  const double stores = 300.0 + (nhwc ? 0.0 : tiles[config.tile].q_lanes == 8 ? 150.0 : 600.0);
  const double barrier = config.warps == 8 ? 1.04 : 1.0;  // more warps wait for each other
  const std::int64_t turns = ceil_div<std::int64_t>(config.tiles * config.k_tiles, device.processors);
  const std::int64_t warps = std::clamp<std::int64_t>(std::min(at_once, turns) * config.warps / 4, 1, 4);
  const double filters = (converts ? 160.0 : 20.0) * lines * static_cast<double>(problem.s) * config.k_tile /
                         config.threads();  // a block's
  const double instructions = ((multiply_adds + chunks + staging + stores) * static_cast<double>(turns) +
                               filters * static_cast<double>(std::min(at_once, turns))) *
                              config.warps / 4.0 * barrier;
  const double flops = 64.0 * 4.0 * device.processors * instructions;
  const double body =
      std::max(fp32_us(flops, share_of_rate[warps - 1], device), memory_us(problem.compulsory_bytes(), 0.8, device));
  return 5.5 + parts_of_sectors(problem) * body;
}

inline std::optional<Config> configure(const ConvProblem& problem, const DeviceInfo& device, int index, int warps) {
  const std::int64_t terms = problem.c * problem.r * problem.s;
  if (problem.groups != 1 || terms > max_terms || chunk_count(problem) > max_chunks) return std::nullopt;
  // The kernel numbers the padded input, the tiles and the outputs of an image with 31 bits.
  constexpr double limit = 1073741824.0;
  const double padded = static_cast<double>(problem.n * problem.x_pitch()) *
                        static_cast<double>(problem.h + 2 * problem.pad_h) *
                        static_cast<double>(problem.w + 2 * problem.pad_w);
  const double image = static_cast<double>(problem.y_pitch()) * static_cast<double>(problem.p() * problem.q());
  if (std::max(padded, image) >= limit) return std::nullopt;

  const Tile& tile = tiles[index];
  Config config;
  config.tile = index, config.warps = warps;
  config.tile_p = tile.p(warps), config.tile_q = tile.q();
  config.k_tile = tile.filters(), config.half_filters = config.k_tile / filter_quads;
  const std::int64_t patch_h = patch_extent(config.tile_p, problem.stride_h, problem.r, problem.dilation_h);
  const std::int64_t patch_w = patch_extent(config.tile_q, problem.stride_w, problem.s, problem.dilation_w);
  // The last window starts behind tile_q - 4 outputs and the taps before it, and is up to 8 floats long.
  const std::int64_t phase_pitch =
      config.tile_q + 4 + ceil_div<std::int64_t>((problem.s - 1) * problem.dilation_w / problem.stride_w, 4) * 4;
  std::int64_t pitch = phase_pitch * problem.stride_w;
  // A warp with two lanes along P reads two rows at once: from different banks.
  for (int i = 0; i < 8 && tile.p_lanes() == 2 && rows * problem.stride_h * pitch % 32 != 16; ++i) pitch += 4;
  config.shared_bytes = 4 * ((terms + 1) * filter_pitch + 2 * problem.c * patch_h * pitch);  // + 1: the bias
  const std::int64_t most = max_bytes(device);
  if (config.shared_bytes > most) return std::nullopt;
  config.patch_h = static_cast<int>(patch_h), config.patch_w = static_cast<int>(patch_w);
  config.phase_pitch = static_cast<int>(phase_pitch);
  config.pitch = static_cast<int>(pitch), config.plane = static_cast<int>(patch_h * pitch);

  config.k_tiles = ceil_div<std::int64_t>(problem.k, config.k_tile);
  config.p_tiles = ceil_div<std::int64_t>(problem.p(), config.tile_p);
  config.q_tiles = ceil_div<std::int64_t>(problem.q(), config.tile_q);
  config.tiles = problem.n * config.p_tiles * config.q_tiles;
  if (static_cast<double>(config.tiles) * static_cast<double>(config.k_tiles) >= limit) return std::nullopt;
  const std::int64_t at_once = std::min<std::int64_t>(warps_per_processor / warps, most / config.shared_bytes);
  const std::int64_t slots = device.processors * at_once / std::max<std::int64_t>(1, config.k_tiles);
  config.blocks = std::min(config.tiles, std::max<std::int64_t>(1, slots)) * config.k_tiles;
  config.cost_us = cost_us(problem, device, config, at_once);
  return config;
}

inline std::optional<Config> choose(const ConvProblem& problem, const DeviceInfo& device) {
  std::optional<Config> best;
  for (int index = 0; index < tile_count; ++index) {
    for (int warps : {4, 8}) {
      const std::optional<Config> config = configure(problem, device, index, warps);
      if (config && (!best || config->cost_us < best->cost_us)) best = config;
    }
  }
  return best;
}

void run_cuda(const ConvArgs& args, Runtime& runtime, const Config& config);

}  // namespace fastconv::algos::direct_tiled::resident

namespace fastconv::algos::direct_tiled {

// What serves a problem on CUDA: one of the five, or none where not even a channel fits shared memory.
using Choice =
    std::optional<std::variant<Config, resident::Config, depthwise::Config, few_filters::Config, pointwise::Plan>>;

inline Choice choose(const ConvProblem& problem, const DeviceInfo& device) {
  if (const auto config = depthwise::choose(problem, device)) return *config;
  const auto tiled = choose_config(problem, device);
  const auto resident = resident::choose(problem, device);
  const auto pointwise = pointwise::choose(problem, device);
  const auto few_filters = few_filters::choose(problem, device);
  // In NHWC it has lost none.
  const bool few = few_filters && (problem.layout == Layout::nhwc || !tiled || few_filters->cost_us <= tiled->cost_us);
  if (few) return *few_filters;
  const bool small = pointwise && (!tiled || pointwise->cost_us <= tiled->cost_us) &&
                     (!resident || pointwise->cost_us <= resident->cost_us);
  if (small) return *pointwise;
  // With few channels the tiles' cost leaves out what their chunks cannot hide: they have lost every comparison there.
  if (resident && (!tiled || problem.c <= 4 || resident->cost_us <= tiled->cost_us)) return *resident;
  return tiled;
}

}  // namespace fastconv::algos::direct_tiled
