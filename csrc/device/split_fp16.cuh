// float32 as the sum of two limbs of FP16: the value rounded, and what that leaves (docs/concepts/numerics.md).
#pragma once

#include <cuda_fp16.h>

namespace fastconv {

struct HalfLimbs {
  __half2 high, low;
};

__device__ __forceinline__ HalfLimbs split_fp16(float a, float b) {
  const __half2 high = __floats2half2_rn(a, b);
  return {high, __floats2half2_rn(a - __low2float(high), b - __high2float(high))};
}

}  // namespace fastconv
