// Tiles of the Hopper kernel (wgmma), shared by the planner and the kernel.
//
// The reduction is cut into steps: one filter tap (r, s) and one block of channels, 128 bytes of x per pixel. Steps are
// gathered into stages, what one tensor copy brings into shared memory:
//   whole window   the input under an output tile, with its halo, serves all R S taps of a channel block (stride 1)
//   single tap     the pixels of one tap; with a stride the copy skips pixels
//
// Packed weight: [filter tile][channel block][tap] blocks of [filter_tile] rows, a row 128 bytes: 32 hi halves and 32
// lo (class fp32) or 64 halves (float16, bfloat16); or 64 bytes: 32 halves (class tf32). Within a row in the order of
// the A fragments (operand.cuh), pieces of 16 bytes swizzled as wgmma reads them, zeros beyond C and K. Class
// tf32: a pair of channel blocks, then taps, then the two blocks. Then
// [filter tile][filter_tile] int32 exponents of the filters' scales.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "algos/implicit_gemm/plan.h"
#include "core/integers.h"

namespace fastconv::algos::implicit_gemm::persistent {

// Hopper's instructions exist on Hopper alone. Tensor copies need rows of C elements that are multiples of 16 bytes,
// and skip at most 7 pixels. The answer depends on the weight and the device alone (the rule of packed_weight()).
constexpr int max_stride = 8;
inline bool is_used(const ConvProblem& problem, const DeviceInfo& device) {
  return device.type == DeviceType::cuda && device.compute_capability == 90 && problem.groups == 1 &&
         loads_vectors(problem);
}

constexpr int multiply_warpgroups = 2;
constexpr int input_row_bytes = 128;  // channels of a step, of one pixel
constexpr int filter_ring_bytes = 64 * 1024, max_filter_slots = 8, max_input_slots = 8;
constexpr int filter_slots(int tile_bytes, bool raw) {  // a power of two; raw: input slots are no more
  return tile_bytes * 8 <= filter_ring_bytes && !raw ? max_filter_slots : max_filter_slots / 2;
}
constexpr int max_box_pixels = 640, max_split_k = 8;  // of a reduction: the blocks of a cluster
constexpr std::size_t shared_limit = 227 * 1024;
constexpr std::size_t shared_overhead = 12 * 1024;  // alignment, barriers, overflow flags of tiles, data of filters
constexpr std::size_t min_staging = 22 * 1024, max_staging = 64 * 1024;  // sums on their way to y
constexpr int few_filters = 8;                                           // that are stored by elements of y
constexpr int box_bytes = 128;                                           // of filters, that a copy brings to y

// What depends on the weight and the class alone (the rule of packed_weight()).
struct Weights {
  Mode mode;
  int filter_tile;    // n of wgmma
  int row_bytes;      // of a packed row
  int step_channels;  // channels of a step
  std::int64_t channel_blocks, filter_tiles, taps;

  std::size_t tile_bytes() const { return static_cast<std::size_t>(filter_tile) * row_bytes; }
  // Class tf32: [filter tile][pair of channel blocks][tap][block], so that two blocks can be one step.
  bool paired() const { return mode == Mode::single; }
  std::int64_t packed_blocks() const { return paired() ? (channel_blocks + 1) / 2 * 2 : channel_blocks; }
  std::size_t weight_bytes() const {
    return static_cast<std::size_t>(filter_tiles * packed_blocks() * taps) * tile_bytes();
  }
  std::size_t rounded_offset() const {
    return weight_bytes() + align_bytes(static_cast<std::size_t>(filter_tiles * filter_tile) * sizeof(std::int32_t));
  }
  // Class tf32: once more as float32 rounded to TF32, in blocks of 128 bytes a row (single_tile/plan.h).
  std::size_t bytes() const {
    const std::int64_t rounded = mode == Mode::single ? filter_tiles * channel_blocks * taps * filter_tile * 128 : 0;
    return rounded_offset() + static_cast<std::size_t>(rounded);
  }
};

// Filters of a block: the most, but little waste. A narrow tile costs shared-memory bandwidth: n = 64 reads as many
// bytes per product as it can get. one_step: where a tile's products are those of one step, its time is that of the
// input, which every tile of filters reads again, and of the outputs (docs/log/123-tiles-of-96.md).
inline int tile_filters(Mode mode, std::int64_t k, bool one_step) {
  int best = 128;
  double least = 1e30;
  for (int tile : {128, 96, 64, 48, 32}) {
    if (mode != Mode::split && tile == 48) continue;  // fewer kernels
    const bool whole = k % tile == 0;
    if (mode != Mode::split && tile == 96 && !whole) continue;  // y is stored without copies (Shape::stores_by_tma)
    const double of_one_step = tile == 128 ? (whole ? 126 : 134) : tile == 96 ? 94 : tile == 64 ? 64 : 46;
    const double cost =
        static_cast<double>(ceil_div(k, tile)) * (mode != Mode::split && one_step ? of_one_step : tile + 8.0);
    if (cost < least) least = cost, best = tile;
  }
  return best;
}

// Two blocks of 64 pixels a warpgroup fill the registers at so many filters: in split mode with totals beside the sums.
constexpr int max_filters_of_two_rows(Mode mode) { return mode == Mode::split ? 64 : 128; }

inline Weights make_weights(const ConvProblem& problem) {
  Weights weights{};
  weights.mode = problem.accuracy == AccuracyClass::tf32 ? Mode::single : select_mode(problem.accuracy);
  weights.row_bytes = weights.mode == Mode::single ? 64 : 128;
  weights.step_channels = static_cast<int>(input_row_bytes / size_of(problem.dtype));
  weights.channel_blocks = (problem.c + weights.step_channels - 1) / weights.step_channels;
  weights.taps = problem.r * problem.s;
  weights.filter_tile = tile_filters(weights.mode, problem.k, weights.channel_blocks * weights.taps == 1);
  weights.filter_tiles = (problem.k + weights.filter_tile - 1) / weights.filter_tile;
  return weights;
}

// How A comes to the multiplying warps.
enum class Source {
  fp16,         // as it is: half types
  transformed,  // float32, split in shared memory by a warpgroup of its own, once for all taps
  raw,          // float32, split on the way into registers: where a stage is one tap, each value is read once
  converted,    // float32 (class tf32), in halves from the workspace, where a kernel before has put it
  affine,       // as fp16, or as raw, and normed on the way into registers: an affine input of one tap
};
// The tiles of an affine input: not those of few filters, and as many as there are registers for.
constexpr int min_affine_filters = 64;
constexpr bool has_affine_kernel(int filter_tile, int row_blocks) {
  return filter_tile >= min_affine_filters && filter_tile * row_blocks <= 128;
}
constexpr int converted_block = 64;  // channels: C must be a multiple

// The rest of the plan.
struct Plan {
  Weights weights;
  Source source;
  int filter_tile;  // of a block: all of a packed tile, or half of it
  int row_blocks;   // 64-pixel blocks of a multiplying warpgroup
  int tile_n, tile_p, tile_q;
  bool whole_window;
  // A tile is so many pixels in a row, through the images' ends: 1 x 1 x tile_q of one row of N P Q. A stage is the
  // rows of input under them, image after image, each row by a copy of its own. No tile is cut short but the last.
  bool flat;
  int stage_taps;           // steps of a stage
  int box_n, box_h, box_w;  // pixels of a stage
  int input_slots;
  int element_bytes;  // of y
  std::int64_t x_values;
  // How y is written: by copies from shared memory, beside the next tile; by 16 bytes of filters (NHWC); by four pixels
  // (NCHW). Else value by value.
  bool stores_by_tma, stores_vectors, stores_quads;
  // NCHW: clocks of a value more where a tile has few pixels of a row, which lie in as many places as it has rows
  // (docs/log/136-measured-again.md). In NHWC the shape of a tile does not matter.
  double scattered;
  // Stages of the input's ring through which a residual comes before the sums are ready; 0: it is read where y is
  // written.
  int residual_stages;
  std::size_t staging_bytes;
  std::int64_t stages;  // of the whole reduction
  // Tiles from `whole` on have their reduction cut into so many splits. clusters: one for each block of a cluster,
  // which adds them; else they go through memory, a second kernel adds them, and `whole` is 0.
  std::int64_t split_k, whole;
  bool clusters;
  std::int64_t tiles_n, tiles_p, tiles_q;
  std::vector<Plan> fallback;  // one, of a converted plan: if the input's range is too wide for a scale an image

  bool affine() const { return source == Source::affine; }
  bool raw() const { return source == Source::raw || (affine() && element_bytes == 4); }
  bool reads_fp16() const {
    return source == Source::fp16 || source == Source::converted || (affine() && element_bytes == 2);
  }
  int step_channels() const { return source == Source::converted ? converted_block : weights.step_channels; }
  int pixel_tile() const { return 64 * multiply_warpgroups * row_blocks; }
  std::size_t stage_bytes() const {
    return (static_cast<std::size_t>(box_n * box_h * box_w) * input_row_bytes + 1023) / 1024 * 1024;
  }
  // Scales and shifts of a stage's channels; there is one set more than there are input slots (ChannelLoader).
  std::size_t channels_bytes() const {
    return affine() ? static_cast<std::size_t>(step_channels()) * 2 * sizeof(float) : 0;
  }
  // With the largest value of each of its pixels, where they are found on the way.
  std::size_t slot_bytes() const {
    return stage_bytes() + (source == Source::transformed ? stage_bytes() / 32 : 0) + channels_bytes();
  }
  std::size_t filter_bytes() const {  // of a step
    return static_cast<std::size_t>(filter_tile) * (source == Source::converted ? 128 : weights.row_bytes);
  }
  std::size_t ring_bytes() const { return filter_slots(static_cast<int>(filter_bytes()), raw()) * filter_bytes(); }
  std::size_t shared_bytes() const {
    return shared_overhead + staging_bytes + input_slots * slot_bytes() + channels_bytes() + ring_bytes();
  }
  std::size_t partial_bytes(const ConvProblem& problem) const {
    if (split_k == 1 || clusters) return 0;
    return align_bytes(static_cast<std::size_t>(split_k * problem.output_numel()) * sizeof(float));
  }
  // Converted: x in halves, then the exponents of the images' scales, then a flag of each block that has converted.
  std::size_t converted_bytes(const ConvProblem& problem) const {
    return source == Source::converted
               ? align_bytes(static_cast<std::size_t>(problem.n * problem.h * problem.w * problem.c) * 2)
               : 0;
  }
  std::int64_t convert_blocks(const ConvProblem& problem) const {  // of an image
    const std::int64_t values = problem.h * problem.w * problem.c;
    return std::max<std::int64_t>(1, std::min((2048 + problem.n - 1) / problem.n, values / 16384));
  }
  std::size_t workspace_bytes(const ConvProblem& problem) const {
    if (source != Source::converted) return partial_bytes(problem);
    return converted_bytes(problem) +
           align_bytes(static_cast<std::size_t>(problem.n * (1 + convert_blocks(problem))) * sizeof(int));
  }
  std::int64_t filter_tiles() const { return weights.filter_tiles * (weights.filter_tile / filter_tile); }
  std::int64_t tiles() const { return tiles_n * tiles_p * tiles_q * filter_tiles(); }
  std::int64_t work_tiles() const { return whole + (tiles() - whole) * split_k; }
};

// One shape of output tile.
struct TileShape {
  Source source;
  int filter_tile, row_blocks, n, p, q;
  bool whole_window, flat;
};

// The most rows of input, halo included, under `pixels` pixels in a row.
inline int max_rows_under(const ConvProblem& problem, int pixels) {
  const std::int64_t p = problem.p(), q = problem.q(), image = p * q;
  const auto most = [pixels](std::int64_t size) {
    return pixels % size == 0 ? pixels / size : (pixels - 2) / size + 2;
  };
  const std::int64_t rows = std::min(most(q), problem.n * p);
  const std::int64_t images = std::min(image % pixels == 0 ? 1 : most(image), problem.n);
  return static_cast<int>(rows + images * (problem.r - 1) * problem.dilation_h);
}

// Makes its plan; false if it does not fit.
inline bool shape_tile(const ConvProblem& problem, const Weights& weights, const TileShape& tile, Plan& plan) {
  plan.weights = weights;
  plan.source = tile.source;
  plan.filter_tile = tile.filter_tile;
  plan.row_blocks = tile.row_blocks;
  plan.tile_n = tile.n, plan.tile_p = tile.p, plan.tile_q = tile.q;
  plan.whole_window = tile.whole_window;
  plan.flat = tile.flat;
  plan.element_bytes = static_cast<int>(size_of(problem.dtype));
  plan.x_values = problem.n * problem.h * problem.w * problem.c;
  plan.stage_taps = plan.whole_window ? static_cast<int>(weights.taps) : 1;
  plan.box_n = tile.n;
  plan.box_h = tile.p + (plan.whole_window ? static_cast<int>((problem.r - 1) * problem.dilation_h) : 0);
  plan.box_w = static_cast<int>(plan.flat ? problem.q() : tile.q) +
               (plan.whole_window ? static_cast<int>((problem.s - 1) * problem.dilation_w) : 0);
  if (plan.flat) plan.box_h = max_rows_under(problem, tile.q);
  const auto span = [](int box, std::int64_t stride) { return (box - 1) * stride + 1; };
  if (plan.box_n > 256 || span(plan.flat ? 1 : plan.box_h, plan.whole_window ? 1 : problem.stride_h) > 256 ||
      span(plan.box_w, plan.whole_window ? 1 : problem.stride_w) > 256) {
    return false;  // a box of a tensor copy has at most 256 elements along a dimension
  }
  if (plan.box_n * plan.box_h * plan.box_w > max_box_pixels) return false;
  if (tile.source == Source::transformed && plan.stage_taps == 1) plan.source = Source::raw;
  plan.stages = (problem.c + plan.step_channels() - 1) / plan.step_channels() * (plan.whole_window ? 1 : weights.taps);
  const bool many_taps = plan.whole_window && weights.taps > 1;
  const auto slots_beside = [&](std::size_t staging) {
    const std::size_t taken = shared_overhead + plan.ring_bytes() + plan.channels_bytes() + staging;
    return taken < shared_limit ? (shared_limit - taken) / plan.slot_bytes() : 0;
  };
  // Memory takes a tile of y at 16 to 20 bytes a clock. A short reduction does not hide that, copies do. With a long
  // one they cost more than they gain: shared memory, and that the warpgroups meet for each tile.
  constexpr std::int64_t short_reduction = 16;  // steps
  const std::size_t row_bytes = plan.filter_tile * size_of(problem.dtype), boxes = row_bytes * plan.pixel_tile();
  const bool row = is_matrix_product(problem) || plan.flat, nhwc = problem.layout == Layout::nhwc;
  plan.stores_vectors = nhwc && problem.y_k() * size_of(problem.dtype) % 16 == 0;
  plan.stores_quads =
      !nhwc && (row ? problem.p() * problem.q() % 4 == 0 : problem.q() % 4 == 0 && plan.tile_q % 4 == 0);
  plan.scattered = !nhwc && !row && tile.q < 8 ? 4.0 / tile.q - 0.5 : 0.0;
  const bool fits_rows = !problem.shuffles() || problem.q() % tile.q == 0;  // else a box would write into the next one
  plan.stores_by_tma = plan.stores_vectors && fits_rows && row_bytes % box_bytes == 0 && boxes <= max_staging &&
                       plan.stages * plan.stage_taps <= short_reduction && (!many_taps || plan.filter_tile <= 64) &&
                       slots_beside(boxes) >= (many_taps ? 2 : 3);
  plan.staging_bytes = plan.stores_by_tma ? std::max(boxes, min_staging) : min_staging;
  const std::size_t slots = slots_beside(plan.staging_bytes);
  if (slots < 2) return false;
  plan.input_slots = static_cast<int>(std::min<std::size_t>(slots, many_taps ? 3 : max_input_slots));
  const std::int64_t n = row ? 1 : problem.n, p = row ? 1 : problem.p();
  const std::int64_t q = row ? problem.n * problem.p() * problem.q() : problem.q();
  plan.tiles_n = ceil_div(n, tile.n), plan.tiles_p = ceil_div(p, tile.p), plan.tiles_q = ceil_div(q, tile.q);
  plan.split_k = 1;
  plan.whole = plan.tiles();
  return true;
}

// Clocks of a multiprocessor for one step of a tile: the longest of what its parts need. Factors as measured on an H200
// (docs/log/12-implicit-gemm-wgmma-2.md).
inline double step_clocks(const Plan& plan) {
  const Weights& weights = plan.weights;
  const bool split = weights.mode == Mode::split, single = weights.mode == Mode::single && !plan.reads_fp16();
  const double products = split ? 3 : 1, pixels = plan.pixel_tile();
  const double tensor = pixels * plan.filter_tile * plan.step_channels() * products / 2048;
  const double stage = static_cast<double>(plan.stage_bytes()) / plan.stage_taps;  // of input
  const double filters = static_cast<double>(plan.filter_bytes());
  // Shared memory, 128 bytes a clock: A once, B once for 64 pixels and product; copies; splitting in place.
  const double a = pixels * (single && !plan.raw() ? 64 : 128), b = pixels / 64 * filters * (split ? 1.5 : 1);
  const double shared = (a + b + filters + stage * (plan.raw() ? 1 : split ? 3 : single ? 2.5 : 1)) / 128;
  // From the L2 cache: the input, which each block reads for itself, and the filters, which all blocks read.
  const double copies = stage / 36 + filters / 78;
  // Splitting: a pixel after the other on the way into registers; or stage by stage in shared memory.
  const double transform = plan.raw()        ? std::max(pixels * (split ? 5.2 : 2.6), 700.0)
                           : split || single ? (300 + stage * plan.stage_taps / input_row_bytes * 5) / plan.stage_taps
                                             : 0;
  const double of_tensor = plan.raw() ? 1.26
                           : split    ? 1.18
                                      : 0.97,
               of_shared = plan.raw()          ? 0.85
                           : plan.reads_fp16() ? 1.1
                           : single            ? 1.25
                                               : 1.2;
  // What lies between two steps' products, if they are few.
  const double between = split    ? 0
                         : single ? (plan.row_blocks == 2 ? 480 : 350) + plan.filter_tile
                                  : (plan.row_blocks == 2 ? 600 : 350) + 3 * plan.filter_tile;
  // An affine input hides behind nothing (an H100, docs/log/94-affine-and-ranges.md).
  const double norm = plan.affine() ? pixels * (split ? 1.7 : single ? 0.8 : 1.2) : 0;
  return std::max({of_tensor * tensor, of_shared * shared, copies, transform, between}) + 0.05 * copies + norm;
}

// Blocks that run side by side. Clusters lie within groups of 16 or 18 multiprocessors, and do not fill them.
inline std::int64_t blocks_at_once(const Plan& plan, int processors) {
  if (!plan.clusters) return processors;
  constexpr int of_132[max_split_k + 1] = {0, 132, 132, 117, 120, 110, 102, 105, 120};  // an H200
  return processors * of_132[plan.split_k] / 132 / plan.split_k * plan.split_k;
}

inline double plan_clocks(const Plan& plan, int processors) {
  const double steps = static_cast<double>(plan.stages) * plan.stage_taps;
  const std::int64_t blocks = blocks_at_once(plan, processors);
  // The warps wait for memory to take the tile; beside copies the next tile begins, and its loads wait a little.
  const double values = static_cast<double>(plan.pixel_tile()) * plan.filter_tile;
  const double bytes = values * plan.element_bytes;
  const double epilogue = plan.stores_by_tma ? 1500 + bytes / 33 : 1000 + bytes / 20;
  const double whole = steps * step_clocks(plan) + epilogue + plan.scattered * values;
  // Few blocks have their first operands sooner.
  double clocks = 2200 + 15.0 * static_cast<double>(std::min<std::int64_t>(plan.work_tiles(), processors)) +
                  static_cast<double>(ceil_div(plan.whole, blocks)) * whole;
  // Converting reads and writes x, 6 bytes a value; its launch, and that of a fallback that finds nothing to do.
  if (plan.source == Source::converted)
    clocks += 19000 + 6.0 * static_cast<double>(plan.x_values) / (20.0 * processors);
  const std::int64_t cut = plan.tiles() - plan.whole;
  if (cut == 0) return clocks;
  const double part = static_cast<double>(ceil_div(plan.stages, plan.split_k)) * plan.stage_taps * step_clocks(plan);
  const double rounds = static_cast<double>(ceil_div(cut * plan.split_k, blocks)),
               splits = static_cast<double>(plan.split_k);
  if (plan.clusters) {
    // Sums into shared memory, two meetings, and what others have left there.
    return clocks + rounds * (part + 2600 + 0.29 * values + 370 * splits + (plan.whole > 0 ? 2500 : 0));
  }
  const double left = static_cast<double>(plan.tile_n * plan.tile_p * plan.tile_q * plan.filter_tile) * sizeof(float);
  const double sum = 4000 + static_cast<double>(plan.tiles()) * splits * left / 1800;  // the second kernel
  return clocks + rounds * (part + (plan.row_blocks == 2 ? 2500 : 1000) + left / 20) + sum;
}

// All plans: visit(plan).
template <typename Visit>
void for_each_plan(const ConvProblem& problem, const Weights& weights, int processors, Visit&& visit) {
  const auto consider = [&](const TileShape& tile) {
    Plan plan{};
    if (!shape_tile(problem, weights, tile, plan)) return;
    visit(plan);
    const std::size_t sums = static_cast<std::size_t>(plan.pixel_tile()) * (plan.filter_tile + 5) * sizeof(float);
    const bool fits = plan.reads_fp16() && sums <= plan.input_slots * plan.stage_bytes() + plan.ring_bytes();
    for (const bool clusters : {true, false}) {
      if (clusters ? !fits : plan.source == Source::converted) continue;
      plan.clusters = clusters;
      for (plan.split_k = 2; plan.split_k <= (clusters ? max_split_k : 16); ++plan.split_k) {
        const std::int64_t blocks = blocks_at_once(plan, processors);
        if (blocks < plan.split_k) break;
        plan.whole = clusters ? plan.tiles() / blocks * blocks : 0;
        if (plan.whole == plan.tiles() || (plan.tiles() - plan.whole) * plan.split_k > blocks) continue;
        const std::int64_t per_split = ceil_div(plan.stages, plan.split_k);
        if (ceil_div(plan.stages, per_split) == plan.split_k) visit(plan);  // no split is empty
      }
    }
  };
  const auto consider_tile = [&](Source source, int filter_tile, int row_blocks) {
    if (source == Source::affine && !has_affine_kernel(filter_tile, row_blocks)) return;
    if (!fits_shuffle(problem, filter_tile)) return;
    const int pixels = 64 * multiply_warpgroups * row_blocks;
    if (is_matrix_product(problem)) {
      consider({source, filter_tile, row_blocks, 1, 1, pixels, true, false});
      return;
    }
    const bool stride_1 = problem.stride_h == 1 && problem.stride_w == 1;
    if (stride_1 && source != Source::transformed && !problem.shuffles()) {
      consider({source, filter_tile, row_blocks, 1, 1, pixels, true, true});
    }
    for (int q = 1; q <= pixels && q < 2 * problem.q(); ++q) {
      for (int p = 1; q * p <= pixels && p < 2 * problem.p(); ++p) {
        const int n = static_cast<int>(std::min<std::int64_t>(pixels / (q * p), problem.n));
        if (stride_1) consider({source, filter_tile, row_blocks, n, p, q, true, false});
        consider({source, filter_tile, row_blocks, n, p, q, false, false});
      }
    }
  };
  const auto consider_source = [&](Source source) {
    const Mode accumulators = source == Source::converted ? Mode::fp16 : weights.mode;
    if (weights.filter_tile <= max_filters_of_two_rows(accumulators)) consider_tile(source, weights.filter_tile, 2);
    consider_tile(source, weights.filter_tile, 1);
    if (weights.filter_tile == 128) consider_tile(source, 64, 1);  // more blocks, where there are too few
  };
  if (problem.input_affine) return consider_source(Source::affine);
  const bool scaled = weights.mode == Mode::split || weights.mode == Mode::single;
  consider_source(scaled ? Source::transformed : Source::fp16);
  // A gated activation has kernels of raw input alone.
  const bool converts = weights.mode == Mode::single && problem.c % converted_block == 0;
  if (converts && !is_gated(problem.activation)) consider_source(Source::converted);
}

// Where the kernel's end has registers for it and for the activation, in their order. Class tf32 has them for any.
inline int residual_stages(const ConvProblem& problem, const Plan& plan) {
  const Activation activation = problem.activation;
  const bool is_linear =
      activation == Activation::none || (activation == Activation::leaky_relu && problem.negative_slope == 1.0f);
  const bool is_quick = is_linear || activation == Activation::relu || activation == Activation::relu6;
  const bool follows = problem.residual != Residual::after || is_linear, on_the_way = plan.source == Source::raw;
  const bool joins = plan.weights.mode == Mode::single  ? on_the_way || plan.source == Source::converted
                     : plan.weights.mode == Mode::split ? on_the_way && follows && is_quick
                                                        : plan.source == Source::fp16 && follows;
  const std::size_t box = static_cast<std::size_t>(plan.tile_n * plan.tile_p * plan.tile_q) * box_bytes;
  if (!problem.has_residual() || !plan.stores_vectors || plan.partial_bytes(problem) > 0 || !joins ||
      box > plan.stage_bytes()) {
    return 0;
  }
  return ceil_div(plan.filter_tile * plan.element_bytes, box_bytes);
}

inline Plan make_plan(const ConvProblem& problem, const Weights& weights, int processors) {
  Plan best{}, on_chip{};  // on_chip: the best in one kernel that reads x as it is
  double least = 1e300, min_on_chip = 1e300;
  for_each_plan(problem, weights, processors, [&](const Plan& plan) {
    const double clocks = plan_clocks(plan, processors);
    if (clocks < least) least = clocks, best = plan;
    if (plan.source != Source::converted && plan.split_k == 1 && clocks < min_on_chip) {
      min_on_chip = clocks, on_chip = plan;
    }
  });
  best.residual_stages = residual_stages(problem, best), on_chip.residual_stages = residual_stages(problem, on_chip);
  if (best.source == Source::converted) best.fallback = {on_chip};
  return best;
}

}  // namespace fastconv::algos::implicit_gemm::persistent
