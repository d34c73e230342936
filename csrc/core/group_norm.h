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

  constexpr std::int64_t element_bytes() const { return dtype == DType::f32 ? 4 : 2; }
  constexpr std::int64_t channels_per_access() const { return 16 / element_bytes(); }
  // Whether it fits the kernels: whole accesses of 16 bytes, a block's threads and shared memory, and what is counted
  // with 31 bits.
  bool has_kernels(const DeviceInfo& device) const {
    if (device.type != DeviceType::cuda || !device.has_kernels) return false;
    return dtype != DType::other && c <= 4096 && c % channels_per_access() == 0 && n < 65536 &&
           pixels < (std::int64_t{1} << 30) / (c / channels_per_access());
  }
  std::size_t workspace_bytes(const DeviceInfo& device) const;
};

// How three kernels share it out. A chunk is a block's pixels of one image.
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

// How one kernel shares it out where a cluster of blocks has shared memory for a slice of an image: whole groups, whole
// accesses. Each of its blocks keeps a share of the pixels, so that x is read once.
struct GroupNormClusters {
  int blocks = 0;             // of a cluster, a power of two; 0: the three kernels take less time, or nothing fits
  int groups = 1, lanes = 1;  // of a slice; a lane is an access of a pixel
  int rows = 1;               // pixels that a block has threads for
  int unit = 1;               // so many neighbouring channels of an access are of one group, whichever they are
  std::int64_t pixels = 1;    // of a block, at most
  std::int64_t slices = 1;    // of an image

  static constexpr int max_threads = 512, max_lanes = 256, max_blocks = 8;
  static constexpr std::int64_t max_shared_bytes = 200 * 1024;

  constexpr GroupNormClusters() = default;
  constexpr GroupNormClusters(const GroupNorm& norm, const DeviceInfo& device) {
    if (device.compute_capability != 90) return;  // elsewhere the kernel is empty
    double best = separate_us(norm);
    const std::int64_t group_bytes = norm.c / norm.groups * norm.element_bytes();
    for (std::int64_t groups = 1; groups <= norm.groups && groups * group_bytes <= 16 * max_lanes; ++groups) {
      if (norm.groups % groups != 0 || groups * group_bytes % 16 != 0) continue;
      for (int blocks = 1; blocks <= max_blocks; blocks *= 2) {
        GroupNormClusters candidate;
        if (!candidate.divide(norm, groups, blocks)) continue;
        const double us = candidate.estimated_us(norm, device.processors);
        if (us < best) best = us, *this = candidate;
      }
    }
  }

  constexpr bool found() const { return blocks > 0; }
  constexpr int threads() const { return round_up(lanes * rows, 32); }
  constexpr std::int64_t slice_bytes() const { return std::int64_t{16} * lanes; }  // of a pixel
  constexpr std::int64_t shared_bytes(const GroupNorm& norm) const {
    const std::int64_t channels = lanes * norm.channels_per_access(), moments = 2 * sizeof(float);
    const std::int64_t of_threads = rows * (channels / unit), of_groups = (blocks + 1) * groups;
    return pixels * slice_bytes() + (of_threads + of_groups + channels) * moments;  // channels: factor, what is added
  }

 private:
  constexpr bool divide(const GroupNorm& norm, std::int64_t slice_groups, int cluster_blocks) {
    const std::int64_t per_group = norm.c / norm.groups;
    pixels = ceil_div(norm.pixels, std::int64_t{cluster_blocks});
    lanes = static_cast<int>(slice_groups * per_group / norm.channels_per_access());
    if (pixels * slice_bytes() > max_shared_bytes) return false;
    // Two accesses of a thread where they do not make many threads; and as many rows as have the same number of pixels.
    std::int64_t wanted = ceil_div(pixels * lanes, std::int64_t{2});
    wanted = wanted < 128 ? 128 : wanted > max_threads ? max_threads : wanted;
    rows = static_cast<int>(wanted / lanes > 0 ? wanted / lanes : 1);
    rows = static_cast<int>(ceil_div(pixels, ceil_div(pixels, std::int64_t{rows})));
    while (2 * unit <= norm.channels_per_access() && per_group % (2 * unit) == 0) unit *= 2;
    blocks = cluster_blocks, groups = static_cast<int>(slice_groups), slices = norm.groups / slice_groups;
    return shared_bytes(norm) <= max_shared_bytes;
  }

  // Estimates, for choices among these and the three kernels, fitted to an H200 (docs/log/155-shuffles.md): behind what
  // starts and meets, the latter go through some 550 values in a nanosecond in half types and 350 in float32, and a
  // processor through some 8 to 12 KB in a microsecond here; neighbouring bytes of a pixel that are few share sectors
  // and pages with other blocks'; a block that leaves no room for a second one is alone in waiting. One launch is worth
  // a twelfth: to the host it is a third of three.
  static constexpr double separate_us(const GroupNorm& norm) {
    const double values = static_cast<double>(norm.n * norm.pixels * norm.c);
    return 6.0 + values * (norm.element_bytes() == 2 ? 1.85e-6 : 2.8e-6);
  }
  constexpr double estimated_us(const GroupNorm& norm, int processors) const {
    const std::int64_t grid = norm.n * slices * blocks, rounds = ceil_div(grid, std::int64_t{processors});
    const bool alone = 2 * shared_bytes(norm) > max_shared_bytes;
    double us = 4.0;
    for (int i = 1; i < blocks; i *= 2) us += i == 1 ? 0.4 : 0.1;
    const double kilobytes = static_cast<double>(rounds * pixels * slice_bytes()) / 1024.0;
    const double rate = norm.element_bytes() == 2 ? 0.12 : 0.08;
    us += rate * kilobytes * (1.0 + 32.0 / static_cast<double>(slice_bytes())) * (alone ? 1.15 : 1.0);
    return us / 1.09;
  }
};

inline std::size_t GroupNorm::workspace_bytes(const DeviceInfo& device) const {
  if (GroupNormClusters(*this, device).found()) return 0;
  return GroupNormPlan(*this, device.processors).workspace_bytes(*this);
}

}  // namespace fastconv
