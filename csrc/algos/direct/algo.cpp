#include "core/algorithm.h"
#include "core/cost.h"
#include "core/roundoffs.h"

namespace fastconv::algos::direct {
namespace {

Support supports(const ConvProblem&, const DeviceInfo&) { return Support::yes(); }

ConvPlan plan(const ConvProblem& problem, const DeviceInfo& device) {
  // Every multiply-add reads both operands through the caches; about 3 % of the FP32 rate is what that sustains.
  ConvPlan plan;
  plan.config = device.type == DeviceType::cpu ? "one row of outputs per task" : "256 threads";
  // A thread walks the whole reduction, which small problems wait for (measured on an H200).
  const double terms = static_cast<double>(problem.c_per_group() * problem.r * problem.s);
  const double latency_us = device.type == DeviceType::cuda ? 0.13 * terms : 0.0;
  plan.cost_us = 8.0 + latency_us + fp32_us(problem.direct_flops(), problem.c_per_group() == 1 ? 0.01 : 0.03, device);
  return plan;
}

double roundoffs(const ConvProblem& problem, const DeviceInfo&) { return serial_sum(reduction_length(problem)); }

}  // namespace

extern const Algorithm algorithm;
const Algorithm algorithm{
    .name = "direct",
    .family = "direct",
    .summary = "one thread per output element",
    .source = 2,
    .roundoffs = roundoffs,
    .supports = supports,
    .plan = plan,
    .abilities = {.ranges = true},
};

}  // namespace fastconv::algos::direct
