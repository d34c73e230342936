// Dispatches to the plan's kernel.
#include <variant>

#include "algos/implicit_gemm/kernels.h"
#include "core/kernels.h"

namespace fastconv::algos::implicit_gemm {

namespace persistent {  // each class in .cu files of its own
template <Mode mode>
void run_class(const ConvArgs& args, const Plan& plan, Runtime& runtime);
template <Mode mode>
void run_affine(const ConvArgs& args, const Plan& plan, Runtime& runtime);
template <Mode mode>
void run_gated(const ConvArgs& args, const Plan& plan, Runtime& runtime);
template <Mode mode>
void pack_class(const PackArgs& args, Runtime& runtime);

void run(const ConvArgs& args, const Plan& plan, Runtime& runtime) {
  dispatch_mode(plan.weights.mode, [&](auto mode) {
    if (plan.affine()) return run_affine<mode()>(args, plan, runtime);
    if constexpr (mode() != Mode::split) {
      if (is_gated(args.problem.activation)) return run_gated<mode()>(args, plan, runtime);
    }
    run_class<mode()>(args, plan, runtime);
  });
}

void pack(const PackArgs& args, Runtime& runtime) {
  dispatch_mode(make_weights(args.problem).mode, [&](auto mode) { pack_class<mode()>(args, runtime); });
}
}  // namespace persistent
namespace few_channels {
void run(const ConvArgs& args, const Plan& plan, Runtime& runtime);
// `packed`: its own part of the packed weight. Leaves the snapshot as it is.
void pack(const PackArgs& args, const Weights& weights, void* packed, Runtime& runtime);
}  // namespace few_channels
namespace portable {
void run(const ConvArgs& args, const Plan& plan, Runtime& runtime);
void pack(const PackArgs& args, Runtime& runtime);
}  // namespace portable
namespace single_tile {
void run(const ConvArgs& args, const Plan& plan, Runtime& runtime);
}

void run_cuda(const ConvArgs& args, Runtime& runtime) {
  // Found by the plan's namespace.
  std::visit([&](const auto& plan) { run(args, plan, runtime); }, plan_as<Plan>(args.kernel_plan));
}

void pack_cuda(const PackArgs& args, Runtime& runtime) {
  if (const auto weights = few_channels::make_weights(args.problem, runtime.device())) {
    auto* packed = static_cast<char*>(args.packed) + few_channels_offset(args.problem, runtime.device());
    few_channels::pack(args, *weights, packed, runtime);  // before the snapshot is renewed
  }
  persistent::is_used(args.problem, runtime.device()) ? persistent::pack(args, runtime) : portable::pack(args, runtime);
}

}  // namespace fastconv::algos::implicit_gemm
