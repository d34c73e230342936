#include "algos/implicit_gemm/persistent/launch.cuh"

namespace fastconv::algos::implicit_gemm::persistent {

void run_split(const ConvArgs& args, const Plan& plan, const void* x, void* workspace, Runtime& runtime) {
  run_class<float, Mode::split>(args, plan, x, workspace, runtime);
}

void pack_split(const PackArgs& args, Runtime& runtime) { pack_class<float, Mode::split>(args, runtime); }

}  // namespace fastconv::algos::implicit_gemm::persistent
