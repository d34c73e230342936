// The terms that the algorithms' cost models are written in: what a device needs for bytes, products and clocks, at the
// share of its sustained rates (DeviceInfo) that a kernel was measured to reach. All in microseconds.
#pragma once

#include <algorithm>
#include <cmath>

#include "core/device_info.h"
#include "core/integers.h"
#include "core/problem.h"

namespace fastconv {

// A kernel behind another one on the same stream.
constexpr double launch_us = 3.0;

inline double memory_us(double bytes, double share, const DeviceInfo& device) {
  return 1e6 * bytes / (share * device.bandwidth_bytes_per_s);
}

// FP32 arithmetic: FFMA on a GPU, vectors on a CPU.
inline double fp32_us(double flops, double share, const DeviceInfo& device) {
  return 1e6 * flops / (share * device.fp32_flops_per_s);
}

// Tensor cores: 16-bit operands, FP32 accumulation.
inline double tensor_us(double flops, double share, const DeviceInfo& device) {
  return 1e6 * flops / (share * device.fp16_tensor_flops_per_s);
}

// Clocks of a multiprocessor.
inline double clocks_us(double clocks, const DeviceInfo& device) { return 1e6 * clocks / device.clock_hz; }

// Blocks in waves of so many at once: the last wave takes as long as a full one.
inline double in_whole_waves(double blocks, double at_once) { return std::ceil(blocks / at_once) * at_once; }

// Bringing a tensor of `bytes` from NCHW to NHWC: a launch, reading and writing.
inline double transposition_us(double bytes, const DeviceInfo& device) {
  return launch_us + memory_us(2.0 * bytes, 0.9, device);
}

// A 2x2 max-pool of what lies in memory: a launch, reading all and writing a quarter.
inline double max_pool_us(const ConvProblem& problem, const DeviceInfo& device) {
  const double elements = static_cast<double>(problem.output_numel() + problem.y_numel());
  return launch_us + memory_us(elements * static_cast<double>(size_of(problem.dtype)), 0.9, device);
}

// A launch that reads `from` bytes and writes `to`: the passes around kernels without ranges of channels or affine
// inputs.
inline double pass_us(double from, double to, const DeviceInfo& device) {
  return launch_us + memory_us(from + to, 0.8, device);
}

// NCHW output whose rows are no whole sectors of 32 bytes: those at the ends of a row's pieces are written in parts, by
// several blocks. The L2 cache puts them together, if an image fits it: beyond 40 MB a first layer of 64 filters took 5
// to 10 times as long as its bytes where rows have 570 values (docs/log/136-measured-again.md), and no longer than they
// do where rows have 512 (docs/log/138-interrupted.md).
inline bool in_parts_of_sectors(const ConvProblem& problem) {
  const std::int64_t row = problem.q() * static_cast<std::int64_t>(size_of(problem.dtype));
  return problem.layout == Layout::nchw && row % 32 != 0 && static_cast<double>(problem.k * problem.p() * row) > 40e6;
}

// Its factor on the time of a kernel whose tiles have pieces of rows.
inline double parts_of_sectors(const ConvProblem& problem) { return in_parts_of_sectors(problem) ? 6.0 : 1.0; }

// Packing a weight: a launch that reads it and writes `packed_bytes`, of an algorithm that packs. A CPU's thread comes
// to a quarter of the memory's rate: what it writes lies in as many places as a tile has values, and was mapped for the
// call.
inline double packing_us(const ConvProblem& problem, double packed_bytes, const DeviceInfo& device) {
  if (packed_bytes == 0.0) return 0.0;
  const double bytes = static_cast<double>(problem.k * problem.c_per_group() * problem.r * problem.s) *
                       static_cast<double>(size_of(problem.dtype));
  return device.type == DeviceType::cuda
             ? pass_us(bytes, packed_bytes, device)
             : memory_us(bytes + packed_bytes, 0.25 * std::min(device.processors, 4), device);
}

// A function of PyTorch's of each element, behind a convolution: `bytes` read and written.
inline double elementwise_us(double bytes, const DeviceInfo& device) { return 2.0 + memory_us(bytes, 1.0, device); }

// Reading a residual in a kernel's epilogue, which waits for it: so many times what its bytes take of the memory, as
// measured (docs/log/142-residuals-ahead.md).
inline double residual_us(const ConvProblem& problem, double passes, const DeviceInfo& device) {
  if (!problem.has_residual()) return 0.0;
  const double elements = static_cast<double>(problem.output_numel());
  return memory_us(passes * elements * static_cast<double>(size_of(problem.dtype)), 1.0, device);
}

// A CPU function's shares with each instruction set. `generic` takes AVX2's, without measurements.
template <typename Rates>
struct CpuRates {
  Rates avx2, avx512;

  constexpr const Rates& of(const DeviceInfo& device) const {
    return device.instruction_set == InstructionSet::avx512 ? avx512 : avx2;
  }
};

// A CPU function for the tests, never the fastest.
inline double reference_us(const ConvProblem& problem, const DeviceInfo& device) {
  return 15.0 + 1e6 * problem.direct_flops() / (2e9 * device.processors);
}

// The share of an NHWC input that is read if a kernel has fewer taps than its stride, between 0 and 1. Rows without a
// tap are not read, nor are pixels without one in the other rows, as far as memory's granularity of 256 bytes allows.
inline double touched_share(const ConvProblem& problem) {
  constexpr std::int64_t piece = 256;
  const std::int64_t pixel = std::max<std::int64_t>(problem.c * static_cast<std::int64_t>(size_of(problem.dtype)), 1);
  const double pieces = static_cast<double>(round_up(pixel, piece)) / static_cast<double>(pixel);
  const double rows = static_cast<double>(problem.r) / static_cast<double>(problem.stride_h);
  const double columns = pieces * static_cast<double>(problem.s) / static_cast<double>(problem.stride_w);
  return std::min(rows, 1.0) * std::min(columns, 1.0);
}

}  // namespace fastconv
