// How the work is cut into chunks that fit the workspace: shared by the planner and by both run functions.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/device_info.h"
#include "core/gemm.h"
#include "core/integers.h"
#include "core/problem.h"

namespace fastconv::algos::im2col_gemm {

// A chunk is at most this many bytes of unrolled input and staged product, unless one output row of one sample needs
// more. On the CPU less, because what does not stay in the caches between unrolling and GEMM is fetched twice.
inline constexpr std::int64_t chunk_bytes_cuda = std::int64_t{256} << 20;
inline constexpr std::int64_t chunk_bytes_cpu = std::int64_t{8} << 20;
// ... and never more elements than this, so that indices inside a chunk are 31-bit numbers.
inline constexpr std::int64_t chunk_elements = (std::int64_t{1} << 31) - 1;

// Elements of the unrolled input, or of the product if that is larger, that belong to one output row of one sample.
inline std::int64_t elements_per_row(const ConvProblem& problem) {
  return problem.q() * std::max(problem.c * problem.r * problem.s, problem.k);
}

struct Cut {
  DType gemm_type;             // of both operands
  bool unrolls;                // false: the GEMM reads x as it is (1x1, stride 1, no padding)
  bool staged;                 // the product goes to the workspace in FP32 and is rounded once, by the epilogue
  bool ends;                   // the GEMM's kernel ends in the epilogue
  bool finishes;               // an elementwise pass follows the GEMM
  bool converts_weight;        // to gemm_type, in the workspace
  std::int64_t samples, rows;  // of a chunk; samples > 1 only with all P rows
  std::size_t columns_bytes, product_bytes, weight_bytes, library_bytes;

  std::size_t workspace_bytes() const { return columns_bytes + product_bytes + weight_bytes + library_bytes; }
};

// Whether cuBLAS's product can end in the epilogue: rows of outputs are pixels, along which the bias runs, and of all
// matrices they are whole pieces of 16 bytes: other kernels nearly all lose NaN in their ReLU
// (docs/log/143-ends-of-products.md).
inline bool ends_in_product(const ConvProblem& problem) {
  const std::int64_t depth = problem.c * problem.r * problem.s,
                     size = static_cast<std::int64_t>(size_of(problem.dtype));
  const bool known = problem.activation == Activation::none || problem.activation == Activation::relu;
  return problem.layout == Layout::nhwc && problem.groups == 1 && known && problem.residual != Residual::after &&
         depth > 0 && depth * size % 16 == 0 && problem.k * size % 16 == 0;
}

// Of the kernels for TF32, which are several times slower without any.
inline constexpr std::size_t library_workspace_bytes = std::size_t{4} << 20;

inline Cut cut(const ConvProblem& problem, DeviceType device) {
  const bool cpu = device == DeviceType::cpu, wide = problem.dtype == DType::f32;
  const bool epilogue = problem.has_bias || problem.has_residual() || problem.activation != Activation::none;
  Cut result{};
  result.gemm_type = cpu ? DType::f32 : problem.dtype;  // the CPU library's GEMM is FP32
  result.converts_weight = result.gemm_type != problem.dtype;
  result.unrolls = result.converts_weight || !is_matrix_product(problem);
  result.ends = epilogue && !cpu && ends_in_product(problem);
  result.staged = !wide && (cpu || (epilogue && !result.ends));
  result.finishes = result.staged || (epilogue && !result.ends);

  const std::int64_t depth = problem.c * problem.r * problem.s;
  const std::int64_t columns_row =
      result.unrolls ? problem.q() * depth * static_cast<std::int64_t>(size_of(result.gemm_type)) : 0;
  const std::int64_t product_row =
      result.staged ? problem.q() * problem.k * static_cast<std::int64_t>(sizeof(float)) : 0;
  std::int64_t rows = chunk_elements / elements_per_row(problem);
  if (columns_row + product_row > 0) {
    rows = std::min(rows, (cpu ? chunk_bytes_cpu : chunk_bytes_cuda) / (columns_row + product_row));
  }
  rows = std::max<std::int64_t>(rows, 1);
  result.samples = std::clamp<std::int64_t>(rows / problem.p(), 1, std::max<std::int64_t>(problem.n, 1));
  result.rows = std::min(rows, problem.p());

  result.columns_bytes = align_bytes(result.samples * result.rows * columns_row);
  result.product_bytes = align_bytes(result.samples * result.rows * product_row);
  result.weight_bytes = result.converts_weight ? align_bytes(problem.k * problem.c_per_group() * problem.r * problem.s *
                                                             static_cast<std::int64_t>(sizeof(float)))
                                               : 0;
  result.library_bytes = result.ends && problem.accuracy == AccuracyClass::tf32 ? library_workspace_bytes : 0;
  return result;
}

}  // namespace fastconv::algos::im2col_gemm
