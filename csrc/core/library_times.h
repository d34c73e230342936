// What a library's matrix product or convolution takes on a GPU: PyTorch's (algos/torch) and cuBLAS's (im2col_gemm).
#pragma once

#include "core/cost.h"
#include "core/integers.h"

namespace fastconv {

// A launch with a block's waits; its walk over the reduction; the products of whole tiles; input and output read and
// written, conversions included.
struct LibraryTimes {
  double launch;         // us
  double term;           // us for each 1000 terms of the reduction
  double products;       // times their time at the device's sustained rate
  double input, output;  // times their bytes' time at the memory's

  double us(double terms, double products_us, double input_bytes, double output_bytes, const DeviceInfo& device) const {
    return launch + 1e-3 * term * terms + products * products_us +
           memory_us(input * input_bytes + output * output_bytes, 1.0, device);
  }
};

// Products of images in NCHW, one by one: tiles of 128 pixels end with each image. By what factor that exceeds its
// pixels.
inline double image_tiles_factor(const ConvProblem& problem) {
  const std::int64_t pixels = problem.p() * problem.q();
  if (problem.layout == Layout::nhwc || problem.dtype == DType::f32 || pixels == 1) {
    return 1.0;
  }
  return static_cast<double>(ceil_div<std::int64_t>(pixels, 128) * 128) / static_cast<double>(pixels);
}

namespace algos::torch {

// What is known of an input gradient beside its problem: PyTorch's time for the convolutions it is made of, the time to
// interleave them, and whether they are the alternative.
struct SameConvolutions {
  double us, weaving_us;
  bool are_torch;
};
// What PyTorch's input gradient takes on a GPU (algos/torch/algo.cpp).
double input_gradient_us(const ConvProblem& problem, const SameConvolutions& same, const DeviceInfo& device);
// What its weight gradient takes, on either device.
double weight_gradient_us(const ConvProblem& problem, const DeviceInfo& device);

}  // namespace algos::torch

namespace algos::im2col_gemm {

// What an input gradient takes on a GPU as one matrix product with the filter as it lies (im2col_gemm/wgrad/algo.cpp),
// beside PyTorch's time for it, and im2col_gemm's for the convolution with a flipped filter.
double input_product_us(const ConvProblem& problem, double torch_us, double convolution_us, const DeviceInfo& device);

}  // namespace algos::im2col_gemm
}  // namespace fastconv
