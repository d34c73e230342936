// Dispatches to the plan's kernel.
#include <variant>

#include "algos/implicit_gemm/few_channels/launch.h"
#include "algos/implicit_gemm/kernels.h"
#include "algos/implicit_gemm/persistent/launch.h"
#include "algos/implicit_gemm/portable/launch.h"
#include "algos/implicit_gemm/single_tile/launch.h"
#include "core/kernels.h"

namespace fastconv::algos::implicit_gemm {

void run_cuda(const ConvArgs& args, Runtime& runtime) {
  struct Run {
    const ConvArgs& args;
    Runtime& runtime;
    void operator()(const portable::Plan& plan) const { portable::run(args, plan, runtime); }
    void operator()(const persistent::Plan& plan) const { persistent::run(args, plan, runtime); }
    void operator()(const single_tile::Plan& plan) const { single_tile::run(args, plan, runtime); }
    void operator()(const few_channels::Plan& plan) const { few_channels::run(args, plan, runtime); }
  };
  std::visit(Run{args, runtime}, plan_as<Plan>(args.kernel_plan));
}

void pack_cuda(const PackArgs& args, Runtime& runtime) {
  if (const auto weights = few_channels::make_weights(args.problem, runtime.device())) {
    auto* packed = static_cast<char*>(args.packed) + few_channels_offset(args.problem, runtime.device());
    few_channels::pack(args, *weights, packed, runtime);  // before the snapshot is renewed
  }
  persistent::is_used(args.problem, runtime.device()) ? persistent::pack(args, runtime) : portable::pack(args, runtime);
}

}  // namespace fastconv::algos::implicit_gemm
