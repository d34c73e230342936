// What the planner knows about an algorithm: what it is, what it can serve, what it would cost. No kernels here:
// those are reached through csrc/core/kernels.h, so that planning needs neither torch nor CUDA.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "core/device_info.h"
#include "core/problem.h"

namespace fastconv {

// The answer of supports(): yes, or the reason why not. `code` is for programs ("stride", "dtype", ...), `reason` for
// people ("stride is 2x2; winograd_f4 needs 1x1").
struct Support {
  bool ok = true;
  std::string code;
  std::string reason;

  static Support yes() { return {}; }
  static Support no(std::string code, std::string reason) { return {false, std::move(code), std::move(reason)}; }
};

struct ConvPlan {
  std::string config;               // printable: tile shapes, chunks, ...
  std::size_t workspace_bytes = 0;  // from torch's allocator, per call
  double cost_us = 0.0;             // estimate: only the order of two plans matters
  // What the algorithm's own kernels need of a plan that takes long to make; ConvArgs::detail brings it to them.
  std::shared_ptr<const void> detail = nullptr;
};

// How the weight is laid out for an algorithm. bytes == 0: it reads the plain contiguous [K, C/groups, R, S] weight.
// RULE: depends on the weight's shape, groups, dtype and accuracy class alone, never on N, H, W, layout or epilogue,
// so that one packed weight serves every input.
struct PackedWeight {
  std::size_t bytes = 0;
};

struct Algorithm {
  const char* name;
  const char* family;   // direct, gemm, winograd, library
  const char* summary;  // one line
  int source;           // published system it comes from (docs/algorithms.md); 0: ours or PyTorch
  bool on_cpu;
  bool on_cuda;
  // Bound on the relative L2 error against float64, as a multiple of PyTorch's own in the same class; 0: the class is
  // not offered. Tests check it; selection never picks an algorithm above auto_error_limit.
  double (*error_multiple)(AccuracyClass accuracy);
  Support (*supports)(const ConvProblem& problem, const DeviceInfo& device);  // may assume supports_common() is yes
  ConvPlan (*plan)(const ConvProblem& problem, const DeviceInfo& device);     // requires supports().ok
  PackedWeight (*packed_weight)(const ConvProblem& problem, const DeviceInfo& device);
  // Class fp32 on CUDA: the relative L2 error in roundoffs of float32 (2^-24), of reductions so short that
  // fp32_error_limit decides. Longer ones hardly add to it. 0: a plain sum's, or less.
  double fp32_roundoffs = 0.0;
};

// An algorithm's weight gradient. `problem` is that of the forward convolution, without epilogue.
struct WeightGradient {
  const char* name;  // of the algorithm
  Support (*supports)(const ConvProblem& problem, const DeviceInfo& device);
  ConvPlan (*plan)(const ConvProblem& problem, const DeviceInfo& device);  // requires supports().ok
};

// `auto` takes an algorithm only if its error is at most this multiple of PyTorch's own error in the class.
inline constexpr double auto_error_limit = 4.0;

// In class fp32 on CUDA also at most this multiple of the error of cuDNN's direct FP32 sum, which PyTorch's own may be
// below (FFT) or above (Winograd): so many roundoffs times the root of the reduction's length (docs/numerics.md).
inline constexpr double fp32_error_limit = 1.5, direct_roundoffs = 0.21;

// For an algorithm that reads the plain weight.
PackedWeight plain_weight(const ConvProblem& problem, const DeviceInfo& device);

// For an algorithm that sums plain products in FP32, in blocks (docs/numerics.md): 4 in the FP32 classes, 2 in half
// precision, where the rounding of the output dominates.
double plain_error_multiple(AccuracyClass accuracy);

}  // namespace fastconv
