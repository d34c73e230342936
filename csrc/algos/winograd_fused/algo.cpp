// One-dimensional Winograd F(4,3) along W in one kernel: only x, U and y are in memory.
#include <algorithm>
#include <memory>
#include <string>

#include "algos/winograd_fused/plan.h"
#include "core/cost.h"
#include "core/roundoffs.h"
#include "winograd/limits.h"

namespace fastconv::algos::winograd_fused {
namespace {

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
double narrow_outputs_factor(const ConvProblem& problem, double slowness) {
  const bool whole = problem.k * static_cast<std::int64_t>(size_of(problem.dtype)) % 16 == 0;
  return problem.layout == Layout::nhwc && problem.k < 8 && !whole ? slowness : 1.0;
}

double cuda_cost_us(const ConvProblem& problem, const Config& config, const DeviceInfo& device) {
  const double factor = narrow_outputs_factor(problem, config.split ? 1.1 : 1.7);
  // Few channels: what copies of boxes with halos reach, 0.62 of an H200's memory, whose multiprocessors ask for no
  // more; one product leaves time for 0.8 of a slower one (docs/log/130-measured.md).
  constexpr double bytes_of_processor_per_s = 0.62 * 4.3e12 / 132;
  const double asked_for = bytes_of_processor_per_s * device.processors / device.bandwidth_bytes_per_s;
  const double share = config.split ? 0.62 : std::min(asked_for, 0.8);
  const double us =
      std::max(kernel_us(problem, config, device.processors), memory_us(problem.compulsory_bytes(), share, device));
  return factor * ((config.split ? 11.5 : 7.3) + us);
}

ConvPlan plan(const ConvProblem& problem, const DeviceInfo& device) {
  const Config config = choose_config(problem, device.processors);
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
                        config.v_reuse > 1 ? text_of(", v_reuse ", config.v_reuse) : "");
  plan.cost_us = cuda_cost_us(problem, config, device);
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
