#include "core/algorithm.h"
#include "core/roundoffs.h"

namespace fastconv::algos::null {
namespace {

double roundoffs(const ConvProblem& problem, const DeviceInfo&) { return serial_sum(reduction_length(problem)); }

// Every refusal names the value that was met and the value that is needed: explain() and the swap report print it.
Support supports(const ConvProblem& problem, const DeviceInfo&) {
  if (problem.r != 1 || problem.s != 1) {
    return Support::no("kernel_size", "the kernel is ", problem.r, "x", problem.s, "; null needs 1x1");
  }
  if (problem.groups != problem.c || problem.k != problem.c) {
    return Support::no("groups", "groups, C, K are ", problem.groups, ", ", problem.c, ", ", problem.k,
                       "; null needs all three equal");
  }
  if (problem.stride_h != 1 || problem.stride_w != 1) {
    return Support::no("stride", "stride is ", problem.stride_h, "x", problem.stride_w, "; null needs 1x1");
  }
  if (problem.pad_h != 0 || problem.pad_w != 0) {
    return Support::no("padding", "padding is ", problem.pad_h, "x", problem.pad_w, "; null needs 0x0");
  }
  return Support::yes();
}

ConvPlan plan(const ConvProblem&, const DeviceInfo&) {
  ConvPlan plan;
  plan.config = "elementwise";
  plan.cost_us = 1e12;  // a template, not a rival: `auto` never takes it
  return plan;
}

}  // namespace

extern const Algorithm algorithm;
const Algorithm algorithm{
    .name = "null",
    .family = "direct",
    .summary = "a template to copy from: scales each channel (1x1 depthwise)",
    .roundoffs = roundoffs,
    .supports = supports,
    .plan = plan,
};

}  // namespace fastconv::algos::null
