// From a plan to the launches of the weight gradient: conversions, products, sum of the splits.
#pragma once

#include "algos/implicit_gemm/wgrad/convert.cuh"
#include "algos/implicit_gemm/wgrad/kernel.cuh"
#include "core/kernels.h"
#include "device/cuda_check.h"
#include "device/indexing.h"
#include "device/launch.h"
#include "device/shared_memory.h"
#include "hopper/tensor_map.h"

namespace fastconv::algos::implicit_gemm::wgrad {

// Sums of the splits of each element of dW, by `slices` threads, each of so many splits in a row: few weights have many
// splits, and one thread for each would wait for memory again and again. Always in the same order, whichever block of
// the products was first.
constexpr int reduce_threads = 256;

template <typename T>
__global__ void __launch_bounds__(reduce_threads)
    reduce_split_k(const float* __restrict__ partial,  // [split][K][columns]
                   T* __restrict__ dw, int splits, int slices, std::int64_t split_numel, int channels, int taps,
                   std::int64_t stride_k, std::int64_t stride_tap, std::int64_t stride_c, bool unrolled,
                   FastDivide by_pitch, FastDivide by_columns, FastDivide by_channels) {
  __shared__ float sums[reduce_threads];
  const int elements = reduce_threads / slices, element = static_cast<int>(threadIdx.x) % elements;
  const int slice = static_cast<int>(threadIdx.x) / elements, per_slice = (splits + slices - 1) / slices;
  const int begin = slice * per_slice, end = min(splits, begin + per_slice);
  for (std::int64_t first = blockIdx.x * std::int64_t{elements}; first < split_numel;
       first += gridDim.x * std::int64_t{elements}) {
    const std::int64_t i = first + element;
    unsigned k = static_cast<unsigned>(i);
    unsigned column = by_columns.divmod(k);
    unsigned tap = column;
    unsigned c = unrolled ? by_channels.divmod(tap) : by_pitch.divmod(tap);  // the pitch behind R S C, or C, is nothing
    const bool exists = i < split_numel && tap < static_cast<unsigned>(taps) && c < static_cast<unsigned>(channels);
    float sum = 0.0f;
    if (exists) {
#pragma unroll 8
      for (int split = begin; split < end; ++split) sum += partial[split * split_numel + i];
    }
    if (slices > 1) {
      __syncthreads();  // the elements before have been read
      sums[threadIdx.x] = sum;
      __syncthreads();
      for (int other = 1; other < slices; ++other) sum += sums[(slice + other) % slices * elements + element];
    }
    if (exists && slice == 0) dw[k * stride_k + tap * stride_tap + c * stride_c] = from_float<T>(sum);
  }
}

template <typename T, int limbs>
void convert(Conversion conversion, bool unrolled, bool nchw, const Operand<T>& operand, bool retry, int processors,
             cudaStream_t stream) {
  const std::int64_t pieces = static_cast<std::int64_t>(operand.pixels) * operand.pitch / 8;
  const std::int64_t blocks = std::min<std::int64_t>(ceil_div<std::int64_t>(pieces, convert_threads * 4),
                                                     ceil_div<std::int64_t>(processors * 16, operand.images));
  const dim3 grid(static_cast<unsigned>(std::max<std::int64_t>(blocks, 1)), static_cast<unsigned>(operand.images));
  if (conversion == Conversion::vectors) {
    convert_vectors<T, limbs><<<grid, convert_threads, 0, stream>>>(operand, retry);
  } else if (unrolled) {
    convert_elements<T, limbs, true><<<grid, convert_threads, 0, stream>>>(operand, retry);
  } else if (nchw) {
    convert_tiles<T, limbs><<<grid, convert_threads, 0, stream>>>(operand, retry);
  } else {
    convert_elements<T, limbs, false><<<grid, convert_threads, 0, stream>>>(operand, retry);
  }
  check_launch("implicit_gemm: conversion for the weight gradient");
}

// tensor: [N, channels, H, W] of the input, or the same of dY
template <typename T>
Operand<T> make_operand(const ConvProblem& problem, const Plan& plan, bool is_x, const void* source, void* target,
                        const Scales& scales) {
  const std::int64_t channels = is_x ? problem.c : problem.k;
  const std::int64_t h = is_x ? problem.h : problem.p(), w = is_x ? problem.w : problem.q();
  const bool unrolled = is_x && plan.unrolled;
  const std::int64_t pitch = is_x ? plan.pitch_x : plan.pitch_grad;
  return {.source = static_cast<const T*>(source),
          .target = static_cast<Half<T>*>(target),
          .scales = scales,
          .is_x = is_x,
          .strides = dense_strides(problem.layout, channels, h, w),
          .image_numel = channels * h * w,
          .images = as_int(problem.n),
          .channels = as_int(channels),
          .target_channels = as_int(is_x ? plan.c : problem.k),
          .pitch = as_int(pitch),
          .pixels = as_int(unrolled ? problem.p() * problem.q() : h * w),
          .unroll = {.h = as_int(h),
                     .w = as_int(w),
                     .stride_h = as_int(problem.stride_h),
                     .stride_w = as_int(problem.stride_w),
                     .pad_h = as_int(problem.pad_h),
                     .pad_w = as_int(problem.pad_w),
                     .dilation_h = as_int(problem.dilation_h),
                     .dilation_w = as_int(problem.dilation_w),
                     .by_q = unrolled ? problem.q() : w,
                     .by_s = problem.s},
          .by_vectors = pitch / 8,
          .by_channels = channels};
}

inline Params make_params(const ConvProblem& problem, const Plan& plan, float* partial, const int* sums,
                          WaitReport* report) {
  const bool unrolled = plan.unrolled;
  const bool short_rows = plan.window && plan.tile_q == 8;  // a step is two rows of 8 pixels
  const int pixel_rows = plan.window ? plan.box_w * row_bytes : 0;
  const auto geometry = [&](std::int64_t value, std::int64_t plain) { return as_int(unrolled ? plain : value); };
  return {.partial = partial,
          .sums = sums,
          .report = report,
          .split_numel = plan.split_numel(problem),
          .k = as_int(problem.k),
          .pitch_x = as_int(plan.pitch_x),
          .pitch_grad = as_int(plan.pitch_grad),
          .taps = as_int(plan.taps()),
          .taps_s = as_int(plan.taps_s),
          .channel_blocks = as_int(plan.channel_blocks()),
          .taps_groups = as_int(plan.taps_groups()),
          .tile_n = plan.tile_n,
          .tile_p = plan.tile_p,
          .tile_q = plan.tile_q,
          .chunks = as_int(plan.chunks()),
          .chunks_per_split = as_int(plan.chunks_per_split),
          .chunks_p = as_int(plan.chunks_p),
          .chunks_q = as_int(plan.chunks_q),
          .stride_h = geometry(problem.stride_h, 1),
          .stride_w = geometry(problem.stride_w, 1),
          .pad_h = geometry(problem.pad_h, 0),
          .pad_w = geometry(problem.pad_w, 0),
          .dilation_h = geometry(problem.dilation_h, 1),
          .dilation_w = geometry(problem.dilation_w, 1),
          .slots = plan.slots,
          .steps = plan.steps,
          .chunk_bytes = plan.chunk_bytes(),
          .slot_bytes = plan.slot_bytes(),
          .grad_region = plan.grad_region_bytes(),
          .x_region = plan.x_region_bytes(),
          .x_group_stride = short_rows ? pixel_rows : 8 * row_bytes,
          .x_step_stride = plan.window ? (short_rows ? 2 : 1) * pixel_rows : 16 * row_bytes,
          .x_block_stride = plan.window ? as_int(problem.dilation_w) * row_bytes : plan.x_region_bytes(),
          .by_tiles = plan.tiles(),
          .by_column_tiles = plan.column_tiles,
          .by_channel_blocks = plan.channel_blocks(),
          .by_taps_groups = plan.taps_groups(),
          .by_taps_s = plan.taps_s,
          .by_chunks_p = plan.chunks_p,
          .by_chunks_q = plan.chunks_q};
}

template <typename S>
void launch(const Plan& plan, const CUtensorMap& x, const CUtensorMap& grad, const Params& params,
            cudaStream_t stream) {
  const std::size_t bytes = plan.shared_bytes();
  allow_shared_memory<multiply_pixels<S>>(static_cast<int>(shared_limit),
                                          "implicit_gemm: shared memory of the weight gradient");
  multiply_pixels<S>
      <<<static_cast<unsigned>(plan.tiles() * plan.split_k), S::threads, bytes, stream>>>(x, grad, params);
  check_launch("implicit_gemm: weight gradient");
}

template <typename Half, int products>
void launch_products(const Plan& plan, const CUtensorMap& x, const CUtensorMap& grad, const Params& params,
                     cudaStream_t stream) {
  dispatch_value<1, 2, 3>(plan.blocks_n, [&](auto blocks_n) {
    dispatch_value<true, false>(plan.rows_by_warps, [&](auto rows_by_warps) {
      dispatch_value<true, false>(plan.window, [&](auto window) {
        if constexpr (blocks_n() > 1 || !window()) {
          launch<Shape<Half, products, blocks_n(), rows_by_warps(), window()>>(plan, x, grad, params, stream);
        }
      });
    });
  });
}

template <Mode mode>
void run_class(const WeightGradientArgs& args, const Plan& plan, Runtime& runtime) {
  using T = ElementOf<mode>;
  constexpr int products = mode == Mode::split ? 3 : 1, limbs = mode == Mode::split ? 2 : 1;
  const ConvProblem& problem = args.problem;
  const auto stream = stream_of(runtime);
  const int processors = runtime.device().processors;
  auto* scale_memory = static_cast<ImageScale*>(args.workspace);
  auto* x_memory = static_cast<char*>(args.workspace) + plan.scale_bytes(problem);
  char* grad_memory = x_memory + plan.x_bytes(problem);
  auto* partial = reinterpret_cast<float*>(grad_memory + plan.grad_bytes(problem));

  Scales scales{};
  if (plan.scaled()) {
    const PairScales pair{scale_memory, scale_memory + problem.n, static_cast<int>(problem.n), exact_target,
                          exact_target};
    scales = {pair, reinterpret_cast<int*>(scale_memory + 2 * problem.n), plan.tile_n};
  }
  const Operand<T> x = make_operand<T>(problem, plan, true, args.x, x_memory, scales);
  const Operand<T> grad = make_operand<T>(problem, plan, false, args.grad, grad_memory, scales);
  const bool nchw = problem.layout == Layout::nchw;
  if constexpr (std::is_same_v<T, float>) {
    const dim3 grid(static_cast<unsigned>(problem.n), 2);
    guess_image_scales<<<grid, sample_threads, 0, stream>>>(
        {{{x.source, scales.pair.first, x.image_numel, guessed_target},
          {grad.source, scales.pair.second, grad.image_numel, guessed_target}}});
    check_launch("implicit_gemm: scales of the weight gradient");
  }
  for (const bool retry : {false, true}) {
    if (retry && !std::is_same_v<T, float>) break;
    if (plan.convert_x != Conversion::none) {
      convert<T, limbs>(plan.convert_x, plan.unrolled, nchw, x, retry, processors, stream);
    }
    if (plan.convert_grad != Conversion::none) {
      convert<T, limbs>(plan.convert_grad, false, nchw, grad, retry, processors, stream);
    }
  }

  const DType half = std::is_same_v<T, bfloat16_t> ? DType::bf16 : DType::f16;
  const auto map = [&](const Operand<T>& operand, bool converted, std::int64_t h, std::int64_t w, int box_w,
                       std::int64_t stride_h, std::int64_t stride_w) {
    const void* data = converted ? static_cast<const void*>(operand.target) : operand.source;
    const Box4 box{.c = block_channels,
                   .w = box_w,
                   .h = plan.tile_p,
                   .n = plan.tile_n,
                   .stride_w = static_cast<int>(stride_w),
                   .stride_h = static_cast<int>(stride_h)};
    return make_tensor_map(data, half, problem.n, h, w, static_cast<std::int64_t>(limbs) * operand.pitch, box);
  };
  const CUtensorMap x_map = plan.unrolled ? map(x, true, problem.p(), problem.q(), plan.box_w, 1, 1)
                                          : map(x, plan.convert_x != Conversion::none, problem.h, problem.w, plan.box_w,
                                                problem.stride_h, problem.stride_w);
  const CUtensorMap grad_map =
      map(grad, plan.convert_grad != Conversion::none, problem.p(), problem.q(), plan.tile_q, 1, 1);
  const Params params = make_params(problem, plan, partial, scales.sums, runtime.wait_report());
  launch_products<Half<T>, products>(plan, x_map, grad_map, params, stream);

  const std::int64_t numel = plan.split_numel(problem), taps = problem.r * problem.s;
  const auto blocks = static_cast<unsigned>(
      std::min<std::int64_t>(ceil_div<std::int64_t>(numel, reduce_threads / plan.reduce_slices), processors * 16));
  reduce_split_k<T><<<blocks, reduce_threads, 0, stream>>>(
      partial, static_cast<T*>(args.dw), static_cast<int>(plan.splits()), plan.reduce_slices, numel,
      static_cast<int>(problem.c), static_cast<int>(taps), problem.c * taps, args.channels_last ? problem.c : 1,
      args.channels_last ? 1 : taps, plan.unrolled, plan.pitch_x, plan.taps() * plan.pitch_x, problem.c);
  check_launch("implicit_gemm: sum of the weight gradient's splits");
}

}  // namespace fastconv::algos::implicit_gemm::wgrad
