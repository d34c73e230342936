#include "algos/null/plan.h"
#include "core/kernels.h"

namespace fastconv::algos::null {

void run_cpu(const ConvArgs& args, Runtime& runtime) {
  dispatch_dtype(args.problem.dtype, [&](auto zero) {
    using T = decltype(zero);
    const Scale<T> scale = make_scale<T>(args);
    constexpr std::int64_t grain = 1 << 14;  // elements that are worth a thread
    runtime.parallel_for(0, args.problem.output_numel(), grain, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t index = begin; index < end; ++index) scale(index);
    });
  });
}

}  // namespace fastconv::algos::null
