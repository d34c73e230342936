#include "algos/direct_tiled/resident/kernel.cuh"
#include "core/kernels.h"
#include "core/store_mode.h"
#include "device/cuda_check.h"
#include "device/indexing.h"
#include "device/launch.h"
#include "device/shared_memory.h"

namespace fastconv::algos::direct_tiled::resident {
namespace {

template <typename T>
Params<T> make_params(const ConvArgs& args, const Config& config) {
  const ConvProblem& problem = args.problem;
  const bool nhwc = problem.layout == Layout::nhwc;
  const Strides4 in = input_strides(problem), out = output_strides(problem);
  const int c = as_int(problem.c), in_row = as_int(in.h), in_plane = as_int(in.c);
  const PatchOrder patch{
      .count = c * config.patch_h * config.patch_w,
      .by_0 = nhwc ? c : config.patch_w,
      .by_1 = nhwc ? config.patch_w : config.patch_h,
      .in_1 = nhwc ? as_int(in.w) : in_row,
      .in_2 = nhwc ? in_row : in_plane,
      .staged_0 = nhwc ? config.plane : 1,
      .staged_1 = nhwc ? 1 : config.pitch,
      .staged_2 = nhwc ? config.pitch : config.plane,
  };
  Params<T> params{.x = static_cast<const T*>(args.x),
                   .weight = static_cast<const T*>(args.weight),
                   .y = static_cast<T*>(args.y),
                   .image_out = out.n,
                   .image_in = static_cast<std::uint32_t>(in.n),
                   .in_row = in_row,
                   .out_k = as_int(out.c),
                   .out_p = as_int(out.h),
                   .out_q = as_int(out.w),
                   .epilogue = make_epilogue<T>(args),
                   .config = config,
                   .tile = tiles[config.tile],
                   .patch = patch,
                   .by_p_tiles = config.p_tiles,
                   .by_q_tiles = config.q_tiles,
                   .by_stride_w = problem.stride_w,
                   .by_s = problem.s,
                   .by_terms = problem.c * problem.r * problem.s,
                   .chunks = {},
                   .chunk_count = 0,
                   .nhwc = nhwc,
                   .has_activation = problem.activation != Activation::none,
                   .vector = select_store_mode(problem, quad) != StoreMode::elements};
  set_sizes(params, problem);
  for_each_chunk(problem, config.phase_pitch, [&](const Chunk& chunk) { params.chunks[params.chunk_count++] = chunk; });
  return params;
}

template <typename T, int r, int s, int stride>
void launch(const ConvArgs& args, Runtime& runtime, const Config& config) {
  constexpr auto kernel = convolve<T, r, s, stride>;
  allow_shared_memory<kernel>(static_cast<int>(max_bytes(runtime.device())), "direct_tiled: shared memory");
  kernel<<<static_cast<unsigned>(config.blocks), static_cast<unsigned>(config.threads()),
           static_cast<std::size_t>(config.shared_bytes), stream_of(runtime)>>>(make_params<T>(args, config));
  check_launch("direct_tiled");
}

}  // namespace

void run_cuda(const ConvArgs& args, Runtime& runtime, const Config& config) {
  dispatch_dtype(args.problem.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (!has_own_kernel(args.problem)) return launch<T, 0, 0, 0>(args, runtime, config);
    if (args.problem.s == 3) return launch<T, 3, 3, 1>(args, runtime, config);
    launch<T, 7, 7, 2>(args, runtime, config);
  });
}

}  // namespace fastconv::algos::direct_tiled::resident
