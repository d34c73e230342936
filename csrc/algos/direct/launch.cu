#include "core/kernels.h"
#include "device/cuda_check.h"
#include "device/epilogue.h"
#include "device/indexing.h"
#include "device/launch.h"

namespace fastconv::algos::direct {
namespace {

// One thread per output element, serial over C, R, S: no atomics, deterministic. Consecutive threads take consecutive
// elements of y in memory, so stores coalesce in either layout. In NCHW neighbours are pixels: reads of x coalesce, the
// weight is a broadcast. In NHWC they are filters: x is a broadcast, reads of the weight are strided.
template <typename T>
__global__ void convolve(ConvProblem problem, const T* __restrict__ x,  // [N, C, H, W]
                         const T* __restrict__ weight,                  // [K, C/G, R, S]
                         T* __restrict__ y,                             // [N, K, P, Q]
                         Strides4 in, Strides4 out, Epilogue<T> epilogue) {
  const std::int64_t p_size = problem.p(), q_size = problem.q(), c_size = problem.c_per_group();
  const std::int64_t total = problem.output_numel();
  for (std::int64_t index = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x; index < total;
       index += static_cast<std::int64_t>(gridDim.x) * blockDim.x) {
    std::int64_t n, k, p, q;
    if (problem.layout == Layout::nhwc) {
      k = index % problem.k, q = index / problem.k % q_size;
      p = index / problem.k / q_size % p_size, n = index / problem.k / q_size / p_size;
    } else {
      q = index % q_size, p = index / q_size % p_size;
      k = index / q_size / p_size % problem.k, n = index / q_size / p_size / problem.k;
    }
    const std::int64_t c0 = k / problem.k_per_group() * c_size;
    const T* filter = weight + k * c_size * problem.r * problem.s;
    float sum = 0.0f;
    for (std::int64_t r = 0; r < problem.r; ++r) {
      const std::int64_t h = p * problem.stride_h + r * problem.dilation_h - problem.pad_h;
      if (h < 0 || h >= problem.h) continue;
      for (std::int64_t s = 0; s < problem.s; ++s) {
        const std::int64_t w = q * problem.stride_w + s * problem.dilation_w - problem.pad_w;
        if (w < 0 || w >= problem.w) continue;
        const T* source = x + in(n, c0, h, w);
        float tap = 0.0f;  // a sum of sums: the error of a long reduction grows with its longest part alone
        for (std::int64_t c = 0; c < c_size; ++c) {
          tap += to_float(source[c * in.c]) * to_float(filter[(c * problem.r + r) * problem.s + s]);
        }
        sum += tap;
      }
    }
    const std::int64_t place = out(n, k, p, q);
    y[place] = epilogue(sum, place, k);
  }
}

}  // namespace

void run_cuda(const ConvArgs& args, Runtime& runtime) {
  dispatch_dtype(args.problem.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int threads = 256;
    const std::int64_t blocks = ceil_div<std::int64_t>(args.problem.output_numel(), threads);
    const auto grid = static_cast<unsigned>(blocks < (1 << 30) ? blocks : (1 << 30));  // the loop takes the rest
    convolve<T><<<grid, threads, 0, stream_of(runtime)>>>(
        args.problem, static_cast<const T*>(args.x), static_cast<const T*>(args.weight), static_cast<T*>(args.y),
        input_strides(args.problem), output_strides(args.problem), make_epilogue<T>(args));
    check_launch("direct");
  });
}

}  // namespace fastconv::algos::direct
