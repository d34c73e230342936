#include "algos/direct_tiled/pointwise/kernel.cuh"
#include "core/kernels.h"
#include "device/indexing.h"
#include "device/launch.h"
#include "device/shared_memory.h"

namespace fastconv::algos::direct_tiled::pointwise {
namespace {

Params make_params(const ConvArgs& args, const Plan& plan, const Runtime& runtime) {
  const ConvProblem& problem = args.problem;
  const std::int64_t map = problem.p() * problem.q();
  const Strides4 in = input_strides(problem);
  return {.x = static_cast<const float*>(args.x),
          .weight = static_cast<const float*>(args.weight),
          .y = static_cast<float*>(args.y),
          .epilogue = make_epilogue<float>(args),
          .config = plan,
          .by_map = map,
          .by_q = problem.q(),
          .c = as_int(problem.c),
          .k = as_int(problem.k),
          .pixels = as_int(problem.n * map),
          .in_image = as_int(in.n),
          .in_channel = as_int(in.c),
          .in_row = as_int(in.h * problem.stride_h),
          .in_column = as_int(in.w * problem.stride_w),
          .dense = problem.stride_h == 1 && problem.stride_w == 1,
          .out_pixel = as_int(problem.y_pitch()),
          .vector_y = plan.vector_y,
          .report = runtime.wait_report()};
}

template <bool nhwc, bool vector_x, bool vector_weight>
void launch(const ConvArgs& args, Runtime& runtime, const Plan& plan) {
  constexpr auto kernel = convolve<nhwc, vector_x, vector_weight>;
  allow_shared_memory<kernel>(max_shared_bytes, "direct_tiled: shared memory");
  const dim3 grid(static_cast<unsigned>(plan.filter_tiles * plan.split()), static_cast<unsigned>(plan.pixel_tiles));
  LaunchPlan{grid, threads, static_cast<std::size_t>(plan.shared_bytes), plan.split()}.launch(
      kernel, stream_of(runtime), "direct_tiled", make_params(args, plan, runtime));
}

}  // namespace

void run_cuda(const ConvArgs& args, Runtime& runtime, const Plan& plan) {
  if (args.problem.layout == Layout::nhwc) {
    return plan.vector_x ? launch<true, true, true>(args, runtime, plan)
                         : launch<true, false, false>(args, runtime, plan);
  }
  if (!plan.vector_weight) return launch<false, false, false>(args, runtime, plan);
  plan.vector_x ? launch<false, true, true>(args, runtime, plan) : launch<false, false, true>(args, runtime, plan);
}

}  // namespace fastconv::algos::direct_tiled::pointwise
