// From an algorithm of the registry to the functions that run it on a device.
#pragma once

#include "core/algorithm.h"
#include "core/group_norm.h"
#include "core/kernels.h"
#include "core/max_pool.h"
#include "core/upsampling.h"
#include "device/flipped_filter.h"

namespace fastconv::ops {

struct Kernels {
  RunFunction run = nullptr;    // null: PyTorch's own convolution
  PackFunction pack = nullptr;  // null: reads the plain weight
};

WeightGradientFunction find_weight_gradient(const WeightGradient& algorithm, DeviceType device);

struct PlannedInput {
  const void* x;
  Layout layout;
};

// x, dense in the problem's layout, converted to the layout that the plan asks for: x itself, or a copy at the end of
// the workspace.
PlannedInput bring_into_layout(const ConvPlan& plan, const ConvProblem& problem, const void* x, void* workspace,
                               Runtime& runtime);

struct PlannedOperands {
  const void *x, *grad;
  Layout layout;
};

// The same of both operands of a weight gradient, one behind the other.
PlannedOperands bring_into_layout(const ConvPlan& plan, const ConvProblem& problem, const void* x, const void* grad,
                                  void* workspace, Runtime& runtime);

// Each on devices for which its problem says has_kernels().
void max_pool(const MaxPool& pool, const void* x, void* y, Runtime& runtime);
void group_norm(const GroupNorm& norm, const void* x, const void* weight, const void* bias, void* y, void* workspace,
                Runtime& runtime);
void upsample(const Upsampling& upsampling, const void* x, void* y, Runtime& runtime);

// The weight [K, C/G, R, S] of the problem as the filters of its input gradient.
void flip_filter(const ConvProblem& problem, const FlippedFilter& filter, const void* weight, void* flipped,
                 Runtime& runtime);

Kernels find_kernels(const Algorithm& algorithm, DeviceType device);

}  // namespace fastconv::ops
