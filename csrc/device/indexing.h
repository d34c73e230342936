// Element offsets of the two memory orders. 64-bit throughout: tensors may exceed 2^31 elements.
#pragma once

#include <cstdint>

#include "core/integers.h"
#include "core/problem.h"
#include "device/numeric.h"

namespace fastconv {

// Strides, in elements, of an [N, C, H, W] tensor.
struct Strides4 {
  std::int64_t n, c, h, w;

  FASTCONV_HOST_DEVICE std::int64_t operator()(std::int64_t in, std::int64_t ic, std::int64_t ih,
                                               std::int64_t iw) const {
    return in * n + ic * c + ih * h + iw * w;
  }
};

inline Strides4 dense_strides(Layout layout, std::int64_t c, std::int64_t h, std::int64_t w) {
  if (layout == Layout::nhwc) return {h * w * c, 1, w * c, c};
  return {c * h * w, h * w, w, 1};
}
// In NHWC, perhaps a range of channels of a larger tensor, whose number they follow. Of shuffled outputs, those from
// one pixel of the convolution to the next.
inline Strides4 input_strides(const ConvProblem& problem) {
  const bool nhwc = problem.layout == Layout::nhwc;
  return dense_strides(problem.layout, nhwc ? problem.x_pitch() : problem.c, problem.h, problem.w);
}
inline Strides4 output_strides(const ConvProblem& problem) {
  const bool nhwc = problem.layout == Layout::nhwc;
  const Strides4 y = dense_strides(problem.layout, nhwc ? problem.y_pitch() : problem.k, problem.y_p(), problem.y_q());
  return problem.shuffles() ? Strides4{y.n, y.c, 2 * y.h, 2 * y.w} : y;
}

// For kernels that count in 32 bits: the planner has seen to it that the value fits.
constexpr int as_int(std::int64_t value) { return static_cast<int>(value); }

// The sizes of a convolution, or of a pool, that parameters of a kernel have under the same names.
template <typename Params, typename Problem>
void set_sizes(Params& params, const Problem& problem) {
#define FASTCONV_SET(NAME, VALUE) \
  if constexpr (requires {        \
                  params.NAME;    \
                  problem.VALUE;  \
                })                \
  params.NAME = static_cast<decltype(params.NAME)>(problem.VALUE)
  FASTCONV_SET(n, n);
  FASTCONV_SET(c, c);
  FASTCONV_SET(h, h);
  FASTCONV_SET(w, w);
  FASTCONV_SET(k, k);
  FASTCONV_SET(p, p());
  FASTCONV_SET(q, q());
  FASTCONV_SET(r, r);
  FASTCONV_SET(s, s);
  FASTCONV_SET(stride_h, stride_h);
  FASTCONV_SET(stride_w, stride_w);
  FASTCONV_SET(pad_h, pad_h);
  FASTCONV_SET(pad_w, pad_w);
  FASTCONV_SET(dilation_h, dilation_h);
  FASTCONV_SET(dilation_w, dilation_w);
#undef FASTCONV_SET
}

}  // namespace fastconv
