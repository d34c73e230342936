// Tiles and memory layout of the fused one-dimensional Winograd convolution, shared by the planner and the kernels.
//
//   M[f][k][p, tile] = sum over c, r of U[f][k][c, r] * V[f][c][p + r, tile],   Y = A^T M: 4 outputs along W
//
// Packed weight on CUDA: U as [K/64][C/16][f][r][hi, lo][thread][4][2] halves, the registers that wgmma reads, zeros
// behind the last filter and channel; then [K] int32 exponents of the filters' scales. In the one-product classes there
// is no lo. On the CPU: [r][f][C][K] float32.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/device_info.h"
#include "core/integers.h"
#include "core/problem.h"
#include "core/store_mode.h"

namespace fastconv::algos::winograd_fused {

constexpr int points = 6, taps = 3;  // of F(4,3) along W; filter rows
constexpr int tile_outputs = 4;      // along W

// A work tile: 64 filters x 8 rows x 8 tiles of 4 outputs. The rows are one strip, or two of 4 rows, which lose less at
// the lower edge and transform more. The tiles of a strip are neighbours in a list of all columns of tiles: of a block
// of as many rows from left to right, then of the block below, in the next image if need be; then come those of the
// next strip. So none are lost but the last ones, whatever the width. The images may be stacked (image_pitch).
constexpr int filter_tile = 64;
constexpr int tile_rows = 8;
constexpr int tile_columns = 8;  // also the rows of a core matrix of wgmma: a filter row further is a whole one
constexpr int max_strips = 2;
constexpr int strip_rows(int strips) { return tile_rows / strips; }
constexpr int strip_input_rows(int strips) { return strip_rows(strips) + taps - 1; }

// Columns of tiles of a block of rows in a list, so that 8 neighbours meet two blocks at most: they are two of 4, start
// at an even one of 6, or end in the next one of 7 and more.
constexpr std::int64_t packed_width(std::int64_t tiles) { return tiles <= 4 ? 4 : tiles == 5 ? 6 : tiles; }
constexpr bool meets_two_blocks(std::int64_t columns) {
  for (std::int64_t tile = 0; tile < tile_columns * columns; tile += tile_columns) {
    if (tile_columns - (columns - tile % columns) > columns) return false;
  }
  return true;
}
constexpr bool always_meets_two_blocks() {
  for (int tiles = 1; tiles < 2 * tile_columns; ++tiles) {
    if (packed_width(tiles) < tiles || !meets_two_blocks(packed_width(tiles))) return false;
  }
  return true;
}
static_assert(always_meets_two_blocks() && !meets_two_blocks(5));

constexpr int channels = 16;  // of a stage: the depth of one wgmma

// U of one stage and 64 filters: [f][r][hi, lo][128 threads][16 bytes].
constexpr int u_fragment_bytes = 128 * 16;
constexpr int u_point_bytes = taps * 2 * u_fragment_bytes;
constexpr int u_stage_bytes = points * u_point_bytes;

// The one-product classes have a third of the products and half of U, so that U's way from the L2 cache and the
// transform would bound them: a block takes 64 filters x as many tiles as the registers hold.
namespace single {
// Of a work tile: so many images side by side, so many tiles of each of so many of their rows.
struct Shape {
  int images, rows, tiles;
  // The tiles are neighbours in a list of all columns of tiles: of a block of rows from left to right, then of the
  // block below, in the next image if need be. So none are lost but the last ones, whatever the width.
  bool packs_columns = false;

  // The columns of a product are positions: tiles fastest, then images, then rows; and some that are none.
  constexpr int row_positions() const { return images * tiles; }
  constexpr int positions() const { return rows * row_positions(); }
  constexpr int products() const { return round_up(positions(), 8); }
  constexpr int width() const { return tiles * tile_outputs; }
  constexpr int input_rows() const { return rows + taps - 1; }
  // Odd, so that neighbouring rows lie in different banks: one more than needed, or one less, which is zero then.
  constexpr int raw_columns() const { return width() + (images == 1 ? 3 : 1); }
  constexpr bool operator==(const Shape&) const = default;
};
// For maps of 28 columns and more; for 9 to 16; for up to 8; for any whose rows are about a multiple of 13.
constexpr Shape wide{1, 14, 7}, narrow{2, 14, 4}, small{4, 7, 2}, packed_columns{1, 13, tile_columns, true};
constexpr Shape shapes[] = {wide, narrow, small, packed_columns};
// Whether the consumers' two passes are in code of their own, too: a launch starts 1.5 us later, and what saves
// registers pays for it of packed columns of half types alone (docs/log/39-fused-one-product-7-passes.md).
constexpr bool consumes_apart(const Shape& shape, std::size_t element_bytes) {
  return shape.packs_columns && element_bytes == 2;
}
constexpr int number_of(Shape shape) { return shape == wide ? 0 : shape == narrow ? 1 : shape == small ? 2 : 3; }
// 64 bytes of a pixel are a stage.
constexpr int stage_channels(DType dtype) { return dtype == DType::f32 ? 16 : 32; }
// Where point f of U and V lies: +a, -a, 0 of one warpgroup, +b, -b, infinity of the other.
constexpr int point_order(int f) { return f == 0 ? 2 : f < 3 ? f - 1 : f; }
}  // namespace single

// Stages of V that are kept for another turn.
constexpr int kept_stages = 4;

// So many numbers have 31 bits, less what the last work tile may reach beyond.
constexpr std::int64_t max_numbers = (std::int64_t{1} << 31) - 64;

// What is behind the sums in NHWC. Of code for all of it most is skipped, and what is not is far more than its
// arithmetic: kernels of their own for what most networks have (select_end).
enum class End {
  any,
  residual,  // before or after; no activation, ReLU or leaky ReLU with a slope in (0, 1]
  leaky,     // no residual; leaky ReLU with such a slope
  plain,     // no residual; no activation or ReLU
};

struct Config {
  bool use_tma;  // x is read by tensor copies, else element by element
  StoreMode store;
  End end;                                                         // of the kernel, where y is stored by filters
  bool split;                                                      // three products of halves, else one
  single::Shape shape;                                             // of a work tile of one product
  std::int64_t stages;                                             // of 16 channels, or 64 bytes
  std::int64_t u_steps;                                            // 16 channels of U
  std::int64_t filter_tiles, column_tiles, row_tiles, work_tiles;  // split: of a block; blocks
  std::int64_t pitch;                                              // split: rows from one image to the next

  // split:
  int blocks;                  // of a cluster, which share the points
  int strips;                  // of a work tile
  int v_reuse;                 // that V of a work tile serves, each with other filters
  int work_tile_filter_tiles;  // of a turn of a work tile

  std::size_t u_bytes() const {
    return static_cast<std::size_t>(filter_tiles * u_steps) * (split ? u_stage_bytes : u_stage_bytes / 2);
  }
  // 31 bits number work tiles, and, split, tiles and rows of all images.
  bool fits_31_bits() const {
    return std::max(work_tiles, row_tiles * std::max<std::int64_t>(column_tiles, strip_rows(strips))) < max_numbers;
  }
};

// Rows from one image to the next, row i of which is row i - pad_h of the input and row i of the output. A multiple of
// a strip's, so that no block crosses images. Or, of work tiles of one strip, if that makes fewer blocks, images one
// below the other with the rows of padding between two serving both: stacked. Even, since input is copied two rows at a
// time, and large enough for blocks that cross only once.
inline std::int64_t image_pitch(const ConvProblem& problem, int strips) {
  const std::int64_t whole = round_up(problem.p(), strip_rows(strips));
  if (strips > 1) return whole;
  return std::min(whole, std::max<std::int64_t>(round_up(problem.h + problem.pad_h, 2), strip_input_rows(strips)));
}

// What a work tile of class fp32 is: see Config. With as many times 64 filters as blocks, each warpgroup of a block has
// 64 of them or half of the points; of fewer it has half of the positions.
struct SplitTile {
  int blocks = 1, strips = 1, v_reuse = 1, filter_tiles = blocks;
};

// Whether x is read by tensor copies: from NHWC with pixels whole multiples of 16 bytes apart (ConvPlan::reads_nhwc).
// Any other is read element by element, from either layout.
inline bool can_use_tma(const ConvProblem& problem) {
  return problem.x_pitch() * static_cast<std::int64_t>(size_of(problem.dtype)) % 16 == 0;
}

inline Config make_config(const ConvProblem& problem, single::Shape shape = single::wide, SplitTile work_tile = {}) {
  Config config{};
  config.shape = shape;
  config.blocks = work_tile.blocks;
  config.strips = work_tile.strips;
  config.v_reuse = work_tile.v_reuse;
  config.work_tile_filter_tiles = work_tile.filter_tiles;
  config.split = problem.accuracy == AccuracyClass::fp32;
  const auto element_bytes = static_cast<std::int64_t>(size_of(problem.dtype));
  config.use_tma = can_use_tma(problem);
  config.store = select_store_mode(problem, config.split ? 2 : 16 / element_bytes);
  const int stage_channels = config.split ? channels : single::stage_channels(problem.dtype);
  config.stages = ceil_div(problem.c, stage_channels);
  config.u_steps = config.stages * (stage_channels / channels);
  config.filter_tiles = ceil_div(problem.k, filter_tile);
  if (config.split) {
    config.column_tiles = packed_width(ceil_div(problem.q(), tile_outputs));
    config.pitch = image_pitch(problem, work_tile.strips);
    config.row_tiles = ceil_div((problem.n - 1) * config.pitch + problem.p(), strip_rows(work_tile.strips));
    config.work_tiles = ceil_div(config.row_tiles * config.column_tiles, work_tile.strips * tile_columns) *
                        ceil_div(config.filter_tiles, work_tile.filter_tiles * work_tile.v_reuse);
  } else if (shape.packs_columns) {
    config.column_tiles = packed_width(ceil_div(problem.q(), tile_outputs));
    config.row_tiles = ceil_div(problem.p(), shape.rows);
    config.work_tiles = ceil_div(problem.n * config.row_tiles * config.column_tiles, shape.tiles) * config.filter_tiles;
  } else {
    config.column_tiles = ceil_div(problem.q(), shape.width());
    config.row_tiles = ceil_div(problem.p(), shape.rows);
    config.work_tiles =
        ceil_div(problem.n, shape.images) * config.row_tiles * config.column_tiles * config.filter_tiles;
  }
  return config;
}

// Times seen on an H200 (docs/log/06-cost-models.md), in us: 16 channels of a work tile, and its end, when the tensor
// cores wait for the outputs.
struct Rates {
  double step, end, nchw_end, element_step;
};
inline Rates rates_of(const ConvProblem& problem, const Config& config) {
  const bool whole_pieces = problem.q() % tile_outputs == 0;  // NCHW: of 4 outputs, each stored at once
  if (config.split) {
    if (config.v_reuse > 1) return {1.45, 2.67, 0.0, 0.0};
    if (config.blocks == 1) return {1.55, 2.67, whole_pieces ? 4.6 : 16.6, 12.0};
    if (config.work_tile_filter_tiles < config.blocks) return {1.12, config.strips == 1 ? 2.3 : 2.4, 0.0, 0.0};
    return config.strips == 1 ? Rates{1.40, 3.5, 0.0, 0.0} : Rates{1.45, 3.5, 0.0, 0.0};
  }
  const bool floats = problem.dtype == DType::f32, bf16 = problem.dtype == DType::bf16;
  if (config.shape == single::narrow)
    return {floats ? 1.37 : bf16 ? 1.06 : 1.00, floats ? 2.4 : bf16 ? 2.9 : 2.2, 0.0, 0.0};
  if (config.shape == single::small) return {floats ? 1.08 : 0.77, floats ? 0.9 : 0.4, 0.0, 0.0};
  if (config.shape == single::packed_columns) return {floats ? 1.40 : bf16 ? 1.04 : 1.00, floats ? 2.9 : 1.6, 0.0, 0.0};
  const double pieces = whole_pieces ? 0.0 : 5.5;
  if (floats) return {1.12, 2.7, 7.6 + pieces, 20.0};
  return {bf16 ? 0.84 : 0.82, 1.95, 5.7 + pieces, 20.0};
}

// What the start of a launch takes more or less than that of wide work tiles. Whole work tiles of two turns start
// later; of half a work tile, what is not beside another's products is half as long.
inline double start_us(const ConvProblem& problem, const Config& config) {
  if (config.split && problem.layout == Layout::nchw) return 2.0;  // at batch 1 (docs/log/139-h200-one-commit.md)
  if (config.split) return config.v_reuse > 1 ? 3.5 : config.work_tile_filter_tiles < config.blocks ? -3.1 : 0.0;
  return single::consumes_apart(config.shape, size_of(problem.dtype)) ? 1.5 : 0.0;
}

// Whole waves of work tiles.
inline double kernel_us(const ConvProblem& problem, const Config& config, int processors) {
  const Rates rates = rates_of(problem, config);
  const double start = start_us(problem, config);
  return start + static_cast<double>(ceil_div(config.work_tiles, processors / config.blocks) * config.v_reuse) *
                     (static_cast<double>(config.u_steps) * (config.use_tma ? rates.step : rates.element_step) +
                      (problem.layout == Layout::nchw ? rates.nchw_end : rates.end));
}

// The fastest shape of work tiles. All but the wide one, and clusters, are for what tensor copies bring from NHWC, and
// what goes there by vectors.
inline Config choose_config(const ConvProblem& problem, int processors) {
  Config best = make_config(problem);
  if (!best.use_tma || best.store != StoreMode::filters) return best;
  if (best.split) {
    if (processors < 2) return best;
    const auto consider = [&](SplitTile work_tile) {
      const Config other = make_config(problem, single::wide, work_tile);
      if (other.fits_31_bits() && kernel_us(problem, other, processors) < kernel_us(problem, best, processors)) {
        best = other;
      }
    };
    for (int strips = 1; strips <= max_strips; ++strips) {
      for (int tiles = 1; tiles <= 2; ++tiles) consider({.blocks = 2, .strips = strips, .filter_tiles = tiles});
    }
    // All of a work tile's V is kept, and is most of what there is room for.
    const bool keeps = best.stages <= kept_stages && 2 * best.stages > kept_stages;
    if (keeps && best.filter_tiles % 2 == 0) consider({.v_reuse = 2});
    return best;
  }
  for (const single::Shape& shape : {single::narrow, single::small, single::packed_columns}) {
    if (shape.images > 1 && problem.w + problem.pad_w > shape.raw_columns()) continue;
    const Config other = make_config(problem, shape);
    if (shape.packs_columns && other.work_tiles >= (std::int64_t{1} << 31) / shape.tiles)
      continue;  // 31 bits number the tiles
    if (kernel_us(problem, other, processors) < kernel_us(problem, best, processors)) best = other;
  }
  return best;
}

}  // namespace fastconv::algos::winograd_fused
