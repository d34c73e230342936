// A max-pool of a tensor in memory, after a convolution or on its own: plain data, no torch, no CUDA.
#pragma once

#include <cstdint>

#include "core/device_info.h"
#include "core/problem.h"

namespace fastconv {

// y[n,c,p,q] = max_{r,s} x[n, c, p*stride_h + r*dilation_h - pad_h, q*stride_w + s*dilation_w - pad_w], as PyTorch's
// max_pool2d: values outside x are -infinity, NaN is larger than everything.
struct MaxPool {
  std::int64_t n = 0, c = 0, h = 0, w = 0;  // x [N, C, H, W]
  std::int64_t p = 0, q = 0;                // y [N, C, P, Q]: how the size is rounded is the caller's
  std::int64_t r = 1, s = 1;                // window
  std::int64_t stride_h = 1, stride_w = 1;
  std::int64_t pad_h = 0, pad_w = 0;  // at most half the window's extent
  std::int64_t dilation_h = 1, dilation_w = 1;
  DType dtype = DType::f32;
  Layout layout = Layout::nchw;  // of both, dense
  std::int64_t x_channels = 0;   // in NHWC: of a pixel of the larger tensor of which x is a range; 0: x is dense

  // Elements from one pixel of x to the next, in NHWC.
  constexpr std::int64_t x_pitch() const { return x_channels != 0 ? x_channels : c; }
  constexpr bool is_dilated() const { return dilation_h != 1 || dilation_w != 1; }
  bool has_kernels(const DeviceInfo& device) const {
    return device.type == DeviceType::cuda && device.has_kernels && dtype != DType::other && counts_in_31_bits();
  }
  // Whether they fit the kernels: elements of an image, coordinates, rows and blocks.
  constexpr bool counts_in_31_bits() const {
    constexpr std::int64_t limit = std::int64_t{1} << 30;
    const auto less = [](std::int64_t a, std::int64_t b) { return a < limit && b < limit && a * b < limit; };
    return less(r, dilation_h) && less(s, dilation_w) && less(p, stride_h) && less(q, stride_w) && less(h, w) &&
           less(h * w, x_pitch()) && less(p, q) && less(p * q, c) && less(n, layout == Layout::nchw ? c * p : p) &&
           less(n, c * p * q / 32);
  }

  // The pool is that along rows, [N, C, H, Q], and then that along columns: the largest of the largest.
  constexpr MaxPool along_rows() const {
    MaxPool pool = *this;
    pool.p = h, pool.r = pool.stride_h = pool.dilation_h = 1, pool.pad_h = 0;
    return pool;
  }
  constexpr MaxPool along_columns() const {
    MaxPool pool = *this;
    pool.w = q, pool.s = pool.stride_w = pool.dilation_w = 1, pool.pad_w = 0;
    pool.x_channels = 0;
    return pool;
  }
  // Whether that is faster, R + S loads in the place of R S for a tensor that is written and read again
  // (docs/log/89-pools-alone.md).
  constexpr bool is_faster_apart() const {
    return r > 1 && s > 1 && r * s >= 25 && along_rows().counts_in_31_bits() && along_columns().counts_in_31_bits();
  }
};

// The pool of a problem with `max_pool`: of what its convolution has written.
constexpr MaxPool max_pool_of(const ConvProblem& problem) {
  MaxPool pool;
  pool.n = problem.n, pool.c = problem.k, pool.h = problem.p(), pool.w = problem.q();
  pool.p = problem.y_p(), pool.q = problem.y_q();
  pool.r = pool.s = pool.stride_h = pool.stride_w = 2;
  pool.dtype = problem.dtype, pool.layout = problem.layout;
  return pool;
}

}  // namespace fastconv
