// Power-of-two scales of the weight gradient's operands, one for each group of images that a chunk may span. They are
// guessed from a sample; the conversion finds the true maxima on its way, and where the guess does not fit, repeats
// itself with the exact scale. Everything derives from (guess, maximum), so no kernel has to write the decision down.
#pragma once

#include "device/power_of_two.h"

namespace fastconv::algos::implicit_gemm::wgrad {

// A guess brings the largest sampled value to [2^10, 2^11), an exact scale the largest to [2^14, 2^15). A guess stands if
// the largest is then within [2^4, 2^15): below, hi and lo would lose bits to float16's subnormals.
constexpr int guessed_target = 10, exact_target = 14, least_target = 4;

struct GroupScale {
  int guess;
  int largest;  // the bits of max |value| among the finite ones

  __device__ __forceinline__ bool fits() const {
    if (largest == 0) return true;
    const int exponent = (largest >> 23) - 127 + guess;
    return exponent >= least_target && exponent <= exact_target;
  }
  __device__ __forceinline__ int exponent() const {
    return fits() ? guess : scale_exponent(__int_as_float(largest), exact_target);
  }
};

struct Scales {
  GroupScale* x;     // [groups]; null: not scaled
  GroupScale* grad;  // [groups]

  // What undoes both scales. The second factor is 1 unless one float could not hold their product.
  struct Undo {
    float first, second;
  };
  __device__ __forceinline__ Undo undo(int group) const {
    if (x == nullptr) return {1.0f, 1.0f};
    const int exponent = -x[group].exponent() - grad[group].exponent();
    const int first = max(-126, min(exponent, 127));
    return {power_of_two(first), power_of_two(max(-126, min(exponent - first, 127)))};
  }
};

}  // namespace fastconv::algos::implicit_gemm::wgrad
