#include "algos/direct_tiled/resident.cuh"
#include "core/kernels.h"
#include "device/cuda_check.h"

namespace fastconv::algos::direct_tiled::resident {
namespace {

bool aligned(const void* pointer, std::size_t bytes) { return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0; }

template <typename T>
Params<T> make_params(const ConvArgs& args, const Config& config) {
  const ConvProblem& problem = args.problem;
  const auto divide_by = [](std::int64_t value) { return FastDivide(static_cast<std::uint32_t>(value)); };
  const auto small = [](std::int64_t value) { return static_cast<int>(value); };  // bounded by configure()
  const bool nhwc = problem.layout == Layout::nhwc;
  const Strides4 in = input_strides(problem), out = output_strides(problem);
  const int c = small(problem.c), in_row = small(in.h), in_plane = small(in.c);
  const PatchOrder patch{
      .count = c * config.patch_h * config.patch_w,
      .by_0 = divide_by(nhwc ? c : config.patch_w),
      .by_1 = divide_by(nhwc ? config.patch_w : config.patch_h),
      .in_1 = nhwc ? c : in_row,
      .in_2 = nhwc ? in_row : in_plane,
      .staged_0 = nhwc ? config.plane : 1,
      .staged_1 = nhwc ? 1 : config.pitch,
      .staged_2 = nhwc ? config.pitch : config.plane,
  };
  constexpr std::size_t bytes = quad * sizeof(T);
  Params<T> params{.x = static_cast<const T*>(args.x),
                   .weight = static_cast<const T*>(args.weight),
                   .y = static_cast<T*>(args.y),
                   .image_out = out.n,
                   .image_in = static_cast<std::uint32_t>(in.n),
                   .in_row = in_row,
                   .out_k = small(out.c),
                   .out_p = small(out.h),
                   .out_q = small(out.w),
                   .epilogue = make_epilogue<T>(args),
                   .config = config,
                   .tile = tiles[config.tile],
                   .patch = patch,
                   .by_p_tiles = divide_by(config.p_tiles),
                   .by_q_tiles = divide_by(config.q_tiles),
                   .by_stride_w = divide_by(problem.stride_w),
                   .by_s = divide_by(problem.s),
                   .by_terms = divide_by(problem.c * problem.r * problem.s),
                   .chunks = {},
                   .k = small(problem.k),
                   .p = small(problem.p()),
                   .q = small(problem.q()),
                   .c = c,
                   .r = small(problem.r),
                   .s = small(problem.s),
                   .h = small(problem.h),
                   .w = small(problem.w),
                   .pad_h = small(problem.pad_h),
                   .pad_w = small(problem.pad_w),
                   .stride_h = small(problem.stride_h),
                   .stride_w = small(problem.stride_w),
                   .dilation_h = small(problem.dilation_h),
                   .dilation_w = small(problem.dilation_w),
                   .chunk_count = 0,
                   .nhwc = nhwc,
                   .has_activation = problem.activation != Activation::none,
                   .vector = (nhwc ? problem.k : problem.q()) % quad == 0 && aligned(args.y, bytes) &&
                             aligned(args.residual, bytes)};
  for_each_chunk(problem, config.phase_pitch, [&](const Chunk& chunk) { params.chunks[params.chunk_count++] = chunk; });
  return params;
}

template <typename T, int r, int s, int stride>
void launch(const ConvArgs& args, Runtime& runtime, const Config& config) {
  const auto kernel = convolve<T, r, s, stride>;
  if (config.shared_bytes > preferred_shared_bytes) {
    // Always the same value: another thread may launch the same kernel with another size between these two calls.
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(most_bytes(runtime.device()))),
               "direct_tiled: shared memory");
  }
  kernel<<<static_cast<unsigned>(config.blocks), static_cast<unsigned>(config.threads()),
           static_cast<std::size_t>(config.shared_bytes), static_cast<cudaStream_t>(runtime.stream())>>>(
      make_params<T>(args, config));
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
