// Launches of the one-product kernel.
#pragma once

#include <numeric>

#include "algos/winograd_fused/shared/launch.cuh"
#include "algos/winograd_fused/single/kernel.cuh"
#include "device/launch.h"

namespace fastconv::algos::winograd_fused::single {

// Numbers of tiles of a work tile of packed columns' segments are multiples of this.
inline int packed_step(const Config& config) {
  return static_cast<int>(std::gcd<std::int64_t, std::int64_t>(packed_columns.tiles, config.column_tiles));
}

template <typename T, Shape shape>
LineMaps<line_maps(shape)> make_line_maps(const ConvArgs& args, const Config& config) {
  const ConvProblem& problem = args.problem;
  const auto at = [](std::int64_t value) { return static_cast<cuuint64_t>(value); };
  const std::int64_t k = problem.k, p = problem.p(), q = problem.q();
  const std::int64_t pixel = problem.y_pitch(), bytes = pixel * static_cast<std::int64_t>(sizeof(T));
  LineMaps<line_maps(shape)> maps{};
  const auto make = [&](int left) {
    for (int i = 0; i < std::min<std::int64_t>(tile_outputs, q); ++i) {
      const std::int64_t tiles = ceil_div(q - i, tile_outputs);
      maps.column[left][i] = make_tensor_map(
          static_cast<T*>(args.y) + i * pixel, problem.dtype,
          {.sizes = {at(k), at(left == 0 ? tiles : std::min<std::int64_t>(left, tiles)), at(problem.n), at(p)},
           .strides = {at(tile_outputs * bytes), at(p * q * bytes), at(q * bytes)},
           .box = {line_bytes / sizeof(T), static_cast<cuuint32_t>(shape.tiles), static_cast<cuuint32_t>(shape.images),
                   static_cast<cuuint32_t>(shape.rows)}});
    }
  };
  const int step = shape.packs_columns ? packed_step(config) : 1;
  for (int left = 0; left < line_maps(shape); left += step) make(left);
  if (args.residual != nullptr) {
    const Box4 box{.c = filter_tile, .w = shape.width(), .h = residual_rows, .n = shape.images, .swizzled = false};
    maps.residual = make_tensor_map(args.residual, problem.dtype, problem.n, p, q, k, box, pixel);
  }
  return maps;
}

// x [N, H, W, C], a stage of a work tile or of its part: only those numbers of tiles that packed columns have.
template <Shape shape>
InputMaps<input_maps(shape)> make_input_maps(const ConvProblem& problem, const Config& config, const void* x) {
  InputMaps<input_maps(shape)> maps{};
  const auto make = [&](int columns) {
    const Box4 box{.c = 64 / static_cast<int>(size_of(problem.dtype)),
                   .w = columns,
                   .h = shape.input_rows(),
                   .n = shape.images,
                   .swizzled = false};
    return make_tensor_map(x, problem.dtype, problem.n, problem.h, problem.w, problem.c, box, problem.x_pitch());
  };
  if constexpr (shape.packs_columns) {
    const int step = packed_step(config);
    for (int tiles = step; tiles <= shape.tiles; tiles += step) maps.map[tiles - 1] = make(segment_columns(tiles));
  } else {
    maps.map[0] = make(shape.raw_columns());
  }
  return maps;
}

template <typename T, Shape shape, bool use_tma, StoreMode output, End end = End::any>
void launch(const Params<T>& params, const Config& config, const ConvArgs& args, int processors, cudaStream_t stream) {
  constexpr std::size_t bytes =
      output == StoreMode::filters ? sizeof(Shared<T, shape>) : Shared<T, shape>::bytes_for_exchange();
  InputMaps<input_maps(shape)> input{};
  LineMaps<line_maps(shape)> lines{};
  if constexpr (use_tma) input = make_input_maps<shape>(args.problem, config, params.x);
  if constexpr (output == StoreMode::filters) lines = make_line_maps<T, shape>(args, config);
  launch_work_tiles<convolve<T, number_of(shape), use_tma, output, end>>(params, config, bytes, processors, stream,
                                                                         input, lines);
}

template <typename T>
void run(const ConvArgs& args, const Config& config, Runtime& runtime) {
  const auto params = make_params<T>(args, config, runtime.wait_report());
  const int processors = runtime.device().processors;
  const auto stream = stream_of(runtime);
  const auto by_filters = [&]<Shape shape, bool use_tma = true>() {
    const auto with_end = [&]<End end>() {
      launch<T, shape, use_tma, StoreMode::filters, end>(params, config, args, processors, stream);
    };
    switch (config.end) {
      case End::plain: return with_end.template operator()<End::plain>();
      case End::leaky: return with_end.template operator()<End::leaky>();
      case End::residual:  // one product has no kernel for it (select_end)
      case End::any: return with_end.template operator()<End::any>();
    }
  };
  if (config.shape == narrow) return by_filters.template operator()<narrow>();
  if (config.shape == small) return by_filters.template operator()<small>();
  if (config.shape == packed_columns) return by_filters.template operator()<packed_columns>();
  const auto launch_as = [&]<StoreMode output>() {
    config.use_tma ? launch<T, wide, true, output>(params, config, args, processors, stream)
                   : launch<T, wide, false, output>(params, config, args, processors, stream);
  };
  switch (config.store) {
    case StoreMode::filters:
      return config.use_tma ? by_filters.template operator()<wide>() : by_filters.template operator()<wide, false>();
    case StoreMode::pixels: return launch_as.template operator()<StoreMode::pixels>();
    case StoreMode::elements: return launch_as.template operator()<StoreMode::elements>();
  }
}

}  // namespace fastconv::algos::winograd_fused::single
