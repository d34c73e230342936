#include "algos/direct_tiled/pointwise/kernel.cuh"
#include "core/kernels.h"
#include "device/indexing.h"
#include "device/launch.h"
#include "device/shared_memory.h"

namespace fastconv::algos::direct_tiled::pointwise {
namespace {

Params make_params(const ConvArgs& args, const Config& config, const Runtime& runtime) {
  const ConvProblem& problem = args.problem;
  const std::int64_t map = problem.p() * problem.q();
  const Strides4 in = input_strides(problem);
  return {.x = static_cast<const float*>(args.x),
          .weight = static_cast<const float*>(args.weight),
          .y = static_cast<float*>(args.y),
          .epilogue = make_epilogue<float>(args),
          .config = config,
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
          .vector_y = (problem.layout == Layout::nhwc ? problem.k : map) % quad == 0,
          .report = runtime.wait_report()};
}

template <bool nhwc, bool vector_x, bool vector_weight>
void launch(const ConvArgs& args, Runtime& runtime, const Config& config) {
  constexpr auto kernel = convolve<nhwc, vector_x, vector_weight>;
  allow_shared_memory<kernel>(max_shared_bytes, "direct_tiled: shared memory");
  const dim3 grid(static_cast<unsigned>(config.filter_tiles * config.split()),
                  static_cast<unsigned>(config.pixel_tiles));
  LaunchPlan{grid, threads, static_cast<std::size_t>(config.shared_bytes), config.split()}.launch(
      kernel, stream_of(runtime), "direct_tiled", make_params(args, config, runtime));
}

}  // namespace

void run_cuda(const ConvArgs& args, Runtime& runtime, const Config& config) {
  const ConvProblem& problem = args.problem;
  const bool rows = problem.c % quad == 0;  // of channels, in whole vectors
  if (problem.layout == Layout::nhwc) {
    return rows ? launch<true, true, true>(args, runtime, config) : launch<true, false, false>(args, runtime, config);
  }
  const bool maps = problem.h * problem.w % quad == 0 && problem.stride_h == 1 && problem.stride_w == 1;
  if (!rows) return launch<false, false, false>(args, runtime, config);
  maps ? launch<false, true, true>(args, runtime, config) : launch<false, false, true>(args, runtime, config);
}

}  // namespace fastconv::algos::direct_tiled::pointwise
