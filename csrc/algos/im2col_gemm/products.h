// What decides which of cuBLAS's kernels a product has, for the costs of all passes.
#pragma once

#include <cstdint>

#include "core/problem.h"

namespace fastconv::algos::im2col_gemm {

inline bool on_tensor_cores(const ConvProblem& problem) {
  return problem.dtype != DType::f32 || problem.accuracy == AccuracyClass::tf32;
}

// A single pixel: a product of a matrix and a vector, which has kernels of its own.
inline bool is_single_pixel(const ConvProblem& problem) { return problem.n * problem.p() * problem.q() == 1; }

// Whether rows of TF32 products, of operands and of outputs, are whole pieces of 16 bytes.
inline bool is_aligned_tf32(const ConvProblem& problem) {
  const std::int64_t row = problem.layout == Layout::nhwc ? problem.k : problem.p() * problem.q();
  return problem.c_per_group() * problem.r * problem.s % 4 == 0 && row % 4 == 0;
}

}  // namespace fastconv::algos::im2col_gemm
