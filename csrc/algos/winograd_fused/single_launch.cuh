// Launches of the one-product kernel.
#pragma once

#include "algos/winograd_fused/launch.cuh"
#include "algos/winograd_fused/single.h"
#include "algos/winograd_fused/single_kernel.cuh"

namespace fastconv::algos::winograd_fused::single {

template <typename T>
Output select_output(const ConvArgs& args) {
  const ConvProblem& problem = args.problem;
  const bool nchw = problem.layout == Layout::nchw;
  const bool filters =
      !nchw && problem.k * sizeof(T) % 16 == 0 && is_aligned(args.y, 16) && is_aligned(args.residual, 8);
  const std::size_t bytes = tile_outputs * sizeof(T);
  const bool columns =
      nchw && problem.q() % tile_outputs == 0 && is_aligned(args.y, bytes) && is_aligned(args.residual, bytes);
  return filters ? Output::filters : columns ? Output::columns : Output::elements;
}

template <typename T>
LineMaps make_line_maps(const ConvArgs& args, const Shape& shape) {
  const ConvProblem& problem = args.problem;
  const auto at = [](std::int64_t value) { return static_cast<cuuint64_t>(value); };
  const std::int64_t k = problem.k, p = problem.p(), q = problem.q(), bytes = sizeof(T);
  LineMaps maps{};
  for (int i = 0; i < std::min<std::int64_t>(tile_outputs, q); ++i) {
    maps.column[i] =
        make_tensor_map(static_cast<T*>(args.y) + i * k, problem.dtype,
                        {.sizes = {at(k), at((q - i + tile_outputs - 1) / tile_outputs), at(problem.n), at(p)},
                         .strides = {at(tile_outputs * k * bytes), at(p * q * k * bytes), at(q * k * bytes)},
                         .box = {line_bytes / sizeof(T), static_cast<cuuint32_t>(shape.tiles),
                                 static_cast<cuuint32_t>(shape.images), static_cast<cuuint32_t>(shape.rows)}});
  }
  return maps;
}

template <typename T, Shape shape, bool boxes, Output output>
void launch(const Params<T>& params, const Config& config, const CUtensorMap& map, const LineMaps& lines,
            int processors, cudaStream_t stream) {
  constexpr std::size_t bytes =
      output == Output::filters ? sizeof(Shared<T, shape>) : Shared<T, shape>::bytes_for_exchange();
  launch_items<convolve<T, shape.images, boxes, output>>(params, config, bytes, processors, stream, map, lines);
}

template <typename T>
void run_class(const ConvArgs& args, const Config& plan, const T* x, Layout layout, Runtime& runtime) {
  const ConvProblem& problem = args.problem;
  const bool boxes = loads_boxes(problem) && is_aligned(x, 16);  // the caller's tensor may start at any element
  const Output output = select_output<T>(args);
  const bool by_copies = boxes && output == Output::filters;  // what any shape but the wide one needs
  const Config config = make_config(problem, by_copies ? plan.shape : wide);
  const auto params = make_params(args, config, x, layout, runtime.wait_report());
  const Box4 box{.c = 64 / static_cast<int>(sizeof(T)),
                 .w = config.shape.raw_columns(),
                 .h = config.shape.input_rows(),
                 .n = config.shape.images,
                 .swizzled = false};
  const CUtensorMap map =
      boxes ? make_tensor_map(x, problem.dtype, problem.n, problem.h, problem.w, problem.c, box) : CUtensorMap{};
  const LineMaps lines = output == Output::filters ? make_line_maps<T>(args, config.shape) : LineMaps{};
  const int processors = runtime.device().processors;
  const auto stream = static_cast<cudaStream_t>(runtime.stream());
  if (config.shape == narrow) {
    return launch<T, narrow, true, Output::filters>(params, config, map, lines, processors, stream);
  }
  if (config.shape == small) {
    return launch<T, small, true, Output::filters>(params, config, map, lines, processors, stream);
  }
  const auto launch_as = [&]<Output output>() {
    boxes ? launch<T, wide, true, output>(params, config, map, lines, processors, stream)
          : launch<T, wide, false, output>(params, config, map, lines, processors, stream);
  };
  switch (output) {
    case Output::filters: return launch_as.template operator()<Output::filters>();
    case Output::columns: return launch_as.template operator()<Output::columns>();
    case Output::elements: return launch_as.template operator()<Output::elements>();
  }
}

}  // namespace fastconv::algos::winograd_fused::single
