// From a plan to the kernel of its class.
#include "algos/winograd_fused/shared/pack.cuh"
#include "core/kernels.h"
#include "device/launch.h"

namespace fastconv::algos::winograd_fused {

namespace split {
void run(const ConvArgs& args, const Config& config, Runtime& runtime);
}
namespace single {  // a .cu file for each type, so that they compile side by side
template <typename T>
void run(const ConvArgs& args, const Config& config, Runtime& runtime);
}

void run_cuda(const ConvArgs& args, Runtime& runtime) {
  const Config& config = plan_as<Config>(args.kernel_plan);
  if (config.split) return split::run(args, config, runtime);
  dispatch_dtype(args.problem.dtype, [&](auto zero) { single::run<decltype(zero)>(args, config, runtime); });
}

void pack_cuda(const PackArgs& args, Runtime& runtime) {
  const auto stream = stream_of(runtime);
  if (args.problem.accuracy == AccuracyClass::fp32) return pack<float, 2>(args, stream);
  dispatch_dtype(args.problem.dtype, [&](auto zero) { pack<decltype(zero), 1>(args, stream); });
}

}  // namespace fastconv::algos::winograd_fused
