#include "algos/implicit_gemm/kernel.cuh"
#include "algos/implicit_gemm/pack.cuh"
#include "core/kernels.h"
#include "device/cuda_check.h"
#include "device/indexing.h"
#include "device/transpose.cuh"

namespace fastconv::algos::implicit_gemm {
namespace {

cudaStream_t stream_of(const Runtime& runtime) { return static_cast<cudaStream_t>(runtime.stream()); }

bool is_aligned(const void* pointer, std::size_t bytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
}

template <typename T>
Params<T> make_params(const ConvArgs& args, const Config& config, const T* x, Layout x_layout) {
  const ConvProblem& problem = args.problem;
  const auto as_int = [](std::int64_t value) { return static_cast<int>(value); };
  const auto divide = [](std::int64_t divisor) { return FastDivide(static_cast<std::uint32_t>(divisor)); };
  const Strides4 in = dense_strides(x_layout, problem.c, problem.h, problem.w);
  const std::int64_t plane = problem.p() * problem.q();
  const bool nchw = problem.layout == Layout::nchw;
  const bool quads = (nchw ? plane : problem.k) % 4 == 0 && is_aligned(args.y, 4 * sizeof(T)) &&
                     is_aligned(args.residual, 4 * sizeof(T));
  const auto* packed = static_cast<const char*>(args.weight);
  return {x,
          reinterpret_cast<const Half<T>*>(packed),
          reinterpret_cast<const int*>(packed + config.weight_bytes(problem.k)),
          static_cast<T*>(args.y),
          make_epilogue<T>(args),
          in.n,
          in.w,
          in.c,
          as_int(problem.c),
          as_int(problem.h),
          as_int(problem.w),
          as_int(problem.k),
          as_int(plane),
          static_cast<unsigned>(config.pixels),
          as_int(config.reduction),
          as_int(config.steps),
          as_int(problem.s),
          as_int(problem.stride_h),
          as_int(problem.stride_w),
          as_int(problem.pad_h),
          as_int(problem.pad_w),
          as_int(problem.dilation_h),
          as_int(problem.dilation_w),
          nchw,
          quads,
          divide(config.filter_tiles),
          divide(plane),
          divide(problem.q()),
          divide(problem.c),
          divide(problem.s)};
}

template <typename T, int products, int column_tiles, bool vector>
void launch(const Params<T>& params, const Config& config, cudaStream_t stream) {
  using S = Shape<T, products, column_tiles, vector>;
  constexpr int bytes = sizeof(SharedTile<S>);
  check_cuda(cudaFuncSetAttribute(convolve<S>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
             "implicit_gemm: shared memory");
  convolve<S><<<static_cast<unsigned>(config.pixel_tiles * config.filter_tiles), threads, bytes, stream>>>(params);
  check_launch("implicit_gemm");
}

template <typename T>
void run(const ConvArgs& args, Runtime& runtime) {
  const ConvProblem& problem = args.problem;
  const Config config = make_config(problem);
  const cudaStream_t stream = stream_of(runtime);
  const T* x = static_cast<const T*>(args.x);
  Layout layout = problem.layout;
  if (transposed_input_bytes(problem) != 0) {
    auto* turned = static_cast<T*>(args.workspace);
    transpose(x, turned, problem.n, problem.c, problem.h * problem.w, stream);
    x = turned, layout = Layout::nhwc;
  }
  const bool vector = loads_vectors(problem) && is_aligned(x, 16);  // the caller's tensor may start at any element
  const Params<T> params = make_params<T>(args, config, x, layout);
  if constexpr (std::is_same_v<T, float>) {
    if (config.filter_tile == 64) {
      vector ? launch<T, 3, 8, true>(params, config, stream) : launch<T, 3, 8, false>(params, config, stream);
    } else if (config.filter_tile == 48) {
      vector ? launch<T, 3, 6, true>(params, config, stream) : launch<T, 3, 6, false>(params, config, stream);
    } else {
      vector ? launch<T, 3, 4, true>(params, config, stream) : launch<T, 3, 4, false>(params, config, stream);
    }
  } else {
    vector ? launch<T, 1, 8, true>(params, config, stream) : launch<T, 1, 8, false>(params, config, stream);
  }
}

template <typename T, int planes>
void pack(const PackArgs& args, Runtime& runtime) {
  const ConvProblem& problem = args.problem;
  const Config config = make_config(problem);
  auto* packed = static_cast<char*>(args.packed);
  pack_filters<T, planes><<<static_cast<unsigned>(problem.k), threads, 0, stream_of(runtime)>>>(
      static_cast<int>(problem.c), static_cast<int>(problem.r * problem.s), static_cast<int>(config.steps),
      static_cast<const T*>(args.weight), reinterpret_cast<Half<T>*>(packed),
      reinterpret_cast<int*>(packed + config.weight_bytes(problem.k)), static_cast<T*>(args.snapshot));
  check_launch("implicit_gemm: packing");
}

}  // namespace

void run_cuda(const ConvArgs& args, Runtime& runtime) {
  dispatch_dtype(args.problem.dtype, [&](auto zero) { run<decltype(zero)>(args, runtime); });
}

void pack_cuda(const PackArgs& args, Runtime& runtime) {
  dispatch_dtype(args.problem.dtype, [&](auto zero) {
    using T = decltype(zero);
    pack<T, std::is_same_v<T, float> ? 2 : 1>(args, runtime);
  });
}

}  // namespace fastconv::algos::implicit_gemm
