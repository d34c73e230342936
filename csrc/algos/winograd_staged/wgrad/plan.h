// Plan of the weight gradient by F(4x4, 3x3), shared by the planner and the kernels.
//
//   dW[k][c] = G^T [ sum over tiles t of (A dy A^T)[t][k] . (B^T d B)[t][c] ] G
//
// is, for each of the 36 points, a matrix product whose reduction runs over the tiles of the batch. Both operands
// are written by transform kernels as pairs of halves, in blocks that the product copies and reads as they are:
//
//   V [36][stages][blocks of 64 channels][hi, lo][64 tiles][64 channels]    rows of 128 bytes, their 16-byte pieces
//                                                                           swizzled (piece p of row r at p ^ (r & 7))
//   W the same of dy, with filters for channels
//   partial sums [splits][36][rows][columns] float32, rows and columns being filters and channels, or the reverse
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/device_info.h"
#include "core/integers.h"
#include "core/problem.h"

namespace fastconv::algos::winograd_staged::wgrad {

constexpr int m = 4, alpha = m + 2, points = alpha * alpha;
constexpr int stage_tiles = 64, block_channels = 64;
constexpr int row_bytes = 128, limb_bytes = stage_tiles * row_bytes, block_bytes = 2 * limb_bytes;
constexpr int slots = 3;
constexpr std::size_t workspace_limit = std::size_t{6} << 30;

struct Plan {
  std::int64_t tiles_p, tiles_q, tiles, stages;
  std::int64_t x_blocks, grad_blocks;  // of 64 channels
  bool rows_are_filters;
  int row_blocks;     // of a work tile, one for each multiplying warpgroup: 2, or 3 with one column block
  int column_blocks;  // of a work tile: 1 or 2
  std::int64_t row_tiles, column_tiles;
  std::int64_t split_k, stages_per_split;
  std::int64_t rows, columns, pitch;  // of the partial sums

  std::int64_t work_tiles() const { return points * row_tiles * column_tiles * split_k; }

  // ---- The workspace: scales of images and stages, V, W, partial sums.
  std::size_t scale_bytes(const ConvProblem& problem) const { return align_bytes(16 * problem.n + 4 * (stages + 1)); }
  std::size_t x_bytes() const { return align_bytes(points * stages * x_blocks * block_bytes); }
  std::size_t grad_bytes() const { return align_bytes(points * stages * grad_blocks * block_bytes); }
  std::size_t partial_bytes() const { return align_bytes(split_k * points * rows * pitch * 4); }
  // Operands in NCHW are read from copies that the partial sums then write over.
  std::size_t workspace_bytes(const ConvProblem& problem) const {
    const std::size_t copies = problem.layout == Layout::nchw ? nhwc_operand_bytes(problem) : 0;
    return scale_bytes(problem) + x_bytes() + grad_bytes() + std::max(partial_bytes(), copies);
  }
};

namespace detail {

// Clocks of the product on all multiprocessors: tensor cores or copies for each stage, sums written and read again.
inline double product_clocks(const Plan& plan, int processors) {
  const double rounds = static_cast<double>(ceil_div(plan.work_tiles(), processors));
  const double tensor = 12.0 * 32 * plan.column_blocks * plan.row_blocks;
  const double copies = (plan.row_blocks + plan.column_blocks) * block_bytes / 45.0;
  const double work_tile = static_cast<double>(plan.stages_per_split) * std::max(1.1 * tensor, copies) + 3000.0;
  return 4000 + rounds * work_tile + 2.0 * static_cast<double>(plan.partial_bytes()) / (16.0 * processors);
}

}  // namespace detail

inline Plan make_plan(const ConvProblem& problem, int processors) {
  Plan plan{};
  plan.tiles_p = ceil_div(problem.p(), m);
  plan.tiles_q = ceil_div(problem.q(), m);
  plan.tiles = problem.n * plan.tiles_p * plan.tiles_q;
  plan.stages = ceil_div(plan.tiles, stage_tiles);
  plan.x_blocks = ceil_div(problem.c, block_channels);
  plan.grad_blocks = ceil_div(problem.k, block_channels);
  Plan best{};
  double least = 1e300;
  for (const bool rows_are_filters : {true, false}) {
    const std::int64_t all_rows = rows_are_filters ? plan.grad_blocks : plan.x_blocks;
    const std::int64_t all_columns = rows_are_filters ? plan.x_blocks : plan.grad_blocks;
    plan.rows_are_filters = rows_are_filters;
    plan.rows = rows_are_filters ? problem.k : problem.c;
    plan.columns = rows_are_filters ? problem.c : problem.k;
    plan.pitch = round_up(plan.columns, 8);
    const auto consider = [&](int row_blocks, int column_blocks) {
      plan.row_blocks = row_blocks, plan.column_blocks = column_blocks;
      plan.row_tiles = ceil_div(all_rows, row_blocks);
      plan.column_tiles = ceil_div(all_columns, column_blocks);
      for (std::int64_t split_k = 1; split_k <= std::min<std::int64_t>(plan.stages, 64); ++split_k) {
        plan.stages_per_split = ceil_div(plan.stages, split_k);
        plan.split_k = ceil_div(plan.stages, plan.stages_per_split);  // none is empty
        const double clocks = detail::product_clocks(plan, processors);
        if (clocks < least) least = clocks, best = plan;
      }
    };
    consider(2, 1);
    if (all_columns > 1) consider(2, 2);
    if (all_rows > 2) consider(3, 1);
  }
  return best;
}

}  // namespace fastconv::algos::winograd_staged::wgrad
