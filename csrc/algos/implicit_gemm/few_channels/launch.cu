// Launches of the kernel for first layers.
#include "algos/implicit_gemm/few_channels/kernel.cuh"
#include "algos/implicit_gemm/few_channels/pack.cuh"
#include "algos/implicit_gemm/shared/half.h"
#include "core/kernels.h"
#include "device/cuda_check.h"
#include "device/indexing.h"
#include "device/launch.h"
#include "device/shared_memory.h"

namespace fastconv::algos::implicit_gemm::few_channels {
namespace {

template <typename T>
Params<T> make_params(const ConvArgs& args, const Plan& plan) {
  const ConvProblem& problem = args.problem;
  const Strides4 in = input_strides(problem), out = output_strides(problem);
  const auto* packed = static_cast<const unsigned char*>(args.weight) + plan.weights_offset;
  const bool nhwc = problem.layout == Layout::nhwc;
  Params<T> params{};
  params.x = static_cast<const T*>(args.x), params.y = static_cast<T*>(args.y);
  params.weight = packed + plan.weights.form_offset(plan.dense);
  params.exponents = reinterpret_cast<const int*>(packed + plan.weights.exponents_offset());
  params.epilogue = make_epilogue<T>(args);
  params.plan = plan;
  params.image_in = in.n, params.image_out = out.n;
  params.x_bytes = static_cast<std::uint64_t>(problem.n * in.n) * sizeof(T);
  params.in_row = as_int(in.h), params.in_pixel = as_int(in.w), params.in_channel = as_int(in.c);
  params.out_k = as_int(out.c), params.out_p = as_int(out.h), params.out_q = as_int(out.w);
  params.pixel_bytes = as_int(problem.stride_w * plan.pitch * 2);
  params.by_line_chunks = plan.line_chunks, params.by_pixel_pairs = plan.pixel_pairs;
  params.by_p_tiles = plan.p_tiles, params.by_q_tiles = plan.q_tiles;
  params.by_patch_h = plan.patch_h, params.by_row_pairs = plan.weights.row_pairs(plan.dense);
  params.lines_at_once = plan.threads() / plan.line_chunks, params.rows_at_once = plan.threads() / plan.pixel_pairs;
  set_sizes(params, problem);
  params.nhwc = nhwc, params.has_activation = problem.activation != Activation::none;
  params.vector = plan.stores_vectors;
  return params;
}

template <typename T, int products, int column_tiles>
void launch(const ConvArgs& args, const Plan& plan, Runtime& runtime) {
  constexpr auto kernel = convolve<Shape<T, products, column_tiles>>;
  allow_shared_memory<kernel>(static_cast<int>(runtime.device().shared_memory_bytes), "implicit_gemm: shared memory");
  const dim3 grid(static_cast<unsigned>(plan.blocks), static_cast<unsigned>(plan.weights.filter_tiles));
  kernel<<<grid, static_cast<unsigned>(plan.threads()), static_cast<std::size_t>(plan.shared_bytes),
           stream_of(runtime)>>>(make_params<T>(args, plan));
  check_launch("implicit_gemm");
}

template <typename T, int products>
void run(const ConvArgs& args, const Plan& plan, Runtime& runtime) {
  dispatch_value<64, 48, 32>(plan.weights.filter_tile,
                             [&](auto filters) { launch<T, products, filters() / 8>(args, plan, runtime); });
}

template <typename T, int limbs>
void pack(const PackArgs& args, const Weights& weights, void* packed, Runtime& runtime) {
  pack_filters<T, limbs>
      <<<static_cast<unsigned>(weights.filter_tiles * weights.filter_tile), pack_threads, 0, stream_of(runtime)>>>(
          weights, args.strides(), static_cast<const T*>(args.weight), static_cast<unsigned char*>(packed),
          static_cast<const T*>(args.snapshot));
  check_launch("implicit_gemm: packing");
}

}  // namespace

void run(const ConvArgs& args, const Plan& plan, Runtime& runtime) {
  dispatch_mode(plan.weights.mode,
                [&](auto mode) { run<ElementOf<mode()>, mode() == Mode::split ? 3 : 1>(args, plan, runtime); });
}

void pack(const PackArgs& args, const Weights& weights, void* packed, Runtime& runtime) {
  dispatch_mode(weights.mode,
                [&](auto mode) { pack<ElementOf<mode()>, limbs_of(mode())>(args, weights, packed, runtime); });
}

}  // namespace fastconv::algos::implicit_gemm::few_channels
