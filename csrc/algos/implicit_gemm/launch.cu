#include "algos/implicit_gemm/kernel.cuh"
#include "algos/implicit_gemm/lean.h"
#include "algos/implicit_gemm/pack.cuh"
#include "algos/implicit_gemm/wgmma.h"
#include "core/kernels.h"
#include "device/cuda_check.h"
#include "device/indexing.h"
#include "device/transpose.cuh"

namespace fastconv::algos::implicit_gemm {
namespace {

cudaStream_t stream_of(const Runtime& runtime) { return static_cast<cudaStream_t>(runtime.stream()); }

template <typename T>
Params<T> make_params(const ConvArgs& args, const Config& config, const T* x, Layout x_layout) {
  const ConvProblem& problem = args.problem;
  const Strides4 in = dense_strides(x_layout, problem.c, problem.h, problem.w);
  const std::int64_t plane = problem.p() * problem.q();
  const bool nchw = problem.layout == Layout::nchw;
  const bool quads = (nchw ? plane : problem.k_per_group()) % 4 == 0 && is_aligned(args.y, 4 * sizeof(T)) &&
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
          as_int(problem.c_per_group()),
          as_int(problem.h),
          as_int(problem.w),
          as_int(problem.k_per_group()),
          as_int(plane),
          as_int(problem.k),
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
          config.filter_tiles,
          plane,
          problem.q(),
          problem.c_per_group(),
          problem.s};
}

template <typename T, int products, int column_tiles, bool vector>
void launch(const Params<T>& params, const Config& config, cudaStream_t stream) {
  using S = Shape<T, products, column_tiles, vector>;
  constexpr int bytes = sizeof(SharedTile<S>);
  check_cuda(cudaFuncSetAttribute(convolve<S>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
             "implicit_gemm: shared memory");
  const dim3 grid(static_cast<unsigned>(config.pixel_tiles * config.filter_tiles),
                  static_cast<unsigned>(params.all_filters / params.k));
  convolve<S><<<grid, threads, bytes, stream>>>(params);
  check_launch("implicit_gemm");
}

// x in NHWC if the kernels want it so: in the workspace, behind which is what is left of it.
struct Input {
  const void* x;
  Layout layout;
  void* workspace;
};

Input prepare_input(const ConvArgs& args, cudaStream_t stream) {
  const ConvProblem& problem = args.problem;
  const std::size_t bytes = transposed_input_bytes(problem);
  if (bytes == 0) return {args.x, problem.layout, args.workspace};
  dispatch_dtype(problem.dtype, [&](auto zero) {
    using T = decltype(zero);
    transpose(static_cast<const T*>(args.x), static_cast<T*>(args.workspace), problem.n, problem.c,
              problem.h * problem.w, stream);
  });
  return {args.workspace, Layout::nhwc, static_cast<char*>(args.workspace) + bytes};
}

void run_wgmma(const ConvArgs& args, Runtime& runtime) {
  const Input input = prepare_input(args, stream_of(runtime));
  const auto& plan = *static_cast<const wgmma::Plan*>(args.detail);
  if (plan.lean != nullptr && is_aligned(args.y, 16) && is_aligned(args.residual, 16)) {
    const bool tf32 = args.problem.accuracy == AccuracyClass::tf32;
    const char* weight = static_cast<const char*>(args.weight);
    const auto* exponents = reinterpret_cast<const int*>(weight + plan.weights.weight_bytes());
    const auto run = tf32                               ? lean::run_tf32
                     : plan.weights.mode == Mode::split ? lean::run_fp32
                     : plan.weights.mode == Mode::fp16  ? lean::run_fp16
                                                        : lean::run_bf16;
    return run(args, *plan.lean, input.x, weight + (tf32 ? plan.weights.rounded_offset() : 0), exponents, runtime);
  }
  const auto run = plan.weights.mode == Mode::split    ? wgmma::run_split
                   : plan.weights.mode == Mode::single ? wgmma::run_single
                   : plan.weights.mode == Mode::fp16   ? wgmma::run_fp16
                                                       : wgmma::run_bf16;
  run(args, plan, input.x, input.workspace, runtime);
}

void pack_wgmma(const PackArgs& args, Runtime& runtime) {
  const Mode mode = wgmma::make_weights(args.problem).mode;
  const auto pack = mode == Mode::split    ? wgmma::pack_split
                    : mode == Mode::single ? wgmma::pack_single
                    : mode == Mode::fp16   ? wgmma::pack_fp16
                                           : wgmma::pack_bf16;
  pack(args, runtime);
}

template <typename T>
void run(const ConvArgs& args, Runtime& runtime) {
  const ConvProblem& problem = args.problem;
  const Config config = make_config(problem);
  const cudaStream_t stream = stream_of(runtime);
  const Input input = prepare_input(args, stream);
  const T* x = static_cast<const T*>(input.x);
  const Layout layout = input.layout;
  const bool vector = loads_vectors(problem) && is_aligned(x, 16);
  const Params<T> params = make_params<T>(args, config, x, layout);
  if constexpr (std::is_same_v<T, float>) {
    if (config.filter_tile == 64) {
      vector ? launch<T, 3, 8, true>(params, config, stream) : launch<T, 3, 8, false>(params, config, stream);
    } else if (config.filter_tile == 48) {
      vector ? launch<T, 3, 6, true>(params, config, stream) : launch<T, 3, 6, false>(params, config, stream);
    } else if (config.filter_tile == 32) {
      vector ? launch<T, 3, 4, true>(params, config, stream) : launch<T, 3, 4, false>(params, config, stream);
    } else {
      vector ? launch<T, 3, 2, true>(params, config, stream) : launch<T, 3, 2, false>(params, config, stream);
    }
  } else if (config.filter_tile == 32) {
    vector ? launch<T, 1, 4, true>(params, config, stream) : launch<T, 1, 4, false>(params, config, stream);
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
      static_cast<int>(problem.c_per_group()), static_cast<int>(problem.r * problem.s), static_cast<int>(config.steps),
      static_cast<int>(problem.k_per_group()), args.strides(), static_cast<const T*>(args.weight),
      reinterpret_cast<Half<T>*>(packed), reinterpret_cast<int*>(packed + config.weight_bytes(problem.k)),
      static_cast<T*>(args.snapshot));
  check_launch("implicit_gemm: packing");
}

}  // namespace

void run_cuda(const ConvArgs& args, Runtime& runtime) {
  if (wgmma::is_used(args.problem, runtime.device())) return run_wgmma(args, runtime);
  dispatch_dtype(args.problem.dtype, [&](auto zero) { run<decltype(zero)>(args, runtime); });
}

void pack_cuda(const PackArgs& args, Runtime& runtime) {
  if (wgmma::is_used(args.problem, runtime.device())) return pack_wgmma(args, runtime);
  dispatch_dtype(args.problem.dtype, [&](auto zero) {
    using T = decltype(zero);
    pack<T, std::is_same_v<T, float> ? 2 : 1>(args, runtime);
  });
}

}  // namespace fastconv::algos::implicit_gemm
