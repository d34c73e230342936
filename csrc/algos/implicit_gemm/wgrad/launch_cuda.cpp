#include "algos/implicit_gemm/wgrad/plan.h"
#include "algos/implicit_gemm/wgrad/pointwise/plan.h"
#include "core/kernels.h"

namespace fastconv::algos::implicit_gemm {
namespace wgrad {

// One file for each class, so that they compile side by side.
template <Mode mode>
void run_class(const WeightGradientArgs& args, const Plan& plan, Runtime& runtime);
namespace pointwise {
template <Mode mode>
void run(const WeightGradientArgs& args, const Plan& plan, Runtime& runtime);
}

}  // namespace wgrad

void weight_gradient_cuda(const WeightGradientArgs& args, Runtime& runtime) {
  if (const auto* kept = dynamic_cast<const KernelPlanOf<wgrad::pointwise::Plan>*>(args.kernel_plan)) {
    return dispatch_value<Mode::split, Mode::single>(
        kept->plan.mode, [&](auto mode) { wgrad::pointwise::run<mode()>(args, kept->plan, runtime); });
  }
  const auto& plan = plan_as<wgrad::Plan>(args.kernel_plan);
  dispatch_mode(plan.mode, [&](auto mode) { wgrad::run_class<mode()>(args, plan, runtime); });
}

}  // namespace fastconv::algos::implicit_gemm
