#include "algos/direct_tiled/depthwise/kernel.cuh"
#include "core/kernels.h"
#include "device/cuda_check.h"
#include "device/indexing.h"
#include "device/launch.h"

namespace fastconv::algos::direct_tiled::depthwise {
namespace {

template <typename T>
Params<T> make_params(const ConvArgs& args, const Config& config) {
  const ConvProblem& problem = args.problem;
  const std::int64_t tasks = problem.n * config.strips * config.column_tiles;
  Params<T> params{.x = static_cast<const T*>(args.x),
                   .weight = static_cast<const T*>(args.weight),
                   .y = static_cast<T*>(args.y),
                   .epilogue = make_epilogue<T>(args),
                   .x_image = problem.c * problem.h * problem.w,
                   .y_image = problem.k * problem.p() * problem.q(),
                   .strip = config.strip,
                   .channel_tiles = as_int(config.channel_tiles),
                   .plain = args.residual == nullptr && problem.activation != Activation::silu,
                   .tasks = static_cast<unsigned>(problem.layout == Layout::nhwc ? tasks : tasks * problem.c),
                   .by_channel_tiles = config.channel_tiles,
                   .by_columns = config.column_tiles,
                   .by_strips = config.strips,
                   .by_c = problem.c};
  set_sizes(params, problem);
  return params;
}

template <typename T, int r, int stride>
void launch(const ConvArgs& args, Runtime& runtime, const Config& config) {
  const Params<T> params = make_params<T>(args, config);
  const auto blocks = static_cast<unsigned>(config.blocks);
  const auto stream = stream_of(runtime);
  if (args.problem.layout == Layout::nchw) {
    convolve_nchw<Shape<r, stride, 1>><<<blocks, warps * 32, 0, stream>>>(params);
  } else {
    convolve_nhwc<Shape<r, stride, columns>><<<blocks, warps * 32, 0, stream>>>(params);
  }
  check_launch("direct_tiled: depthwise");
}

}  // namespace

void run_cuda(const ConvArgs& args, Runtime& runtime, const Config& config) {
  if (config.pairs) return pairs::run_cuda(args, runtime, config);
  dispatch_dtype(args.problem.dtype, [&](auto zero) {
    dispatch_value<3, 5, 7>(args.problem.r, [&](auto r) {
      dispatch_value<1, 2>(args.problem.stride_h,
                           [&](auto stride) { launch<decltype(zero), r(), stride()>(args, runtime, config); });
    });
  });
}

}  // namespace fastconv::algos::direct_tiled::depthwise
