// From a plan to the launches of the weight gradient: scales, transforms, products, transform of their sums.
#include "algos/winograd_staged/wgrad/kernel.cuh"
#include "algos/winograd_staged/wgrad/transform.cuh"
#include "core/kernels.h"
#include "device/cuda_check.h"
#include "device/dependent_launch.cuh"
#include "device/indexing.h"
#include "device/launch.h"
#include "device/shared_memory.h"

namespace fastconv {
namespace algos::winograd_staged::wgrad {
namespace {

// Every kernel but the first begins beside the last blocks of the one before.
template <typename Kernel, typename... Arguments>
void launch_dependent(Kernel kernel, dim3 grid, dim3 block, std::size_t shared_bytes, Arguments&&... arguments) {
  LaunchPlan{.grid = grid, .block = block, .shared_bytes = shared_bytes, .early = true}.launch(
      kernel, std::forward<Arguments>(arguments)...);
}

template <int blocks_m, int blocks_n>
void multiply(const Params& params, int processors, cudaStream_t stream) {
  using S = Shape<blocks_m, blocks_n>;
  allow_shared_memory<multiply_tiles<S>>(S::shared_bytes, "winograd weight gradient: shared memory");
  launch_dependent(multiply_tiles<S>, std::min<unsigned>(params.work_tiles, processors), S::threads, S::shared_bytes,
                   stream, "winograd weight gradient: products", params);
}

void run(const WeightGradientArgs& args, Runtime& runtime) {
  const ConvProblem& problem = args.problem;
  const auto& plan = plan_as<Plan>(args.kernel_plan);
  const auto stream = stream_of(runtime);
  const int processors = runtime.device().processors;
  auto* scale_memory = static_cast<ImageScale*>(args.workspace);
  char* memory = static_cast<char*>(args.workspace) + plan.scale_bytes(problem);
  auto* v = reinterpret_cast<half_t*>(memory);
  auto* w = reinterpret_cast<half_t*>(memory += plan.x_bytes());
  auto* partial = reinterpret_cast<float*>(memory += plan.grad_bytes());

  const auto* x = static_cast<const float*>(args.x);
  const auto* grad = static_cast<const float*>(args.grad);
  const PairScales scales{scale_memory, scale_memory + problem.n, as_int(problem.n), exact_x, exact_grad};
  auto* sums = reinterpret_cast<int*>(scale_memory + 2 * problem.n);  // [stages + 1]
  const std::int64_t x_image = problem.c * problem.h * problem.w, grad_image = problem.k * problem.p() * problem.q();
  guess_image_scales<<<dim3(static_cast<unsigned>(problem.n), 2), sample_threads, 0, stream>>>(
      {{{x, scales.first, x_image, exact_x - guess_room}, {grad, scales.second, grad_image, exact_grad - guess_room}}});
  check_launch("winograd weight gradient: scales");

  const TileGrid grid{as_int(plan.tiles), as_int(plan.stages), plan.tiles_q, plan.tiles_p, plan.tiles_p * plan.tiles_q};
  const Operand of_x{x,
                     v,
                     as_int(problem.h),
                     as_int(problem.w),
                     as_int(problem.c),
                     as_int(problem.pad_h),
                     as_int(problem.pad_w),
                     problem.c % 2 == 0,
                     plan.x_blocks,
                     plan.stages * plan.x_blocks * block_bytes / 2};
  const Operand of_grad{
      grad, w, as_int(problem.p()), as_int(problem.q()), as_int(problem.k),
      0,    0, problem.k % 2 == 0,  plan.grad_blocks,    plan.stages * plan.grad_blocks * block_bytes / 2};
  // Tiles and channel blocks come in whole stages: no warp is without a tile.
  const auto blocks = [&](std::int64_t channel_blocks) {
    return static_cast<unsigned>(plan.stages * stage_tiles * channel_blocks * 32 / transform_threads);
  };
  launch_dependent(transform, blocks(plan.x_blocks) + blocks(plan.grad_blocks), transform_threads, 0, stream,
                   "winograd weight gradient: transforms", grid, of_x, of_grad, scales, blocks(plan.x_blocks));
  const std::int64_t stage_blocks = ceil_div<std::int64_t>(plan.stages, retry_threads / 32);
  launch_dependent(retry_transforms, static_cast<unsigned>(std::min<std::int64_t>(stage_blocks, 2 * processors)),
                   retry_threads, 0, stream, "winograd weight gradient: repetition", grid, of_x, of_grad, scales, sums);

  const bool filters = plan.rows_are_filters;
  const Params params{filters ? w : v,
                      filters ? v : w,
                      partial,
                      sums,
                      runtime.wait_report(),
                      plan.rows * plan.pitch,
                      as_int(filters ? plan.grad_blocks : plan.x_blocks),
                      as_int(filters ? plan.x_blocks : plan.grad_blocks),
                      as_int(plan.rows),
                      as_int(plan.pitch),
                      as_int(plan.stages),
                      as_int(plan.stages_per_split),
                      static_cast<unsigned>(plan.work_tiles()),
                      plan.column_tiles,
                      plan.row_tiles,
                      plan.split_k};
  if (plan.row_blocks == 3) {
    multiply<3, 1>(params, processors, stream);
  } else if (plan.column_blocks == 2) {
    multiply<2, 2>(params, processors, stream);
  } else {
    multiply<2, 1>(params, processors, stream);
  }

  const std::int64_t stride_k = problem.c * 9, stride_c = args.channels_last ? 1 : 9;
  const Output output{partial,
                      static_cast<float*>(args.dw),
                      as_int(plan.split_k),
                      as_int(plan.rows),
                      as_int(plan.columns),
                      as_int(plan.pitch),
                      filters ? stride_k : stride_c,
                      filters ? stride_c : stride_k,
                      args.channels_last ? problem.c : 1,
                      sums + plan.stages};
  const auto output_blocks = static_cast<unsigned>(ceil_div<std::int64_t>(plan.rows * plan.columns, output_columns));
  launch_dependent(transform_output, output_blocks, dim3(output_columns, alpha), 0, stream,
                   "winograd weight gradient: transform of the sums", output, plan.columns);
}

}  // namespace
}  // namespace algos::winograd_staged::wgrad

namespace algos::winograd_f4 {

void weight_gradient_cuda(const WeightGradientArgs& args, Runtime& runtime) {
  winograd_staged::wgrad::run(args, runtime);
}

}  // namespace algos::winograd_f4
}  // namespace fastconv
