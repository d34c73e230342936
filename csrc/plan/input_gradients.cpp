// The input gradient.
#include <algorithm>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "core/cost.h"
#include "core/few_filters.h"
#include "core/library_times.h"
#include "plan/gradient_parts.h"
#include "plan/gradients.h"
#include "plan/measured.h"
#include "plan/registry.h"

namespace fastconv {

namespace algos::torch {
extern const Algorithm algorithm;
}

const char* name_of(InputGradientMethod method) {
  switch (method) {
    case InputGradientMethod::torch: return "torch";
    case InputGradientMethod::phases: return "phases";
    case InputGradientMethod::together: return "together";
  }
  return "?";
}

bool may_be_together(const ConvProblem& problem) {
  return problem.stride_h * problem.stride_w != 1 && problem.dilation_h == 1 && problem.dilation_w == 1 &&
         problem.groups == 1;
}

namespace {

constexpr std::int64_t min_filters = 8;     // with fewer, most of a phase's tiles would be nearly empty
constexpr std::int64_t many_channels = 64;  // with which a phase has enough filters to be fast alone

// Whether the gradient's convolution, whose filters are the forward channels, is one of direct_tiled's kernel for few
// filters, where that beats PyTorch: 3x3, FP32.
bool is_few_filters(const ConvProblem& problem) {
  ConvProblem gradient = problem;
  std::swap(gradient.k, gradient.c);
  return problem.dtype == DType::f32 && problem.r == 3 && is_for_few_filters(gradient);
}

// What flipping the filter takes of each call. On a GPU with packing it: launches, and passes over the filter far from
// the memory's rate, measured on an H200. On a CPU as long as packing it does.
double flipping_us(const ConvProblem& problem, const DeviceInfo& device) {
  const double bytes = static_cast<double>(problem.k * problem.c_per_group() * problem.r * problem.s) *
                       static_cast<double>(size_of(problem.dtype));
  if (device.type == DeviceType::cpu) return packing_us(problem, bytes, device);
  return problem.r * problem.s == 1 ? 5.0 + memory_us(7.0 * bytes, 1.0, device)
                                    : 8.0 + memory_us(14.0 * bytes, 1.0, device);
}

// Phases are put in their places by strided copies (csrc/ops/input_gradient.cpp), which move 16 bytes at a time, or an
// element where channels are no whole 16 bytes: so many in a clock of a multiprocessor (docs/log/49: 26 MB in 11 us).
double weaving_us(const InputGradientChoice& choice, const ConvProblem& problem, const DeviceInfo& device) {
  if (problem.stride_h * problem.stride_w == 1 || choice.convolution.shuffles()) return 0.0;
  const auto size = static_cast<std::int64_t>(size_of(problem.dtype));
  const bool in_pieces = problem.layout == Layout::nhwc && problem.c * size % 16 == 0;
  const double bytes = static_cast<double>(problem.n * problem.c * problem.h * problem.w * size);
  if (device.type == DeviceType::cpu) return memory_us(2.0 * bytes, 1.0, device);
  const double moves = bytes / (in_pieces ? 16.0 : static_cast<double>(size));
  return launch_us * choice.convolutions +
         std::max(memory_us(2.0 * bytes, 0.8, device), clocks_us(moves / (0.73 * device.processors), device));
}

// What our convolutions take, each of which takes as long as the one with the most taps.
double own_us(const InputGradientChoice& choice, double convolution_us, const ConvProblem& problem,
              const DeviceInfo& device) {
  return choice.convolutions * convolution_us + flipping_us(problem, device) + weaving_us(choice, problem, device);
}

// What PyTorch's gradient takes, beside our convolutions as they were chosen; on the CPU as long as the forward pass.
double torch_us(const InputGradientChoice& choice, const Candidate& own, const ConvProblem& problem,
                const DeviceInfo& device) {
  const Algorithm& torch = algos::torch::algorithm;
  if (device.type == DeviceType::cpu) return torch.plan(problem, device).cost_us;
  const algos::torch::SameConvolutions same{choice.convolutions * torch.plan(choice.convolution, device).cost_us,
                                            weaving_us(choice, problem, device), own.algorithm == &torch};
  return algos::torch::input_gradient_us(problem, same, device);
}

// What one matrix product with the filter as it lies takes, which for the flipped one takes `convolution_us`.
double product_us(double convolution_us, double torch_us, const ConvProblem& problem, const DeviceInfo& device) {
  if (device.type == DeviceType::cpu) return convolution_us;
  return algos::im2col_gemm::input_product_us(problem, torch_us, convolution_us, device);
}

// Sets what is gained, and the algorithm where that is a matrix product; returns whether PyTorch's is taken.
bool torch_is_faster(InputGradientChoice& choice, const ConvProblem& problem, const DeviceInfo& device) {
  constexpr double never = std::numeric_limits<double>::infinity();
  const Candidate own = choose("auto", choice.convolution, device);
  // What would be a product convolves nothing (gradient_parts.h), whatever that would take.
  const bool convolves = !is_product_with_filter(own.algorithm->name, problem, device.type);
  const double of_convolutions = convolves ? own_us(choice, own.plan.cost_us, problem, device) : never;
  const double of_torch = torch_us(choice, own, problem, device);
  double of_product = never;
  if (is_product_with_filter(product_algorithm, problem, device.type)) {
    const Candidate product = evaluate(find_algorithm(product_algorithm), choice.convolution, device);
    if (product.auto_eligible) of_product = product_us(product.plan.cost_us, of_torch, problem, device);
  }
  const double of_ours = std::min(of_convolutions, of_product);
  choice.gain_us = of_torch - of_ours;
  if (of_ours >= preference(algos::torch::algorithm, device) * of_torch) return true;
  if (of_product < of_convolutions) choice.algorithm = product_algorithm;
  return false;
}

Support input_gradient_support(const std::string& name, const ConvProblem& problem, const DeviceInfo& device) {
  if (name == "torch") return Support::no("algorithm", "PyTorch's own convolution was asked for");
  if (problem.output_numel() == 0 || problem.k * problem.c_per_group() * problem.r * problem.s == 0) {
    return Support::no("empty", "there is nothing to compute");
  }
  if (problem.dtype == DType::other) return Support::no("dtype", "the dtype is not float32, float16 or bfloat16");
  if (name != "auto") return Support::yes();
  if (device.type == DeviceType::cuda) {
    const bool few = problem.c_per_group() < min_filters && !is_few_filters(problem);
    if (problem.layout == Layout::nhwc || (problem.dtype == DType::f32 && !few)) return Support::yes();
    return Support::no("layout", "of half types and of fewer than ", min_filters,
                       " channels a group ours was measured in NHWC alone; PyTorch's is taken in NCHW");
  }
  if (problem.c_per_group() < min_filters) {
    return Support::no("filters", "C/groups is ", problem.c_per_group(), "; below ", min_filters,
                       " filters PyTorch's gradient is faster on a CPU");
  }
  const bool unit = problem.stride_h == 1 && problem.stride_w == 1;
  if (!unit) return Support::no("stride", "the stride is not 1; PyTorch's gradient is faster on a CPU");
  if (problem.dilation_h * (problem.r - 1) < problem.pad_h || problem.dilation_w * (problem.s - 1) < problem.pad_w) {
    return Support::no("padding", "the padding exceeds dilation * (kernel - 1)");
  }
  return Support::yes();
}

// Whether implicit_gemm writes all phases where they belong.
bool is_shuffled(const ConvProblem& problem, const DeviceInfo& device) {
  const ConvProblem made = gradient_convolution(problem, all_phases(problem), device.type);
  if (!made.shuffles()) return false;
  const Candidate candidate = evaluate(find_algorithm("implicit_gemm"), made, device);
  return candidate.support.ok && candidate.auto_eligible && !candidate.plan.shuffles_apart;
}

// Whether the phases are the filters of one convolution, which reads the output's gradient once: where its kernels
// shuffle them; or it multiplies zeros, but has at most twice the taps of the convolution itself, or a phase would have
// too few filters for any tile.
bool is_together(const ConvProblem& problem, const DeviceInfo& device) {
  if (!may_be_together(problem)) return false;
  if (is_shuffled(problem, device)) return true;
  if (problem.c > many_channels) return false;
  const std::int64_t rows = GradientDimension::height(problem).together().taps.count;
  const std::int64_t columns = GradientDimension::width(problem).together().taps.count;
  return rows * columns * problem.stride_h * problem.stride_w <= 2 * problem.r * problem.s || problem.c < min_filters;
}

// By our convolutions, where `name` asks for them and there is something to compute.
InputGradientChoice by_convolutions(const std::string& name, InputGradientMethod method, const ConvProblem& problem,
                                    const DeviceInfo& device) {
  InputGradientChoice choice{InputGradientMethod::torch, input_gradient_support(name, problem, device), problem};
  if (!choice.support.ok) return choice;
  const GradientConvolutions made =
      gradient_convolutions(problem, method == InputGradientMethod::together, device.type);
  choice.convolutions = made.count;
  if (made.count == 0) {
    choice.support = Support::no("empty", "the filter reaches padding alone");
    return choice;
  }
  choice.method = method;
  choice.convolution = made.different.front();
  return choice;
}

InputGradientChoice choose_by_cost(const std::string& name, const ConvProblem& problem, const DeviceInfo& device) {
  const auto method = is_together(problem, device) ? InputGradientMethod::together : InputGradientMethod::phases;
  InputGradientChoice choice = by_convolutions(name, method, problem, device);
  if (name == "auto" && choice.support.ok && torch_is_faster(choice, problem, device)) {
    choice.method = InputGradientMethod::torch;
    choice.support = Support::no("cost", "PyTorch's gradient is estimated to be faster");
  }
  return choice;
}

// The choices of `auto` for each convolution, if they are not all the same; else the one that they are.
std::string own_choices(const std::vector<ConvProblem>& convolutions, const DeviceInfo& device) {
  std::string common;
  for (const ConvProblem& convolution : convolutions) {
    const std::string name = choose("auto", convolution, device).algorithm->name;
    if (!common.empty() && name != common) return "auto";
    common = name;
  }
  return common;
}

// By one algorithm, or by the choices of `auto`. choice: without it.
InputGradientCandidate evaluate(InputGradientChoice choice, const std::string& name,
                                const std::vector<ConvProblem>& convolutions, const ConvProblem& problem,
                                const DeviceInfo& device) {
  choice.algorithm = name;
  InputGradientCandidate result{std::move(choice), "", 0, 0.0, true, 0.0};
  for (const ConvProblem& convolution : convolutions) {
    Candidate one =
        name == "auto" ? choose(name, convolution, device) : evaluate(find_algorithm(name), convolution, device);
    if (!one.support.ok) {
      result.choice.support = one.support;
      result.auto_eligible = false;
      return result;
    }
    if (&convolution == &convolutions.front()) {
      result.config = one.plan.config;
      result.cost_us = is_product_with_filter(name, problem, device.type)
                           ? product_us(one.plan.cost_us, torch_input_gradient_us(problem, device), problem, device)
                           : own_us(result.choice, one.plan.cost_us, problem, device);
    }
    result.workspace_bytes = std::max(result.workspace_bytes, one.plan.workspace_bytes);
    result.expected_error = std::max(result.expected_error, one.expected_error);
    result.auto_eligible = result.auto_eligible && one.auto_eligible;
  }
  return result;
}

std::optional<InputGradientChoice> measured_input_gradient(const ConvProblem& problem, const DeviceInfo& device) {
  const std::string found = find_measured(Pass::backward_input, problem, device);
  if (found.empty()) return std::nullopt;
  for (InputGradientCandidate& candidate : input_gradients(problem, device)) {
    if (name_of(candidate.choice) != found || !candidate.auto_eligible) continue;
    candidate.choice.measured = true;
    if (candidate.choice.method == InputGradientMethod::torch) candidate.choice.support = measured_support();
    return candidate.choice;
  }
  return std::nullopt;
}

}  // namespace

std::string name_of(const InputGradientChoice& choice) {
  const std::string method = name_of(choice.method);
  return choice.method == InputGradientMethod::torch ? method : method + " " + choice.algorithm;
}

double torch_input_gradient_us(const ConvProblem& problem, const DeviceInfo& device) {
  const InputGradientChoice ours = choose_by_cost("implicit_gemm", problem, device);  // any name of ours
  return ours.support.ok ? torch_us(ours, choose("auto", ours.convolution, device), problem, device) : 0.0;
}

std::vector<InputGradientCandidate> input_gradients(const ConvProblem& problem, const DeviceInfo& device) {
  std::vector<InputGradientCandidate> found;
  for (const auto method : {InputGradientMethod::phases, InputGradientMethod::together}) {
    const bool together = method == InputGradientMethod::together;
    if (together && !may_be_together(problem)) continue;
    const InputGradientChoice choice = by_convolutions("implicit_gemm", method, problem, device);  // any name of ours
    if (!choice.support.ok) break;
    const std::vector<ConvProblem> convolutions = gradient_convolutions(problem, together, device.type).different;
    for (const Algorithm* algorithm : algorithms()) {
      found.push_back(evaluate(choice, algorithm->name, convolutions, problem, device));
    }
    if (own_choices(convolutions, device) == "auto") {
      found.push_back(evaluate(choice, "auto", convolutions, problem, device));
    }
  }
  const double cost_us = torch_input_gradient_us(problem, device);
  found.push_back({{InputGradientMethod::torch, Support::yes(), problem}, "", 0, 1.0, true, cost_us});
  return found;
}

InputGradientChoice choose_input_gradient(const std::string& name, const ConvProblem& problem,
                                          const DeviceInfo& device) {
  if (name == "auto") {
    if (std::optional<InputGradientChoice> choice = measured_input_gradient(problem, device)) return *choice;
  }
  return choose_by_cost(name, problem, device);
}

InputGradientChoice choose_input_gradient_by_cost(const ConvProblem& problem, const DeviceInfo& device) {
  InputGradientChoice choice = choose_by_cost("auto", problem, device);
  if (choice.method != InputGradientMethod::torch && choice.algorithm == "auto") {
    const bool together = choice.method == InputGradientMethod::together;
    choice.algorithm = own_choices(gradient_convolutions(problem, together, device.type).different, device);
  }
  return choice;
}

InputGradientChoice choose_own_input_gradient(const std::string& name, const ConvProblem& problem,
                                              const DeviceInfo& device) {
  InputGradientChoice choice = choose_input_gradient(name, problem, device);
  const std::string& code = choice.support.code;
  if (code != "cost" && code != "layout" && code != "measured") return choice;
  return choose_by_cost("implicit_gemm", problem, device);  // any name of ours asks for our convolutions
}

}  // namespace fastconv
