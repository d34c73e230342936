#include <cstdint>

#include "core/kernels.h"
#include "device/cuda_check.h"
#include "device/flipped_filter.h"
#include "device/launch.h"

namespace fastconv {
namespace {

constexpr int flip_threads = 256;

template <typename T>
__global__ void __launch_bounds__(flip_threads)
    flip(FlippedFilter filter, std::int64_t size, const T* __restrict__ weight, T* __restrict__ flipped) {
  const std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * flip_threads + threadIdx.x;
  if (index >= size) return;
  const std::int64_t source = filter.source(index);
  flipped[index] = source < 0 ? T(0.0f) : weight[source];
}

}  // namespace

// weight: [K, C/G, R, S], flipped: [residues * C, K/G, rows, columns], both dense, in memory as FlippedFilter says.
void flip_filter(const ConvProblem& problem, const FlippedFilter& filter, const void* weight, void* flipped,
                 Runtime& runtime) {
  const std::int64_t size = filter.size();
  dispatch_dtype(problem.dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto blocks = static_cast<unsigned>((size + flip_threads - 1) / flip_threads);
    flip<T><<<blocks, flip_threads, 0, stream_of(runtime)>>>(filter, size, static_cast<const T*>(weight),
                                                             static_cast<T*>(flipped));
  });
  check_launch("flipping a filter");
}

}  // namespace fastconv
