// A nearest-neighbour upsampling by integers of a tensor in memory: plain data, no torch, no CUDA.
#pragma once

#include <cstdint>

#include "core/device_info.h"
#include "core/problem.h"

namespace fastconv {

// y[n,c,p,q] = x[n, c, p / scale_h, q / scale_w], in NHWC. By 1 x 1 it is a copy.
struct Upsampling {
  std::int64_t n = 0, c = 0, h = 0, w = 0;      // x [N, C, H, W]
  std::int64_t scale_h = 1, scale_w = 1;        // y [N, C, H scale_h, W scale_w]
  std::int64_t x_channels = 0, y_channels = 0;  // of a pixel in memory: more than C where it is a range of channels
  DType dtype = DType::f32;

  bool has_kernels(const DeviceInfo& device) const {
    return device.type == DeviceType::cuda && device.has_kernels && dtype != DType::other && counts_in_31_bits() &&
           is_pytorchs();
  }
  // Whether they fit the kernel: rows, elements of a row, and the threads.
  constexpr bool counts_in_31_bits() const {
    constexpr std::int64_t limit = std::int64_t{1} << 31;
    const auto less = [](std::int64_t a, std::int64_t b) { return a < limit && b < limit && a * b < limit; };
    return less(n, h) && less(w, x_channels) && less(w, scale_w) && less(w * scale_w, y_channels) &&
           less(n * h, w * scale_w * c) && scale_h < limit;
  }

  // PyTorch takes p * (1.0f / scale), rounded, for p / scale: the same pixel where the reciprocal is not rounded down
  // (by 41 it is: PyTorch takes pixel 0 for y's 41), and 2^-24 of the quotient is less than a step.
  constexpr bool is_pytorchs() const { return is_pytorchs(h, scale_h) && is_pytorchs(w, scale_w); }

 private:
  static constexpr bool is_pytorchs(std::int64_t size, std::int64_t scale) {
    constexpr std::int64_t limit = std::int64_t{1} << 22;
    if (scale >= limit || size * scale >= limit) return false;
    return static_cast<double>(static_cast<float>(1.0 / static_cast<double>(scale))) * static_cast<double>(scale) >=
           1.0;
  }
};

}  // namespace fastconv
