// What the planner knows about an algorithm: what it is, what it can serve, what it would cost. No kernels here:
// those are reached through csrc/core/kernels.h, so that planning needs neither torch nor CUDA.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <utility>

#include "core/device_info.h"
#include "core/kernel_plan.h"
#include "core/problem.h"
#include "core/text.h"

namespace fastconv {

// The answer of supports(): yes, or the reason why not. `code` is for programs ("stride", "dtype", ...), `reason` for
// people ("stride is 2x2; winograd_f4 needs 1x1").
struct Support {
  bool ok = true;
  std::string code;
  std::string reason;

  static Support yes() { return {}; }
  template <typename... Parts>
  static Support no(std::string code, const Parts&... reason) {
    return {false, std::move(code), text_of(reason...)};
  }
};

template <typename Plan>
std::shared_ptr<const KernelPlan> keep_plan(Plan plan) {
  return std::make_shared<const KernelPlanOf<Plan>>(std::move(plan));
}

struct ConvPlan {
  std::string config;               // printable: tile shapes, chunks, ...
  std::size_t workspace_bytes = 0;  // from torch's allocator, per call
  double cost_us = 0.0;             // estimate: only the order of two plans matters
  std::shared_ptr<const KernelPlan> kernel_plan = nullptr;
  // The caller brings NCHW input into NHWC before the kernels run; evaluate() adds the memory and time of that to what
  // plan() answers.
  bool reads_nhwc = false;
  // The plan is for the convolution without its max-pool, which the caller runs after it; evaluate() adds its time.
  bool pools_apart = false;
  // Likewise without its shuffle.
  bool shuffles_apart = false;
  // Likewise without an affine input or ranges of channels: the caller norms the input first, or copies it into a dense
  // tensor, or the output from one.
  bool norms_apart = false, copies_x = false, copies_y = false;
  // Likewise without a gated activation (is_gated) and a residual after it: passes over y, which must then be dense.
  bool activates_apart = false;
  double packing_us = 0.0;  // of cost_us: ConvProblem::packs
};

// How the weight is laid out for an algorithm. bytes == 0: it reads the plain contiguous [K, C/groups, R, S] weight.
// RULE: depends on the weight's shape, groups, dtype and accuracy class alone, never on N, H, W, layout or epilogue,
// so that one packed weight serves every input.
struct PackedWeight {
  std::size_t bytes = 0;
};

// For an algorithm that reads the plain weight.
PackedWeight plain_weight(const ConvProblem& problem, const DeviceInfo& device);

// How independent errors of a Winograd tile's products grow: its matrices say so (core/roundoffs.h has the numbers).
struct TransformNoise {
  double gain = 1.0;             // on data whose neighbours are of like size, all outputs of a tile taken together
  double noisiest_output = 1.0;  // over `gain`: the error of the output of a tile that errs most
  double noisiest_pixel = 1.0;   // over `gain`, at most: where one pixel outweighs its tile
};

// How outputs are computed: one by one, as sums of products (the defaults), or in tiles, which share rounding errors.
struct Arithmetic {
  int tile_rows = 1, tile_columns = 1;  // outputs of a tile; the first begins at output 0, 0
  TransformNoise noise = {};            // none: all of them are 1
  bool exact = true;                    // on small integers: no constant is irrational
};

// What the kernels do themselves. For anything else supports() and plan() never see it, and the planner adds a pass.
struct Abilities {
  bool pool = false;    // ConvProblem::max_pool
  bool affine = false;  // input_affine
  bool ranges = false;  // x_channels, y_channels
  bool gated = false;   // activations that are is_gated(): of the CUDA kernels
  bool shuffle = false;
};

struct Algorithm {
  const char* name;
  const char* family;   // direct, gemm, winograd, library
  const char* summary;  // one line
  int source = 0;       // published system it comes from (docs/concepts/algorithms.md); 0: ours or PyTorch
  bool on_cpu = true, on_cuda = true;
  // The expected error before the result is rounded to its type (core/roundoffs.h); 0: the class is not offered. What
  // `auto` admits is decided by it, and tests hold the algorithm to it.
  double (*roundoffs)(const ConvProblem& problem, const DeviceInfo& device);
  Support (*supports)(const ConvProblem& problem, const DeviceInfo& device);  // may assume supports_common() is yes
  ConvPlan (*plan)(const ConvProblem& problem, const DeviceInfo& device);     // requires supports().ok
  PackedWeight (*packed_weight)(const ConvProblem& problem, const DeviceInfo& device) = plain_weight;
  Arithmetic arithmetic = {};  // tests take their bounds from it
  Abilities abilities = {};
};

// An algorithm's weight gradient. `problem` is that of the forward convolution, without epilogue.
struct WeightGradient {
  const char* name;                                                           // of the algorithm
  double (*roundoffs)(const ConvProblem& problem, const DeviceInfo& device);  // as Algorithm's
  Support (*supports)(const ConvProblem& problem, const DeviceInfo& device);
  // Requires supports().ok. With reads_nhwc the workspace ends in nhwc_operand_bytes(), free until both operands have
  // been read, and the time has that of the copies: whoever runs it brings NCHW operands there.
  ConvPlan (*plan)(const ConvProblem& problem, const DeviceInfo& device);
};

}  // namespace fastconv
