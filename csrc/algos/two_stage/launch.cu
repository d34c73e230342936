#include <limits>

#include "algos/two_stage/kernel.cuh"
#include "core/kernels.h"
#include "device/cuda_check.h"
#include "device/launch.h"

namespace fastconv::algos::two_stage {
namespace {

// Images n .. n + images.
template <typename T>
Params<T> make_params(const ConvArgs& args, const Config& config, std::int64_t n, std::int64_t images) {
  const ConvProblem& problem = args.problem;
  Params<T> params{};
  params.in = input_strides(problem), params.out = output_strides(problem);
  params.x = static_cast<const T*>(args.x) + n * params.in.n;
  params.weight = static_cast<const T*>(args.weight);
  params.y = static_cast<T*>(args.y) + n * params.out.n;
  params.planes = single_stage(problem) ? nullptr : static_cast<float*>(args.workspace);
  params.epilogue = make_epilogue<T>(args);
  if (params.epilogue.residual != nullptr) params.epilogue.residual += n * params.out.n;
  params.images = images;
  set_sizes(params, problem);
  params.groups = problem.groups, params.c_per_group = problem.c_per_group();
  params.k_per_group = problem.k_per_group();
  params.taps = problem.r * problem.s;
  params.pixels = images * problem.p() * problem.q();
  params.pixel_tiles = ceil_div<std::int64_t>(params.pixels, config.pixel_tile);
  params.k_tiles = config.k_tiles;
  params.blocks = params.taps * params.groups * params.k_tiles * params.pixel_tiles;
  params.numel = params.pixels * problem.k;
  return params;
}

unsigned grid_for(std::int64_t blocks) {  // the kernels' loops take what is beyond the limit
  return static_cast<unsigned>(std::min<std::int64_t>(blocks, std::numeric_limits<int>::max()));
}

template <typename T, int tile_index, bool lanes_on_filters>
void launch(const ConvArgs& args, Runtime& runtime, const Config& config) {
  const ConvProblem& problem = args.problem;
  const auto stream = stream_of(runtime);
  const std::int64_t step = images_per_chunk(problem);
  for (std::int64_t n = 0; n < problem.n; n += step) {
    const Params<T> params = make_params<T>(args, config, n, std::min(step, problem.n - n));
    scalar_products<T, tile_index, lanes_on_filters><<<grid_for(params.blocks), threads, 0, stream>>>(params);
    check_launch("two_stage: scalar products");
    if (single_stage(problem)) continue;
    sum_planes<T><<<grid_for(ceil_div<std::int64_t>(params.numel, threads)), threads, 0, stream>>>(params, problem.k);
    check_launch("two_stage: sum of planes");
  }
}

}  // namespace

void run_cuda(const ConvArgs& args, Runtime& runtime) {
  const Config& config = plan_as<Config>(args.kernel_plan);
  dispatch_dtype(args.problem.dtype, [&](auto zero) {
    static_assert(tile_count == 3);
    dispatch_value<0, 1, 2>(config.tile, [&](auto tile) {
      dispatch_value<false, true>(config.lanes_on_filters, [&](auto lanes_on_filters) {
        launch<decltype(zero), tile(), lanes_on_filters()>(args, runtime, config);
      });
    });
  });
}

}  // namespace fastconv::algos::two_stage
