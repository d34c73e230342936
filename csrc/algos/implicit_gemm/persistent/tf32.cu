#include "algos/implicit_gemm/persistent/launch.cuh"

namespace fastconv::algos::implicit_gemm::persistent {

void run_single(const ConvArgs& args, const Plan& plan, const void* x, void* workspace, Runtime& runtime) {
  run_class<float, Mode::single>(args, plan, x, workspace, runtime);
}

void pack_single(const PackArgs& args, Runtime& runtime) { pack_class<float, Mode::single>(args, runtime); }

}  // namespace fastconv::algos::implicit_gemm::persistent
