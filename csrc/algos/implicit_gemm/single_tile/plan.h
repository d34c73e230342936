// Tiles of the single-tile kernel, shared by the planner and the kernel: for problems that last some microseconds,
// where what counts is how many instructions lie before the first product and behind the last one. Half types, and
// class tf32 in TF32 products: both operands are read from shared memory by the tensor cores themselves. Class fp32 in
// three products of halves: pixels pass through registers (load.cuh). NHWC.
//
// A block has one tile of output, or one split of its reduction. Steps and packed weights are those of
// persistent/plan.h; in class tf32 a step has 32 channels and its weights are float32, rounded.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "algos/implicit_gemm/plan.h"
#include "core/cost.h"
#include "core/device_info.h"
#include "core/integers.h"
#include "core/problem.h"

namespace fastconv::algos::implicit_gemm::single_tile {

constexpr int multiply_warpgroups = 2;
constexpr int row_bytes = 128;  // of a pixel of a stage, and of a filter of a step
constexpr int max_filter_slots = 12, max_input_slots = 4, max_box_pixels = 640, max_split_k = 8;
constexpr double max_rounds = 20;         // of blocks: what has been measured
constexpr std::int64_t max_grid = 65535;  // blocks along the second and third dimension
constexpr std::size_t shared_limit = 227 * 1024, shared_of_two = 113 * 1024;
constexpr int control_bytes = 1024, split_control_bytes = 4096;  // Control in tile.cuh

// How the rows of A, pixels of a stage in shared memory, lie under a tile.
enum class Tile {
  window,  // 8 columns of y, a stage with its halo serves all taps: groups of 8 pixels, a row of the stage apart
  rows,    // consecutive pixels of rows of y that are as long as those of the stage, halo included; the surplus is
           // dropped
  dense,   // a stage is one tap: its pixels are those of the tile, one behind the other
};

// Whether there are registers for two blocks on a multiprocessor.
constexpr bool is_paired(int filter_tile, bool split) { return filter_tile < (split ? 64 : 128); }

struct Plan {
  Tile kind;
  bool split;       // class fp32
  int pixels;       // of a tile: 128; or 64, whose steps the two warpgroups share
  int filter_tile;  // of a block: 128, 64 or 32; class fp32: or 48
  int split_k;      // of the reduction: blocks of a cluster
  int tile_n, tile_p, tile_q;
  int box_n, box_h, box_w;
  int stage_taps, step_channels, element_bytes;
  int input_slots, filter_slots;
  std::int64_t steps, steps_per_split, packed_rows, filter_tiles, tiles_n, tiles_p, tiles_q;
  // In the packed weight, in bytes: [filter tile][step][packed rows][128 bytes], and the exponents of class fp32.
  std::size_t weights_offset = 0, exponents_offset = 0;

  bool is_paired() const { return single_tile::is_paired(filter_tile, split); }
  int warpgroup_splits() const { return multiply_warpgroups * 64 / pixels; }  // warpgroups that have the same pixels
  std::size_t stage_bytes() const {
    return (static_cast<std::size_t>(box_n * box_h * box_w) * row_bytes + 1023) / 1024 * 1024;
  }
  std::size_t filter_bytes() const { return static_cast<std::size_t>(filter_tile) * row_bytes; }
  // Sums that come from other warps: of each warp's 16 pixels, from all others that have them.
  int contributors() const { return split_k * warpgroup_splits(); }
  int owned_warps() const { return pixels / 16 / split_k; }
  std::size_t sums_bytes() const {
    return static_cast<std::size_t>((contributors() - 1) * owned_warps() * filter_tile) * 64;
  }
  std::size_t bytes_from_others() const {  // of these, what other blocks send
    const int others = contributors() - warpgroup_splits();
    return static_cast<std::size_t>(others * owned_warps() * filter_tile) * 64;
  }
  std::size_t shared_bytes() const {  // alignment, control and bias; stages; filters; sums
    return 1024 + (split ? split_control_bytes : control_bytes) + input_slots * stage_bytes() +
           filter_slots * filter_bytes() + sums_bytes();
  }
  std::int64_t tiles() const { return tiles_n * tiles_p * tiles_q * filter_tiles; }
  std::int64_t blocks() const { return tiles() * split_k; }
};

inline bool is_possible(const ConvProblem& problem) {
  const auto size = static_cast<std::int64_t>(size_of(problem.dtype));
  return problem.groups == 1 && problem.k * size % 16 == 0 &&
         (problem.accuracy == AccuracyClass::fp16 || problem.accuracy == AccuracyClass::bf16 ||
          problem.accuracy == AccuracyClass::tf32 || problem.accuracy == AccuracyClass::fp32) &&
         problem.n * problem.y_p() * problem.y_q() * problem.y_pitch() < std::int64_t{1} << 30;
}

// All plans: visit(plan). packed_rows: filters of a packed tile.
template <typename Visit>
void for_each_plan(const ConvProblem& problem, int packed_rows, Visit&& visit) {
  if (!is_possible(problem)) return;
  const std::int64_t taps = problem.r * problem.s;
  const int halo_h = static_cast<int>((problem.r - 1) * problem.dilation_h),
            halo_w = static_cast<int>((problem.s - 1) * problem.dilation_w);
  const bool product = is_matrix_product(problem);
  const bool stride_1 = problem.stride_h == 1 && problem.stride_w == 1;
  const auto consider = [&](Plan plan) {
    const auto span = [](int box, std::int64_t stride) { return (box - 1) * stride + 1; };
    const bool dense = plan.kind == Tile::dense;
    if (plan.box_n > 256 || span(plan.box_h, dense ? problem.stride_h : 1) > 256 ||
        span(plan.box_w, dense ? problem.stride_w : 1) > 256 || plan.box_n * plan.box_h * plan.box_w > max_box_pixels) {
      return;
    }
    if (plan.kind != Tile::dense && taps < plan.warpgroup_splits()) return;  // or stages would be given back too late
    if (plan.tiles_q > max_grid || plan.tiles_p * plan.tiles_n > max_grid) return;
    plan.element_bytes = static_cast<int>(size_of(problem.dtype));
    plan.step_channels = row_bytes / plan.element_bytes;
    plan.stage_taps = dense ? 1 : static_cast<int>(taps);
    plan.steps = ceil_div(problem.c, plan.step_channels) * taps;
    plan.packed_rows = packed_rows;
    for (int filters : {128, 64, 48, 32}) {
      if (packed_rows % filters != 0) continue;
      if (filters == 48 && !plan.split) continue;  // fewer kernels
      if (filters > 32 && problem.k <= filters / 2) continue;
      if (filters == 128 && plan.split) continue;  // sums and totals: too many registers
      if (!fits_shuffle(problem, filters)) continue;
      plan.filter_tile = filters;
      plan.filter_tiles = ceil_div(problem.k, filters);
      for (plan.split_k = 1; plan.split_k <= std::min(plan.pixels / 16, max_split_k); plan.split_k *= 2) {
        plan.steps_per_split = ceil_div(plan.steps, plan.split_k);
        if (ceil_div(plan.steps, plan.steps_per_split) != plan.split_k) continue;
        const std::int64_t min_steps = plan.steps - (plan.split_k - 1) * plan.steps_per_split;
        if (min_steps < plan.warpgroup_splits()) continue;
        // A warpgroup that has no step of a stage does not wait for it, and would not notice its slot's next phase.
        bool waits = true;
        for (int rank = 1; rank < plan.split_k && plan.warpgroup_splits() > 1; ++rank) {
          waits =
              waits && (plan.stage_taps == 1 || rank * plan.steps_per_split % plan.stage_taps != plan.stage_taps - 1);
        }
        if (!waits) continue;
        const auto stages = static_cast<int>(
            std::min<std::int64_t>(ceil_div(plan.steps_per_split, plan.stage_taps) +
                                       (plan.split_k > 1 && plan.steps_per_split % plan.stage_taps ? 1 : 0),
                                   max_input_slots));
        for (const std::size_t limit : {shared_of_two, shared_limit}) {
          if (limit == shared_of_two && !plan.is_paired()) continue;
          plan.filter_slots = static_cast<int>(std::min<std::int64_t>(plan.steps_per_split, max_filter_slots));
          plan.input_slots = std::min(stages, plan.stage_taps == 1 ? max_input_slots : 3);
          const int min_inputs = std::min(stages, 2), min_filters = std::min(plan.filter_slots, 4);
          while (plan.shared_bytes() > limit && (plan.input_slots > min_inputs || plan.filter_slots > min_filters)) {
            if (plan.filter_slots > min_filters) {
              --plan.filter_slots;
            } else {
              --plan.input_slots;
            }
          }
          if (plan.shared_bytes() > limit) continue;
          // Warpgroups that take every other slot must meet each phase of theirs.
          const std::int64_t stages_per_split = plan.stage_taps == 1 ? plan.steps_per_split : 0;
          // They give a slot back at their next one.
          const int whole_turns = ~(plan.warpgroup_splits() - 1), least = 2 * plan.warpgroup_splits();
          if (plan.filter_slots < plan.steps_per_split) plan.filter_slots &= whole_turns;
          if (plan.input_slots < stages_per_split) plan.input_slots &= whole_turns;
          if (plan.filter_slots < std::min<std::int64_t>(plan.steps_per_split, least) ||
              plan.input_slots < std::min<std::int64_t>(stages_per_split, least)) {
            continue;
          }
          visit(plan);
          if (plan.filter_slots == std::min<std::int64_t>(plan.steps_per_split, max_filter_slots)) break;
        }
      }
    }
  };
  const auto consider_tile = [&](int pixels) {
    Plan plan{};
    plan.split = problem.accuracy == AccuracyClass::fp32;
    plan.pixels = pixels;
    const auto set = [&](Tile kind, int n, int p, int q) {
      plan.kind = kind;
      plan.tile_n = n, plan.tile_p = p, plan.tile_q = q;
      plan.tiles_n = ceil_div(problem.n, n), plan.tiles_p = ceil_div(problem.p(), p),
      plan.tiles_q = ceil_div(problem.q(), q);
      plan.box_n = n, plan.box_h = p, plan.box_w = q;
    };
    if (product) {
      set(Tile::dense, 1, 1, pixels);
      plan.tiles_n = plan.tiles_p = 1;
      plan.tiles_q = ceil_div(problem.n * problem.h * problem.w, pixels);
      consider(plan);
      return;
    }
    if (stride_1 && taps > 1) {
      for (const int n : {1, 2}) {
        const int p = pixels / 8 / n;
        if (p % 8 != 0 || (n > 1 && problem.n < n)) continue;
        set(Tile::window, n, p, 8);
        plan.box_h = p + halo_h, plan.box_w = 8 + halo_w;
        consider(plan);
      }
      const std::int64_t pitch = problem.q() + halo_w;
      if (pitch <= 256) {
        set(Tile::rows, 1, 1 << 20, static_cast<int>(pitch));
        plan.tiles_n = problem.n;
        plan.tiles_p = 1;
        plan.tiles_q = ceil_div((problem.p() - 1) * pitch + problem.q(), pixels);
        plan.box_w = static_cast<int>(pitch);
        plan.box_h = static_cast<int>((pitch - 1 + pixels - 1) / pitch) + 1 + halo_h;
        if (pixels % pitch == 0) plan.box_h = static_cast<int>(pixels / pitch) + halo_h;
        consider(plan);
      }
    }
    for (int q = 8; q <= pixels && q < 2 * problem.q() + 8; q *= 2) {
      for (int p = 1; p * q <= pixels; p *= 2) {
        if (p >= 2 * problem.p() && p > 1) break;
        const int n = pixels / (p * q);
        if (n > 1 && n >= 2 * problem.n) continue;
        set(Tile::dense, n, p, q);
        consider(plan);
      }
    }
  };
  for (const int pixels : {128, 64}) consider_tile(pixels);
}

// Blocks that run side by side, one on a multiprocessor: clusters lie within groups of 16 or 18.
inline double blocks_at_once(const Plan& plan, const DeviceInfo& device) {
  return plan.split_k >= 4 ? std::floor(device.processors * (120.0 / 132.0)) : device.processors;
}

// Microseconds of a launch with cold caches, timer included, fitted to some thousand plans of 22 layers with 1 to 64
// images on an H200 (docs/log/15-implicit-gemm-small-grids.md).
struct Factors {
  double step, step_filter;     // of a warpgroup, however small
  double tap, tap_filter;       // the same where a stage is one tap
  double strided;               // times a tap's, where copies skip pixels
  double stage, split;          // class fp32: splitting a stage; a block's instructions for a step of 64 pixels
  double tensor;                // a step's pixel and filter
  double filter_row, pixel;     // copies of a block
  double round;                 // of blocks
  double split_k, contributor;  // adding up
  double launch;
};
constexpr Factors one_product{.step = 0.205,
                              .step_filter = 0.00018,
                              .tap = 0.285,
                              .tap_filter = 0.0001,
                              .strided = 1.1,
                              .stage = 0,
                              .split = 0,
                              .tensor = 0.7e-5,
                              .filter_row = 0.00196,
                              .pixel = 0.0007,
                              .round = 2.4,
                              .split_k = 0.31,
                              .contributor = 0.078,
                              .launch = 7.75};
constexpr Factors three_products{.step = 0.230,
                                 .step_filter = 0.0016,
                                 .tap = 0.347,
                                 .tap_filter = 0.0017,
                                 .strided = 1.3,
                                 .stage = 0.18,
                                 .split = 0.097,
                                 .tensor = 3.6e-5,
                                 .filter_row = 0.0027,
                                 .pixel = 0.00135,
                                 .round = 2.9,
                                 .split_k = 0.08,
                                 .contributor = 0.107,
                                 .launch = 9.9};

inline double cost_us(const Plan& plan, const ConvProblem& problem, const DeviceInfo& device) {
  const Factors& factor = plan.split ? three_products : one_product;
  const bool taps = plan.stage_taps == 1;
  const double strided = problem.stride_h * problem.stride_w > 1 ? factor.strided : 1.0;
  const double filters = plan.filter_tile, steps = static_cast<double>(plan.steps_per_split);
  const double blocks = static_cast<double>(plan.blocks()),
               rounds = std::max(1.0, std::ceil(blocks / blocks_at_once(plan, device)));
  const double beside = std::min(rounds, plan.is_paired() && plan.shared_bytes() <= shared_of_two ? 2.0 : 1.0);
  const double stages = std::ceil(steps / plan.stage_taps), pixels = stages * plan.box_n * plan.box_h * plan.box_w;
  const double latency =
      std::ceil(steps / plan.warpgroup_splits()) *
          (taps ? strided * factor.tap + factor.tap_filter * filters : factor.step + factor.step_filter * filters) +
      (taps ? 0 : stages * factor.stage);
  const double tensor = beside * steps * plan.pixels * filters * factor.tensor;
  const double copies = beside * (steps * filters * factor.filter_row + pixels * factor.pixel);
  const double split = beside * steps * plan.pixels / 64 * factor.split;
  const double all_copies = blocks * (steps * filters + pixels) * row_bytes / 8.9e6;  // from the L2 cache
  const double body =
      std::max(std::ceil(rounds / beside) * std::max({latency, tensor, copies, split}) + factor.round * (rounds - 1),
               all_copies);
  const double contributors = plan.contributors();
  const double joining = (plan.split_k > 1 ? factor.split_k : 0.0) +
                         (contributors > 1 ? factor.contributor * contributors * std::sqrt(filters / 64) : 0.0);
  const double bytes = problem.compulsory_bytes();
  // Elements of NCHW are stored one by one.
  const double nchw = problem.layout == Layout::nchw ? 1.0 + 3.0e-6 * static_cast<double>(problem.output_numel()) : 0.0;
  // Beyond 8 MB weights come at memory's full rate (docs/log/91-weight-bound.md).
  const double weights = static_cast<double>(problem.k * problem.c * problem.r * problem.s * plan.element_bytes);
  const double filling = 0.167e-6 * (bytes - std::max(0.0, weights - 8e6));
  return factor.launch + joining + nchw + filling + std::max(body, memory_us(bytes, 1.0, device));
}

// The best plan, if there is one. packed_rows: filters of a packed tile.
inline std::optional<Plan> make_plan(const ConvProblem& problem, int packed_rows, const DeviceInfo& device) {
  std::optional<Plan> best;
  double least = 0;
  for_each_plan(problem, packed_rows, [&](const Plan& plan) {
    if (static_cast<double>(plan.blocks()) > max_rounds * blocks_at_once(plan, device)) return;
    const double us = cost_us(plan, problem, device);
    if (!best || us < least) best = plan, least = us;
  });
  return best;
}

}  // namespace fastconv::algos::implicit_gemm::single_tile
