// A 2x2 max-pool at the memory's rate. PyTorch's counts in 64 bits where it has to find the winner, which it writes,
// too.
#include "core/fast_divide.h"
#include "core/integers.h"
#include "device/cuda_check.h"
#include "device/indexing.h"
#include "device/launch.h"
#include "device/max_pool.h"

namespace fastconv {
namespace {

constexpr int block_threads = 256, vector_bytes = 16;

template <typename T, int vec>
struct alignas(sizeof(T) * vec) Elements {
  T e[vec];
};

// y [images][p][q][channels] -> pooled [images][p/2][q/2][channels], `vec` elements a channel: NHWC, or NCHW as images
// of one channel. A row of the block takes a row of pooled.
template <typename T, int vec>
__global__ void __launch_bounds__(block_threads)
    pool_rows(const Elements<T, vec>* __restrict__ y, Elements<T, vec>* __restrict__ pooled, std::int64_t rows, int p,
              int q, FastDivide by_channels) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= rows) return;
  const int channels = by_channels, length = q / 2 * channels, pitch = q * channels;
  const std::int64_t image = row / (p / 2), i = row % (p / 2);
  const Elements<T, vec>* const above = y + (image * p + 2 * i) * pitch;
  for (int element = static_cast<int>(threadIdx.x); element < length; element += static_cast<int>(blockDim.x)) {
    const int at = element + element / by_channels * channels;  // of pixel 2 j, where this is pixel j
    Elements<T, vec> values[4] = {above[at], above[at + channels], above[at + pitch], above[at + pitch + channels]};
#pragma unroll
    for (int e = 0; e < vec; ++e) {
      const float upper = larger_of(to_float(values[0].e[e]), to_float(values[1].e[e]));
      const float lower = larger_of(to_float(values[2].e[e]), to_float(values[3].e[e]));
      values[0].e[e] = from_float<T>(larger_of(upper, lower));
    }
    pooled[row * length + element] = values[0];
  }
}

template <typename T, int vec>
void launch(const ConvProblem& problem, const void* y, void* pooled, Runtime& runtime) {
  const bool nhwc = problem.layout == Layout::nhwc;
  const std::int64_t rows = problem.n * (nhwc ? 1 : problem.k) * problem.y_p();
  const std::int64_t channels = nhwc ? problem.k / vec : 1, length = problem.y_q() * channels;
  int lanes = 8;
  while (lanes < length && lanes < block_threads) lanes *= 2;
  const dim3 block(lanes, block_threads / lanes);
  const auto grid = static_cast<unsigned>(ceil_div<std::int64_t>(rows, block.y));
  pool_rows<T, vec><<<grid, block, 0, stream_of(runtime)>>>(static_cast<const Elements<T, vec>*>(y),
                                                            static_cast<Elements<T, vec>*>(pooled), rows,
                                                            as_int(problem.p()), as_int(problem.q()), channels);
  check_launch("max-pool");
}

}  // namespace

void max_pool(const ConvProblem& problem, const void* y, void* pooled, Runtime& runtime) {
  dispatch_dtype(problem.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int vec = vector_bytes / sizeof(T);
    const bool whole = problem.layout == Layout::nhwc && problem.k % vec == 0;
    (whole ? launch<T, vec> : launch<T, 1>)(problem, y, pooled, runtime);
  });
}

}  // namespace fastconv
