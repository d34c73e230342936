#include <limits>

#include "algos/direct_tiled/kernel.cuh"
#include "algos/direct_tiled/resident/plan.h"
#include "core/kernels.h"
#include "device/cuda_check.h"
#include "device/indexing.h"
#include "device/launch.h"
#include "device/shared_memory.h"

namespace fastconv::algos::direct_tiled {
namespace {

template <typename T>
Params<T> make_params(const ConvArgs& args, const Config& config) {
  const ConvProblem& problem = args.problem;
  Params<T> params{};
  params.x = static_cast<const T*>(args.x);
  params.weight = static_cast<const T*>(args.weight);
  params.y = static_cast<T*>(args.y);
  params.in = input_strides(problem), params.out = output_strides(problem);
  params.epilogue = make_epilogue<T>(args);
  params.config = config;
  params.by_plane = SmallDivider(config.patch_h * config.patch_w);
  params.by_patch_w = SmallDivider(config.patch_w);
  params.by_slots = SmallDivider(config.group_tile * config.channels);
  params.by_channels = SmallDivider(config.channels);
  params.groups = problem.groups, params.c_per_group = problem.c_per_group();
  params.k_per_group = problem.k_per_group();
  // Bounded by what fits shared memory, but for the dilation of a single tap, which multiplies zero.
  set_sizes(params, problem);
  params.nhwc = problem.layout == Layout::nhwc;
  return params;
}

template <typename T, int tile_index>
void launch(const ConvArgs& args, Runtime& runtime, const Config& config) {
  constexpr auto kernel = convolve<T, tile_index>;
  allow_shared_memory<kernel>(static_cast<int>(max_bytes(runtime.device())), "direct_tiled: shared memory");
  constexpr std::int64_t max_blocks = std::numeric_limits<int>::max();
  const auto grid = static_cast<unsigned>(std::min(config.blocks, max_blocks));  // the kernel's loop takes the rest
  kernel<<<grid, threads, static_cast<std::size_t>(config.shared_bytes), stream_of(runtime)>>>(
      make_params<T>(args, config));
  check_launch("direct_tiled");
}

void run_cuda(const ConvArgs& args, Runtime& runtime, const Config& config) {
  dispatch_dtype(args.problem.dtype, [&](auto zero) {
    static_assert(tile_count == 3);
    dispatch_value<0, 1, 2>(config.tile, [&](auto tile) { launch<decltype(zero), tile()>(args, runtime, config); });
  });
}

}  // namespace

void run_cuda(const ConvArgs& args, Runtime& runtime) {
  std::visit([&](const auto& config) { run_cuda(args, runtime, config); }, plan_as<Choice>(args.kernel_plan).value());
}

}  // namespace fastconv::algos::direct_tiled
