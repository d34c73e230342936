// The weight gradient.
#include "plan/gradients.h"

#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "plan/measured.h"
#include "plan/registry.h"
#include "plan/rules.h"

namespace fastconv {

#define FASTCONV_WEIGHT_GRADIENT(NAME)         \
  namespace algos::NAME {                      \
  extern const WeightGradient weight_gradient; \
  }
#include "plan/weight_gradients.def"
FASTCONV_WEIGHT_GRADIENT(torch)  // its cost; it runs in Python, as everything else that PyTorch computes
#undef FASTCONV_WEIGHT_GRADIENT

namespace algos::torch {
extern const Algorithm algorithm;
}

const std::vector<const WeightGradient*>& weight_gradient_algorithms() {
#define FASTCONV_WEIGHT_GRADIENT(NAME) &algos::NAME::weight_gradient,
  static const std::vector<const WeightGradient*> list{
#include "plan/weight_gradients.def"
      FASTCONV_WEIGHT_GRADIENT(torch)};
#undef FASTCONV_WEIGHT_GRADIENT
  return list;
}

namespace {

// PyTorch's error over that of a direct sum. In FP32 arithmetic cuDNN's search takes Winograd's gradient where it is
// the fastest, from C K of some 4096 on, with tiles so large that 5x5 filters lose half of their digits: so many
// roundoffs for the root of N P Q, where a direct sum in blocks errs 8 (docs/log/132-the-rest-of-fef9e29.md).
double error_of_torch(const ConvProblem& problem, const DeviceInfo& device) {
  const bool is_fp32 = problem.accuracy == AccuracyClass::ieee || problem.accuracy == AccuracyClass::fp32;
  const bool is_plain = problem.stride_h == 1 && problem.stride_w == 1 && problem.dilation_h == 1 &&
                        problem.dilation_w == 1 && problem.groups == 1 && problem.r == problem.s;
  const double searched = problem.r == 3 ? 0.67 : problem.r == 5 ? 160.0 : 0.0;
  if (device.type != DeviceType::cuda || !is_fp32 || !is_plain || problem.c * problem.k < 4096) return 1.0;
  return std::hypot(searched * std::sqrt(static_cast<double>(problem.n * problem.p() * problem.q())) / 8.0, 1.0);
}

}  // namespace

WeightGradientChoice evaluate(const WeightGradient& algorithm, const ConvProblem& problem, const DeviceInfo& device) {
  const WeightGradient& torch = algos::torch::weight_gradient;
  if (&algorithm == &torch) {
    const double error = error_of_torch(problem, device);
    return {&torch, Support::yes(), torch.plan(problem, device), error, error <= error_limit(problem, device)};
  }
  WeightGradientChoice choice{&algorithm, supports_common(find_algorithm(algorithm.name), problem, device), {}};
  if (choice.support.ok) choice.support = algorithm.supports(problem, device);
  if (choice.support.ok) {
    choice.plan = algorithm.plan(problem, device);
    choice.support = within_workspace(algorithm.name, choice.plan, problem);
  }
  if (choice.support.ok) {
    const double roundoffs = algorithm.roundoffs(problem, device);
    choice.expected_error = relative_error(roundoffs, torch.roundoffs(problem, device), problem.accuracy);
    choice.auto_eligible = choice.expected_error <= error_limit(problem, device);
  }
  return choice;
}

std::vector<WeightGradientChoice> weight_gradients(const ConvProblem& problem, const DeviceInfo& device) {
  std::vector<WeightGradientChoice> found;
  for (const WeightGradient* algorithm : weight_gradient_algorithms()) {
    found.push_back(evaluate(*algorithm, problem, device));
  }
  return found;
}

namespace {

std::optional<WeightGradientChoice> measured_weight_gradient(const ConvProblem& problem, const DeviceInfo& device) {
  const std::string found = find_measured(Pass::backward_weight, problem, device);
  for (const WeightGradient* algorithm : weight_gradient_algorithms()) {
    if (found != algorithm->name) continue;
    WeightGradientChoice choice = evaluate(*algorithm, problem, device);
    if (!choice.auto_eligible) break;
    if (algorithm == &algos::torch::weight_gradient) choice = {nullptr, measured_support(), {}};
    choice.measured = true;
    return choice;
  }
  return std::nullopt;
}

WeightGradientChoice choose_by_cost(const std::string& name, const ConvProblem& problem, const DeviceInfo& device) {
  std::vector<WeightGradientChoice> found = weight_gradients(problem, device);
  const double torch_us = found.back().plan.cost_us;
  // Where PyTorch's is beyond the class, it computes what no other algorithm does.
  double min_us = found.back().auto_eligible ? torch_us : std::numeric_limits<double>::infinity();
  found.pop_back();
  WeightGradientChoice choice;
  for (WeightGradientChoice& candidate : found) {
    if (candidate.support.ok && !candidate.auto_eligible && (name == "auto" || problem.limits.max_error > 0.0)) {
      candidate.support =
          too_inaccurate(candidate.algorithm->name, candidate.expected_error, error_limit(problem, device));
    }
    if (candidate.support.ok) {
      candidate.gain_us = torch_us - candidate.plan.cost_us;
      if (name == candidate.algorithm->name) return candidate;
      if (candidate.plan.cost_us < min_us) {
        min_us = candidate.plan.cost_us;
        choice = std::move(candidate);
        continue;
      }
      candidate.support = Support::no("cost", "PyTorch's gradient is estimated to be faster");
    }
    // "Too slow" is the more informative reason than "does not fit".
    if (choice.algorithm == nullptr && choice.support.code != "cost") choice.support = candidate.support;
  }
  return choice;
}

}  // namespace

Support measured_support() { return Support::no("measured", "PyTorch's gradient was measured to be the fastest"); }

WeightGradientChoice choose_weight_gradient(const std::string& name, const ConvProblem& problem,
                                            const DeviceInfo& device) {
  if (name == "torch") return {nullptr, Support::no("algorithm", "PyTorch's own convolution was asked for"), {}};
  if (name == "auto") {
    if (std::optional<WeightGradientChoice> choice = measured_weight_gradient(problem, device)) return *choice;
  }
  return choose_by_cost(name, problem, device);
}

WeightGradientChoice choose_weight_gradient_by_cost(const ConvProblem& problem, const DeviceInfo& device) {
  return choose_by_cost("auto", problem, device);
}

WeightGradientChoice choose_own_weight_gradient(const std::string& name, const ConvProblem& problem,
                                                const DeviceInfo& device) {
  WeightGradientChoice choice = choose_weight_gradient(name, problem, device);
  if (choice.algorithm != nullptr || name != "auto") return choice;
  return choose_weight_gradient("implicit_gemm", problem, device);  // whose gradient serves the most
}

namespace {

// What our way takes of the host over `nn.Conv2d`'s, in one layer and step (docs/log/128-training-step.md).
constexpr double way_us = 25.0;
// An H100's host takes twice as long for the passes of a layer and what stands around it. Where PyTorch's convolutions
// are done sooner the GPU waits for the host, and nothing of a gain is seen (docs/log/130-measured.md).
constexpr double awaited_us = 300.0;

}  // namespace

bool is_left_to_torch(const std::string& name, const ConvProblem& problem, const DeviceInfo& device,
                      std::optional<Pass> without) {
  ConvProblem trained = problem;  // its weight is another one in the next call
  trained.packs = true;
  const Algorithm& torch = algos::torch::algorithm;
  double gain_us = 0.0;
  bool is_torch = true, is_measured = false;
  const auto count = [&](bool is_own, bool measured, double gain) {
    is_torch &= !is_own, is_measured |= measured, gain_us += is_own ? gain : 0.0;
  };
  const WeightGradientChoice weight = choose_weight_gradient(name, problem, device);
  count(weight.algorithm != nullptr, weight.measured, weight.gain_us);
  if (without != Pass::forward) {
    const Candidate forward = choose(name, trained, device);
    count(forward.algorithm != &torch, forward.measured, torch.plan(problem, device).cost_us - forward.plan.cost_us);
  }
  if (without != Pass::backward_input) {
    const InputGradientChoice input = choose_input_gradient(name, problem, device);
    count(input.method != InputGradientMethod::torch, input.measured, input.gain_us);
  }
  if (is_torch) return true;
  // What was measured is not to be weighed by an estimate.
  if (name != "auto" || is_measured) return false;
  if (gain_us < way_us) return true;
  if (device.type == DeviceType::cpu) return false;
  double torch_us = algos::torch::weight_gradient.plan(problem, device).cost_us;
  if (without != Pass::forward) torch_us += torch.plan(problem, device).cost_us;
  if (without != Pass::backward_input) torch_us += torch_input_gradient_us(problem, device);
  return torch_us < awaited_us;
}

}  // namespace fastconv
