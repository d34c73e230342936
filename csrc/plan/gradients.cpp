#include "plan/gradients.h"

#include <algorithm>
#include <string>
#include <utility>

#include "core/cost.h"
#include "core/few_filters.h"
#include "core/library_times.h"
#include "core/roundoffs.h"
#include "plan/gradient_parts.h"
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

WeightGradientChoice evaluate(const WeightGradient& algorithm, const ConvProblem& problem, const DeviceInfo& device) {
  const WeightGradient& torch = algos::torch::weight_gradient;
  if (&algorithm == &torch) return {&torch, Support::yes(), torch.plan(problem, device), 1.0, true};
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

WeightGradientChoice choose_weight_gradient(const std::string& name, const ConvProblem& problem,
                                            const DeviceInfo& device) {
  if (name == "torch") return {nullptr, Support::no("algorithm", "PyTorch's own convolution was asked for"), {}};
  std::vector<WeightGradientChoice> found = weight_gradients(problem, device);
  double min_us = found.back().plan.cost_us;
  found.pop_back();
  WeightGradientChoice choice;
  for (WeightGradientChoice& candidate : found) {
    if (candidate.support.ok && !candidate.auto_eligible && (name == "auto" || problem.limits.max_error > 0.0)) {
      candidate.support =
          too_inaccurate(candidate.algorithm->name, candidate.expected_error, error_limit(problem, device));
    }
    if (candidate.support.ok) {
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

WeightGradientChoice choose_own_weight_gradient(const std::string& name, const ConvProblem& problem,
                                                const DeviceInfo& device) {
  WeightGradientChoice choice = choose_weight_gradient(name, problem, device);
  if (choice.algorithm != nullptr || name != "auto") return choice;
  return choose_weight_gradient("implicit_gemm", problem, device);  // whose gradient serves the most
}

const char* name_of(InputGradientMethod method) {
  switch (method) {
    case InputGradientMethod::torch: return "torch";
    case InputGradientMethod::phases: return "phases";
    case InputGradientMethod::together: return "together";
  }
  return "?";
}

namespace {

constexpr std::int64_t min_filters = 8;     // with fewer, most of a phase's tiles would be nearly empty
constexpr std::int64_t many_channels = 64;  // with which a phase has enough filters to be fast alone

// A dimension's phase with the most taps, and the number of phases.
struct Phases {
  GradientPart largest;
  int count = 0;

  explicit Phases(const GradientDimension& dimension) {
    for (std::int64_t first = 0; first < std::min(dimension.stride, dimension.size); ++first) {
      const GradientPart part = dimension.phase(first);
      if (part.rows == 0) continue;
      ++count;
      if (part.taps.count > largest.taps.count) largest = part;
    }
  }
};

// Whether the gradient's convolution, whose filters are the forward channels, is one of direct_tiled's kernel for few
// filters, where that beats PyTorch: 3x3, FP32.
bool is_few_filters(const ConvProblem& problem) {
  ConvProblem gradient = problem;
  std::swap(gradient.k, gradient.c);
  return problem.dtype == DType::f32 && problem.r == 3 && is_for_few_filters(gradient);
}

// What flipping the filter and packing it takes of each call: launches, and passes over the filter far from the
// memory's rate. Measured on an H200.
double flipping_us(const ConvProblem& problem, const DeviceInfo& device) {
  const double bytes = static_cast<double>(problem.k * problem.c_per_group() * problem.r * problem.s) *
                       static_cast<double>(size_of(problem.dtype));
  return problem.r * problem.s == 1 ? 5.0 + memory_us(7.0 * bytes, 1.0, device)
                                    : 8.0 + memory_us(14.0 * bytes, 1.0, device);
}

// Phases are put in their places by strided copies (csrc/ops/input_gradient.cpp), which move 16 bytes at a time, or an
// element where channels are no whole 16 bytes: so many in a clock of a multiprocessor (docs/log/49: 26 MB in 11 us).
double weaving_us(const InputGradientChoice& choice, const ConvProblem& problem, const DeviceInfo& device) {
  if (problem.stride_h * problem.stride_w == 1) return 0.0;
  const auto size = static_cast<std::int64_t>(size_of(problem.dtype));
  const bool in_pieces = problem.layout == Layout::nhwc && problem.c * size % 16 == 0;
  const double bytes = static_cast<double>(problem.n * problem.c * problem.h * problem.w * size);
  const double moves = bytes / (in_pieces ? 16.0 : static_cast<double>(size));
  return launch_us * choice.convolutions +
         std::max(memory_us(2.0 * bytes, 0.8, device), clocks_us(moves / (0.73 * device.processors), device));
}

bool torch_is_faster(const InputGradientChoice& choice, const ConvProblem& problem, const DeviceInfo& device) {
  const Candidate own = choose("auto", choice.convolution, device);
  const double weaving = weaving_us(choice, problem, device);
  const double own_us = choice.convolutions * own.plan.cost_us + flipping_us(problem, device) + weaving;
  const algos::torch::SameConvolutions same{
      choice.convolutions * algos::torch::algorithm.plan(choice.convolution, device).cost_us, weaving,
      own.algorithm == &algos::torch::algorithm};
  return own_us >= preference(algos::torch::algorithm, device) * algos::torch::input_gradient_us(problem, same, device);
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
    return Support::no("layout", "of half types and of fewer than " + std::to_string(min_filters) +
                                     " channels a group ours was measured in NHWC alone; PyTorch's is taken in NCHW");
  }
  if (problem.c_per_group() < min_filters) {
    return Support::no("filters", "C/groups is " + std::to_string(problem.c_per_group()) + "; below " +
                                      std::to_string(min_filters) + " filters PyTorch's gradient is faster on a CPU");
  }
  const bool unit = problem.stride_h == 1 && problem.stride_w == 1;
  if (!unit) return Support::no("stride", "the stride is not 1; PyTorch's gradient is faster on a CPU");
  if (problem.dilation_h * (problem.r - 1) < problem.pad_h || problem.dilation_w * (problem.s - 1) < problem.pad_w) {
    return Support::no("padding", "the padding exceeds dilation * (kernel - 1)");
  }
  return Support::yes();
}

// Whether the phases are the filters of one convolution, which reads the output's gradient once but multiplies zeros:
// where it has at most twice the taps of the convolution itself, or a phase would have too few filters for any tile.
bool is_together(const ConvProblem& problem, const GradientPart& rows, const GradientPart& columns) {
  const std::int64_t phases = problem.stride_h * problem.stride_w;
  if (phases == 1 || problem.dilation_h != 1 || problem.dilation_w != 1 || problem.groups != 1) return false;
  return problem.c <= many_channels &&
         (rows.taps.count * columns.taps.count * phases <= 2 * problem.r * problem.s || problem.c < min_filters);
}

}  // namespace

InputGradientChoice choose_input_gradient(const std::string& name, const ConvProblem& problem,
                                          const DeviceInfo& device) {
  InputGradientChoice choice{InputGradientMethod::torch, input_gradient_support(name, problem, device), problem, 1};
  if (!choice.support.ok) return choice;
  const auto h = GradientDimension::height(problem), w = GradientDimension::width(problem);
  InputGradientMethod method = InputGradientMethod::phases;
  if (is_together(problem, h.together(), w.together())) {
    method = InputGradientMethod::together;
    choice.convolution = gradient_convolution(problem, h.together(), w.together());
  } else {
    const Phases rows(h), columns(w);
    choice.convolutions = rows.count * columns.count;
    if (choice.convolutions == 0) {
      choice.support = Support::no("empty", "the filter reaches padding alone");
      return choice;
    }
    choice.convolution = gradient_convolution(problem, rows.largest, columns.largest);
  }
  if (name == "auto" && device.type == DeviceType::cuda && torch_is_faster(choice, problem, device)) {
    choice.support = Support::no("cost", "PyTorch's gradient is estimated to be faster");
    return choice;
  }
  choice.method = method;
  return choice;
}

InputGradientChoice choose_own_input_gradient(const std::string& name, const ConvProblem& problem,
                                              const DeviceInfo& device) {
  InputGradientChoice choice = choose_input_gradient(name, problem, device);
  if (choice.support.code != "cost" && choice.support.code != "layout") return choice;
  return choose_input_gradient("implicit_gemm", problem, device);  // any name of ours asks for our convolutions
}

}  // namespace fastconv
