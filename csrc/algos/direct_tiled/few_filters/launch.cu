#include "algos/direct_tiled/few_filters/kernel.cuh"
#include "core/kernels.h"
#include "device/cuda_check.h"
#include "device/indexing.h"
#include "device/launch.h"
#include "device/shared_memory.h"

namespace fastconv::algos::direct_tiled::few_filters {
namespace {

template <typename T>
Params<T> make_params(const ConvArgs& args, const Config& config) {
  const ConvProblem& problem = args.problem;
  Params<T> params{};
  params.x = static_cast<const T*>(args.x);
  params.weight = static_cast<const T*>(args.weight);
  params.y = static_cast<T*>(args.y);
  params.epilogue = make_epilogue<T>(args);
  const Strides4 in = input_strides(problem), out = output_strides(problem);
  params.x_image = in.n, params.y_image = out.n;
  params.x_pixel = as_int(in.w), params.y_pixel = as_int(out.w);
  set_sizes(params, problem);
  params.c_pad = config.c_pad;
  params.tasks = static_cast<unsigned>(config.tasks);
  params.by_q_tiles = config.q_tiles, params.by_p_tiles = config.p_tiles;
  return params;
}

template <typename T, auto kernel>
void launch_kernel(const ConvArgs& args, Runtime& runtime, const Config& config) {
  const char* const what = "direct_tiled: few filters";
  allow_shared_memory<kernel>(static_cast<int>(std::min(max_filter_bytes, max_bytes(runtime.device()))), what);
  kernel<<<static_cast<unsigned>(config.blocks), block_threads, static_cast<std::size_t>(config.shared_bytes),
           stream_of(runtime)>>>(make_params<T>(args, config));
  check_launch(what);
}

template <typename T, int r, int k_tile>
void launch(const ConvArgs& args, Runtime& runtime, const Config& config) {
  if constexpr (r == 3) {
    if (args.problem.layout == Layout::nchw) {
      return launch_kernel<T, convolve_nchw<T, r, k_tile>>(args, runtime, config);
    }
  }
  launch_kernel<T, convolve_nhwc<T, r, k_tile>>(args, runtime, config);
}

}  // namespace

void run_cuda(const ConvArgs& args, Runtime& runtime, const Config& config) {
  dispatch_dtype(args.problem.dtype, [&](auto zero) {
    dispatch_value<3, 5, 7>(args.problem.r, [&](auto r) {
      dispatch_value<3, 4>(config.k_tile,
                           [&](auto k_tile) { launch<decltype(zero), r(), k_tile()>(args, runtime, config); });
    });
  });
}

}  // namespace fastconv::algos::direct_tiled::few_filters
