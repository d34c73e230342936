// Tiles of the Hopper kernel (wgmma), shared by the planner and the kernel.
//
// The reduction is cut into steps: one filter tap (r, s) and one block of channels, 128 bytes of x per pixel. Steps are
// gathered into stages, what one tensor copy brings into shared memory:
//   whole window   the input under an output tile, with its halo, serves all R S taps of a channel block (stride 1)
//   single tap     the pixels of one tap; with a stride the copy skips pixels
//
// Packed weight: [filter tile][channel block][tap] blocks of [filter_tile] rows, a row 128 bytes: 32 hi halves and 32
// lo (class fp32) or 64 halves (float16, bfloat16); or 64 bytes: 32 halves (class tf32). Within a row in the order of
// the A fragments (wgmma_operand.cuh), pieces of 16 bytes swizzled as wgmma reads them, zeros beyond C and K. Then
// [filter tile][filter_tile] int32 exponents of the filters' scales.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "algos/implicit_gemm/config.h"

namespace fastconv::algos::implicit_gemm::wgmma {

// Hopper's instructions exist on Hopper alone. Tensor copies need rows of C elements that are multiples of 16 bytes,
// and skip at most 7 pixels. The answer depends on the weight and the device alone (the rule of packed_weight()).
constexpr int most_stride = 8;
inline bool is_used(const ConvProblem& problem, const DeviceInfo& device) {
  return device.type == DeviceType::cuda && device.compute_capability == 90 && problem.groups == 1 &&
         loads_vectors(problem);
}

constexpr int multiply_warpgroups = 2;
constexpr int input_row_bytes = 128;  // channels of a step, of one pixel
constexpr int filter_ring_bytes = 64 * 1024, most_filter_slots = 8, most_input_slots = 8;
constexpr int filter_slots(int tile_bytes) {  // a power of two
  return tile_bytes * 8 <= filter_ring_bytes ? most_filter_slots : most_filter_slots / 2;
}
constexpr int most_box_pixels = 640;
constexpr std::size_t shared_limit = 227 * 1024;
constexpr std::size_t shared_overhead = 36 * 1024;  // alignment, barriers, marks of tiles to repeat, epilogue

// What depends on the weight and the class alone (the rule of packed_weight()).
struct Weights {
  Mode mode;
  int filter_tile;    // n of wgmma
  int row_bytes;      // of a packed row
  int step_channels;  // channels of a step
  std::int64_t channel_blocks, filter_tiles, taps;

  std::size_t tile_bytes() const { return static_cast<std::size_t>(filter_tile) * row_bytes; }
  std::size_t ring_bytes() const { return filter_slots(static_cast<int>(tile_bytes())) * tile_bytes(); }
  std::size_t weight_bytes() const {
    return static_cast<std::size_t>(filter_tiles * channel_blocks * taps) * tile_bytes();
  }
  std::size_t bytes() const {
    return weight_bytes() + Config::align(static_cast<std::size_t>(filter_tiles * filter_tile) * sizeof(std::int32_t));
  }
};

// Filters of a block: the most, but little waste. A narrow tile costs shared-memory bandwidth: n = 64 reads as many
// bytes per product as it can get.
inline int tile_filters(Mode mode, std::int64_t k) {
  int best = 128;
  double least = 1e30;
  for (int tile : {128, 96, 64, 48, 32}) {
    if (mode != Mode::split && (tile == 96 || tile == 48)) continue;  // fewer kernels
    const double cost = static_cast<double>((k + tile - 1) / tile) * (tile + 8.0);
    if (cost < least) least = cost, best = tile;
  }
  return best;
}

// Two blocks of 64 pixels a warpgroup fill the registers at so many filters: in split mode with totals beside the sums.
constexpr int most_filters_of_two_rows(Mode mode) { return mode == Mode::split ? 64 : 128; }

inline Weights make_weights(const ConvProblem& problem) {
  Weights weights{};
  weights.mode = problem.accuracy == AccuracyClass::tf32 ? Mode::single : select_mode(problem.accuracy);
  weights.filter_tile = tile_filters(weights.mode, problem.k);
  weights.row_bytes = weights.mode == Mode::single ? 64 : 128;
  weights.step_channels = static_cast<int>(input_row_bytes / size_of(problem.dtype));
  weights.channel_blocks = (problem.c + weights.step_channels - 1) / weights.step_channels;
  weights.filter_tiles = (problem.k + weights.filter_tile - 1) / weights.filter_tile;
  weights.taps = problem.r * problem.s;
  return weights;
}

// The rest of the plan.
struct Plan {
  Weights weights;
  int row_blocks;  // 64-pixel blocks of a multiplying warpgroup
  int tile_n, tile_p, tile_q;
  bool whole_window;
  int stage_taps;           // steps of a stage
  int box_n, box_h, box_w;  // pixels of a stage
  int input_slots;
  std::int64_t stages, splits;  // of the whole reduction; parts into which it is cut
  std::int64_t tiles_n, tiles_p, tiles_q;

  int pixel_tile() const { return 64 * multiply_warpgroups * row_blocks; }
  std::size_t stage_bytes() const {
    return (static_cast<std::size_t>(box_n * box_h * box_w) * input_row_bytes + 1023) / 1024 * 1024;
  }
  // With the largest value of each of its pixels.
  std::size_t slot_bytes() const { return stage_bytes() + stage_bytes() / 32; }
  std::size_t shared_bytes() const { return shared_overhead + input_slots * slot_bytes() + weights.ring_bytes(); }
  std::size_t partial_bytes(const ConvProblem& problem) const {
    return splits == 1 ? 0 : Config::align(static_cast<std::size_t>(splits * problem.output_numel()) * sizeof(float));
  }
  std::int64_t tiles() const { return tiles_n * tiles_p * tiles_q * weights.filter_tiles; }
};

// 1x1 with stride 1 and no padding has no geometry: one row of N H W pixels.
inline bool is_matrix_product(const ConvProblem& problem) {
  return problem.r == 1 && problem.s == 1 && problem.stride_h == 1 && problem.stride_w == 1 && problem.pad_h == 0 &&
         problem.pad_w == 0;
}

// Makes the plan for one shape of output tile; false if it does not fit.
inline bool shape_tile(const ConvProblem& problem, const Weights& weights, int row_blocks, int tile_n, int tile_p,
                       int tile_q, bool whole_window, Plan& plan) {
  plan.weights = weights;
  plan.row_blocks = row_blocks;
  plan.tile_n = tile_n, plan.tile_p = tile_p, plan.tile_q = tile_q;
  plan.whole_window = whole_window;
  plan.stage_taps = whole_window ? static_cast<int>(weights.taps) : 1;
  plan.box_n = tile_n;
  plan.box_h = tile_p + (whole_window ? static_cast<int>((problem.r - 1) * problem.dilation_h) : 0);
  plan.box_w = tile_q + (whole_window ? static_cast<int>((problem.s - 1) * problem.dilation_w) : 0);
  const auto span = [](int box, std::int64_t stride) { return (box - 1) * stride + 1; };
  if (tile_n > 256 || span(plan.box_h, whole_window ? 1 : problem.stride_h) > 256 ||
      span(plan.box_w, whole_window ? 1 : problem.stride_w) > 256) {
    return false;  // a box of a tensor copy has at most 256 elements along a dimension
  }
  if (plan.box_n * plan.box_h * plan.box_w > most_box_pixels) return false;
  const std::size_t slots = (shared_limit - shared_overhead - weights.ring_bytes()) / plan.slot_bytes();
  if (slots < 2) return false;
  plan.input_slots =
      static_cast<int>(std::min<std::size_t>(slots, whole_window && weights.taps > 1 ? 3 : most_input_slots));
  const std::int64_t n = is_matrix_product(problem) ? 1 : problem.n, p = is_matrix_product(problem) ? 1 : problem.p();
  const std::int64_t q = is_matrix_product(problem) ? problem.n * problem.h * problem.w : problem.q();
  const auto tiles = [](std::int64_t size, int tile) { return (size + tile - 1) / tile; };
  plan.tiles_n = tiles(n, tile_n), plan.tiles_p = tiles(p, tile_p), plan.tiles_q = tiles(q, tile_q);
  plan.stages = weights.channel_blocks * (whole_window ? 1 : weights.taps);
  plan.splits = 1;
  return true;
}

// Clocks of a multiprocessor for one step of a tile: the longest of what its parts need. Factors as measured on an H200
// (docs/performance.md).
inline double step_clocks(const Plan& plan) {
  const Weights& weights = plan.weights;
  const bool split = weights.mode == Mode::split, single = weights.mode == Mode::single;
  const double products = split ? 3 : 1, pixels = plan.pixel_tile();
  const double tensor = pixels * weights.filter_tile * weights.step_channels * products / 2048;
  const double stage = static_cast<double>(plan.stage_bytes()) / plan.stage_taps;  // of input
  const double filters = static_cast<double>(weights.tile_bytes());
  // Shared memory, 128 bytes a clock: A once, B once for 64 pixels and product; copies; splitting in place.
  const double a = pixels * (single ? 64 : 128), b = pixels / 64 * filters * (split ? 1.5 : 1);
  const double shared = (a + b + filters + stage * (split ? 3 : single ? 2.5 : 1)) / 128;
  // From the L2 cache: the input, which each block reads for itself, and the filters, which all blocks read.
  const double copies = stage / 36 + filters / 78;
  const double transform =
      split || single ? (300 + stage * plan.stage_taps / input_row_bytes * 5) / plan.stage_taps : 0;
  return std::max({(split ? 1.33 : 1.06) * tensor, 1.35 * shared, copies, transform}) + 0.05 * copies;
}

inline double plan_clocks(const Plan& plan, int processors) {
  const double steps = static_cast<double>(plan.stages) * plan.stage_taps;
  const auto ceil_div = [](double a, double b) {
    return static_cast<double>(static_cast<std::int64_t>((a + b - 1) / b));
  };
  const double rounds = ceil_div(static_cast<double>(plan.tiles() * plan.splits), processors);
  const double epilogue = 1500 + 80.0 * plan.row_blocks * plan.weights.filter_tile / 2;
  const double sum_of_parts = plan.splits > 1 ? 4000 + 300.0 * static_cast<double>(plan.splits) : 0;
  return 4000 + rounds * (steps / static_cast<double>(plan.splits) * step_clocks(plan) + epilogue) + sum_of_parts;
}

inline Plan make_plan(const ConvProblem& problem, const Weights& weights, int processors) {
  Plan best{};
  double least = 1e300;
  const auto consider = [&](int row_blocks, int n, int p, int q, bool whole_window) {
    Plan plan{};
    if (!shape_tile(problem, weights, row_blocks, n, p, q, whole_window, plan)) return;
    for (std::int64_t splits : {1, 2, 3, 4, 6, 8, 12, 16}) {
      if (splits > plan.stages || (splits > 1 && plan.tiles() * splits > processors)) break;
      const std::int64_t stages_per_split = (plan.stages + splits - 1) / splits;
      plan.splits = (plan.stages + stages_per_split - 1) / stages_per_split;  // none is empty
      const double clocks = plan_clocks(plan, processors);
      if (clocks < least) least = clocks, best = plan;
    }
  };
  const int most_rows = weights.filter_tile <= most_filters_of_two_rows(weights.mode) ? 2 : 1;
  for (int row_blocks = most_rows; row_blocks >= 1; --row_blocks) {
    const int pixels = 64 * multiply_warpgroups * row_blocks;
    if (is_matrix_product(problem)) {
      consider(row_blocks, 1, 1, pixels, true);
      continue;
    }
    const bool stride_1 = problem.stride_h == 1 && problem.stride_w == 1;
    for (int q = 1; q <= pixels && q < 2 * problem.q(); ++q) {
      for (int p = 1; q * p <= pixels && p < 2 * problem.p(); ++p) {
        const int n = static_cast<int>(std::min<std::int64_t>(pixels / (q * p), problem.n));
        if (stride_1) consider(row_blocks, n, p, q, true);
        consider(row_blocks, n, p, q, false);
      }
    }
  }
  return best;
}

}  // namespace fastconv::algos::implicit_gemm::wgmma
