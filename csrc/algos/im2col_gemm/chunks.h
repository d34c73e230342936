// The loop over chunks and the GEMM of each: one code for the CPU and for CUDA, which bring the elementwise passes.
#pragma once

#include <algorithm>

#include "algos/im2col_gemm/plan.h"
#include "core/gemm.h"
#include "core/kernels.h"

namespace fastconv::algos::im2col_gemm {

// Output rows [p0, p0 + rows) of samples [n0, n0 + samples). In memory that is a matrix in either layout:
// NHWC: samples*rows*Q pixels by K, dense. NCHW: samples*K maps by rows*Q, with a pitch of P*Q in y.
struct Chunk {
  std::int64_t n0, samples, p0, rows;
};

// Where a chunk's matrix stands in y.
struct OutputView {
  std::int64_t lines, length;  // matrix
  std::int64_t offset, pitch;  // in y, elements
};

inline OutputView output_view(const ConvProblem& problem, const Chunk& chunk) {
  const std::int64_t q = problem.q(), map = problem.p() * q;
  if (problem.layout == Layout::nhwc) {
    return {chunk.samples * chunk.rows * q, problem.k, (chunk.n0 * map + chunk.p0 * q) * problem.k, problem.k};
  }
  return {chunk.samples * problem.k, chunk.rows * q, chunk.n0 * problem.k * map + chunk.p0 * q, map};
}

inline const void* advance(const void* base, std::int64_t elements, DType dtype) {
  return static_cast<const char*>(base) + elements * static_cast<std::int64_t>(size_of(dtype));
}

// product (the chunk's matrix, line pitch ldd) = weight x columns.
//   weight   [K, C/G*R*S], also seen as [G, K/G, C/G*R*S]
//   columns  NHWC: [samples*rows*Q, C*R*S], in which group g is a range of columns
//            NCHW: [samples, C*R*S, rows*Q], in which group g is a range of rows; line pitch column_pitch
// end: of one group in NHWC, or null. Returns what is left of it.
inline EndLeft multiply(const ConvProblem& problem, const Chunk& chunk, DType in, const void* weight,
                        const void* columns, std::int64_t column_pitch, void* product, std::int64_t ldd, DType out,
                        const GemmEnd* end, Runtime& runtime) {
  const std::int64_t depth = problem.c_per_group() * problem.r * problem.s, groups = problem.groups;
  const std::int64_t pixels = chunk.rows * problem.q(), k = problem.k_per_group();
  GemmArgs gemm;
  gemm.k = depth;
  gemm.in = in, gemm.out = out;
  gemm.ldd = ldd;
  gemm.tf32 = problem.accuracy == AccuracyClass::tf32;
  if (problem.layout == Layout::nhwc) {
    gemm.batch = groups, gemm.m = chunk.samples * pixels, gemm.n = k;
    gemm.a = columns, gemm.lda = groups * depth, gemm.stride_a = depth;
    gemm.b = weight, gemm.ldb = depth, gemm.stride_b = k * depth;
    gemm.d = product, gemm.stride_d = k;
    if (end != nullptr) return runtime.gemm_with_end(gemm, *end);
    runtime.gemm(gemm);
    return EndLeft::nothing;
  }
  // The weight repeats with the samples and the columns do not, so one stride cannot walk over both: batch the longer.
  const bool batch_samples = chunk.samples >= groups;
  gemm.m = k, gemm.n = pixels;
  gemm.lda = depth, gemm.ldb = column_pitch, gemm.b_is_kn = true;
  gemm.batch = batch_samples ? chunk.samples : groups;
  gemm.stride_a = batch_samples ? 0 : k * depth;
  gemm.stride_b = (batch_samples ? groups : 1) * depth * column_pitch;
  gemm.stride_d = (batch_samples ? groups : 1) * k * ldd;
  for (std::int64_t i = 0; i < (batch_samples ? groups : chunk.samples); ++i) {
    gemm.a = advance(weight, batch_samples ? i * k * depth : 0, in);
    gemm.b = advance(columns, i * (batch_samples ? 1 : groups) * depth * column_pitch, in);
    gemm.d = const_cast<void*>(advance(product, i * (batch_samples ? 1 : groups) * k * ldd, out));
    runtime.gemm(gemm);
  }
  return EndLeft::nothing;
}

// unroll(chunk, columns) writes a chunk's columns as described above (line pitch rows*Q);
// finish(view, product) applies the epilogue to y; product is the staged FP32 matrix (dense), or null if y holds it;
// clamp(view) applies ReLU to y alone;
// convert(target) writes the weight in the GEMM's type.
template <typename Unroll, typename Finish, typename Clamp, typename Convert>
void run_chunks(const ConvArgs& args, Runtime& runtime, Unroll&& unroll, Finish&& finish, Clamp&& clamp,
                Convert&& convert) {
  const ConvProblem& problem = args.problem;
  const Cut& plan = plan_as<Cut>(args.kernel_plan);
  auto* columns = static_cast<char*>(args.workspace);
  auto* product = reinterpret_cast<float*>(columns + plan.columns_bytes);
  auto* converted = reinterpret_cast<float*>(columns + plan.columns_bytes + plan.product_bytes);
  if (plan.converts_weight) convert(converted);
  const void* weight = plan.converts_weight ? converted : args.weight;
  GemmEnd end{.bias = args.bias, .relu = problem.activation == Activation::relu};
  end.workspace = reinterpret_cast<char*>(converted) + plan.weight_bytes, end.workspace_bytes = plan.library_bytes;

  for (std::int64_t n0 = 0; n0 < problem.n; n0 += plan.samples) {
    for (std::int64_t p0 = 0; p0 < problem.p(); p0 += plan.rows) {
      const Chunk chunk{n0, std::min(plan.samples, problem.n - n0), p0, std::min(plan.rows, problem.p() - p0)};
      const OutputView view = output_view(problem, chunk);
      const void* source = columns;
      std::int64_t column_pitch = chunk.rows * problem.q();
      if (plan.unrolls) {
        unroll(chunk, columns);
      } else {  // x is its own unrolling: H*W pixels by C, or C by H*W
        column_pitch = problem.h * problem.w;
        const std::int64_t row = problem.w * (problem.layout == Layout::nhwc ? problem.c : 1);
        source = advance(args.x, n0 * problem.c * problem.h * problem.w + p0 * row, problem.dtype);
      }
      if (plan.staged) {
        multiply(problem, chunk, plan.gemm_type, weight, source, column_pitch, product, view.length, DType::f32,
                 nullptr, runtime);
      } else {
        void* y = const_cast<void*>(advance(args.y, view.offset, problem.dtype));
        if (args.residual != nullptr) end.residual = advance(args.residual, view.offset, problem.dtype);
        const EndLeft left = multiply(problem, chunk, plan.gemm_type, weight, source, column_pitch, y, view.pitch,
                                      problem.dtype, plan.ends ? &end : nullptr, runtime);
        if (left == EndLeft::relu) clamp(view);
        if (left == EndLeft::all) finish(view, nullptr);
      }
      if (plan.finishes) finish(view, plan.staged ? product : nullptr);
    }
  }
}

}  // namespace fastconv::algos::im2col_gemm
