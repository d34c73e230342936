#include "algos/direct_tiled/depthwise/pairs/kernel.cuh"
#include "core/kernels.h"
#include "device/cuda_check.h"
#include "device/indexing.h"
#include "device/launch.h"
#include "device/shared_memory.h"

namespace fastconv::algos::direct_tiled::depthwise::pairs {
namespace {

template <typename T, int r, int stride>
void launch(const ConvArgs& args, Runtime& runtime, const Config& config) {
  const ConvProblem& problem = args.problem;
  Params<T> params{.x = static_cast<const T*>(args.x),
                   .weight = static_cast<const T*>(args.weight),
                   .y = static_cast<T*>(args.y),
                   .epilogue = make_epilogue<T>(args),
                   .x_image = problem.c * problem.h * problem.w,
                   .y_image = problem.k * problem.p() * problem.q(),
                   .strip = config.strip,
                   .threads = static_cast<unsigned>(problem.n * config.strips * config.column_tiles * (problem.c / 2)),
                   .by_pairs = problem.c / 2,
                   .by_columns = config.column_tiles,
                   .by_strips = config.strips};
  set_sizes(params, problem);
  constexpr auto bytes = sizeof(Shape<T, r, stride>);
  static_assert(bytes == shared_bytes(r, stride, sizeof(T)), "the plan's");
  const auto run = [&](auto gated) {
    constexpr auto kernel = convolve<T, r, stride, gated()>;
    if constexpr (bytes > 48 * 1024) allow_shared_memory<kernel>(bytes, "direct_tiled: shared memory");
    kernel<<<static_cast<unsigned>(config.blocks), threads, bytes, stream_of(runtime)>>>(params);
    check_launch("direct_tiled: depthwise");
  };
  if constexpr (sizeof(T) == 2) {
    if (is_gated(problem.activation)) return run(std::true_type{});
  }
  run(std::false_type{});
}

}  // namespace

void run_cuda(const ConvArgs& args, Runtime& runtime, const Config& config) {
  dispatch_dtype(args.problem.dtype, [&](auto zero) {
    dispatch_value<3, 5, 7>(args.problem.r, [&](auto r) {
      dispatch_value<1, 2>(args.problem.stride_h,
                           [&](auto stride) { launch<decltype(zero), r(), stride()>(args, runtime, config); });
    });
  });
}

}  // namespace fastconv::algos::direct_tiled::depthwise::pairs
