#include "algos/two_stage/plan.h"
#include "core/algorithm.h"
#include "core/fitted.h"
#include "core/roundoffs.h"

namespace fastconv::algos::two_stage {
namespace {

Support supports(const ConvProblem& problem, const DeviceInfo&) {
  if (problem.y_channels != 0 && !single_stage(problem)) {
    return Support::no("ranges", "y is a range of a tensor of ", problem.y_channels,
                       " channels; two_stage, whose planes are like y, needs a tensor of its own");
  }
  if (single_stage(problem) || planes_bytes_per_image(problem) <= max_workspace_bytes) return Support::yes();
  return Support::no("workspace", "the ", problem.r * problem.s, " partial planes of one image take ",
                     planes_bytes_per_image(problem), " bytes; two_stage allows ", max_workspace_bytes);
}

std::string stages(const ConvProblem& problem) {
  if (single_stage(problem)) return "one stage, ";
  return text_of(problem.r * problem.s, " planes, ", images_per_chunk(problem), " images at a time, ");
}

ConvPlan plan_cpu(const ConvProblem& problem, const DeviceInfo& device) {
  const CpuConfig config = choose_cpu_config(problem);
  ConvPlan plan;
  plan.kernel_plan = keep_plan(config);
  plan.config = text_of(stages(problem), "tile ", cpu_pixel_tile, " outputs, ", config.k_tile, " filters, ",
                        config.channels, " channels");
  plan.workspace_bytes =
      static_cast<std::size_t>((planes_bytes(problem) + 63) / 64 * 64 + device.processors * config.scratch_bytes());
  const double pixels = static_cast<double>(
      ceil_div<std::int64_t>(problem.n * problem.p() * problem.q(), cpu_pixel_tile) * cpu_pixel_tile);
  const double flops = 2.0 * pixels * static_cast<double>(problem.groups * config.k_tiles * config.k_tile) *
                       static_cast<double>(problem.c_per_group() * problem.r * problem.s);
  const double plane_bytes = single_stage(problem) ? 0.0
                                                   : 2.0 * static_cast<double>(problem.n) *
                                                         static_cast<double>(planes_bytes_per_image(problem));
  plan.cost_us = 15.0 + fp32_us(flops, fitted::two_stage::product.of(device), device) +
                 memory_us(problem.compulsory_bytes() + plane_bytes, 1.0, device);
  return plan;
}

ConvPlan plan(const ConvProblem& problem, const DeviceInfo& device) {
  if (device.type == DeviceType::cpu) return plan_cpu(problem, device);
  const Config config = choose_config(problem, device);
  ConvPlan plan;
  plan.kernel_plan = keep_plan(config);
  plan.config = text_of(stages(problem), "tile ", config.pixel_tile, " outputs, ", config.k_tile,
                        " filters, lanes along ", (config.lanes_on_filters ? "filters" : "outputs"));
  plan.workspace_bytes = static_cast<std::size_t>(planes_bytes(problem));
  plan.cost_us = config.cost_us;
  return plan;
}

double roundoffs(const ConvProblem& problem, const DeviceInfo&) {
  return blocked_sum(reduction_length(problem), 300.0);
}

}  // namespace

extern const Algorithm algorithm;
const Algorithm algorithm{
    .name = "two_stage",
    .family = "direct",
    .summary = "a plane per filter tap, then the sum of the planes",
    .source = 3,
    .roundoffs = roundoffs,
    .supports = supports,
    .plan = plan,
    .abilities = {.ranges = true},
};

}  // namespace fastconv::algos::two_stage
