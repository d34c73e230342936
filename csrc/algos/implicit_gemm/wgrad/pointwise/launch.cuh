// From a plan to the launches of the pointwise weight gradient: guesses of scales, products, products again where a
// guess did not fit, sum of the splits. Each begins beside the one before.
#pragma once

#include "algos/implicit_gemm/wgrad/pointwise/kernel.cuh"
#include "core/kernels.h"
#include "device/cuda_check.h"
#include "device/indexing.h"
#include "device/launch.h"
#include "device/shared_memory.h"
#include "hopper/tensor_map.h"

namespace fastconv::algos::implicit_gemm::wgrad::pointwise {

// As of the general kernel: a guessed scale brings the largest sampled value to [2^10, 2^11), an exact one the largest
// to [2^14, 2^15).
constexpr int guessed_target = 10, exact_target = 14;

template <typename S>
void launch_products(const Plan& plan, const CUtensorMap& rows, const CUtensorMap& columns, Params params,
                     cudaStream_t stream) {
  allow_shared_memory<multiply_pointwise<S>>(Memory<S>::bytes, "implicit_gemm: shared memory of the weight gradient");
  const LaunchPlan launch{.grid = dim3(static_cast<unsigned>(plan.blocks())),
                          .block = dim3(kernel_threads),
                          .shared_bytes = Memory<S>::bytes,
                          .early = true};
  for (const bool retry : {false, true}) {
    params.retry = retry;
    launch.launch(multiply_pointwise<S>, stream, "implicit_gemm: weight gradient", rows, columns, params);
  }
}

template <Mode mode>
void run(const WeightGradientArgs& args, const Plan& plan, Runtime& runtime) {
  constexpr int limbs = mode == Mode::split ? 2 : 1;
  const ConvProblem& problem = args.problem;
  const auto stream = stream_of(runtime);
  auto* scales = static_cast<ImageScale*>(args.workspace);
  auto* partial = reinterpret_cast<float*>(static_cast<char*>(args.workspace) + plan.scale_bytes());
  const int images = as_int(plan.images);
  const PairScales pair{scales, scales + images, images, exact_target, exact_target};
  const std::int64_t image_pixels = problem.h * problem.w;
  const auto* x = static_cast<const float*>(args.x);
  const auto* grad = static_cast<const float*>(args.grad);
  guess_image_scales<<<dim3(static_cast<unsigned>(images), 2), sample_threads, 0, stream>>>(
      {{{x, pair.first, image_pixels * problem.c, guessed_target},
        {grad, pair.second, image_pixels * problem.k, guessed_target}}});
  check_launch("implicit_gemm: scales of the weight gradient");

  const auto map = [&](const float* data, std::int64_t channels) {
    return make_tensor_map(data, DType::f32, 1, 1, plan.pixels, channels,
                           {.c = box_channels, .w = chunk_pixels, .h = 1, .n = 1});
  };
  const CUtensorMap x_map = map(x, problem.c), grad_map = map(grad, problem.k);
  const Params params{.pair = pair,
                      .transposed = plan.transposed,
                      .retry = false,
                      .partial = partial,
                      .report = runtime.wait_report(),
                      .rows = as_int(plan.rows),
                      .columns = as_int(plan.columns),
                      .chunks = as_int(plan.chunks()),
                      .chunks_per_split = as_int(plan.chunks_per_split),
                      .by_tiles = plan.tiles(),
                      .by_column_tiles = plan.column_tiles(),
                      .by_image_pixels = image_pixels};
  for_each_tile<limbs>([&](auto warpgroups, auto columns) {
    if (plan.tile.warpgroups != warpgroups() || plan.tile.warpgroup_columns != columns()) return;
    using S = Shape<limbs, warpgroups(), columns()>;
    launch_products<S>(plan, plan.transposed ? x_map : grad_map, plan.transposed ? grad_map : x_map, params, stream);
  });

  const std::int64_t numel = plan.split_numel();
  const std::int64_t blocks = std::min<std::int64_t>(ceil_div<std::int64_t>(numel, 32), 1 << 16);
  LaunchPlan{.grid = dim3(static_cast<unsigned>(blocks)), .block = dim3(sum_threads), .early = true}.launch(
      reduce_split_k, stream, "implicit_gemm: sum of the weight gradient's splits", partial,
      static_cast<float*>(args.dw), as_int(plan.splits()), numel, plan.transposed ? std::int64_t{1} : problem.c,
      plan.transposed ? problem.c : std::int64_t{1}, FastDivide(plan.columns));
}

}  // namespace fastconv::algos::implicit_gemm::wgrad::pointwise
