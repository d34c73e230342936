// From an algorithm of the registry to the functions that run it on a device.
#pragma once

#include "core/algorithm.h"
#include "core/kernels.h"

namespace fastconv::ops {

struct Kernels {
  RunFunction run = nullptr;    // null: PyTorch's own convolution
  PackFunction pack = nullptr;  // null: reads the plain weight
};

WeightGradientFunction find_weight_gradient(const WeightGradient& algorithm, DeviceType device);

Kernels find_kernels(const Algorithm& algorithm, DeviceType device);

}  // namespace fastconv::ops
