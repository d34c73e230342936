// PyTorch's own convolution: always fits, so `auto` always answers. Its run function lives in csrc/ops (it needs
// torch).
#include <algorithm>

#include "core/algorithm.h"

namespace fastconv::algos::torch {
namespace {

double error_multiple(AccuracyClass) { return 1.0; }

Support supports(const ConvProblem&, const DeviceInfo&) { return Support::yes(); }

// Share of the device's rate that PyTorch's convolution reaches (docs/performance.md has the measurements).
double sustained_flops(const ConvProblem& problem, const DeviceInfo& device) {
  if (device.type == DeviceType::cpu) return 2.2 * device.fp32_flops_per_s;  // oneDNN, float32: 112 GFLOP/s per core
  switch (problem.accuracy) {
    case AccuracyClass::ieee:
    case AccuracyClass::fp32: return 1.8 * device.fp32_flops_per_s;  // Winograd inside cuDNN: above the FFMA rate
    case AccuracyClass::tf32: return 0.42 * device.fp16_tensor_flops_per_s;
    default: return 0.8 * device.fp16_tensor_flops_per_s;
  }
}

ConvPlan plan(const ConvProblem& problem, const DeviceInfo& device) {
  ConvPlan plan;
  plan.config = "aten::_convolution";
  const double overhead = device.type == DeviceType::cpu ? 10.0 : 6.0;
  plan.cost_us = overhead + 1e6 * std::max(problem.direct_flops() / sustained_flops(problem, device),
                                           problem.compulsory_bytes() / device.bandwidth_bytes_per_s);
  return plan;
}

}  // namespace

extern const Algorithm algorithm;
const Algorithm algorithm{
    "torch", "library",   "PyTorch's own convolution (cuDNN, oneDNN)", 0, true, true, error_multiple, supports,
    plan,    plain_weight};

}  // namespace fastconv::algos::torch
