// Launches of the kernel for every GPU since compute capability 8.0.
#include "algos/implicit_gemm/portable/kernel.cuh"
#include "algos/implicit_gemm/portable/pack.cuh"
#include "core/kernels.h"
#include "device/cuda_check.h"
#include "device/indexing.h"
#include "device/launch.h"

namespace fastconv::algos::implicit_gemm::portable {
namespace {

template <typename T>
Params<T> make_params(const ConvArgs& args, const Plan& plan) {
  const ConvProblem& problem = args.problem;
  const Strides4 in = dense_strides(args.x_layout, problem.x_pitch(), problem.h, problem.w);
  const std::int64_t plane = problem.p() * problem.q();
  const bool nchw = problem.layout == Layout::nchw;
  const auto* packed = static_cast<const char*>(args.weight);
  return {static_cast<const T*>(args.x),
          reinterpret_cast<const Half<T>*>(packed),
          reinterpret_cast<const int*>(packed + plan.weight_bytes(problem.k)),
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
          as_int(problem.y_pitch()),
          static_cast<unsigned>(plan.pixels),
          as_int(plan.reduction),
          as_int(plan.steps),
          as_int(problem.s),
          as_int(problem.stride_h),
          as_int(problem.stride_w),
          as_int(problem.pad_h),
          as_int(problem.pad_w),
          as_int(problem.dilation_h),
          as_int(problem.dilation_w),
          nchw,
          plan.stores_quads,
          plan.filter_tiles,
          plane,
          problem.q(),
          problem.c_per_group(),
          problem.s};
}

template <typename T, int products, int column_tiles, bool vector>
void launch(const Params<T>& params, const Plan& plan, std::int64_t groups, cudaStream_t stream) {
  using S = Shape<T, products, column_tiles, vector>;
  constexpr int bytes = sizeof(SharedTile<S>);
  check_cuda(cudaFuncSetAttribute(convolve<S>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
             "implicit_gemm: shared memory");
  const dim3 grid(static_cast<unsigned>(plan.pixel_tiles * plan.filter_tiles), static_cast<unsigned>(groups));
  convolve<S><<<grid, threads, bytes, stream>>>(params);
  check_launch("implicit_gemm");
}

template <typename T>
void run(const ConvArgs& args, const Plan& plan, Runtime& runtime) {
  constexpr bool split = std::is_same_v<T, float>;
  const auto run_tile = [&](auto filters) {
    dispatch_value<false, true>(plan.loads_vectors, [&](auto vector) {
      launch<T, split ? 3 : 1, filters() / 8, vector()>(make_params<T>(args, plan), plan, args.problem.groups,
                                                        stream_of(runtime));
    });
  };
  if constexpr (split) {
    dispatch_value<64, 48, 32, 16>(plan.filter_tile, run_tile);
  } else {
    dispatch_value<64, 32>(plan.filter_tile, run_tile);
  }
}

template <typename T, int limbs>
void pack(const PackArgs& args, Runtime& runtime) {
  const ConvProblem& problem = args.problem;
  const Weights weights = make_weights(problem);
  auto* packed = static_cast<char*>(args.packed);
  pack_filters<T, limbs><<<static_cast<unsigned>(problem.k), threads, 0, stream_of(runtime)>>>(
      static_cast<int>(problem.c_per_group()), static_cast<int>(problem.r * problem.s), static_cast<int>(weights.steps),
      static_cast<int>(problem.k_per_group()), args.strides(), static_cast<const T*>(args.weight),
      reinterpret_cast<Half<T>*>(packed), reinterpret_cast<int*>(packed + weights.weight_bytes(problem.k)),
      static_cast<T*>(args.snapshot));
  check_launch("implicit_gemm: packing");
}

}  // namespace

void run(const ConvArgs& args, const Plan& plan, Runtime& runtime) {
  dispatch_dtype(args.problem.dtype, [&](auto zero) { run<decltype(zero)>(args, plan, runtime); });
}

void pack(const PackArgs& args, Runtime& runtime) {
  dispatch_dtype(args.problem.dtype, [&](auto zero) {
    using T = decltype(zero);
    pack<T, std::is_same_v<T, float> ? 2 : 1>(args, runtime);
  });
}

}  // namespace fastconv::algos::implicit_gemm::portable
