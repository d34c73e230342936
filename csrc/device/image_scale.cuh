// Power-of-two scales of two tensors whose images are multiplied and summed: one for each image and tensor, so that
// images of any magnitude are served. They are guessed from a sample; the pass that applies them finds the true maxima
// on its way, and where a guess does not fit, the pass is repeated with exact scales. The decision derives from
// (guess, maximum), so nobody has to write it down.
//
// Images that are summed together form a group, whose products must have the same scale: the least that one of its
// images needs. Images with smaller products are scaled down to that, half in each tensor.
#pragma once

#include <climits>
#include <cstdint>

#include "device/dependent_launch.cuh"
#include "device/power_of_two.h"

namespace fastconv {

constexpr int no_scale = INT_MIN;  // of an image that is zero, as far as is known

struct alignas(8) ImageScale {
  int guess;
  int largest;  // the bits of max |value| among the finite ones

  // exact: the exponent to which the largest value may be brought.
  __device__ __forceinline__ bool fits(int exact) const {
    if (largest == 0) return true;
    return guess != no_scale && (largest >> 23) - 127 + guess <= exact;
  }
  __device__ __forceinline__ int exponent(bool is_exact, int exact) const {
    if (!is_exact) return guess;
    return largest == 0 ? no_scale : scale_exponent(__int_as_float(largest), exact);
  }
};

// With the maximum: from the L2 cache, since other multiprocessors' atomics do not reach this one's L1.
__device__ __forceinline__ ImageScale load_scale(const ImageScale* scale) {
  const int2 both = __ldcg(reinterpret_cast<const int2*>(scale));
  return {both.x, both.y};
}
__device__ __forceinline__ ImageScale load_scale(const ImageScale* scale, bool with_largest) {
  return with_largest ? load_scale(scale) : ImageScale{scale->guess, 0};
}

// The smaller of two exponents, where there are any.
__device__ __forceinline__ int min_scale(int a, int b) { return a == no_scale ? b : b == no_scale ? a : min(a, b); }

struct PairScales {
  ImageScale *first, *second;  // [images]
  int images;
  int exact_first, exact_second;

  struct Group {
    bool exact;  // a guess did not fit
    int sum;     // the exponent of the products' scale
  };
  // Of the images begin <= image <= last; for all lanes of a warp. maxima_known: the first pass is complete.
  __device__ __forceinline__ Group group(int begin, int last, bool maxima_known) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    bool exact = false;
    if (maxima_known) {
      for (int i = begin + lane; i <= last; i += 32) {
        exact = exact || !load_scale(first + i).fits(exact_first) || !load_scale(second + i).fits(exact_second);
      }
      exact = __any_sync(0xffffffffu, exact);
    }
    int least = INT_MAX;
    for (int i = begin + lane; i <= last; i += 32) {
      const int a = load_scale(first + i, exact).exponent(exact, exact_first);
      const int b = load_scale(second + i, exact).exponent(exact, exact_second);
      if (a != no_scale && b != no_scale) least = min(least, a + b);
    }
    least = __reduce_min_sync(0xffffffffu, least);
    return {exact, least == INT_MAX ? 0 : least};
  }
  // 2^this is the scale of the values of an image of that group.
  __device__ __forceinline__ int exponent(bool of_first, int image, Group group) const {
    const int a = load_scale(first + image, group.exact).exponent(group.exact, exact_first);
    const int b = load_scale(second + image, group.exact).exponent(group.exact, exact_second);
    if (a != no_scale && b != no_scale) {
      const int excess = a + b - group.sum;
      return of_first ? a - excess / 2 : b - (excess - excess / 2);
    }
    const int own = of_first ? a : b;  // its products are zero, if its values are finite
    return own == no_scale ? 0 : own;
  }
  // At most the sum of every group, and near the least of them; for all lanes of a warp, when the first pass is
  // complete.
  __device__ __forceinline__ int floor() const {
    int least = INT_MAX;
    for (int i = static_cast<int>(threadIdx.x % 32); i < images; i += 32) {
      const ImageScale a = load_scale(first + i), b = load_scale(second + i);
      if (a.largest == 0 || b.largest == 0) continue;
      least = min(least, min_scale(a.guess, a.exponent(true, exact_first)) +
                             min_scale(b.guess, b.exponent(true, exact_second)));
    }
    least = __reduce_min_sync(0xffffffffu, least);
    return least == INT_MAX ? 0 : least;
  }
};

// What undoes the scale of a product of two scaled values. The second factor is 1 unless one float could not hold both.
struct Undo {
  float first, second;

  __device__ __forceinline__ explicit Undo(int sum) {
    const int exponent = max(-126, min(-sum, 127));
    first = power_of_two(exponent), second = power_of_two(max(-126, min(-sum - exponent, 127)));
  }
  __device__ __forceinline__ float operator()(float value) const { return value * first * second; }

  // total += the values that these sums stand for, which are changed.
  template <int count>
  __device__ __forceinline__ void add(float (&sum)[count], float (&total)[count]) const {
    if (second != 1.0f) {
#pragma unroll
      for (int i = 0; i < count; ++i) sum[i] *= second;
    }
#pragma unroll
    for (int i = 0; i < count; ++i) total[i] = fmaf(sum[i], first, total[i]);
  }
};

// Block (image, 0 or 1 of the two tensors): a sample over the whole of the image. target: the exponent to which the
// largest sampled value is brought, which leaves room for larger ones.
struct Sampled {
  const float* source;  // [images][numel]
  ImageScale* scales;   // [images]
  std::int64_t numel;
  int target;
};
struct SampledPair {
  Sampled tensors[2];
};
constexpr int sample_threads = 256;
static __global__ void __launch_bounds__(sample_threads) guess_image_scales(const __grid_constant__ SampledPair pair) {
  constexpr int turns = 16, lines = turns * sample_threads / 32;
  launch_dependents();
  const Sampled& tensor = pair.tensors[blockIdx.y];
  const std::int64_t numel = tensor.numel, part = max(numel / lines, std::int64_t{1});
  const float* source = tensor.source + blockIdx.x * numel;
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < turns; ++i) {
    // A warp's values are neighbours, somewhere in their part, so that no stride of the tensor is hit again and again.
    const unsigned line = (i * sample_threads + threadIdx.x) / 32;
    const auto within = static_cast<unsigned>(min(part, std::int64_t{1} << 22));
    const std::int64_t at = line * part + (line * 2654435761u >> 8) % within + threadIdx.x % 32;
    largest = larger_finite(largest, at < numel ? source[at] : 0.0f);
  }
  __shared__ int bits;
  if (threadIdx.x == 0) bits = 0;
  __syncthreads();
  atomicMax(&bits, __float_as_int(largest));
  __syncthreads();
  if (threadIdx.x == 0) {
    tensor.scales[blockIdx.x] = {bits == 0 ? no_scale : scale_exponent(__int_as_float(bits), tensor.target), 0};
  }
}

}  // namespace fastconv
