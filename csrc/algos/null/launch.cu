#include <algorithm>

#include "algos/null/plan.h"
#include "core/kernels.h"
#include "device/cuda_check.h"
#include "device/launch.h"

namespace fastconv::algos::null {
namespace {

template <typename T>
__global__ void scale_channels(Scale<T> scale, std::int64_t total) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t index = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x; index < total;
       index += step) {
    scale(index);
  }
}

}  // namespace

void run_cuda(const ConvArgs& args, Runtime& runtime) {
  dispatch_dtype(args.problem.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int threads = 256;
    const std::int64_t total = args.problem.output_numel();
    // A bounded grid: the kernel's loop takes what is left of a tensor beyond 2^31 elements.
    const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(ceil_div<std::int64_t>(total, threads), 1 << 20));
    scale_channels<T><<<blocks, threads, 0, stream_of(runtime)>>>(make_scale<T>(args), total);
    check_launch("null");
  });
}

}  // namespace fastconv::algos::null
