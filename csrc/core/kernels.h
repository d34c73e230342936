// What running an algorithm needs: pointers, and a Runtime between the kernels and torch. Every CUDA source includes
// this and is compiled four times: no heavy headers here.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/device_info.h"
#include "core/kernel_plan.h"
#include "core/problem.h"

namespace fastconv {

struct ConvArgs {
  const ConvProblem& problem;
  // All pointers to tensors are multiples of 16 bytes on CUDA.
  const void* x;                  // [N, C, H, W] in x_layout, dense but for problem.x_channels
  const void* weight;             // plain contiguous [K, C/groups, R, S], or what pack() wrote
  const void* bias;               // [K] or null
  const void* residual;           // [N, K, P, Q] in problem.layout, with the pixels of y; or null
  void* y;                        // [N, y_k(), y_p(), y_q()] in problem.layout, dense but for problem.y_channels
  void* workspace;                // plan().workspace_bytes, 256-byte aligned, uninitialised
  const KernelPlan* kernel_plan;  // plan().kernel_plan: see plan_as()
  Layout x_layout;                // problem.layout, or NHWC if the plan asks for it (ConvPlan::reads_nhwc)
  const float* scale = nullptr;   // [C], if problem.input_affine
  const float* shift = nullptr;   // [C], likewise
};

// Where a filter's weights lie: that of a channel and a tap (r * S + s) at channel * this->channel + tap * this->tap.
struct FilterStrides {
  int channel, tap;
};

struct PackArgs {
  const ConvProblem& problem;  // n, h, w, layout and epilogue are not meaningful here
  const void* weight;          // [K, C/groups, R, S], dense
  bool channels_last;          // weight and snapshot lie in memory as [K, R, S, C/groups], else [K, C/groups, R, S]
  void* packed;                // packed_weight().bytes, 256-byte aligned, uninitialised unless snapshot is given
  // Null: pack everything. Else the plain weight as of the last packing, same shape: a filter that still equals its
  // snapshot bit for bit is left alone; any other is packed again and its snapshot renewed after that, in one kernel,
  // so that a cached packing follows the weight without the host having to know that the weight has changed.
  void* snapshot;

  FilterStrides strides() const {
    if (channels_last) return {1, static_cast<int>(problem.c_per_group())};
    return {static_cast<int>(problem.r * problem.s), 1};
  }
};

// dw[k,c,r,s] = sum_{n,p,q} grad[n,k,p,q] * x[n, g*C/G + c, p*stride_h + r*dilation_h - pad_h, ...]
struct WeightGradientArgs {
  const ConvProblem& problem;  // of the forward convolution, in the operands' layout; its epilogue is not meaningful
  const void* x;               // [N, C, H, W] in problem.layout, dense; on CUDA 16-byte aligned
  const void* grad;            // [N, K, P, Q], as x
  void* dw;                    // [K, C/groups, R, S], uninitialised
  bool channels_last;          // dw lies in memory as [K, R, S, C/groups], else [K, C/groups, R, S]
  void* workspace;             // plan().workspace_bytes, 256-byte aligned, uninitialised
  const KernelPlan* kernel_plan;
};

struct GemmArgs;  // core/gemm.h
struct GemmEnd;   // likewise
enum class EndLeft : std::uint8_t;
struct WaitReport;  // hopper/wait_report.h

// A reference to a function of a range, for the length of a call.
class RangeFunction {
 public:
  template <typename Body>
  RangeFunction(const Body& body)  // NOLINT: so that a lambda can be given
      : body_(&body), call_([](const void* body, std::int64_t begin, std::int64_t end) {
          (*static_cast<const Body*>(body))(begin, end);
        }) {}
  void operator()(std::int64_t begin, std::int64_t end) const { call_(body_, begin, end); }

 private:
  const void* body_;
  void (*call_)(const void* body, std::int64_t begin, std::int64_t end);
};

// The services of the host framework. Implemented once, in csrc/ops.
class Runtime {
 public:
  virtual ~Runtime() = default;
  virtual const DeviceInfo& device() const = 0;
  virtual void* stream() const = 0;                            // cudaStream_t; null on the CPU
  virtual bool is_capturing() const { return false; }          // whether stream() records a CUDA graph
  virtual WaitReport* wait_report() const { return nullptr; }  // where kernels note a wait that has expired
  // The library's GEMM on stream(). On the CPU: f32 only.
  virtual void gemm(const GemmArgs& args) = 0;
  // The same with what follows it in the same kernel, as far as there is one; on CUDA alone.
  virtual EndLeft gemm_with_end(const GemmArgs& args, const GemmEnd& end) = 0;
  // body(begin, end) over disjoint ranges on torch's thread pool; serial when called from inside itself.
  virtual void parallel_for(std::int64_t begin, std::int64_t end, std::int64_t grain, RangeFunction body) const = 0;
};

using RunFunction = void (*)(const ConvArgs& args, Runtime& runtime);
using WeightGradientFunction = void (*)(const WeightGradientArgs& args, Runtime& runtime);
using PackFunction = void (*)(const PackArgs& args, Runtime& runtime);

}  // namespace fastconv
