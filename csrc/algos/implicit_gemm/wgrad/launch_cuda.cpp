#include "algos/implicit_gemm/wgrad/plan.h"
#include "algos/implicit_gemm/wgrad/pointwise/plan.h"
#include "core/kernels.h"

namespace fastconv::algos::implicit_gemm {
namespace wgrad {

// One file for each class, so that they compile side by side.
void run_split(const WeightGradientArgs& args, Runtime& runtime);
void run_single(const WeightGradientArgs& args, Runtime& runtime);
void run_fp16(const WeightGradientArgs& args, Runtime& runtime);
void run_bf16(const WeightGradientArgs& args, Runtime& runtime);

namespace pointwise {
void run_split(const WeightGradientArgs& args, const Plan& plan, Runtime& runtime);
void run_single(const WeightGradientArgs& args, const Plan& plan, Runtime& runtime);
}  // namespace pointwise

}  // namespace wgrad

void weight_gradient_cuda(const WeightGradientArgs& args, Runtime& runtime) {
  if (const auto* kept = dynamic_cast<const KernelPlanOf<wgrad::pointwise::Plan>*>(args.kernel_plan)) {
    const auto run = kept->plan.mode == Mode::split ? wgrad::pointwise::run_split : wgrad::pointwise::run_single;
    return run(args, kept->plan, runtime);
  }
  switch (plan_as<wgrad::Plan>(args.kernel_plan).mode) {
    case Mode::split: return wgrad::run_split(args, runtime);
    case Mode::single: return wgrad::run_single(args, runtime);
    case Mode::fp16: return wgrad::run_fp16(args, runtime);
    case Mode::bf16: return wgrad::run_bf16(args, runtime);
  }
}

}  // namespace fastconv::algos::implicit_gemm
