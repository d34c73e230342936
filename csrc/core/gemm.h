// A matrix product of the library's.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/problem.h"

namespace fastconv {

// 1x1 with stride 1 and no padding, of pixels that stay where they are, has no geometry: one row of N H W pixels.
inline bool is_matrix_product(const ConvProblem& problem) {
  return problem.r == 1 && problem.s == 1 && problem.stride_h == 1 && problem.stride_w == 1 && problem.pad_h == 0 &&
         problem.pad_w == 0 && !problem.shuffles();
}

// Strided batched D[b] = A[b] * B[b]^T, all row-major: A is m x k, B is n x k, D is m x n, FP32
// accumulation.
struct GemmArgs {
  std::int64_t batch = 1, m = 0, n = 0, k = 0;
  const void* a = nullptr;
  std::int64_t lda = 0, stride_a = 0;  // in elements
  const void* b = nullptr;
  std::int64_t ldb = 0, stride_b = 0;
  bool a_is_km = false;  // A[b] is k x m instead
  bool b_is_kn = false;  // B[b] is k x n instead (no transposition)
  void* d = nullptr;
  std::int64_t ldd = 0, stride_d = 0;
  DType in = DType::f32, out = DType::f32;
  bool tf32 = false;  // operands of f32 are rounded to TF32; else the arithmetic is FP32
};

// D = max(A * B^T + bias + residual, 0), or without the maximum, of one matrix. All rows, of operands and of D, begin
// at multiples of 16 bytes. What is given is of D's type.
struct GemmEnd {
  const void* bias = nullptr;      // [n], or null
  const void* residual = nullptr;  // m x n with D's pitch, or null
  bool relu = false;
  void* workspace = nullptr;  // of the library's kernels, 256-byte aligned
  std::size_t workspace_bytes = 0;
};

// What of an end is left to do. All but ReLU is done where no kernel of the library is known to keep NaN through its
// own, nothing where the library has none that ends so.
enum class EndLeft : std::uint8_t { nothing, relu, all };

}  // namespace fastconv
