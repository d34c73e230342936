#include "algos/im2col_gemm/unroll.cuh"
#include "device/cuda_check.h"
#include "device/indexing.h"
#include "device/launch.h"

namespace fastconv::algos::im2col_gemm {
namespace {

unsigned blocks_for(std::int64_t threads) {  // at most 2^31 / 256: far below the grid's limit
  return static_cast<unsigned>(ceil_div<std::int64_t>(threads, unroll_threads));
}

template <typename T>
void unroll(const ConvProblem& problem, const Chunk& chunk, const T* x, T* columns, cudaStream_t stream) {
  const std::int64_t q = problem.q(), pixels = chunk.rows * q;
  if (problem.layout == Layout::nhwc) {
    const std::int64_t total = chunk.samples * pixels * problem.c * problem.r * problem.s;
    unroll_nhwc<T><<<blocks_for(total), unroll_threads, 0, stream>>>(
        problem, chunk, static_cast<std::uint32_t>(total), problem.s, problem.r, problem.c, q, chunk.rows, x, columns);
  } else {
    const std::int64_t total = chunk.samples * problem.c * pixels;
    unroll_nchw<T><<<blocks_for(total), unroll_threads, 0, stream>>>(problem, chunk, static_cast<std::uint32_t>(total),
                                                                     pixels, q, x, columns);
  }
  check_launch("im2col_gemm unroll");
}

template <typename T>
void convolve(const ConvArgs& args, Runtime& runtime) {
  const ConvProblem& problem = args.problem;
  const auto stream = stream_of(runtime);
  const auto finish = [&](const OutputView& view, const float* product, const Epilogue<T>& epilogue) {
    const std::int64_t total = view.lines * view.length;
    finish_chunk<T><<<blocks_for(total), unroll_threads, 0, stream>>>(
        view, static_cast<std::uint32_t>(total), problem.layout == Layout::nhwc, view.length, problem.k, product,
        static_cast<T*>(args.y), epilogue);
    check_launch("im2col_gemm epilogue");
  };
  run_chunks(
      args, runtime,
      [&](const Chunk& chunk, void* columns) {
        unroll(problem, chunk, static_cast<const T*>(args.x), static_cast<T*>(columns), stream);
      },
      [&](const OutputView& view, const float* product) { finish(view, product, make_epilogue<T>(args)); },
      [&](const OutputView& view) {
        const ActivationFunction relu(Activation::relu, 0.0f);
        finish(view, nullptr, {.bias = nullptr, .residual = nullptr, .activate = relu, .residual_after = false});
      },
      [](float*) {});  // the GEMM takes every type as it is
}

}  // namespace

void run_cuda(const ConvArgs& args, Runtime& runtime) {
  dispatch_dtype(args.problem.dtype, [&](auto zero) { convolve<decltype(zero)>(args, runtime); });
}

}  // namespace fastconv::algos::im2col_gemm
