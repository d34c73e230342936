#include "ops/kernel_table.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/error.h"
#include "core/integers.h"
#include "device/flipped_filter.h"
#include "device/group_norm.h"
#include "device/max_pool.h"
#include "device/upsampling.h"

namespace fastconv {

void nhwc_from_nchw(const ConvProblem& problem, const void* x, void* target, Runtime& runtime);           // csrc/device
void flip_filter(const ConvProblem&, const FlippedFilter&, const void* weight, void* flipped, Runtime&);  // csrc/device

#define FASTCONV_PLAIN(NAME)                \
  namespace algos::NAME {                   \
  void run_cpu(const ConvArgs&, Runtime&);  \
  void run_cuda(const ConvArgs&, Runtime&); \
  }
#define FASTCONV_PACKED(NAME)                \
  FASTCONV_PLAIN(NAME)                       \
  namespace algos::NAME {                    \
  void pack_cpu(const PackArgs&, Runtime&);  \
  void pack_cuda(const PackArgs&, Runtime&); \
  }
#define FASTCONV_LIBRARY(NAME)
#include "plan/algorithms.def"
#undef FASTCONV_PLAIN
#undef FASTCONV_PACKED
#undef FASTCONV_LIBRARY

#define FASTCONV_WEIGHT_GRADIENT(NAME)                            \
  namespace algos::NAME {                                         \
  void weight_gradient_cpu(const WeightGradientArgs&, Runtime&);  \
  void weight_gradient_cuda(const WeightGradientArgs&, Runtime&); \
  }
#include "plan/weight_gradients.def"
#undef FASTCONV_WEIGHT_GRADIENT

namespace ops {
namespace {

struct Entry {
  const char* name;
  Kernels cpu, cuda;
};

#ifdef FASTCONV_WITH_CUDA
constexpr bool with_cuda = true;
#define FASTCONV_CUDA_FUNCTION(FUNCTION) FUNCTION
#else
constexpr bool with_cuda = false;
#define FASTCONV_CUDA_FUNCTION(FUNCTION) nullptr
#endif
#define FASTCONV_PLAIN(NAME) \
  {#NAME, {algos::NAME::run_cpu, nullptr}, {FASTCONV_CUDA_FUNCTION(algos::NAME::run_cuda), nullptr}},
#define FASTCONV_PACKED(NAME)                     \
  {#NAME,                                         \
   {algos::NAME::run_cpu, algos::NAME::pack_cpu}, \
   {FASTCONV_CUDA_FUNCTION(algos::NAME::run_cuda), FASTCONV_CUDA_FUNCTION(algos::NAME::pack_cuda)}},
#define FASTCONV_LIBRARY(NAME) {#NAME, {}, {}},
constexpr Entry table[] = {
#include "plan/algorithms.def"
};

}  // namespace

Kernels find_kernels(const Algorithm& algorithm, DeviceType device) {
  for (const Entry& entry : table) {
    if (std::strcmp(entry.name, algorithm.name) == 0) return device == DeviceType::cuda ? entry.cuda : entry.cpu;
  }
  return {};
}

namespace {

void transpose(const ConvProblem& problem, const void* x, void* target, Runtime& runtime) {
  if (!with_cuda || runtime.device().type != DeviceType::cuda) throw DeviceError("no kernel brings NCHW into NHWC");
  if constexpr (with_cuda) nhwc_from_nchw(problem, x, target, runtime);
}

}  // namespace

PlannedInput bring_into_layout(const ConvPlan& plan, const ConvProblem& problem, const void* x, void* workspace,
                               Runtime& runtime) {
  if (!plan.reads_nhwc || problem.layout == Layout::nhwc) return {x, problem.layout};
  if (nhwc_input_bytes(problem) == 0) return {x, Layout::nhwc};
  char* target = static_cast<char*>(workspace) + plan.workspace_bytes - nhwc_input_bytes(problem);
  transpose(problem, x, target, runtime);
  return {target, Layout::nhwc};
}

PlannedOperands bring_into_layout(const ConvPlan& plan, const ConvProblem& problem, const void* x, const void* grad,
                                  void* workspace, Runtime& runtime) {
  if (!plan.reads_nhwc || problem.layout == Layout::nhwc) return {x, grad, problem.layout};
  char* x_target = static_cast<char*>(workspace) + plan.workspace_bytes - nhwc_operand_bytes(problem);
  char* grad_target = x_target + nhwc_grad_offset(problem);
  transpose(problem, x, x_target, runtime);
  ConvProblem of_grad = problem;
  of_grad.c = problem.k, of_grad.h = problem.p(), of_grad.w = problem.q();
  transpose(of_grad, grad, grad_target, runtime);
  return {x_target, grad_target, Layout::nhwc};
}

void max_pool(const MaxPool& pool, const void* x, void* y, Runtime& runtime) {
  if constexpr (with_cuda) return fastconv::max_pool(pool, x, y, runtime);
  throw DeviceError("no kernel for max_pool");
}

void group_norm(const GroupNorm& norm, const void* x, const void* weight, const void* bias, void* y, void* workspace,
                Runtime& runtime) {
  if constexpr (with_cuda) return fastconv::group_norm(norm, x, weight, bias, y, workspace, runtime);
  throw DeviceError("no kernel for group_norm");
}

void upsample(const Upsampling& upsampling, const void* x, void* y, Runtime& runtime) {
  if constexpr (with_cuda) return fastconv::upsample(upsampling, x, y, runtime);
  throw DeviceError("no kernel for upsample");
}

namespace {

// Of a channel and a tap the filters are equally far apart, in both. Channels that are neighbours in the weight are
// taken together: each of its cache lines is read once.
template <typename T>
void flip_on_cpu(const FlippedFilter& filter, const T* weight, T* flipped, Runtime& runtime) {
  constexpr std::int64_t block = 16;  // channels
  const std::int64_t taps = filter.rows.count * filter.columns.count, filters = filter.filters;
  const std::int64_t line = filters * taps, apart = filter.channels * filter.r * filter.s;
  const std::int64_t next_tap = filter.channels_last ? filters : 1, next_filter = filter.channels_last ? 1 : taps;
  if (line == 0) return;
  const std::int64_t lines = filter.size() / line;
  struct Move {
    std::int64_t source, target;  // of the first filter
  };
  runtime.parallel_for(0, ceil_div(lines, block), 1, [&](std::int64_t begin, std::int64_t end) {
    std::vector<Move> moves;
    for (std::int64_t first = begin * block; first < std::min(end * block, lines); first += block) {
      moves.clear();
      for (std::int64_t i = first * taps; i < std::min(first + block, lines) * taps; ++i) {
        const std::int64_t target = i / taps * line + i % taps * next_tap;
        moves.push_back({filter.source(target), target});
      }
      for (std::int64_t k = 0; k < filters; ++k) {
        for (const auto& [source, target] : moves) {
          flipped[target + k * next_filter] = source < 0 ? T(0.0f) : weight[source + k * apart];
        }
      }
    }
  });
}

}  // namespace

void flip_filter(const ConvProblem& problem, const FlippedFilter& filter, const void* weight, void* flipped,
                 Runtime& runtime) {
  if (runtime.device().type == DeviceType::cuda) {
    if (!with_cuda) throw DeviceError("no kernel flips a filter");
    if constexpr (with_cuda) return fastconv::flip_filter(problem, filter, weight, flipped, runtime);
  }
  dispatch_dtype(problem.dtype, [&](auto zero) {
    flip_on_cpu(filter, static_cast<const decltype(zero)*>(weight), static_cast<decltype(zero)*>(flipped), runtime);
  });
}

WeightGradientFunction find_weight_gradient(const WeightGradient& algorithm, DeviceType device) {
#define FASTCONV_WEIGHT_GRADIENT(NAME)                                                            \
  if (std::strcmp(#NAME, algorithm.name) == 0) {                                                  \
    return device == DeviceType::cuda ? FASTCONV_CUDA_FUNCTION(algos::NAME::weight_gradient_cuda) \
                                      : algos::NAME::weight_gradient_cpu;                         \
  }
#include "plan/weight_gradients.def"
#undef FASTCONV_WEIGHT_GRADIENT
  return nullptr;
}

}  // namespace ops
}  // namespace fastconv
