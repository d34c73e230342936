// From a plan to the kernel of its class.
#include "algos/winograd_fused/shared/pack.cuh"
#include "algos/winograd_fused/single/launch.h"
#include "algos/winograd_fused/split/launch.h"
#include "core/kernels.h"
#include "device/transpose.cuh"

namespace fastconv::algos::winograd_fused {
namespace {

cudaStream_t stream_of(const Runtime& runtime) { return static_cast<cudaStream_t>(runtime.stream()); }

}  // namespace

void run_cuda(const ConvArgs& args, Runtime& runtime) {
  const ConvProblem& problem = args.problem;
  const Config& config = *static_cast<const Config*>(args.detail);
  dispatch_dtype(problem.dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto* x = static_cast<const T*>(args.x);
    Layout layout = problem.layout;
    if (transposed_input_bytes(problem) != 0) {
      auto* turned = static_cast<T*>(args.workspace);
      transpose(x, turned, problem.n, problem.c, problem.h * problem.w, stream_of(runtime));
      x = turned, layout = Layout::nhwc;
    }
    if constexpr (std::is_same_v<T, float>) {
      if (config.split) return split::run(args, config, x, layout, runtime);
    }
    single::run(args, config, x, layout, runtime);
  });
}

void pack_cuda(const PackArgs& args, Runtime& runtime) {
  const ConvProblem& problem = args.problem;
  if (problem.accuracy == AccuracyClass::fp32) return pack<float, 2>(args, stream_of(runtime));
  dispatch_dtype(problem.dtype, [&](auto zero) { pack<decltype(zero), 1>(args, stream_of(runtime)); });
}

}  // namespace fastconv::algos::winograd_fused
