// From a problem to the kernel of its class.
#include "algos/winograd_megakernel/ffma/launch.h"
#include "algos/winograd_megakernel/wgmma/launch.h"

namespace fastconv::algos::winograd_megakernel {

void run_cuda(const ConvArgs& args, Runtime& runtime) {
  if (args.problem.accuracy == AccuracyClass::ieee) return ffma::run_cuda(args, runtime);
  dispatch_dtype(args.problem.dtype, [&](auto zero) { wgmma::run<decltype(zero)>(args, runtime); });
}

void pack_cuda(const PackArgs& args, Runtime& runtime) {
  if (args.problem.accuracy == AccuracyClass::ieee) return ffma::pack_cuda(args, runtime);
  dispatch_dtype(args.problem.dtype, [&](auto zero) { wgmma::pack<decltype(zero)>(args, runtime); });
}

}  // namespace fastconv::algos::winograd_megakernel
