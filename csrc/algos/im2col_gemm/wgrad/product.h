// The weight gradient of a 1x1 convolution as one matrix product, on either device: dW [K, C] = dY^T X, whose reduction
// runs over the N H W pixels of NHWC operands.
#pragma once

#include "core/gemm.h"
#include "core/kernels.h"

namespace fastconv::algos::im2col_gemm::wgrad {

inline void multiply(const WeightGradientArgs& args, Runtime& runtime) {
  const ConvProblem& problem = args.problem;
  GemmArgs gemm;
  gemm.m = problem.k, gemm.n = problem.c, gemm.k = problem.n * problem.h * problem.w;
  gemm.a = args.grad, gemm.lda = problem.k, gemm.a_is_km = true;
  gemm.b = args.x, gemm.ldb = problem.c, gemm.b_is_kn = true;
  gemm.d = args.dw, gemm.ldd = problem.c;
  gemm.in = gemm.out = problem.dtype;
  gemm.tf32 = problem.accuracy == AccuracyClass::tf32;
  runtime.gemm(gemm);
}

}  // namespace fastconv::algos::im2col_gemm::wgrad
