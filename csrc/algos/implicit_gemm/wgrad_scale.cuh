// Power-of-two scales of the weight gradient's operands, one for each image. They are guessed from a sample; the
// conversion finds the true maxima on its way, and where a guess does not fit, repeats itself with exact scales.
// Everything derives from (guess, maximum), so no kernel has to write the decision down.
//
// The images of a group may lie in one chunk, so the product of an image's two scales must be the group's: the least
// that one of its images needs. The x of an image with smaller products is scaled down to that: it loses bits that the
// sum over the group would not keep, and no others.
#pragma once

#include <climits>

#include "device/power_of_two.h"

namespace fastconv::algos::implicit_gemm::wgrad {

// A guess brings the largest sampled value to [2^10, 2^11), an exact scale the largest to [2^14, 2^15). A guess stands
// if the largest is then within [2^4, 2^15): below, hi and lo would lose bits to float16's subnormals.
constexpr int guessed_target = 10, exact_target = 14, least_target = 4;
constexpr int no_exponent = INT_MIN;  // of an image that is zero, as far as is known

struct ImageScale {
  int guess;
  int largest;  // the bits of max |value| among the finite ones

  __device__ __forceinline__ bool fits() const {
    if (largest == 0) return true;
    if (guess == no_exponent) return false;
    const int exponent = (largest >> 23) - 127 + guess;
    return exponent >= least_target && exponent <= exact_target;
  }
  __device__ __forceinline__ int exponent(bool exact) const {
    if (!exact) return guess;
    return largest == 0 ? no_exponent : scale_exponent(__int_as_float(largest), exact_target);
  }
};

struct Scales {
  ImageScale* x;     // [images]; null: not scaled
  ImageScale* grad;  // [images]
  int* sums;         // [groups]: the exponent of the scales' product, for the main kernel
  int images, group_images;

  struct Group {
    bool exact;  // a guess did not fit
    int sum;
  };
  // maxima_known: the first conversion is complete.
  __device__ __forceinline__ Group group(int index, bool maxima_known) const {
    const int first = index * group_images, last = min(first + group_images, images);
    bool exact = false;
    for (int i = first; maxima_known && i < last; ++i) exact = exact || !x[i].fits() || !grad[i].fits();
    int sum = INT_MAX;
    for (int i = first; i < last; ++i) {
      const int a = x[i].exponent(exact), b = grad[i].exponent(exact);
      if (a != no_exponent && b != no_exponent) sum = min(sum, a + b);
    }
    return {exact, sum == INT_MAX ? 0 : sum};
  }
  // Of an image of that group.
  __device__ __forceinline__ int exponent(bool of_x, int image, Group group) const {
    const int a = x[image].exponent(group.exact), b = grad[image].exponent(group.exact);
    if (a != no_exponent && b != no_exponent) return of_x ? group.sum - b : b;
    const int own = of_x ? a : b;  // its products are zero, if its values are finite
    return own == no_exponent ? 0 : own;
  }

  // What undoes both scales. The second factor is 1 unless one float could not hold their product.
  struct Undo {
    float first, second;
  };
  __device__ __forceinline__ Undo undo(int group) const {
    if (x == nullptr) return {1.0f, 1.0f};
    const int exponent = -sums[group], first = max(-126, min(exponent, 127));
    return {power_of_two(first), power_of_two(max(-126, min(exponent - first, 127)))};
  }
};

}  // namespace fastconv::algos::implicit_gemm::wgrad
