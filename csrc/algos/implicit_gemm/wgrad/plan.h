// Plan of the weight gradient, shared by the planner and the kernels.
//
//   dW[k][tap][c] = sum over pixels (n, p, q) of dY[n, p, q, k] * x[n, p * stride - pad + r * dilation, ..., c]
//
// is a matrix product whose two operands have their channels fast and the reduction slow. float32 operands are first
// converted to scaled halves ("limbs": hi, and lo in class fp32) in the workspace; half types in NHWC are read as they
// are. Then a block of the main kernel takes 64 or 128 filters, a few blocks of 64 columns (tap, 64 channels), and a
// part of the pixels, which come in chunks: boxes of images, rows and columns. The partial sums are added by a third
// kernel.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "algos/implicit_gemm/plan.h"
#include "core/integers.h"

namespace fastconv::algos::implicit_gemm::wgrad {

constexpr int multiply_warpgroups = 2;
constexpr int block_channels = 64;  // of a block of filters or columns: 128 bytes of halves
constexpr int row_bytes = 128;
constexpr int max_blocks_n = 3;  // column blocks of a warpgroup: with 96 sums and 96 totals a thread is full
constexpr int max_chunk_pixels = 128;
constexpr int max_stride = 8;  // of a tensor copy
constexpr int max_slots = 8;
constexpr std::size_t shared_limit = 227 * 1024;
constexpr std::size_t shared_overhead = 2 * 1024;  // alignment, barriers

// With few channels the taps become channels, R S times as many: blocks of 64 would be mostly empty.
constexpr int unrolled_channels = 24;
inline bool is_unrolled(const ConvProblem& problem) {
  return problem.c <= unrolled_channels && problem.r * problem.s > 1;
}
// More is left to others.
constexpr double max_unrolled_bytes = 6.0 * 1073741824.0;
inline double unrolled_bytes(const ConvProblem& problem) {
  if (!is_unrolled(problem)) return 0.0;
  const double limbs = problem.accuracy == AccuracyClass::fp32 ? 2.0 : 1.0;
  return 2.0 * limbs * static_cast<double>(problem.n * problem.p() * problem.q()) *
         static_cast<double>(round_up(problem.r * problem.s * problem.c, 8));
}

// How an operand comes into the form that the main kernel reads.
enum class Conversion : std::uint8_t {
  none,      // it has that form
  vectors,   // NHWC, 8 channels at a time
  elements,  // any layout, any number of channels, taps as channels
};

struct Plan {
  Mode mode;
  int limbs, products;
  Conversion convert_x, convert_grad;
  bool unrolled;               // x is converted to [N, P, Q, R S C], and the filter is 1x1
  bool window;                 // the blocks of columns are neighbouring taps of a filter row, which share one box of x
  bool rows_by_warps;          // the two warpgroups take 64 filters each; else every other chunk each
  int blocks_n;                // column blocks of a warpgroup
  int tile_n, tile_p, tile_q;  // pixels of a chunk
  int box_w;                   // columns of the box of x
  int steps;                   // of 16 pixels
  int slots;                   // of the ring of chunks
  std::int64_t c;              // channels of the product: C, or R S C
  std::int64_t pitch_x, pitch_grad;  // channels of a limb in the operands
  std::int64_t taps_r, taps_s;       // of the product
  std::int64_t row_tiles, column_tiles;
  std::int64_t chunks_n, chunks_p, chunks_q;
  std::int64_t split_k, chunks_per_split;
  int reduce_slices;  // of the splits, which threads of a block add side by side

  int blocks_m() const { return rows_by_warps ? 2 : 1; }
  int boxes_x() const { return window ? 1 : blocks_n; }
  std::int64_t channel_blocks() const { return ceil_div(c, block_channels); }
  std::int64_t taps() const { return taps_r * taps_s; }
  std::int64_t taps_groups() const { return ceil_div(taps_s, blocks_n); }  // of a filter row, with windows
  std::int64_t chunks() const { return chunks_n * chunks_p * chunks_q; }
  std::int64_t tiles() const { return row_tiles * column_tiles; }
  std::int64_t splits() const { return split_k * (rows_by_warps ? 1 : 2); }
  int grad_box_bytes() const { return tile_n * tile_p * tile_q * row_bytes; }
  int x_box_bytes() const { return tile_n * tile_p * box_w * row_bytes; }
  // A region of shared memory holds a box, and zeros up to a multiple of 16 pixels.
  int grad_region_bytes() const { return steps * 16 * row_bytes; }
  int x_region_bytes() const { return window ? (x_box_bytes() + 1023) / 1024 * 1024 : grad_region_bytes(); }
  int slot_bytes() const { return limbs * (blocks_m() * grad_region_bytes() + boxes_x() * x_region_bytes()); }
  int chunk_bytes() const { return limbs * (blocks_m() * grad_box_bytes() + boxes_x() * x_box_bytes()); }
  std::size_t shared_bytes() const { return shared_overhead + static_cast<std::size_t>(slots) * slot_bytes(); }
  bool scaled() const { return mode == Mode::split || mode == Mode::single; }

  // ---- The workspace: exponents and maxima, converted x, converted dY, partial sums.
  std::size_t scale_bytes(const ConvProblem& problem) const {
    return align_bytes(static_cast<std::size_t>(4 * problem.n + chunks_n) * sizeof(int));
  }
  std::size_t x_bytes(const ConvProblem& problem) const {
    const std::int64_t pixels = problem.n * (unrolled ? problem.p() * problem.q() : problem.h * problem.w);
    return convert_x == Conversion::none ? 0 : align_bytes(static_cast<std::size_t>(pixels * limbs * pitch_x) * 2);
  }
  std::size_t grad_bytes(const ConvProblem& problem) const {
    const std::int64_t pixels = problem.n * problem.p() * problem.q();
    return convert_grad == Conversion::none ? 0
                                            : align_bytes(static_cast<std::size_t>(pixels * limbs * pitch_grad) * 2);
  }
  // [split][K][taps][pitch_x]
  std::int64_t split_numel(const ConvProblem& problem) const { return problem.k * taps() * pitch_x; }
  std::size_t partial_bytes(const ConvProblem& problem) const {
    return align_bytes(static_cast<std::size_t>(splits() * split_numel(problem)) * sizeof(float));
  }
  std::size_t workspace_bytes(const ConvProblem& problem) const {
    return scale_bytes(problem) + x_bytes(problem) + grad_bytes(problem) + partial_bytes(problem);
  }
};

namespace detail {

// Clocks of a multiprocessor for a chunk: the tensor cores, or the copies, whose rows of 128 bytes come at 24 bytes a
// clock as measured (docs/log/47-weight-gradient-wgmma.md).
inline double chunk_clocks(const Plan& plan) {
  const double tensor = 16.0 * plan.steps * plan.blocks_m() * 64 * plan.blocks_n * 64 * plan.products / 2048;
  const double copies = plan.chunk_bytes() / 24.0;
  const double promotion = 250.0 + 40.0 * plan.blocks_n;  // and waiting; a part of it is not hidden
  return std::max(1.04 * tensor, copies) + 0.03 * copies + (plan.rows_by_warps ? 0.3 : 0.15) * promotion +
         0.3 * plan.tile_n * plan.tile_p;  // rows lie far apart in memory
}

inline double plan_clocks(const Plan& plan, const ConvProblem& problem, int processors) {
  const double rounds = static_cast<double>(ceil_div(plan.tiles() * plan.split_k, processors));
  const double start = 3000, end = 1500 + 700.0 * plan.blocks_n;
  // The partial sums are written and read again, at some 20 bytes a clock and multiprocessor.
  const double partial = 2.0 * static_cast<double>(plan.partial_bytes(problem)) / (20.0 * processors);
  return rounds * (static_cast<double>(plan.chunks_per_split) * chunk_clocks(plan) + start + end) + partial;
}

}  // namespace detail

// From the converted (or unconverted) operands on. False if the shape does not fit.
inline bool shape_chunk(const ConvProblem& problem, bool window, int blocks_n, bool rows_by_warps, int n, int p, int q,
                        Plan& plan) {
  plan.window = window, plan.blocks_n = blocks_n, plan.rows_by_warps = rows_by_warps;
  plan.tile_n = n, plan.tile_p = p, plan.tile_q = q;
  const std::int64_t dilation_w = plan.unrolled ? 1 : problem.dilation_w;
  plan.box_w = q + (window ? static_cast<int>((blocks_n - 1) * dilation_w) : 0);
  plan.steps = ceil_div(n * p * q, 16);
  const auto span = [&](int box, std::int64_t stride) { return (box - 1) * (plan.unrolled ? 1 : stride) + 1; };
  if (span(p, problem.stride_h) > 256 || span(plan.box_w, problem.stride_w) > 256 || n > 256) return false;
  plan.slots = static_cast<int>(
      std::min<std::size_t>((shared_limit - shared_overhead) / static_cast<std::size_t>(plan.slot_bytes()), max_slots));
  // With every other chunk to each warpgroup, a slot must always be the same one's: a warpgroup that is ahead by a
  // round of the ring could not tell the parity of the phase that it waits for from that of the one before the last.
  if (!rows_by_warps) plan.slots -= plan.slots % 2;
  if (plan.slots < (rows_by_warps ? 3 : 4)) return false;
  plan.row_tiles = ceil_div(problem.k, plan.blocks_m() * block_channels);
  plan.column_tiles = window ? plan.taps_r * plan.taps_groups() * plan.channel_blocks()
                             : ceil_div(plan.taps() * plan.channel_blocks(), blocks_n);
  plan.chunks_n = ceil_div(problem.n, n);
  plan.chunks_p = ceil_div(problem.p(), p);
  plan.chunks_q = ceil_div(problem.q(), q);
  return true;
}

// As many as fill the GPU, of at least 8 splits each.
inline int select_reduce_slices(std::int64_t split_numel, std::int64_t splits, int processors) {
  constexpr int max_slices = 8;
  int slices = 1;
  while (slices < max_slices && splits >= 16 * slices && split_numel * slices < processors * 2048) slices *= 2;
  return slices;
}

inline Conversion select_conversion(const ConvProblem& problem, std::int64_t channels, bool unrolled) {
  if (unrolled || problem.layout == Layout::nchw || channels % 8 != 0) return Conversion::elements;
  return problem.dtype == DType::f32 ? Conversion::vectors : Conversion::none;
}

inline Plan make_plan(const ConvProblem& problem, int processors) {
  Plan base{};
  base.mode = problem.accuracy == AccuracyClass::tf32 ? Mode::single : select_mode(problem.accuracy);
  base.limbs = base.mode == Mode::split ? 2 : 1;
  base.products = base.mode == Mode::split ? 3 : 1;
  base.unrolled = is_unrolled(problem);
  base.convert_x = select_conversion(problem, problem.c, base.unrolled);
  base.convert_grad = select_conversion(problem, problem.k, false);
  base.c = base.unrolled ? problem.r * problem.s * problem.c : problem.c;
  base.pitch_x = round_up(base.c, 8);
  base.pitch_grad = round_up(problem.k, 8);
  base.taps_r = base.unrolled ? 1 : problem.r;
  base.taps_s = base.unrolled ? 1 : problem.s;

  Plan best{};
  double least = 1e300;
  const auto consider = [&](bool window, int blocks_n, bool rows_by_warps, int n, int p, int q) {
    Plan plan = base;
    if (!shape_chunk(problem, window, blocks_n, rows_by_warps, n, p, q, plan)) return;
    for (std::int64_t rounds = 1; rounds <= 8; ++rounds) {  // of all multiprocessors, nearly full
      const std::int64_t split_k = std::max<std::int64_t>(rounds * processors / plan.tiles(), 1);
      plan.chunks_per_split = ceil_div(plan.chunks(), split_k);
      plan.split_k = ceil_div(plan.chunks(), plan.chunks_per_split);  // none is empty
      const double clocks = detail::plan_clocks(plan, problem, processors);
      if (clocks < least) least = clocks, best = plan;
    }
  };
  const auto consider_tiles = [&](int n, int p, int q) {
    const int pixels = n * p * q;
    if (pixels > max_chunk_pixels || (pixels < 16 && pixels * 4 < problem.n * problem.p() * problem.q())) return;
    for (const bool rows_by_warps : {true, false}) {
      if (rows_by_warps && problem.k <= block_channels) continue;
      for (int blocks_n = 1; blocks_n <= max_blocks_n; ++blocks_n) {
        if (blocks_n > 1 && blocks_n > base.taps() * base.channel_blocks()) break;
        consider(false, blocks_n, rows_by_warps, n, p, q);
        // Groups of 8 pixels must be neighbours in the box of x, and all steps alike.
        const bool regular = (q == 8 && n * p % 2 == 0) || q == 16;
        if (regular && blocks_n > 1 && blocks_n <= base.taps_s && problem.stride_w == 1) {
          consider(true, blocks_n, rows_by_warps, n, p, q);
        }
      }
    }
  };
  // Whole rows, parts of rows, and the regular widths; whole images of small maps.
  const auto p = static_cast<int>(std::min<std::int64_t>(problem.p(), max_chunk_pixels));
  const auto q = static_cast<int>(std::min<std::int64_t>(problem.q(), max_chunk_pixels));
  const auto images = static_cast<int>(std::min<std::int64_t>(problem.n, 16));
  for (int tile_q = 1; tile_q <= std::max(q, 16); ++tile_q) {
    const bool even = tile_q <= q && ceil_div(problem.q(), ceil_div(problem.q(), tile_q)) == tile_q;
    if (!even && tile_q != 8 && tile_q != 16) continue;
    for (int tile_p = 1; tile_p <= p + 1 && tile_p * tile_q <= max_chunk_pixels; ++tile_p) {
      for (int tile_n = 1; tile_n <= images && tile_n * tile_p * tile_q <= max_chunk_pixels; ++tile_n) {
        consider_tiles(tile_n, tile_p, tile_q);
      }
    }
  }
  best.reduce_slices = select_reduce_slices(best.split_numel(problem), best.splits(), processors);
  return best;
}

}  // namespace fastconv::algos::implicit_gemm::wgrad
