#include "host/weight_gradient.h"

namespace fastconv::algos::implicit_gemm {

void weight_gradient_cpu(const WeightGradientArgs& args, Runtime& runtime) {
  dispatch_dtype(args.problem.dtype, [&](auto zero) { sum_weight_gradient<decltype(zero)>(args, runtime); });
}

}  // namespace fastconv::algos::implicit_gemm
