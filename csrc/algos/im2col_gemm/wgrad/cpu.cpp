#include "algos/im2col_gemm/wgrad/plan.h"
#include "algos/im2col_gemm/wgrad/product.h"
#include "host/weight_gradient.h"

namespace fastconv::algos::im2col_gemm {

void weight_gradient_cpu(const WeightGradientArgs& args, Runtime& runtime) {
  if (plan_as<wgrad::Plan>(args.kernel_plan).multiplies) return wgrad::multiply(args, runtime);
  dispatch_dtype(args.problem.dtype, [&](auto zero) { sum_weight_gradient<decltype(zero)>(args, runtime); });
}

}  // namespace fastconv::algos::im2col_gemm
