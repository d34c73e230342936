#include "plan/registry.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <optional>
#include <string>
#include <utility>

#include "core/cost.h"
#include "core/error.h"
#include "core/names.h"
#include "core/roundoffs.h"
#include "plan/measured.h"
#include "plan/rules.h"

namespace fastconv {

PackedWeight plain_weight(const ConvProblem&, const DeviceInfo&) { return {}; }

// Each algorithm's folder defines `algorithm` in its namespace.
#define FASTCONV_PLAIN(NAME)        \
  namespace algos::NAME {           \
  extern const Algorithm algorithm; \
  }
#define FASTCONV_PACKED FASTCONV_PLAIN
#define FASTCONV_LIBRARY FASTCONV_PLAIN
#include "plan/algorithms.def"
#undef FASTCONV_PLAIN

const std::vector<const Algorithm*>& algorithms() {
#define FASTCONV_PLAIN(NAME) &algos::NAME::algorithm,
  static const std::vector<const Algorithm*> list{
#include "plan/algorithms.def"
  };
#undef FASTCONV_PLAIN
#undef FASTCONV_PACKED
#undef FASTCONV_LIBRARY
  return list;
}

const Algorithm& find_algorithm(const std::string& name) {
  std::string known = "auto";
  for (const Algorithm* algorithm : algorithms()) {
    if (name == algorithm->name) return *algorithm;
    known += std::string(", ") + algorithm->name;
  }
  throw InvalidArgument("algorithm is '" + name + "'; expected one of " + known);
}

Support supports_common(const Algorithm& algorithm, const ConvProblem& problem, const DeviceInfo& device) {
  const bool cuda = device.type == DeviceType::cuda;
  if (cuda ? !algorithm.on_cuda : !algorithm.on_cpu) {
    return Support::no("device", algorithm.name, " has no ", (cuda ? "CUDA" : "CPU"), " kernel");
  }
  if (!device.has_kernels) {
    return Support::no("build",
                       "this build of fastconv has no kernels for the device (FASTCONV_CUDA=0, no nvcc was found, or "
                       "FASTCONV_CUDA_ARCHS leaves it out)");
  }
  if (problem.dtype == DType::other) {
    return Support::no("dtype", "the dtype is not float32, float16 or bfloat16");
  }
  if (problem.c_per_group() == 0 || problem.r == 0 || problem.s == 0) {
    return Support::no("empty", "the reduction over C/groups, R, S is empty");
  }
  // Products of sizes are 64-bit, but kernels and plans hold each single one of these in 31 bits.
  const std::int64_t largest =
      std::max({problem.n, problem.x_pitch(), problem.h, problem.w, problem.y_pitch(), problem.r, problem.s,
                problem.stride_h, problem.stride_w, problem.pad_h, problem.pad_w, problem.dilation_h,
                problem.dilation_w, problem.p(), problem.q()});
  if (largest >= std::int64_t{1} << 31) {
    return Support::no("size", "a size, stride, padding or dilation is ", largest,
                       "; fastconv's kernels need below 2^31");
  }
  // The largest product of sizes in a plan: bytes of every tap's outputs (two_stage).
  const double planes = 4.0 * static_cast<double>(problem.n) * static_cast<double>(problem.k) *
                        static_cast<double>(problem.p()) * static_cast<double>(problem.q()) *
                        static_cast<double>(problem.r * problem.s);
  if (planes >= 0x1p62) {
    return Support::no("size", "outputs times taps are ", planes / 4.0, "; fastconv's plans need below 2^60");
  }
  // Transpositions and output transforms have a row of blocks for each 32 channels; a grid has at most 65 535 rows.
  constexpr std::int64_t max_channels = 65535 * 32;
  if (cuda && std::max(problem.x_pitch(), problem.y_pitch()) > max_channels) {
    return Support::no("size", "x has ", problem.x_pitch(), " channels and y ", problem.y_pitch(),
                       "; fastconv's CUDA kernels take up to ", max_channels);
  }
  if (algorithm.roundoffs(problem, device) <= 0.0) {
    return Support::no("precision", algorithm.name, " does not offer class ", name_of(problem.accuracy));
  }
  return Support::yes();
}

namespace {

bool is_library(const Algorithm& algorithm) { return std::string(algorithm.family) == "library"; }

// Three significant digits: 1.5, 4, 12.
std::string brief(double number) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g", number);
  return text;
}

}  // namespace

Support too_inaccurate(const char* name, double error, double limit) {
  return Support::no("accuracy", name, " is expected to err ", brief(error), " times as much as PyTorch; the limit is ",
                     brief(limit));
}

Support within_workspace(const char* name, const ConvPlan& plan, const ConvProblem& problem) {
  const std::int64_t limit = problem.limits.max_workspace;
  if (limit < 0 || plan.workspace_bytes <= static_cast<std::size_t>(limit)) return Support::yes();
  return Support::no("workspace", name, " needs a workspace of ", plan.workspace_bytes, " bytes; the limit is ", limit);
}

double relative_error(double roundoffs, double torch_roundoffs, AccuracyClass accuracy) {
  const double rounding = output_rounding(accuracy);
  return std::hypot(roundoffs, rounding) / std::hypot(torch_roundoffs, rounding);
}

double expected_error(const Algorithm& algorithm, const ConvProblem& problem, const DeviceInfo& device) {
  return relative_error(algorithm.roundoffs(problem, device), algos::torch::algorithm.roundoffs(problem, device),
                        problem.accuracy);
}

double error_limit(const ConvProblem& problem, const DeviceInfo& device) {
  if (problem.limits.max_error > 0.0) return problem.limits.max_error;
  return problem.accuracy == AccuracyClass::fp32 && device.type == DeviceType::cuda ? 1.5 : 4.0;
}

ConvPlan with_layout(ConvPlan plan, const ConvProblem& problem, const DeviceInfo& device) {
  if (!plan.reads_nhwc || problem.layout == Layout::nhwc) return plan;
  const std::size_t bytes = nhwc_input_bytes(problem);
  if (bytes == 0) return plan;
  plan.workspace_bytes += bytes;
  plan.cost_us += transposition_us(static_cast<double>(bytes), device);
  return plan;
}

ConvProblem problem_of_kernels(const ConvPlan& plan, const ConvProblem& asked) {
  ConvProblem problem = plan.pools_apart ? without_pool(asked) : asked;
  if (plan.norms_apart) problem = without_affine(problem);
  if (plan.norms_apart || plan.copies_x) problem.x_channels = 0;
  if (plan.copies_y) problem.y_channels = 0;
  if (plan.shuffles_apart) problem = without_shuffle(problem);
  if (plan.activates_apart) {
    problem.activation = Activation::none;
    if (problem.residual == Residual::after) problem.residual = Residual::none;
  }
  return problem;
}

ConvPlan with_pool(ConvPlan plan, const ConvProblem& problem, const DeviceInfo& device) {
  plan.pools_apart = true;
  plan.config += ", then max-pool";
  plan.cost_us += max_pool_us(problem, device);
  return plan;
}

namespace {

// What an algorithm's kernels do not do of a problem, whatever they could do.
ConvPlan all_apart(const ConvProblem& asked) {
  ConvPlan plan;
  plan.norms_apart = asked.input_affine;
  plan.copies_x = asked.x_channels != 0 && !asked.input_affine;
  plan.shuffles_apart = asked.shuffles();
  plan.copies_y = asked.y_channels != 0 && !asked.shuffles();
  return plan;
}

// The passes around the kernels, but for the pool.
ConvPlan with_passes(ConvPlan plan, const ConvPlan& apart, const ConvProblem& asked, const DeviceInfo& device) {
  plan.norms_apart = apart.norms_apart, plan.copies_x = apart.copies_x, plan.copies_y = apart.copies_y;
  plan.shuffles_apart = apart.shuffles_apart;
  const auto bytes = [&](std::int64_t elements) { return static_cast<double>(elements) * size_of(asked.dtype); };
  const double x = bytes(asked.n * asked.c * asked.h * asked.w), y = bytes(asked.y_numel());
  plan.activates_apart = apart.activates_apart;
  if (plan.activates_apart) {
    const double whole = bytes(asked.output_numel());  // before the pool
    plan.cost_us += elementwise_us(2.0 * whole, device);
    plan.config += std::string(", then ") + name_of(asked.activation);
    if (asked.residual == Residual::after) plan.cost_us += elementwise_us(3.0 * whole, device), plan.config += ", sum";
  }
  if (plan.norms_apart) plan.cost_us += pass_us(x, x, device), plan.config += ", input normed before";
  if (plan.copies_x) plan.cost_us += pass_us(x, x, device), plan.config += ", input copied";
  if (plan.copies_y) plan.cost_us += pass_us(y, y, device), plan.config += ", output copied";
  if (plan.shuffles_apart) plan.cost_us += pass_us(y, y, device), plan.config += ", then shuffled";
  return plan;
}

ConvPlan with_packing(ConvPlan plan, const Algorithm& algorithm, const ConvProblem& problem, const DeviceInfo& device) {
  plan.packing_us = packing_us(problem, static_cast<double>(algorithm.packed_weight(problem, device).bytes), device);
  plan.cost_us += plan.packing_us;
  return plan;
}

Candidate evaluate(const Algorithm& algorithm, const ConvProblem& asked, const DeviceInfo& device, ConvPlan apart) {
  Candidate candidate{&algorithm, Support::yes(), {}};
  const bool pools_apart = apart.pools_apart = asked.max_pool && (apart.activates_apart || !algorithm.abilities.pool);
  const ConvProblem problem = problem_of_kernels(apart, asked);
  const bool empty = problem.output_numel() == 0;  // not planned, so that no algorithm divides by a size of zero
  if (!is_library(algorithm)) {
    candidate.support = supports_common(algorithm, problem, device);
    if (candidate.support.ok) candidate.support = algorithm.supports(problem, device);
  }
  if (candidate.support.ok) {
    if (!empty) candidate.plan = with_layout(algorithm.plan(problem, device), problem, device);
    candidate.plan = with_passes(std::move(candidate.plan), apart, asked, device);
    if (problem.packs && !empty) candidate.plan = with_packing(std::move(candidate.plan), algorithm, problem, device);
    if (pools_apart) candidate.plan = with_pool(std::move(candidate.plan), asked, device);
    if (!is_library(algorithm)) candidate.support = within_workspace(algorithm.name, candidate.plan, problem);
  }
  if (candidate.support.ok) {
    candidate.expected_error = expected_error(algorithm, problem, device);
    candidate.auto_eligible = candidate.expected_error <= error_limit(problem, device);
  }
  return candidate;
}

// `direct` does in its kernels what is a pass in `simple`.
Candidate better_of(Candidate direct, Candidate simple) {
  const bool is_better = !simple.support.ok || direct.plan.cost_us <= simple.plan.cost_us;
  return direct.support.ok && is_better ? direct : simple;
}

Candidate evaluate(const Algorithm& algorithm, const ConvProblem& asked, const DeviceInfo& device,
                   bool activates_apart) {
  ConvPlan apart = all_apart(asked), kept;
  const bool passes = apart.norms_apart || apart.copies_x || apart.copies_y || apart.shuffles_apart;
  apart.activates_apart = kept.activates_apart = activates_apart;
  kept.norms_apart = apart.norms_apart && !algorithm.abilities.affine;
  kept.copies_x = apart.copies_x && !algorithm.abilities.ranges;
  kept.copies_y = apart.copies_y && (activates_apart || !algorithm.abilities.ranges);
  kept.shuffles_apart = apart.shuffles_apart && (activates_apart || !algorithm.abilities.shuffle);
  Candidate direct = evaluate(algorithm, asked, device, kept);
  return passes ? better_of(std::move(direct), evaluate(algorithm, asked, device, apart)) : direct;
}

}  // namespace

Candidate evaluate(const Algorithm& algorithm, const ConvProblem& asked, const DeviceInfo& device) {
  if (!is_gated(asked.activation) || is_library(algorithm)) return evaluate(algorithm, asked, device, false);
  Candidate apart = evaluate(algorithm, asked, device, true);
  // On a CPU PyTorch's vectors are faster than any value by value (docs/log/126-gated-activations.md).
  const bool ends_with_them = algorithm.abilities.gated && device.type == DeviceType::cuda;
  return ends_with_them ? better_of(evaluate(algorithm, asked, device, false), std::move(apart)) : apart;
}

double preference(const Algorithm& algorithm, const DeviceInfo& device) {
  return is_library(algorithm) && device.type == DeviceType::cuda ? 0.94 : 1.0;
}

std::vector<Candidate> candidates(const ConvProblem& problem, const DeviceInfo& device) {
  std::vector<Candidate> all;
  all.reserve(algorithms().size());
  for (const Algorithm* algorithm : algorithms()) all.push_back(evaluate(*algorithm, problem, device));
  return all;
}

namespace {

std::optional<Candidate> measured_choice(const std::string& name, const ConvProblem& problem,
                                         const DeviceInfo& device) {
  for (const Algorithm* algorithm : algorithms()) {
    if (name != algorithm->name) continue;
    Candidate candidate = evaluate(*algorithm, problem, device);
    candidate.measured = true;
    if (candidate.auto_eligible) return candidate;
  }
  return std::nullopt;
}

}  // namespace

Candidate choose(const std::string& name, const ConvProblem& problem, const DeviceInfo& device) {
  if (name != "auto") {
    Candidate candidate = evaluate(find_algorithm(name), problem, device);
    if (!candidate.support.ok) {
      throw Unsupported("algorithm '" + name + "' cannot serve " + to_string(problem) + ": " +
                        candidate.support.reason);
    }
    if (problem.limits.max_error > 0.0 && !candidate.auto_eligible) {
      const Support refusal =
          too_inaccurate(candidate.algorithm->name, candidate.expected_error, problem.limits.max_error);
      throw Unsupported("algorithm '" + name + "' cannot serve " + to_string(problem) + ": " + refusal.reason);
    }
    return candidate;
  }
  ConvProblem other = problem;
  other.packs = !problem.packs;
  for (const ConvProblem& asked : {problem, other}) {
    std::optional<Candidate> found = measured_choice(find_measured(Pass::forward, asked, device), problem, device);
    // What was measured of packed weights holds where packing is next to nothing.
    const bool holds = !found || asked.packs || !problem.packs || found->plan.packing_us <= 0.05 * found->plan.cost_us;
    if (found && holds) return *std::move(found);
  }
  return choose_by_cost(problem, device);
}

Candidate choose_by_cost(const ConvProblem& problem, const DeviceInfo& device) {
  Candidate best{};
  double least = 0.0, second = INFINITY;
  for (Candidate& candidate : candidates(problem, device)) {
    if (!candidate.auto_eligible) continue;
    const double us = preference(*candidate.algorithm, device) * candidate.plan.cost_us;
    if (best.algorithm != nullptr && us >= least) {
      second = std::min(second, us);
      continue;
    }
    if (best.algorithm != nullptr) second = least;
    best = std::move(candidate), least = us;
  }
  best.unsure = second < INFINITY && (device.type == DeviceType::cpu || second <= close_costs * least);
  return best;
}

}  // namespace fastconv
