// From a plan to a launch of the single-tile kernel, of all classes: headers take longer to compile than a class does.
#include "algos/implicit_gemm/single_tile/kernel.cuh"
#include "core/kernels.h"
#include "device/indexing.h"
#include "device/launch.h"
#include "device/shared_memory.h"
#include "hopper/tensor_map.h"

namespace fastconv::algos::implicit_gemm::single_tile {
namespace {

template <typename T>
Params<T> make_params(const ConvArgs& args, const Plan& plan, const Runtime& runtime) {
  const ConvProblem& problem = args.problem;
  const auto* weight = static_cast<const unsigned char*>(args.weight);
  const auto log2 = [](std::int64_t value) {
    int result = 0;
    while (std::int64_t{1} << result < value) ++result;
    return result;
  };
  const bool window = plan.kind == Tile::window;
  Params<T> params{.report = runtime.wait_report(),
                   .steps = as_int(plan.steps),
                   .steps_per_split = as_int(plan.steps_per_split),
                   .split_k_log2 = log2(plan.split_k),
                   .input_slots = plan.input_slots,
                   .filter_slots = plan.filter_slots,
                   .stage_bytes = as_int(static_cast<std::int64_t>(plan.stage_bytes())),
                   .box_bytes = plan.box_n * plan.box_h * plan.box_w * row_bytes,
                   .stage_taps = plan.stage_taps,
                   .step_channels = plan.step_channels,
                   .warpgroup_splits = plan.warpgroup_splits(),
                   .joins = plan.contributors() > 1,
                   .rows_pixels = plan.kind == Tile::rows ? plan.pixels : 0,
                   .tile_n = plan.tile_n,
                   .tile_p = plan.tile_p,
                   .tile_q = plan.tile_q,
                   .shifts = problem.shifts(),
                   .by_tile_q = plan.tile_q,
                   .by_tiles_p = plan.tiles_p,
                   .by_stage_taps = plan.stage_taps,
                   .weight = weight + plan.weights_offset,
                   .packed_tile_bytes = plan.steps * plan.packed_rows * row_bytes,
                   .bias = static_cast<const T*>(args.bias),
                   .packed_bytes = as_int(plan.packed_rows * row_bytes),
                   .by_n_splits = plan.packed_rows / plan.filter_tile,
                   .group_stride = window ? plan.box_w * 8 : 64,
                   .second_pixels = !window           ? 64
                                    : plan.tile_n > 1 ? plan.box_h * plan.box_w
                                                      : 8 * plan.box_w,
                   .column_step = as_int(problem.dilation_w) * 8,
                   .row_step = as_int(problem.dilation_h) * plan.box_w * 8,
                   .by_s = problem.s,
                   .by_taps = problem.r * problem.s,
                   .sums_bytes = as_int(static_cast<std::int64_t>(plan.bytes_from_others())),
                   .owned_log2 = log2(plan.owned_warps()),
                   .by_tile_p = plan.tile_p,
                   .y = static_cast<T*>(args.y),
                   .epilogue = make_epilogue<T>(args),
                   .exponents = plan.split ? reinterpret_cast<const int*>(weight + plan.exponents_offset) : nullptr,
                   .nchw = problem.layout == Layout::nchw,
                   .by_image = problem.p() * problem.q(),
                   .y_pitch = as_int(output_strides(problem).w),
                   .y_row = as_int(output_strides(problem).h),
                   .shuffled = {problem, plan.filter_tile}};
  set_sizes(params, problem);
  if (is_matrix_product(problem)) params.n = 1, params.p = 1, params.q = as_int(problem.n * problem.p() * problem.q());
  return params;
}

template <typename T, bool split, bool gated>
void run_class(const ConvArgs& args, const Plan& plan, Runtime& runtime) {
  const ConvProblem& problem = args.problem;
  const Params<T> params = make_params<T>(args, plan, runtime);
  const bool dense = plan.kind == Tile::dense;
  const Box4 box{.c = plan.step_channels,
                 .w = plan.box_w,
                 .h = plan.box_h,
                 .n = plan.box_n,
                 .stride_w = dense ? static_cast<int>(problem.stride_w) : 1,
                 .stride_h = dense ? static_cast<int>(problem.stride_h) : 1};
  const CUtensorMapDataType type = split                       ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                   : std::is_same_v<T, float>  ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32  // rounds
                                   : std::is_same_v<T, half_t> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                               : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const CUtensorMap map = is_matrix_product(problem)
                              ? make_tensor_map(args.x, type, sizeof(T), 1, 1, problem.n * problem.h * problem.w,
                                                problem.c, box, problem.x_pitch())
                              : make_tensor_map(args.x, type, sizeof(T), problem.n, problem.h, problem.w, problem.c,
                                                box, problem.x_pitch());
  const auto launch = [&](auto filter_tile) {
    using S = Shape<T, filter_tile(), split, gated>;
    allow_shared_memory<convolve<S>>(static_cast<int>(shared_limit), "implicit_gemm: shared memory");
    const dim3 grid(static_cast<unsigned>(plan.filter_tiles * plan.split_k), static_cast<unsigned>(plan.tiles_q),
                    static_cast<unsigned>(plan.tiles_p * plan.tiles_n));
    LaunchPlan{grid, S::threads, plan.shared_bytes(), plan.split_k}.launch(convolve<S>, stream_of(runtime),
                                                                           "implicit_gemm", map, params);
  };
  switch (plan.filter_tile) {
    case 128:
      if constexpr (!split) return launch(std::integral_constant<int, 128>{});
    case 64: return launch(std::integral_constant<int, 64>{});
    case 48:
      if constexpr (split) return launch(std::integral_constant<int, 48>{});
    default: return launch(std::integral_constant<int, 32>{});
  }
}

}  // namespace

void run(const ConvArgs& args, const Plan& plan, Runtime& runtime) {
  const auto run_one_product = [&](auto gated) {
    switch (args.problem.accuracy) {
      case AccuracyClass::tf32: return run_class<float, false, gated()>(args, plan, runtime);
      case AccuracyClass::fp16: return run_class<half_t, false, gated()>(args, plan, runtime);
      default: return run_class<bfloat16_t, false, gated()>(args, plan, runtime);
    }
  };
  if (args.problem.accuracy == AccuracyClass::fp32) return run_class<float, true, false>(args, plan, runtime);
  is_gated(args.problem.activation) ? run_one_product(std::true_type{}) : run_one_product(std::false_type{});
}

}  // namespace fastconv::algos::implicit_gemm::single_tile
