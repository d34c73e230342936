// A group norm with what follows it, of images in NHWC: plain data, no torch, no CUDA.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/device_info.h"
#include "core/integers.h"
#include "core/problem.h"

namespace fastconv {

// y = act((x - mean) / sqrt(variance + epsilon) * weight[c] + bias[c]): mean and variance (of all values, not of one
// less) of each image's groups of C / groups channels, as PyTorch's group_norm.
struct GroupNorm {
  std::int64_t n = 0, pixels = 0, c = 0;  // x, y [N, pixels, C], dense
  std::int64_t groups = 1;                // a divisor of C
  double epsilon = 1e-5;                  // 0 or more
  Activation activation = Activation::none;
  DType dtype = DType::f32;  // of x, y, weight and bias

  std::int64_t channels_per_access() const { return 16 / static_cast<std::int64_t>(size_of(dtype)); }
  // Whether it fits the kernels: whole accesses of 16 bytes, a block's threads and shared memory, and what is counted
  // with 31 bits.
  bool has_kernels(const DeviceInfo& device) const {
    if (device.type != DeviceType::cuda || !device.has_kernels) return false;
    return dtype != DType::other && c <= 4096 && c % channels_per_access() == 0 && n < 65536 &&
           pixels < (std::int64_t{1} << 30) / (c / channels_per_access());
  }
};

// How the kernels share it out. A chunk is a block's pixels of one image.
struct GroupNormPlan {
  int lanes = 1, rows = 1;  // of a block: a lane is an access of a pixel, a row a pixel of so many
  std::int64_t chunks = 1, chunk_pixels = 1;

  static constexpr int block_threads = 256;  // and more where a pixel has more accesses
  static constexpr int blocks_per_processor = 4, min_pixels = 4;

  GroupNormPlan(const GroupNorm& norm, int processors) {
    lanes = static_cast<int>(norm.c / norm.channels_per_access());
    rows = lanes < block_threads ? block_threads / lanes : 1;
    const std::int64_t wanted = ceil_div<std::int64_t>(std::int64_t{blocks_per_processor} * processors, norm.n);
    const std::int64_t least = std::int64_t{rows} * min_pixels;
    const std::int64_t even = ceil_div(norm.pixels, wanted);
    chunk_pixels = even > least ? even : least;
    chunks = ceil_div(norm.pixels, chunk_pixels);
  }

  int threads() const { return round_up(lanes * rows, 32); }
  // Of a chunk's groups: mean, and sum of squared deviations from it. Of the image's channels: mean, factor, and what
  // is added.
  std::size_t moments_bytes(const GroupNorm& norm) const {
    return align_bytes(static_cast<std::size_t>(norm.n * chunks * norm.groups) * 2 * sizeof(float));
  }
  std::size_t workspace_bytes(const GroupNorm& norm) const {
    return moments_bytes(norm) + static_cast<std::size_t>(norm.n * 3 * norm.c) * sizeof(float);
  }
};

}  // namespace fastconv
