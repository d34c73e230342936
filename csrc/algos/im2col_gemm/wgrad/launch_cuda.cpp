#include "algos/im2col_gemm/wgrad/product.h"

namespace fastconv::algos::im2col_gemm {

void weight_gradient_cuda(const WeightGradientArgs& args, Runtime& runtime) { wgrad::multiply(args, runtime); }

}  // namespace fastconv::algos::im2col_gemm
