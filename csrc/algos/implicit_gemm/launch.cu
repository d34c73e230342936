// From a problem to the kernel that its plan names.
#include "algos/implicit_gemm/persistent/launch.h"
#include "algos/implicit_gemm/portable/launch.h"
#include "algos/implicit_gemm/single_tile/launch.h"
#include "core/kernels.h"
#include "device/indexing.h"
#include "device/transpose.cuh"

namespace fastconv::algos::implicit_gemm {
namespace {

cudaStream_t stream_of(const Runtime& runtime) { return static_cast<cudaStream_t>(runtime.stream()); }

// x in NHWC if the kernels want it so: in the workspace, behind which is what is left of it.
struct Input {
  const void* x;
  Layout layout;
  void* workspace;
};

Input prepare_input(const ConvArgs& args, cudaStream_t stream) {
  const ConvProblem& problem = args.problem;
  const std::size_t bytes = transposed_input_bytes(problem);
  if (bytes == 0) return {args.x, problem.layout, args.workspace};
  dispatch_dtype(problem.dtype, [&](auto zero) {
    using T = decltype(zero);
    transpose(static_cast<const T*>(args.x), static_cast<T*>(args.workspace), problem.n, problem.c,
              problem.h * problem.w, stream);
  });
  return {args.workspace, Layout::nhwc, static_cast<char*>(args.workspace) + bytes};
}

void run_hopper(const ConvArgs& args, const Input& input, Runtime& runtime) {
  const auto& plan = *static_cast<const persistent::Plan*>(args.detail);
  if (plan.single_tile != nullptr && is_aligned(args.y, 16) && is_aligned(args.residual, 16)) {
    const bool tf32 = args.problem.accuracy == AccuracyClass::tf32;
    const char* weight = static_cast<const char*>(args.weight);
    const auto* exponents = reinterpret_cast<const int*>(weight + plan.weights.weight_bytes());
    const auto run = tf32                               ? single_tile::run_tf32
                     : plan.weights.mode == Mode::split ? single_tile::run_fp32
                     : plan.weights.mode == Mode::fp16  ? single_tile::run_fp16
                                                        : single_tile::run_bf16;
    return run(args, *plan.single_tile, input.x, weight + (tf32 ? plan.weights.rounded_offset() : 0), exponents,
               runtime);
  }
  const auto run = plan.weights.mode == Mode::split    ? persistent::run_split
                   : plan.weights.mode == Mode::single ? persistent::run_single
                   : plan.weights.mode == Mode::fp16   ? persistent::run_fp16
                                                       : persistent::run_bf16;
  run(args, plan, input.x, input.workspace, runtime);
}

void pack_hopper(const PackArgs& args, Runtime& runtime) {
  const Mode mode = persistent::make_weights(args.problem).mode;
  const auto pack = mode == Mode::split    ? persistent::pack_split
                    : mode == Mode::single ? persistent::pack_single
                    : mode == Mode::fp16   ? persistent::pack_fp16
                                           : persistent::pack_bf16;
  pack(args, runtime);
}

}  // namespace

void run_cuda(const ConvArgs& args, Runtime& runtime) {
  const Input input = prepare_input(args, stream_of(runtime));
  if (persistent::is_used(args.problem, runtime.device())) return run_hopper(args, input, runtime);
  portable::run(args, input.x, input.layout, runtime);
}

void pack_cuda(const PackArgs& args, Runtime& runtime) {
  persistent::is_used(args.problem, runtime.device()) ? pack_hopper(args, runtime) : portable::pack(args, runtime);
}

}  // namespace fastconv::algos::implicit_gemm
