#include <cstdint>

#include "core/kernels.h"
#include "device/cuda_check.h"
#include "device/turned_filter.h"

namespace fastconv {
namespace {

constexpr int turn_threads = 256;

template <typename T>
__global__ void __launch_bounds__(turn_threads)
    turn(TurnedFilter filter, std::int64_t size, const T* __restrict__ weight, T* __restrict__ turned) {
  const std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * turn_threads + threadIdx.x;
  if (index >= size) return;
  const std::int64_t source = filter.source(index);
  turned[index] = source < 0 ? T(0.0f) : weight[source];
}

}  // namespace

// weight: [K, C/G, R, S], turned: [residues * C, K/G, rows, columns], both dense, in memory as TurnedFilter says.
void turn_filter(const ConvProblem& problem, const TurnedFilter& filter, const void* weight, void* turned,
                 Runtime& runtime) {
  const std::int64_t size = filter.size();
  dispatch_dtype(problem.dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto blocks = static_cast<unsigned>((size + turn_threads - 1) / turn_threads);
    turn<T><<<blocks, turn_threads, 0, static_cast<cudaStream_t>(runtime.stream())>>>(
        filter, size, static_cast<const T*>(weight), static_cast<T*>(turned));
  });
  check_launch("turning a filter");
}

}  // namespace fastconv
