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
  const std::size_t bytes = 4 * sizeof(T);
  const bool vectors =
      (nchw ? problem.q() : problem.k) % 4 == 0 && is_aligned(args.y, bytes) && is_aligned(args.residual, bytes);
  return !vectors ? Output::elements : nchw ? Output::columns : Output::filters;
}

template <typename T, bool boxes, Output output>
void launch(const Params<T>& params, const Config& config, const CUtensorMap& map, int processors,
            cudaStream_t stream) {
  launch_items<convolve<T, boxes, output>>(params, config, map, sizeof(Shared<T>), processors, stream);
}

template <typename T>
void run_class(const ConvArgs& args, const Config& config, const T* x, Layout layout, Runtime& runtime) {
  const ConvProblem& problem = args.problem;
  const auto params = make_params(args, config, x, layout, runtime.wait_report());
  const bool boxes = loads_boxes(problem) && is_aligned(x, 16);  // the caller's tensor may start at any element
  const Box4 box{.c = Stage<T>::channels, .w = raw_columns, .h = input_rows, .n = 1, .swizzled = false};
  const CUtensorMap map =
      boxes ? make_tensor_map(x, problem.dtype, problem.n, problem.h, problem.w, problem.c, box) : CUtensorMap{};
  const auto launch_as = [&]<Output output>() {
    const int processors = runtime.device().processors;
    const auto stream = static_cast<cudaStream_t>(runtime.stream());
    boxes ? launch<T, true, output>(params, config, map, processors, stream)
          : launch<T, false, output>(params, config, map, processors, stream);
  };
  switch (select_output<T>(args)) {
    case Output::filters: launch_as.template operator()<Output::filters>(); break;
    case Output::columns: launch_as.template operator()<Output::columns>(); break;
    case Output::elements: launch_as.template operator()<Output::elements>(); break;
  }
}

}  // namespace fastconv::algos::winograd_fused::single
