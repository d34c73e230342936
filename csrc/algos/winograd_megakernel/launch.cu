// From a problem to the kernel of its class.
#include "core/kernels.h"
#include "device/numeric.h"

namespace fastconv::algos::winograd_megakernel {

namespace ffma {
void run_cuda(const ConvArgs& args, Runtime& runtime);
void pack_cuda(const PackArgs& args, Runtime& runtime);
}  // namespace ffma
namespace wgmma {  // a .cu file for each type, that of the tensors, so that they compile side by side
template <typename T>
void run(const ConvArgs& args, Runtime& runtime);
template <typename T>
void pack(const PackArgs& args, Runtime& runtime);
}  // namespace wgmma

void run_cuda(const ConvArgs& args, Runtime& runtime) {
  if (args.problem.accuracy == AccuracyClass::ieee) return ffma::run_cuda(args, runtime);
  dispatch_dtype(args.problem.dtype, [&](auto zero) { wgmma::run<decltype(zero)>(args, runtime); });
}

void pack_cuda(const PackArgs& args, Runtime& runtime) {
  if (args.problem.accuracy == AccuracyClass::ieee) return ffma::pack_cuda(args, runtime);
  dispatch_dtype(args.problem.dtype, [&](auto zero) { wgmma::pack<decltype(zero)>(args, runtime); });
}

}  // namespace fastconv::algos::winograd_megakernel
