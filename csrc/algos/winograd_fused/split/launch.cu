// Launches of the kernel of class fp32.
#include <numeric>

#include "algos/winograd_fused/shared/launch.cuh"
#include "algos/winograd_fused/split/kernel.cuh"
#include "device/launch.h"

namespace fastconv::algos::winograd_fused::split {
namespace {

// x [N, H, W, C] in boxes of some tiles, zeros outside. A strip's first column in its block is a multiple of what 8 and
// the number of columns have in common, and so are the numbers of tiles. Pairs of rows are needed where blocks cross
// images.
Maps make_maps(const ConvProblem& problem, const Config& config, const float* x) {
  Maps maps{};
  const int step = static_cast<int>(std::gcd<std::int64_t, std::int64_t>(tile_columns, config.column_tiles));
  for (int tiles = step; tiles <= tile_columns; tiles += step) {
    const auto make = [&](int rows) {
      const Box4 box{.c = channels, .w = raw_columns(tiles), .h = rows, .n = 1, .swizzled = false};
      return make_tensor_map(x, DType::f32, problem.n, problem.h, problem.w, problem.c, box, problem.x_pitch());
    };
    maps.whole[tiles - 1] = make(strip_input_rows(config.strips));
    if (config.pitch % strip_rows(config.strips) != 0) maps.pair[tiles - 1] = make(raw_copied_rows);
  }
  return maps;
}

template <Variant value>
constexpr std::integral_constant<Variant, value> constant{};

}  // namespace

void run(const ConvArgs& args, const Config& config, Runtime& runtime) {
  const ConvProblem& problem = args.problem;
  const bool use_tma = config.use_tma;
  const int processors = runtime.device().processors;
  const cudaStream_t stream = stream_of(runtime);
  const Params params = make_params<float>(args, config, runtime.wait_report());
  const Maps maps = use_tma ? make_maps(problem, config, params.x) : Maps{};
  const auto run = [&](auto variant) {
    launch_work_tiles<convolve<variant()>, block_threads>(params, config, sizeof(Shared<variant()>), processors, stream,
                                                          maps);
  };
  // What is known now is known to the compiler: variant is of NHWC.
  const auto by_filters = [&](auto variant) {
    constexpr auto with = [](Variant value, End end) {
      value.end = end;
      return value;
    };
    switch (config.end) {
      case End::plain: return run(constant<with(variant(), End::plain)>);
      case End::leaky: return run(constant<with(variant(), End::leaky)>);
      case End::residual: return run(constant<with(variant(), End::residual)>);
      case End::any: return run(constant<with(variant(), End::any)>);
    }
  };
  const auto with_output = [&](auto by_tma) {
    switch (config.store) {
      case StoreMode::filters: return by_filters(constant<Variant{1, by_tma(), StoreMode::filters}>);
      case StoreMode::pixels: return run(constant<Variant{1, by_tma(), StoreMode::pixels}>);
      case StoreMode::elements: return run(constant<Variant{1, by_tma(), StoreMode::elements}>);
    }
  };
  if (config.v_reuse == 2) return by_filters(constant<Variant{1, true, StoreMode::filters, 1, 2}>);
  const auto with_strips = [&](auto strips) {
    if (config.work_tile_filter_tiles == 1) {
      return by_filters(constant<Variant{2, true, StoreMode::filters, strips(), 1, 1}>);
    }
    by_filters(constant<Variant{2, true, StoreMode::filters, strips()}>);
  };
  if (config.strips == 2) return with_strips(std::integral_constant<int, 2>{});
  if (config.blocks == 2) return with_strips(std::integral_constant<int, 1>{});
  use_tma ? with_output(std::true_type{}) : with_output(std::false_type{});
}

}  // namespace fastconv::algos::winograd_fused::split
