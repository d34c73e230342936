// Plan of the weight gradient of 1x1 convolutions in float32 that converts its operands on chip, shared by the planner
// and the kernel.
//
//   dW[k][c] = sum over pixels of dY[pixel][k] * x[pixel][c]
//
// is bound by memory where it has few outputs for a pixel, so both operands are read once, as they are. A block takes
// 64 or 128 rows and up to 256 columns of outputs, and a part of the pixels, in chunks that know nothing of images'
// ends. Rows are filters, or channels where the product is transposed: dW^T = x^T dY.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "algos/implicit_gemm/plan.h"
#include "core/integers.h"

namespace fastconv::algos::implicit_gemm::wgrad::pointwise {

constexpr int chunk_pixels = 32;                      // two steps of a product
constexpr int row_bytes = 128;                        // of shared memory: 32 float32 or 64 halves of a pixel
constexpr int box_channels = 32, half_channels = 64;  // of such a row
constexpr int box_bytes = chunk_pixels * row_bytes;   // either kind
constexpr int shared_limit = 227 * 1024, shared_rings = 224 * 1024;  // the rest: barriers, scales, alignment
constexpr int max_staged = 128 * 1024;                               // five times what memory's latency asks for

// What each of the two multiplying warpgroups takes.
enum class Warpgroups : std::uint8_t {
  rows,     // 64 rows, all columns
  columns,  // half of the columns, the same 64 rows
  pixels,   // one step of every chunk, all outputs: two splits of the sum
};

// Of a block. limbs: hi, and lo in class fp32.
struct Tile {
  int limbs;
  Warpgroups warpgroups;
  int warpgroup_columns;

  constexpr int products() const { return limbs == 2 ? 3 : 1; }
  constexpr int rows() const { return warpgroups == Warpgroups::rows ? 128 : 64; }
  constexpr int columns() const { return warpgroup_columns * (warpgroups == Warpgroups::columns ? 2 : 1); }
  constexpr int warpgroup_splits() const { return warpgroups == Warpgroups::pixels ? 2 : 1; }
  // Chunks lie in two rings: as they come, and converted.
  constexpr int staged_bytes() const { return (rows() + columns()) / box_channels * box_bytes; }
  constexpr int limb_bytes() const { return (rows() + columns()) / half_channels * box_bytes; }  // of hi, of lo
  constexpr int operand_bytes() const { return limbs * limb_bytes(); }
  constexpr int operand_slots() const { return std::min(4, shared_rings / 2 / operand_bytes()); }
  constexpr int staged_slots() const {
    return std::min(max_staged, shared_rings - operand_slots() * operand_bytes()) / staged_bytes();
  }
};

// Calls with std::integral_constants (warpgroups, warpgroup_columns) of every tile that is compiled, small ones first.
// By pixels a warpgroup has one step of a chunk: with one product that is not worth a wait.
template <int limbs, typename Function>
void for_each_tile(const Function& function) {
  const auto call = [&]<Warpgroups warpgroups, int columns>() {
    function(std::integral_constant<Warpgroups, warpgroups>{}, std::integral_constant<int, columns>{});
  };
  if constexpr (limbs == 2) {
    call.template operator()<Warpgroups::pixels, 64>();
    call.template operator()<Warpgroups::pixels, 128>();
  } else {
    call.template operator()<Warpgroups::columns, 64>();
  }
  call.template operator()<Warpgroups::columns, 128>();
  call.template operator()<Warpgroups::rows, 128>();
}

struct Plan {
  Mode mode;
  bool transposed;  // rows are channels, columns filters
  Tile tile;
  std::int64_t rows, columns, pixels, images;
  std::int64_t split_k, chunks_per_split;

  std::int64_t row_tiles() const { return ceil_div<std::int64_t>(rows, tile.rows()); }
  std::int64_t column_tiles() const { return ceil_div<std::int64_t>(columns, tile.columns()); }
  std::int64_t tiles() const { return row_tiles() * column_tiles(); }
  std::int64_t chunks() const { return ceil_div<std::int64_t>(pixels, chunk_pixels); }
  std::int64_t blocks() const { return tiles() * split_k; }
  std::int64_t splits() const { return split_k * tile.warpgroup_splits(); }
  std::int64_t split_numel() const { return rows * columns; }

  // ---- The workspace: guesses and maxima of both operands, partial sums [split][rows][columns].
  std::size_t scale_bytes() const { return align_bytes(static_cast<std::size_t>(4 * images) * sizeof(int)); }
  std::size_t workspace_bytes() const {
    return scale_bytes() + static_cast<std::size_t>(splits() * split_numel()) * sizeof(float);
  }
};

inline bool serves(const ConvProblem& problem) {
  return problem.dtype == DType::f32 && problem.accuracy != AccuracyClass::ieee && problem.layout == Layout::nhwc &&
         problem.groups == 1 && is_matrix_product(problem) && problem.c % 8 == 0 && problem.k % 8 == 0;
}

namespace detail {

// Clocks of a multiprocessor for a chunk: copies from the L2 cache at 24 bytes a clock (docs/log/47), shared memory at
// 128, or the tensor cores; and what the first chunk of an image has more, whose scales and maxima are its own
// (docs/log/104-pointwise-weight-gradient.md).
constexpr double image_clocks = 1500.0;
inline double chunk_clocks(const Tile& tile, std::int64_t rows, std::int64_t columns, double images) {
  const auto existing = [](std::int64_t channels, int of_tile) {  // of those, in whole boxes
    return static_cast<double>(round_up(std::min<std::int64_t>(channels, of_tile), box_channels));
  };
  const double bytes = 4.0 * chunk_pixels * (existing(rows, tile.rows()) + existing(columns, tile.columns()));
  const double operands = 2.0 * chunk_pixels * tile.products() * (64 + tile.warpgroup_columns);  // of a warpgroup
  const double shared = (2.0 + 0.5 * tile.limbs) * tile.staged_bytes() + operands * (2.0 / tile.warpgroup_splits());
  const double products = 1.0 * chunk_pixels * tile.products() * tile.rows() * tile.columns();
  return 100.0 + 1.1 * std::max({bytes / 24.0, shared / 128.0, products / 2048.0}) + image_clocks * images;
}

inline double plan_clocks(const Plan& plan, int processors) {
  const double rounds = static_cast<double>(ceil_div<std::int64_t>(plan.blocks(), processors));
  const double images = static_cast<double>(plan.images) / static_cast<double>(plan.chunks());  // of a chunk
  const double chunk = chunk_clocks(plan.tile, plan.rows, plan.columns, images);
  const double block = static_cast<double>(plan.chunks_per_split) * chunk;
  const double partial = 8.0 * static_cast<double>(plan.splits() * plan.split_numel()) / (20.0 * processors);
  return rounds * (block + 5000.0) + partial;  // its beginning and end; writing and reading partial sums
}

}  // namespace detail

inline Plan make_plan(const ConvProblem& problem, int processors) {
  Plan best{};
  double least = 1e300;
  const bool split = problem.accuracy != AccuracyClass::tf32;
  for (const bool transposed : {false, true}) {
    const auto consider = [&](auto warpgroups, auto columns) {
      Plan plan{.mode = split ? Mode::split : Mode::single,
                .transposed = transposed,
                .tile = {split ? 2 : 1, warpgroups(), columns()},
                .rows = transposed ? problem.c : problem.k,
                .columns = transposed ? problem.k : problem.c,
                .pixels = problem.n * problem.h * problem.w,
                .images = problem.n,
                .split_k = 1,
                .chunks_per_split = 1};
      for (std::int64_t rounds = 1; rounds <= 4; ++rounds) {  // of all multiprocessors, nearly full
        const std::int64_t split_k = std::max<std::int64_t>(rounds * processors / plan.tiles(), 1);
        plan.chunks_per_split = ceil_div(plan.chunks(), split_k);
        plan.split_k = ceil_div(plan.chunks(), plan.chunks_per_split);  // none is empty
        const double clocks = detail::plan_clocks(plan, processors);
        if (clocks < least) least = clocks, best = plan;
      }
    };
    split ? for_each_tile<2>(consider) : for_each_tile<1>(consider);
  }
  return best;
}

}  // namespace fastconv::algos::implicit_gemm::wgrad::pointwise
