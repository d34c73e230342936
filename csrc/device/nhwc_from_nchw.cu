// The input in the layout that a plan asks for (ConvPlan::reads_nhwc).
#include "core/kernels.h"
#include "device/numeric.h"
#include "device/transpose.cuh"

namespace fastconv {

// x, target: [N, C, H, W] in NCHW and in NHWC.
void nhwc_from_nchw(const ConvProblem& problem, const void* x, void* target, Runtime& runtime) {
  dispatch_dtype(problem.dtype, [&](auto zero) {
    using T = decltype(zero);
    transpose(static_cast<const T*>(x), static_cast<T*>(target), problem.n, problem.c, problem.h * problem.w,
              static_cast<cudaStream_t>(runtime.stream()));
  });
}

}  // namespace fastconv
