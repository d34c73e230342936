// The one list of algorithms, and the choice among them.
#pragma once

#include <string>
#include <vector>

#include "core/algorithm.h"

namespace fastconv {

// Every algorithm, in the order of csrc/plan/algorithms.def.
const std::vector<const Algorithm*>& algorithms();

// Throws InvalidArgument naming the known ones.
const Algorithm& find_algorithm(const std::string& name);

struct Candidate {
  const Algorithm* algorithm;
  Support support;
  ConvPlan plan;                // meaningful if support.ok
  double expected_error = 0.0;  // if support.ok: over PyTorch's
  bool auto_eligible = false;   // support.ok, and accurate enough for `auto`
  bool measured = false;        // chosen because it was measured to be the fastest
  bool unsure = false;          // chosen by its cost, which does not tell it from another's
};

// Of two costs so close, either may be the faster: most are right within 15 %, a few of PyTorch's within 30. On a CPU
// that nobody has measured costs tell nothing at all.
constexpr double close_costs = 1.35;

// The error that an algorithm which offers the problem's class must be expected to make, over PyTorch's own.
double expected_error(const Algorithm& algorithm, const ConvProblem& problem, const DeviceInfo& device);

// The multiple of PyTorch's error up to which `auto` goes. Without a limit of the caller's: 4, the most that a bound on
// PyTorch's accuracy usually leaves; in class fp32 on CUDA 1.5, because FP32 accuracy is what the class promises, and
// split halves keep it without being slower.
double error_limit(const ConvProblem& problem, const DeviceInfo& device);

// The problem that a plan's kernels solve, where passes around them do a part of it.
ConvProblem problem_of_kernels(const ConvPlan& plan, const ConvProblem& asked);

// Adds the workspace and the time of converting NCHW input to the layout that the plan asks for.
ConvPlan with_layout(ConvPlan plan, const ConvProblem& problem, const DeviceInfo& device);

// Adds the time of a separate max-pool pass.
ConvPlan with_pool(ConvPlan plan, const ConvProblem& problem, const DeviceInfo& device);

// The factor on a cost before costs are compared: on CUDA below 1 for PyTorch's own convolution. Costs are right within
// 10 %, so among about equal ones the choice is a lottery, and losing against PyTorch is worse than missing a small
// gain (docs/log/90-choices.md).
double preference(const Algorithm& algorithm, const DeviceInfo& device);

Candidate evaluate(const Algorithm& algorithm, const ConvProblem& problem, const DeviceInfo& device);
std::vector<Candidate> candidates(const ConvProblem& problem, const DeviceInfo& device);

// The algorithm that runs. `name` is "auto" (the eligible one that was measured to be the fastest, else the cheapest;
// PyTorch's own is always eligible) or a registry name, which throws Unsupported with the reason if it does not fit or
// is expected to err by more than the limit that the caller gave.
Candidate choose(const std::string& name, const ConvProblem& problem, const DeviceInfo& device);

// What `auto` is where nothing was measured.
Candidate choose_by_cost(const ConvProblem& problem, const DeviceInfo& device);

}  // namespace fastconv
