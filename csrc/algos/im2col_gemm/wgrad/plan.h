#pragma once

#include "core/device_info.h"
#include "core/problem.h"

namespace fastconv::algos::im2col_gemm::wgrad {

struct Plan {
  // The library's product; else sums as they are written down: the CPU library's products are of float32, and nothing
  // there brings NCHW into NHWC.
  bool multiplies;
};

inline Plan make_plan(const ConvProblem& problem, DeviceType device) {
  return {device == DeviceType::cuda || (problem.dtype == DType::f32 && problem.layout == Layout::nhwc)};
}

}  // namespace fastconv::algos::im2col_gemm::wgrad
