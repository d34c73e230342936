// Tiles and memory layout of the kernel for first layers: up to four channels, whose whole reduction stays in a block's
// shared memory. Shared by its planning and its launch.
//
// The reduction runs over pairs of neighbouring halves of the input patch: a pixel is `pitch` halves, a row of taps
// S * pitch of them. Two forms: dense, pitch C, where pairs straddle pixels, which needs windows that begin at whole
// pairs (an even stride, no dilation along W); and padded, pitch C rounded up to even. Even C: one form.
//
// Packed weight: of each form [filter tile][step][limb][pair of 8 filters][32 lanes] 16 bytes: a lane's B fragments of
// one m16n8k16 for two times 8 filters; zeros beyond C, S, K and the last pair. Then [filter tiles * filter_tile] int32
// exponents of the filters' scales.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "algos/implicit_gemm/plan.h"
#include "core/cost.h"

namespace fastconv::algos::implicit_gemm::few_channels {

constexpr int max_channels = 4, max_pairs = 512;  // of the padded form: longer reductions are no first layers'
constexpr int step_pairs = 8;                     // of an m16n8k16
constexpr int quad = 4;                           // neighbouring outputs of a row, that a lane has
constexpr int warp_quads = 8, warp_pixels = quad * warp_quads;
constexpr int max_warps = 4;
constexpr int warps_per_processor(int filter_tile, int products) {  // by registers
  return products == 3 && filter_tile > 32 ? 12 : 16;
}

constexpr int limbs_of(Mode mode) { return mode == Mode::split ? 2 : 1; }

// What depends on the weight and the class alone (the rule of packed_weight()).
struct Weights {
  Mode mode;
  int filter_tile;
  int vector;  // neighbouring filters of a lane: 16 bytes of y where the tile allows it
  std::int64_t c, k, r, s, filter_tiles;

  constexpr int forms() const { return c % 2 == 0 ? 1 : 2; }
  constexpr int pitch(bool dense) const { return static_cast<int>(dense ? c : round_up(c, 2)); }
  constexpr std::int64_t row_pairs(bool dense) const { return ceil_div(s * pitch(dense), 2); }
  constexpr std::int64_t pairs(bool dense) const { return r * row_pairs(dense); }
  constexpr std::int64_t steps(bool dense) const { return ceil_div(pairs(dense), step_pairs); }
  // Of a filter tile.
  constexpr std::int64_t tile_bytes(bool dense) const {
    return steps(dense) * limbs_of(mode) * filter_tile * step_pairs * 4;
  }
  constexpr std::int64_t form_offset(bool dense) const {
    return dense && forms() == 2 ? filter_tiles * tile_bytes(false) : 0;
  }
  constexpr std::int64_t exponents_offset() const {
    return filter_tiles * (tile_bytes(false) + (forms() == 2 ? tile_bytes(true) : 0));
  }
  constexpr std::size_t bytes() const {
    return align_bytes(static_cast<std::size_t>(exponents_offset() + filter_tiles * filter_tile * 4));
  }
};

// The answer depends on the weight, the class and the device alone. (The reductions of groups are too short for tiles.)
inline std::optional<Weights> make_weights(const ConvProblem& problem, const DeviceInfo& device) {
  if (device.type != DeviceType::cuda || problem.groups != 1 || problem.c > max_channels) return std::nullopt;
  if (problem.accuracy == AccuracyClass::ieee) return std::nullopt;
  Weights weights{};
  weights.mode = problem.accuracy == AccuracyClass::tf32 ? Mode::single : select_mode(problem.accuracy);
  weights.c = problem.c, weights.k = problem.k, weights.r = problem.r, weights.s = problem.s;
  if (weights.r > max_pairs || weights.s > max_pairs || weights.pairs(false) > max_pairs) return std::nullopt;
  std::int64_t least = INT64_MAX;
  for (int tile : {64, 48, 32}) {
    const std::int64_t cost = ceil_div(problem.k, tile) * (tile + 24);  // a tile's input is worth about 24 filters
    if (cost < least) least = cost, weights.filter_tile = tile;
  }
  weights.vector = problem.dtype != DType::f32 && weights.filter_tile % 32 == 0 ? 8 : 4;
  weights.filter_tiles = ceil_div<std::int64_t>(problem.k, weights.filter_tile);
  return weights;
}

struct Plan {
  Weights weights;
  bool dense;
  bool stores_vectors;  // of filters in NHWC, of four outputs in NCHW
  int warps;
  int tile_p, tile_q;               // outputs of a block at a time: warps * 32
  int patch_h, patch_w;             // input under them
  int pitch;                        // halves of a pixel
  int pixel_pairs;                  // pairs of pixels of a row of the patch
  int row_bytes, patch_limb_bytes;  // of the patch in halves
  int lines, line_chunks;           // the patch in memory: rows, or rows of a channel; 16-byte copies that one may need
  int steps;                        // of the reduction
  std::int64_t p_tiles, q_tiles, tiles;
  std::int64_t blocks;  // of each filter tile, which they keep
  // In shared memory: filters, then taps, bias, exponents, the range of |x| that each warp saw, the patch in halves
  // (hi, then lo), the patch as it lies in memory.
  int taps_offset, bias_offset, exponents_offset, ranges_offset, patch_offset, raw_offset;
  std::int64_t shared_bytes;
  std::size_t weights_offset;  // of few_channels' part in the packed weight
  double cost_us;

  constexpr int threads() const { return warps * 32; }
};

// Clocks of a warp for its part of a tile, on its quarter of the multiprocessor: products, and the issue of
// instructions, counted in the machine code. They were seen to add up rather than to hide each other, memory hides most
// of them; within 17 % on an H100 (docs/log/88-first-layers-tensor-cores.md).
inline double cost_us(const Plan& plan, const ConvProblem& problem, const DeviceInfo& device, std::int64_t at_once) {
  const bool split = plan.weights.mode == Mode::split, floats = problem.dtype == DType::f32;
  const bool nhwc = problem.layout == Layout::nhwc;
  const double filters = plan.weights.filter_tile / 8.0, steps = plan.steps, limbs = split ? 2.0 : 1.0;
  const double products = 2.0 * filters * steps * (split ? 3.0 : 1.0);  // instructions of 8 clocks
  const double multiply = 9.0 * products + (split ? steps * filters * 8.0 : 0.0) + steps * limbs * (20.0 + filters);
  const double pairs = static_cast<double>(plan.patch_h * plan.pixel_pairs) / plan.threads();
  const double chunks = static_cast<double>(plan.lines * plan.line_chunks) / plan.threads();
  // Of windows that share no pixel there is more to stage than to multiply (docs/log/151-single-kinds.md).
  const double apart = problem.stride_w >= problem.s && problem.s > 1 ? 3.3 : 1.0;
  const double stage = apart * (pairs * (floats ? 70.0 : 40.0) + chunks * 25.0) + 80.0;
  const double store = 150.0 + filters * 8.0 * (floats ? 5.0 : 3.0) * (plan.stores_vectors ? 1.0 : 3.0);
  const double clocks = multiply + stage + store;

  const double turns = std::ceil(static_cast<double>(plan.tiles * plan.weights.filter_tiles) / device.processors);
  const double fewer = plan.warps < max_warps ? 1.2 : 1.0;  // more patches, and more of the filters' copies
  const double busy = 0.85 * fewer * clocks * std::ceil(turns * plan.warps / 4.0);
  // However few tiles there are: filters and the first patch, then tile after tile.
  const double alone = (floats ? 4000.0 : 3000.0) +
                       (clocks + (floats ? 1500.0 : 1000.0)) * std::ceil(turns / static_cast<double>(at_once));
  const double compute_us = clocks_us(std::max(busy, alone), device);
  const double bytes_us = memory_us(problem.compulsory_bytes(), 0.93, device);
  const int row_bytes =
      plan.tile_q * static_cast<int>(size_of(problem.dtype));  // that a warp writes of a filter, in NCHW
  const double rows = (nhwc               ? 1.0
                       : row_bytes >= 128 ? 1.08
                       : row_bytes >= 64  ? 1.11
                                          : 1.15) *
                      parts_of_sectors(problem);
  return 6.0 + rows * (std::max(compute_us, bytes_us) + 0.15 * std::min(compute_us, bytes_us));
}

// The most lanes of a warp that read one bank when they load a pair of halves of each: in their rows of `row_words` to
// the next, quads `quad_words` apart, so many of them in a row.
inline int lanes_of_a_bank(int row_words, int quad_words, int quads) {
  int lanes[32] = {}, count = 0;
  for (int lane = 0; lane < 32; ++lane) {
    const int place = lane / 4 / quads * row_words + lane / 4 % quads * quad_words + lane % 4;
    count = std::max(count, ++lanes[place % 32]);
  }
  return count;
}

// One form and one tile; nothing where it does not fit.
inline std::optional<Plan> configure(const ConvProblem& problem, const Weights& weights, const DeviceInfo& device,
                                     bool dense, int warps, int tile_q) {
  Plan plan{};
  plan.weights = weights, plan.dense = dense, plan.warps = warps;
  plan.tile_q = tile_q, plan.tile_p = warps * warp_pixels / tile_q;
  const std::int64_t patch_h = (plan.tile_p - 1) * problem.stride_h + (problem.r - 1) * problem.dilation_h + 1;
  const std::int64_t patch_w = (plan.tile_q - 1) * problem.stride_w + (problem.s - 1) * problem.dilation_w + 1;
  const auto element = static_cast<std::int64_t>(size_of(problem.dtype));
  if (patch_h > 4096 || patch_w > 4096) return std::nullopt;
  plan.patch_h = static_cast<int>(patch_h), plan.patch_w = static_cast<int>(patch_w);
  // Dense: the last pair of a row of taps may reach one pixel further.
  plan.pixel_pairs = dense ? plan.patch_w / 2 + 1 : static_cast<int>(ceil_div(patch_w, 2));
  const bool nhwc = problem.layout == Layout::nhwc;
  plan.stores_vectors = (nhwc ? problem.k % weights.vector : problem.q() % quad) == 0;
  plan.lines = static_cast<int>(nhwc ? patch_h : problem.c * patch_h);
  plan.line_chunks = static_cast<int>(ceil_div(patch_w * (nhwc ? problem.c : 1) * element, 16) + 1);
  plan.pitch = weights.pitch(dense), plan.steps = static_cast<int>(weights.steps(dense));
  int row_words = plan.pixel_pairs * plan.pitch, fewest = 32;
  for (int words = row_words,
           step = plan.pitch == 4   ? 4
                  : plan.pitch == 2 ? 2
                                    : 1,
           end = words + 32;
       words < end; words += step) {
    const int found = lanes_of_a_bank(words * static_cast<int>(problem.stride_h),
                                      quad / 2 * static_cast<int>(problem.stride_w) * plan.pitch, tile_q / quad);
    if (found < fewest) fewest = found, row_words = words;
  }
  plan.row_bytes = row_words * 4;
  plan.patch_limb_bytes = static_cast<int>(round_up(plan.patch_h * plan.row_bytes, 16));
  plan.taps_offset = static_cast<int>(weights.tile_bytes(dense));
  plan.bias_offset = plan.taps_offset + (plan.steps + 1) * step_pairs * 8;
  plan.exponents_offset = plan.bias_offset + weights.filter_tile * 4;
  plan.ranges_offset = plan.exponents_offset + weights.filter_tile * 4;
  plan.patch_offset = plan.ranges_offset + (max_warps + 2) * 8;
  plan.raw_offset = plan.patch_offset + limbs_of(weights.mode) * plan.patch_limb_bytes;
  plan.shared_bytes = plan.raw_offset + static_cast<std::int64_t>(plan.lines) * plan.line_chunks * 16;
  const auto available = static_cast<std::int64_t>(device.shared_memory_bytes);
  if (plan.shared_bytes > available || std::max(plan.line_chunks, plan.pixel_pairs) > plan.threads())
    return std::nullopt;

  plan.p_tiles = ceil_div<std::int64_t>(problem.p(), plan.tile_p);
  plan.q_tiles = ceil_div<std::int64_t>(problem.q(), plan.tile_q);
  plan.tiles = problem.n * plan.p_tiles * plan.q_tiles;
  constexpr double limit = 1073741824.0;            // tiles, and the elements of an image, are numbered with 31 bits
  constexpr std::int64_t max_filter_tiles = 65535;  // a dimension of the grid
  if (static_cast<double>(plan.tiles) >= limit || weights.filter_tiles > max_filter_tiles) return std::nullopt;
  const std::int64_t at_once = std::max<std::int64_t>(
      1, std::min<std::int64_t>(warps_per_processor(weights.filter_tile, weights.mode == Mode::split ? 3 : 1) / warps,
                                available / (plan.shared_bytes + 1024)));
  const std::int64_t slots = std::max<std::int64_t>(1, device.processors * at_once / weights.filter_tiles);
  plan.blocks = std::min(plan.tiles, slots);
  plan.cost_us = cost_us(plan, problem, device, at_once);
  return plan;
}

inline std::optional<Plan> make_plan(const ConvProblem& problem, const DeviceInfo& device) {
  const std::optional<Weights> weights = make_weights(problem, device);
  // A range of so few channels would leave most of the copied bytes unused.
  if (!weights || problem.x_channels != 0 || problem.input_affine) return std::nullopt;
  constexpr double limit = 1073741824.0;
  const double image =
      static_cast<double>(problem.y_pitch()) * static_cast<double>(problem.p()) * static_cast<double>(problem.q());
  const double padded = static_cast<double>(problem.c) * static_cast<double>(problem.h + 2 * problem.pad_h) *
                        static_cast<double>(problem.w + 2 * problem.pad_w);
  // Bytes of float32 are counted with 32 bits from the 16-byte boundary in front of an image (load.cuh, Window).
  if (image >= limit || padded > limit - 4 || static_cast<double>(problem.n) >= limit) return std::nullopt;
  const bool dense = problem.c % 2 == 1 && problem.stride_w % 2 == 0 && problem.dilation_w == 1;
  std::optional<Plan> best;
  for (int warps : {max_warps, max_warps / 2}) {
    for (int tile_q : {32, 16, 8}) {
      const std::optional<Plan> plan = configure(problem, *weights, device, dense, warps, tile_q);
      if (plan && (!best || plan->cost_us < best->cost_us)) best = plan;
    }
  }
  return best;
}

}  // namespace fastconv::algos::implicit_gemm::few_channels
