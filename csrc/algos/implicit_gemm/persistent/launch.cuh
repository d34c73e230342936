// From a plan to a launch of the Hopper kernel. Each class has a .cu file of its own, one for affine inputs and one for
// gated activations, so that they compile side by side.
#pragma once

#include "algos/implicit_gemm/persistent/convert.cuh"
#include "algos/implicit_gemm/persistent/kernel.cuh"
#include "algos/implicit_gemm/persistent/pack.cuh"
#include "algos/implicit_gemm/persistent/plan.h"
#include "algos/implicit_gemm/persistent/reduce.cuh"
#include "algos/implicit_gemm/shared/half.h"
#include "core/kernels.h"
#include "device/cuda_check.h"
#include "device/indexing.h"
#include "device/launch.h"
#include "device/shared_memory.h"
#include "hopper/tensor_map.h"

namespace fastconv::algos::implicit_gemm::persistent {

template <typename T, Mode mode>
Params<T> make_params(const ConvArgs& args, const Plan& plan, void* workspace, const Runtime& runtime) {
  const ConvProblem& problem = args.problem;
  const Weights& weights = plan.weights;
  const bool sums_apart = plan.partial_bytes(problem) > 0;  // which are dense
  const Strides4 out =
      sums_apart ? dense_strides(problem.layout, problem.k, problem.p(), problem.q()) : output_strides(problem);
  const ShuffledPlaces shuffled(problem, plan.filter_tile);
  const bool product = is_matrix_product(problem) || plan.flat;
  const std::int64_t per_split = ceil_div(plan.stages, plan.split_k);
  Params<T> params{
      .weight = static_cast<const unsigned char*>(args.weight),
      .exponents = reinterpret_cast<const int*>(static_cast<const char*>(args.weight) + weights.weight_bytes()),
      .image_exponents = nullptr,
      .condition = nullptr,
      .condition_count = 0,
      .images = as_int(problem.n),
      .y = static_cast<T*>(args.y),
      .partial = sums_apart ? static_cast<float*>(workspace) : nullptr,
      .epilogue = make_epilogue<T>(args),
      .report = runtime.wait_report(),
      .y_image = out.n,
      .y_row = out.h,
      .y_pixel = out.w,
      .y_filter = out.c,
      .y_numel = problem.output_numel(),
      .shuffled = sums_apart ? shuffled.of_sums() : shuffled,
      .tile_n = plan.tile_n,
      .tile_p = plan.tile_p,
      .tile_q = plan.tile_q,
      .box_h = plan.box_h,
      .box_w = plan.box_w,
      .input_slots = plan.input_slots,
      .stage_bytes = static_cast<int>(plan.stage_bytes()),
      .box_bytes = plan.box_n * plan.box_h * plan.box_w * input_row_bytes,
      .stages = as_int(plan.stages),
      .stage_taps = plan.stage_taps,
      .taps = as_int(weights.taps),
      .split_k = as_int(plan.split_k),
      .stages_per_split = as_int(per_split),
      .packed_tile_bytes = static_cast<std::int64_t>(weights.weight_bytes()) / weights.filter_tiles,
      .packed_bytes = as_int(weights.tile_bytes()),
      .n_splits = weights.filter_tile / plan.filter_tile,
      .flat = plan.flat,
      .in_a_row = product,
      .rows = as_int(problem.p()),
      .halo_rows = as_int((problem.r - 1) * problem.dilation_h),
      .row_bytes = plan.box_w * input_row_bytes,
      .by_row = problem.q(),
      .by_rows = problem.p(),
      .by_k = problem.k,
      .along_filters = problem.layout == Layout::nhwc,
      .vectors = false,
      .quads = false,
      .stores_by_tma = false,
      .residual_stages = plan.residual_stages,
      .staging_bytes = static_cast<int>(plan.staging_bytes),
      .flat_nchw = product && problem.layout == Layout::nchw,
      .by_image = problem.p() * problem.q(),
      .work_tiles = static_cast<unsigned>(plan.work_tiles()),
      .whole = static_cast<unsigned>(plan.split_k > 1 ? plan.whole : plan.tiles()),
      .by_split_k = plan.split_k,
      .by_n_splits = weights.filter_tile / plan.filter_tile,
      .by_filter_tiles = plan.filter_tiles(),
      .by_tiles_q = plan.tiles_q,
      .by_tiles_p = plan.tiles_p,
      .by_tiles_n = plan.tiles_n,
      .by_tile_q = plan.tile_q,
      .by_tile_p = plan.tile_p,
      .by_taps = weights.taps,
      .by_s = problem.s,
      .scale = args.scale,
      .shift = args.shift,
      .floor = problem.input_activation == Activation::none ? -INFINITY : 0.0f,
      .cap = problem.input_activation == Activation::relu6 ? 6.0f : INFINITY};
  set_sizes(params, problem);
  if (product) params.n = 1, params.p = 1, params.q = as_int(problem.n * problem.p() * problem.q());
  params.vectors = plan.stores_vectors;
  params.stores_by_tma = plan.stores_by_tma && params.partial == nullptr;
  params.quads = plan.stores_quads;
  if (residual_first<T> && params.residual_stages > 0) params.epilogue.residual = nullptr;
  return params;
}

template <typename S>
void launch(const Params<typename S::T>& params, const CUtensorMap& x_map, const CUtensorMap& y_map,
            const CUtensorMap& residual_map, std::size_t shared_bytes, int blocks, int cluster, cudaStream_t stream) {
  allow_shared_memory<convolve<S>>(static_cast<int>(shared_limit), "implicit_gemm: shared memory");
  const unsigned grid = std::min(params.work_tiles, static_cast<unsigned>(blocks));  // one fits on a multiprocessor
  LaunchPlan{grid, S::threads, shared_bytes, cluster}.launch(convolve<S>, stream, "implicit_gemm", x_map, y_map,
                                                             residual_map, params);
}

// gated: the problem's activation. `sources`: those that the plan may have.
template <typename T, Mode mode, bool gated, Source... sources>
void run_kernel(const ConvArgs& args, const Plan& plan, const Params<T>& params, const void* x, DType x_type,
                Runtime& runtime) {
  const ConvProblem& problem = args.problem;
  const auto stream = stream_of(runtime);
  const Box4 x_box{.c = plan.step_channels(),
                   .w = plan.box_w,
                   .h = plan.flat ? 1 : plan.box_h,
                   .n = plan.box_n,
                   .stride_w = static_cast<int>(problem.stride_w),
                   .stride_h = static_cast<int>(problem.stride_h)};
  const Box4 y_box{.c = box_bytes / static_cast<int>(sizeof(T)), .w = plan.tile_q, .h = plan.tile_p, .n = plan.tile_n};
  const auto make_map = [&](const void* tensor, DType dtype, std::int64_t height, std::int64_t width,
                            std::int64_t channels, std::int64_t pitch, const Box4& box, bool row) {
    return row ? make_tensor_map(tensor, dtype, 1, 1, problem.n * height * width, channels, box, pitch)
               : make_tensor_map(tensor, dtype, problem.n, height, width, channels, box, pitch);
  };
  const CUtensorMap x_map =
      make_map(x, x_type, problem.h, problem.w, problem.c, plan.source == Source::converted ? 0 : problem.x_pitch(),
               x_box, is_matrix_product(problem));
  // Shuffled: rows of 2 Q pairs of pixels (ShuffledPlaces).
  const int rows_of_pairs = problem.shuffles() ? 2 : 1;
  const CUtensorMap y_map = params.stores_by_tma
                                ? make_map(args.y, problem.dtype, problem.p(), rows_of_pairs * problem.q(),
                                           rows_of_pairs == 2 ? 2 * problem.y_pitch() : problem.k,
                                           rows_of_pairs * problem.y_pitch(), y_box, params.in_a_row)
                                : CUtensorMap{};
  const CUtensorMap residual_map =
      params.residual_stages > 0
          ? make_map(args.residual, problem.dtype, problem.p(), problem.q(), problem.k, 0, y_box, params.in_a_row)
          : CUtensorMap{};
  Params<T> products = params;
  if (params.partial != nullptr) products.epilogue.residual = nullptr;  // reduce_split_k has the epilogue
  const int blocks = static_cast<int>(blocks_at_once(plan, runtime.device().processors));
  const int cluster = plan.clusters ? static_cast<int>(plan.split_k) : 1;
  const auto run_tile = [&](auto filter_tile) {
    dispatch_value<sources...>(plan.source, [&](auto source) {
      dispatch_value<1, 2>(plan.row_blocks, [&](auto row_blocks) {
        constexpr Mode accumulators = source() == Source::converted ? Mode::fp16 : mode;
        constexpr bool fits = row_blocks() == 1 || filter_tile() <= max_filters_of_two_rows(accumulators);
        if constexpr (fits && (source() != Source::affine || has_affine_kernel(filter_tile(), row_blocks()))) {
          launch<Shape<T, mode, filter_tile(), row_blocks(), source(), gated>>(
              products, x_map, y_map, residual_map, plan.shared_bytes(), blocks, cluster, stream);
        }
      });
    });
  };
  if constexpr (mode == Mode::split) {
    dispatch_value<128, 64, 32, 96, 48>(plan.filter_tile, run_tile);
  } else {
    dispatch_value<128, 64, 32, 96>(plan.filter_tile, run_tile);
  }
  if (params.partial != nullptr) {
    const std::int64_t numel = problem.output_numel();
    const bool nhwc = problem.layout == Layout::nhwc;
    const FastDivide by_inner = nhwc ? 1 : problem.p() * problem.q();
    const auto sum_blocks =
        static_cast<unsigned>(std::min<std::int64_t>(ceil_div(numel, 256), runtime.device().processors * 8));
    const PixelPlaces places(problem);
    reduce_split_k<T, gated><<<sum_blocks, 256, 0, stream>>>(static_cast<int>(plan.split_k), numel, by_inner, problem.k,
                                                             places, params.partial, params.epilogue, params.y);
    check_launch("implicit_gemm: sum of split_k");
  }
}

template <Mode mode>
void run_class(const ConvArgs& args, const Plan& plan, Runtime& runtime) {
  using T = ElementOf<mode>;
  const ConvProblem& problem = args.problem;
  const void* x = args.x;
  void* workspace = args.workspace;  // plan.workspace_bytes()
  Params<T> params = make_params<T, mode>(args, plan, workspace, runtime);
  if constexpr (mode == Mode::single) {
    constexpr auto run_source = run_kernel<T, mode, false, Source::transformed, Source::raw, Source::converted>;
    if (plan.source == Source::converted) {
      const std::int64_t blocks = plan.convert_blocks(problem);
      int* exponents = reinterpret_cast<int*>(static_cast<char*>(workspace) + plan.converted_bytes(problem));
      int* flags = exponents + problem.n;
      const auto kernel = problem.x_channels == 0 ? convert<half_t, false> : convert<half_t, true>;
      kernel<<<static_cast<unsigned>(blocks * problem.n), convert_threads, 0, stream_of(runtime)>>>(
          static_cast<const float*>(x), static_cast<half_t*>(workspace), exponents, flags,
          problem.h * problem.w * problem.c, blocks, static_cast<int>(blocks), problem.c / 8,
          problem.x_pitch() - problem.c);
      check_launch("implicit_gemm: conversion");
      params.image_exponents = exponents;
      run_source(args, plan, params, workspace, DType::f16, runtime);
      const Plan& fallback = plan.fallback.front();
      params = make_params<T, mode>(args, fallback, nullptr, runtime);
      params.condition = flags;
      params.condition_count = static_cast<int>(blocks * problem.n);
      run_source(args, fallback, params, x, problem.dtype, runtime);
      return;
    }
    run_source(args, plan, params, x, problem.dtype, runtime);
  } else if constexpr (mode == Mode::split) {
    run_kernel<T, mode, false, Source::transformed, Source::raw>(args, plan, params, x, problem.dtype, runtime);
  } else {
    run_kernel<T, mode, false, Source::fp16>(args, plan, params, x, problem.dtype, runtime);
  }
}

template <Mode mode>
void run_affine(const ConvArgs& args, const Plan& plan, Runtime& runtime) {
  using T = ElementOf<mode>;
  run_kernel<T, mode, false, Source::affine>(args, plan, make_params<T, mode>(args, plan, args.workspace, runtime),
                                             args.x, args.problem.dtype, runtime);
}

template <Mode mode>
void run_gated(const ConvArgs& args, const Plan& plan, Runtime& runtime) {
  using T = ElementOf<mode>;
  run_kernel<T, mode, true, mode == Mode::single ? Source::raw : Source::fp16>(
      args, plan, make_params<T, mode>(args, plan, args.workspace, runtime), args.x, args.problem.dtype, runtime);
}

template <Mode mode>
void pack_class(const PackArgs& args, Runtime& runtime) {
  using T = ElementOf<mode>;
  const ConvProblem& problem = args.problem;
  const Weights weights = make_weights(problem);
  auto* packed = static_cast<unsigned char*>(args.packed);
  pack_filters<T, mode>
      <<<static_cast<unsigned>(weights.filter_tiles * weights.filter_tile), pack_threads, 0, stream_of(runtime)>>>(
          static_cast<int>(problem.c), static_cast<int>(problem.k), static_cast<int>(weights.taps),
          static_cast<int>(weights.packed_blocks()), weights.filter_tile, args.strides(),
          static_cast<const T*>(args.weight), packed, reinterpret_cast<int*>(packed + weights.weight_bytes()),
          static_cast<std::int64_t>(weights.rounded_offset() - weights.weight_bytes()), static_cast<T*>(args.snapshot));
  check_launch("implicit_gemm: packing");
}

}  // namespace fastconv::algos::implicit_gemm::persistent
