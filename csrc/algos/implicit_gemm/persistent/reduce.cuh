// The second kernel of reductions that were split through memory.
#pragma once

#include "algos/implicit_gemm/persistent/tile.cuh"
#include "device/fast_gates.cuh"

namespace fastconv::algos::implicit_gemm::persistent {

// Where y has the values of dense sums.
struct PixelPlaces {
  std::int64_t gap, row_gap = 0;  // NHWC: elements of y between two pixels of the sums; two of their rows
  FastDivide by_row = 0x7fffffff;
  ShuffledPlaces shuffled;

  explicit PixelPlaces(const ConvProblem& problem)
      : gap(problem.y_pitch() - problem.k), shuffled(problem, problem.shuffles() ? 1 : problem.k) {
    if (!problem.shuffles()) return;
    gap = 2 * problem.y_pitch() - problem.k;
    row_gap = problem.q() * 2 * problem.y_pitch(), by_row = problem.q();
  }
  __device__ std::int64_t operator()(std::int64_t i, unsigned pixel, unsigned k) const {
    return i + pixel * gap + by_row.quotient(pixel) * row_gap + shuffled.offset(static_cast<int>(k));
  }
};

// y = the sum of the partial ones, in their order, through the epilogue.
template <typename T, bool gated>
__global__ void __launch_bounds__(256)
    reduce_split_k(int split_k, std::int64_t numel, FastDivide by_inner, FastDivide by_k, PixelPlaces places,
                   const float* __restrict__ partial, Epilogue<T> epilogue, T* __restrict__ y) {
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * 256;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * 256 + threadIdx.x; i < numel; i += stride) {
    float sum = 0.0f;
    for (int split = 0; split < split_k; ++split) sum += partial[split * numel + i];
    unsigned pixel = by_inner.quotient(static_cast<unsigned>(i));
    const unsigned k = by_k.divmod(pixel);
    if constexpr (gated) {
      y[places(i, pixel, k)] = from_float<T>(fast_gated(epilogue.activate.gated, sum + epilogue.bias_of(k)));
    } else {
      y[places(i, pixel, k)] = epilogue(sum, i, k);
    }
  }
}

}  // namespace fastconv::algos::implicit_gemm::persistent
