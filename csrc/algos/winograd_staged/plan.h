// Sizes and memory layout of the staged Winograd convolution, shared by the planner and the kernels.
//
//   V [alpha^2][T][depth]   transformed input, in the workspace, a chunk of T tiles at a time
//   U [alpha^2][K][depth]   transformed filters, in the packed weight, then K int32 exponents
//   M [alpha^2][T][K_pad]   float32 products, in the workspace; our own product's as segments, below
//
// depth is C_pad; in split mode 2 C_pad for our own product, which reads hi twice from shared memory: rows
// [group][lo, hi][group_channels], so that what a warp writes and a stage reads lies together; or 3 C_pad for the
// library's: V holds [lo | hi | hi] and U [hi | lo | hi], so that one GEMM sums the three products
// lo*hi + hi*lo + hi*hi, the small ones first.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/device_info.h"
#include "core/integers.h"
#include "core/problem.h"

namespace fastconv::algos::winograd_staged {

// What the GEMM multiplies.
enum class Mode : std::uint8_t {
  fp32,   // float32 operands, FP32 arithmetic (class ieee; every class on the CPU)
  split,  // pairs of float16, three products (classes fp32 and tf32)
  fp16,
  bf16,
};

constexpr int channel_multiple = 8;  // rows of V, U and M start at multiples of 16 bytes
// Largest workspace; more tiles than fit are processed in chunks, which costs nothing measurable.
constexpr std::int64_t workspace_limit = std::int64_t{2} << 30;
constexpr std::int64_t tile_multiple = 128;  // chunks end at multiples of this: whole GEMM tiles
// On the CPU a chunk's V and M stay in the caches between the stages; beyond 128 rows its GEMM gains nothing, and with
// fewer it would read U too often.
constexpr std::int64_t cpu_workspace_per_thread = std::int64_t{2} << 20;
constexpr std::int64_t cpu_tile_multiple = 16;
constexpr std::int64_t cpu_min_tiles = 128;

// Who multiplies: the kernel of gemm/kernel.cuh, or the library. Split operands on Hopper are ours: two thirds of the
// bytes of V, a fifth of the error, and as fast or faster at every size that was measured
// (docs/log/30-staged-product.md). One product stays with the library, which is up to a sixth faster there. The answer
// depends on the weight and the device alone (the rule of packed_weight()).
inline bool multiplies_itself(Mode mode, const DeviceInfo& device) {
  return mode == Mode::split && device.type == DeviceType::cuda && device.compute_capability == 90;
}

constexpr int product_channels = 64;  // of a stage of it

// What a block of it holds in shared memory for all of its multiplying warpgroups, while the rest passes, a work tile
// of tiles or filters at a time for each of them.
enum class Stationary : std::uint8_t {
  filters,     // all channels of U of 128 filters; V passes. Up to 256 channels
  tiles,       // all channels of V of 64 tiles; U passes. Up to 512 channels
  few_stages,  // U of 128 filters, four stages of it, for a pair of work tiles of V
};
constexpr int tile_m = 64, stationary_filters = 128;
constexpr int stationary_filter_stages = 4, stationary_tile_stages = 8;
// That multiply. While one writes its work tile, two keep the tensor cores busier than one.
constexpr int warpgroups(Stationary stationary) { return stationary == Stationary::filters ? 3 : 2; }

// Filters of a work tile, where V is stationary. 48: 36 points of 512 filters are three work tiles for each of 132
// blocks.
inline int choose_tile_n(std::int64_t tiles) { return tiles <= tile_m ? 48 : 64; }

// How the work tiles are shared out (gemm/kernel.cuh).
struct ProductGrid {
  std::int64_t stationary_blocks;  // blocks of the stationary operand, one for each thread block
  std::int64_t point_work_tiles;   // of a point
  std::int64_t work_tiles;         // of all points
  std::int64_t groups;  // of blocks with the same work tiles, if the stationary operand stays; else blocks take turns
  std::int64_t blocks;
  std::int64_t block_work_tiles;  // the most that a block has to do

  // tile_n: that of the plan (below).
  ProductGrid(Stationary stationary, std::int64_t tile_n, std::int64_t points, std::int64_t tiles, std::int64_t filters,
              std::int64_t processors) {
    if (stationary == Stationary::few_stages) {
      stationary_blocks = ceil_div(filters, stationary_filters);
      point_work_tiles = 2 * ceil_div(tiles, 2 * tile_m);
    } else {
      stationary_blocks =
          stationary == Stationary::filters ? ceil_div(filters, stationary_filters) : ceil_div(tiles, tile_m);
      point_work_tiles = stationary == Stationary::filters ? ceil_div(tiles, tile_m) : ceil_div(filters, tile_n);
    }
    work_tiles = points * point_work_tiles;
    if (stationary == Stationary::few_stages) {
      const std::int64_t pairs = work_tiles / 2 * stationary_blocks;
      blocks = groups = std::min(processors, pairs);
      block_work_tiles = 2 * ceil_div(pairs, blocks);
    } else {
      groups = std::min(std::max<std::int64_t>(1, processors / stationary_blocks), work_tiles);
      blocks = groups * stationary_blocks;
      block_work_tiles = ceil_div(work_tiles, groups);
    }
  }
};

// Measured (docs/log/31-staged-product-64-tiles.md): with few tiles U is what counts, and is read once, unless its
// work tiles of 64 filters have as many filters for a block as those of 128: with many channels a stage of one takes no
// longer than of the other. With one block of filters nothing is gained where U stays.
inline Stationary choose_stationary(std::int64_t points, std::int64_t tile_n, std::int64_t tiles, std::int64_t filters,
                                    std::int64_t groups, std::int64_t processors) {
  const auto block_filters = [&](Stationary stationary, std::int64_t of_work_tile) {
    return ProductGrid(stationary, tile_n, points, tiles, filters, processors).block_work_tiles * of_work_tile;
  };
  if (tiles <= 4 * tile_m && groups <= stationary_tile_stages &&
      (groups <= stationary_filter_stages ||
       block_filters(Stationary::tiles, tile_n) < block_filters(Stationary::few_stages, stationary_filters))) {
    return Stationary::tiles;
  }
  return filters > stationary_filters && groups <= stationary_filter_stages ? Stationary::filters
                                                                            : Stationary::few_stages;
}

// M of our own product is written in the order of the multiplying threads' registers: [alpha^2][T/8][K_pad/16] segments
// of 8 tiles x 16 filters, whatever behind the last tiles. Filter f of a segment lies at segment_place(f) of its tile's
// 16.
constexpr int segment_tiles = 8, segment_filters = 16, segment_values = segment_tiles * segment_filters;
constexpr int segment_place(int filter) { return filter % 8 / 2 * 4 + filter / 8 * 2 + filter % 2; }
constexpr int segment_filter(int place) { return place / 2 % 2 * 8 + place / 4 * 2 + place % 2; }
constexpr std::int64_t segment_rows(std::int64_t tiles) { return ceil_div(tiles, segment_tiles); }

// Blocks of the output transform that reads them.
constexpr int segment_block_filters = 2 * segment_filters;
constexpr std::int64_t segment_blocks(std::int64_t tiles, std::int64_t filters, Layout layout) {
  const int block_tiles = layout == Layout::nhwc && filters % 2 != 0 ? 4 : 8;
  return ceil_div(tiles, block_tiles) * ceil_div(filters, segment_block_filters);
}
// Grids of more blocks do not launch dependents early, nor wait for one before: either takes the device about 1 ns a
// block, one after the other (an H200; docs/log/04-staged-dependent-launches.md), where the launch that is hidden took
// 1 us.
constexpr unsigned few_blocks = 2048;

// Tiles that rows of exponents have room for: our own product reads four at once.
constexpr std::int64_t exponent_pitch(std::int64_t tiles) { return round_up(tiles, 4); }

struct Config {
  int m;      // outputs per tile and dimension: 2 or 4
  int alpha;  // inputs per tile and dimension: m + 2
  Mode mode;
  bool wgmma_gemm;                // multiplies_itself()
  std::int64_t tiles_p, tiles_q;  // tiles per image
  std::int64_t tiles;             // N * tiles_p * tiles_q, numbered in that order
  std::int64_t c_pad, k_pad, depth;
  // Channels of a tile that share a scale: all of them, but with our own product, which can undo one for each stage.
  std::int64_t groups, group_channels;  // C_pad = groups * group_channels
  std::int64_t chunk_tiles;             // tiles per chunk
  std::size_t element_bytes;
  // Our own product: the operand that stays, the filters of a work tile where that is V; whether it begins beside the
  // last blocks of the input transform, and whether it then lets blocks of the output transform begin beside its own:
  // some of them, since the turns of waiting of many add up (docs/log/04-staged-dependent-launches.md); none of F(4x4),
  // which lose by it: they load more of M than the L1 cache has room for beside the product's shared memory.
  Stationary stationary;
  int tile_n;
  bool overlaps_product, overlaps_output;
  // The transforms on a GPU: channels of x that a thread loads at once, filters of y in NHWC that it stores at once;
  // whether much of M is in the L2 cache when it is read, of our own product; ConvProblem::has_plain_epilogue().
  int x_vector, y_vector;
  bool cached, plain;

  std::int64_t points() const { return static_cast<std::int64_t>(alpha) * alpha; }
  std::size_t v_bytes() const { return align_bytes(points() * chunk_tiles * depth * element_bytes); }
  std::size_t m_bytes() const {
    const std::int64_t rows = wgmma_gemm ? segment_rows(chunk_tiles) * segment_tiles : chunk_tiles;
    return align_bytes(points() * rows * k_pad * sizeof(float));
  }
  // Power-of-two scales: one int32 exponent per tile, and one per tile and group where there may be several.
  std::size_t tile_exponent_bytes() const { return align_bytes(exponent_pitch(chunk_tiles) * sizeof(std::int32_t)); }
  std::size_t group_exponent_bytes() const { return wgmma_gemm ? groups * tile_exponent_bytes() : 0; }
  std::size_t u_bytes(std::int64_t k) const { return align_bytes(points() * k * depth * element_bytes); }
};

inline Mode select_mode(AccuracyClass accuracy, const DeviceInfo& device) {
  if (device.type == DeviceType::cpu || accuracy == AccuracyClass::ieee) return Mode::fp32;
  if (accuracy == AccuracyClass::fp16) return Mode::fp16;
  if (accuracy == AccuracyClass::bf16) return Mode::bf16;
  return Mode::split;
}

inline Config make_config(int m, const ConvProblem& problem, const DeviceInfo& device) {
  Config config{};
  config.m = m;
  config.alpha = m + 2;
  config.mode = select_mode(problem.accuracy, device);
  const int step = problem.max_pool ? m / 2 : m;  // outputs of y per tile and dimension
  config.tiles_p = ceil_div(problem.y_p(), step);
  config.tiles_q = ceil_div(problem.y_q(), step);
  config.tiles = problem.n * config.tiles_p * config.tiles_q;
  config.wgmma_gemm = multiplies_itself(config.mode, device);
  config.k_pad = round_up(problem.k, config.wgmma_gemm ? segment_filters : channel_multiple);
  config.groups = config.wgmma_gemm ? ceil_div(problem.c, product_channels) : 1;
  config.group_channels = round_up(ceil_div(problem.c, config.groups), channel_multiple);
  config.c_pad = config.groups * config.group_channels;
  config.depth = config.mode != Mode::split ? config.c_pad : (config.wgmma_gemm ? 2 : 3) * config.c_pad;
  config.element_bytes = config.mode == Mode::fp32 ? 4 : 2;
  const std::int64_t bytes_per_tile =
      config.points() * (config.depth * config.element_bytes + config.k_pad * sizeof(float));
  const bool cpu = device.type == DeviceType::cpu;
  const std::int64_t limit = cpu ? cpu_workspace_per_thread * device.processors : workspace_limit;
  const std::int64_t least = cpu ? cpu_min_tiles : tile_multiple;
  const std::int64_t multiple = cpu ? cpu_tile_multiple : tile_multiple;
  const std::int64_t most = std::max(least, limit / bytes_per_tile / multiple * multiple);
  // Chunks of equal size: a short last chunk would leave the device idle.
  const std::int64_t chunks = std::max<std::int64_t>(1, ceil_div(config.tiles, most));
  config.chunk_tiles = chunks == 1 ? std::max<std::int64_t>(1, config.tiles)  // an empty batch is planned for, too
                                   : round_up(ceil_div(config.tiles, chunks), multiple);
  if (config.wgmma_gemm && config.tiles > 0) {
    const std::int64_t tiles = config.chunk_tiles, processors = device.processors;
    config.tile_n = choose_tile_n(tiles);
    config.stationary = choose_stationary(config.points(), config.tile_n, tiles, problem.k, config.groups, processors);
    config.overlaps_product = tiles * config.groups <= few_blocks;
    config.overlaps_output =
        config.overlaps_product && m == 2 && segment_blocks(tiles, problem.k, problem.layout) <= 8 * processors;
    config.cached = config.m_bytes() <= 2 * device.l2_bytes && problem.k % 2 == 0 && problem.layout == Layout::nhwc;
  }
  const int max_channels = config.wgmma_gemm ? 4 : 2;
  config.x_vector = problem.c % max_channels == 0 ? max_channels : 1;
  config.y_vector = problem.layout == Layout::nhwc && problem.k % 2 == 0 ? 2 : 1;
  config.plain = problem.has_plain_epilogue();
  return config;
}

}  // namespace fastconv::algos::winograd_staged
