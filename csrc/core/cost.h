// The terms that the algorithms' cost models are written in.
#pragma once

#include "core/device_info.h"

namespace fastconv {

// A launch behind another kernel, in us.
constexpr double launch_us = 3.0;

// Of `bytes` through the memory, at so much of its bandwidth, in us.
inline double memory_us(double bytes, double of_bandwidth, const DeviceInfo& device) {
  return 1e6 * bytes / (of_bandwidth * device.bandwidth_bytes_per_s);
}

// Bringing a tensor of `bytes` from NCHW to NHWC: a launch, reading and writing.
inline double transposition_us(double bytes, const DeviceInfo& device) {
  return launch_us + memory_us(2.0 * bytes, 0.9, device);
}

}  // namespace fastconv
