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
  ConvPlan plan;          // meaningful if support.ok
  bool auto_eligible;     // support.ok, and accurate enough for `auto`
  bool measured = false;  // chosen because it was measured to be the fastest
};

Candidate evaluate(const Algorithm& algorithm, const ConvProblem& problem, const DeviceInfo& device);
std::vector<Candidate> candidates(const ConvProblem& problem, const DeviceInfo& device);

// The algorithm that runs. `name` is "auto" (the eligible one that was measured to be the fastest, else the cheapest;
// PyTorch's own is always eligible) or a registry name, which throws Unsupported with the reason if it does not fit.
Candidate choose(const std::string& name, const ConvProblem& problem, const DeviceInfo& device);

// What computes a weight gradient. `algorithm` is null if PyTorch does, for the reason in `support`.
struct WeightGradientChoice {
  const WeightGradient* algorithm = nullptr;
  Support support;
  ConvPlan plan;  // meaningful if support.ok
};

// `name` is what the forward convolution was asked for: "torch" asks for PyTorch's gradient, an algorithm that has one
// for its own where that fits; anything else takes what is estimated to be faster.
WeightGradientChoice choose_weight_gradient(const std::string& name, const ConvProblem& problem,
                                            const DeviceInfo& device);

}  // namespace fastconv
