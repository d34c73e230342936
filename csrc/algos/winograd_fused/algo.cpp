// One-dimensional Winograd F(4,3) along W in one kernel: only x, U and y are in memory.
#include <algorithm>
#include <cmath>
#include <memory>
#include <string>

#include "algos/winograd_fused/plan.h"
#include "core/cost.h"
#include "core/fitted.h"
#include "core/roundoffs.h"
#include "device/epilogue.h"
#include "winograd/limits.h"

namespace fastconv::algos::winograd_fused {
namespace {

namespace own = fitted::winograd_fused;

// Products of halves are not IEEE float32 arithmetic; `tf32` rounds x, too, and both half types are multiplied in
// float16.
double roundoffs(const ConvProblem& problem, const DeviceInfo& device) {
  if (problem.accuracy == AccuracyClass::ieee) return 0.0;
  if (device.type == DeviceType::cpu) return winograd_in_fp32(f4_row_noise.gain, problem.c, 64.0);
  if (problem.accuracy == AccuracyClass::fp32) return winograd_in_split_fp16(f4_row_noise.gain, 1.6, problem.c);
  return winograd_in_fp16(f4_row_noise.gain, problem.accuracy == AccuracyClass::tf32 ? 3.0 : 2.0);
}

Support supports(const ConvProblem& problem, const DeviceInfo& device) {
  const Support shape = supports_winograd(problem, "winograd_fused");
  if (!shape.ok) return shape;
  if (device.type == DeviceType::cuda && device.compute_capability != 90) {
    return Support::no("device", "compute capability is ", device.compute_capability,
                       "; winograd_fused needs 90 (wgmma)");
  }
  // Work tiles are numbered with 31 bits, sizes and coordinates too, and rows and tiles of all images; a tensor copy's
  // strides have 40.
  const Config config = make_config(problem);
  const double image = 4.0 * static_cast<double>(problem.x_pitch()) * static_cast<double>(problem.h * problem.w);
  // Within a work tile, outputs are reached by 32 bits.
  const double rows = 16.0 * static_cast<double>(problem.q()) * static_cast<double>(problem.y_pitch());
  const double filters = 64.0 * static_cast<double>(problem.p()) * static_cast<double>(problem.q());
  constexpr auto limit = static_cast<double>(max_numbers);
  if (!config.fits_31_bits() || image >= 1099511627776.0 || std::max(rows, filters) >= limit ||
      static_cast<double>(std::max({problem.n, problem.c, problem.h, problem.w, problem.k})) >= limit) {
    return Support::no("size", "the output has ", config.work_tiles, " work tiles, an image ", image,
                       " bytes, 16 of its rows ", std::max(rows, filters),
                       " elements; winograd_fused needs below 2^31, 2^40 and 2^31");
  }
  return Support::yes();
}

// The factor for NHWC outputs of a few filters that do not fill whole vectors, which tiles of 64 or more filters store
// one by one, between idle lanes: measured on an H200 with 1 and 3 filters (docs/log/87-suite-66b4f44.md).
double narrow_outputs_factor(const ConvProblem& problem) {
  constexpr double slowness = 1.1;
  const bool whole = problem.k * static_cast<std::int64_t>(size_of(problem.dtype)) % 16 == 0;
  return problem.layout == Layout::nhwc && problem.k < 8 && !whole ? slowness : 1.0;
}

// One product: what blocks read and write in waves of work tiles. x comes with its halos, for each 64 filters; those
// that run together find it in the L2 cache, with U, if all that a wave reads fits. Where it does not, blocks lose step
// and each reads for itself, also U if that is half of the cache (2048 to 512 channels at 65x65: 1.8 times the
// products' time).
double single_bytes(const ConvProblem& problem, const Config& config, const DeviceInfo& device) {
  const double element = static_cast<double>(size_of(problem.dtype)), u = static_cast<double>(config.u_bytes());
  const double tiles = static_cast<double>(config.work_tiles), filter_tiles = static_cast<double>(config.filter_tiles);
  const double x_tile = element * static_cast<double>(config.shape.images * config.shape.input_rows() *
                                                      config.shape.raw_columns() * problem.c);
  const double y = element * static_cast<double>(problem.output_numel());
  const double at_once = std::min(tiles, static_cast<double>(device.processors)) / filter_tiles;
  const double of_wave = std::max(at_once, 1.0) * x_tile + u;
  const double alone = std::clamp(4.0 * (of_wave / static_cast<double>(device.l2_bytes) - 1.0), 0.0, 1.0);
  const double u_alone = 2.0 * u > static_cast<double>(device.l2_bytes) ? tiles / filter_tiles * u : u;
  const double together = tiles / filter_tiles * x_tile + u;
  return y + std::max(together, alone * (tiles * x_tile + u_alone));
}

// Outputs that are no whole vectors are stored one by one, whatever the number of filters.
double element_ends_us(const ConvProblem& problem, const Config& config, const DeviceInfo& device) {
  if (problem.layout == Layout::nchw || config.store == StoreMode::filters) return 0.0;
  return own::element_end * static_cast<double>(ceil_div<std::int64_t>(config.work_tiles, device.processors));
}

double single_cost_us(const ConvProblem& problem, const Config& config, const DeviceInfo& device) {
  const double kernel = kernel_us(problem, config, device.processors) + element_ends_us(problem, config, device);
  // Copies of boxes: an H200's multiprocessors ask for no more of its memory, halos included.
  constexpr double bytes_of_processor_per_s = 0.75 * h200_bytes_per_s / h200_processors;
  const double asked_for = bytes_of_processor_per_s * device.processors / device.bandwidth_bytes_per_s;
  const double memory = memory_us(single_bytes(problem, config, device), std::min(asked_for, 1.0), device);
  return 7.3 + std::max(kernel, memory) + own::not_hidden * std::min(kernel, memory);
}

double cuda_cost_us(const ConvProblem& problem, const Config& config, const DeviceInfo& device) {
  if (!config.split) return single_cost_us(problem, config, device);
  const double factor = narrow_outputs_factor(problem);
  // Few channels: what copies of boxes with halos reach, 0.62 of the memory (docs/log/130-measured.md).
  const double us =
      std::max(kernel_us(problem, config, device.processors), memory_us(problem.compulsory_bytes(), 0.62, device));
  return factor * (11.5 + us);
}

End select_end(const ConvProblem& problem, const Config& config) {
  if (config.store != StoreMode::filters) return End::any;
  const ActivationFunction activate(problem.activation, problem.negative_slope);
  if (activate.is_silu || activate.cap != INFINITY) return End::any;
  // A slope of 0 that does not clamp makes NaN of an infinity.
  const bool leaks = activate.negative_slope > 0.0f && activate.negative_slope <= 1.0f;
  if (!leaks && !activate.clamps) return End::any;
  if (problem.has_residual()) return config.split ? End::residual : End::any;
  return activate.clamps || activate.is_linear() ? End::plain : End::leaky;
}

const char* describe(End end) {
  switch (end) {
    case End::any: return "any";
    case End::residual: return "residual";
    case End::leaky: return "leaky";
    case End::plain: return "plain";
  }
  return "?";
}

ConvPlan plan(const ConvProblem& problem, const DeviceInfo& device) {
  Config config = choose_config(problem, device.processors);
  config.end = select_end(problem, config);
  ConvPlan plan;
  if (device.type == DeviceType::cpu) {
    plan.config = "float32, a tile at a time";
    plan.cost_us = 5.0 + reference_us(problem, device);
    return plan;
  }
  const int rows = config.split ? strip_rows(config.strips) : config.shape.rows;
  const int width = config.split ? tile_columns * tile_outputs : config.shape.width();
  const int times = config.split ? config.strips : config.shape.images;
  const std::string images = times == 1 ? "" : text_of(times, "x");
  plan.config = text_of(config.split ? "3 x" : "1 x", " float16, work tiles of ",
                        filter_tile * config.work_tile_filter_tiles * config.v_reuse, " filters, ", images, rows, "x",
                        width, " outputs", !config.split && config.shape.packs_columns ? " of packed columns, " : ", ",
                        config.stages, " stages of ", config.u_steps / config.stages * channels, ", ",
                        config.use_tma ? "tensor copies" : "elements",
                        config.blocks > 1 ? text_of(", clusters of ", config.blocks) : "",
                        config.v_reuse > 1 ? text_of(", v_reuse ", config.v_reuse) : "",
                        config.store == StoreMode::filters ? text_of(", ", describe(config.end), " end") : "");
  const bool nchw = problem.layout == Layout::nchw;
  const bool waits = nchw && problem.accuracy == AccuracyClass::tf32;  // at each position
  const double passes = problem.dtype != DType::f32 ? 1.5 : waits ? 4.6 : nchw ? 2.1 : 1.7;
  ConvProblem bare = problem;  // in the passes all of the residual's bytes are counted
  bare.residual = Residual::none;
  plan.cost_us = cuda_cost_us(bare, config, device) + residual_us(problem, passes, device);
  plan.kernel_plan = keep_plan(config);
  plan.reads_nhwc = config.use_tma;
  return plan;
}

PackedWeight packed_weight(const ConvProblem& problem, const DeviceInfo& device) {
  if (device.type == DeviceType::cpu) {
    return {align_bytes(static_cast<std::size_t>(taps * points * problem.c * problem.k) * sizeof(float))};
  }
  return {make_config(problem).u_bytes() + align_bytes(static_cast<std::size_t>(problem.k) * sizeof(std::int32_t))};
}

}  // namespace

extern const Algorithm algorithm;
const Algorithm algorithm{
    .name = "winograd_fused",
    .family = "winograd",
    .summary = "F(4,3) along W in one kernel, nothing stored in between, on FP16 tensor cores",
    .roundoffs = roundoffs,
    .supports = supports,
    .plan = plan,
    .packed_weight = packed_weight,
    .arithmetic = {.tile_rows = 1, .tile_columns = 4, .noise = f4_row_noise, .exact = false},
    .abilities = {.ranges = true},
};

}  // namespace fastconv::algos::winograd_fused
