#include "algos/implicit_gemm/persistent/launch.cuh"

namespace fastconv::algos::implicit_gemm::persistent {

void run_tf32(const ConvArgs& args, const Plan& plan, Runtime& runtime) {
  run_class<float, Mode::single>(args, plan, runtime);
}

void pack_tf32(const PackArgs& args, Runtime& runtime) { pack_class<float, Mode::single>(args, runtime); }

}  // namespace fastconv::algos::implicit_gemm::persistent
