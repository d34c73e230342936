// From a plan to a launch of the one-product kernel.
#pragma once

#include <algorithm>

#include "algos/winograd_fused/single.h"
#include "algos/winograd_fused/single_kernel.cuh"
#include "device/cuda_check.h"
#include "device/indexing.h"
#include "device/tensor_map.h"

namespace fastconv::algos::winograd_fused::single {

inline bool is_aligned(const void* pointer, std::size_t bytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
}

template <typename T>
Params<T> make_params(const ConvArgs& args, const Config& config, const T* x, Layout layout, WaitReport* report) {
  const ConvProblem& problem = args.problem;
  const auto as_int = [](std::int64_t value) { return static_cast<int>(value); };
  const auto divide = [](std::int64_t value) { return FastDivide(static_cast<std::uint32_t>(value)); };
  const Strides4 in = dense_strides(layout, problem.c, problem.h, problem.w), out = output_strides(problem);
  const auto* packed = static_cast<const char*>(args.weight);
  return {.x = x,
          .u = reinterpret_cast<const uint4*>(packed),
          .exponents = reinterpret_cast<const int*>(packed + config.u_bytes()),
          .y = static_cast<T*>(args.y),
          .epilogue = make_epilogue<T>(args),
          .report = report,
          .x_image = in.n,
          .x_row = in.h,
          .x_column = in.w,
          .x_channel = in.c,
          .y_image = out.n,
          .y_row = out.h,
          .y_column = out.w,
          .y_channel = out.c,
          .c = as_int(problem.c),
          .h = as_int(problem.h),
          .w = as_int(problem.w),
          .k = as_int(problem.k),
          .p = as_int(problem.p()),
          .q = as_int(problem.q()),
          .pad_h = as_int(problem.pad_h),
          .pad_w = as_int(problem.pad_w),
          .stages = as_int(config.stages),
          .first_item = 0,
          .end_item = 0,
          .by_filters = divide(config.filter_tiles),
          .by_columns = divide(config.column_tiles),
          .by_rows = divide(config.row_tiles)};
}

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
void launch(Params<T> params, const Config& config, const CUtensorMap& map, int processors, cudaStream_t stream) {
  constexpr int bytes = sizeof(Shared<T>);
  const auto kernel = convolve<T, boxes, output>;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
             "winograd_fused: shared memory");
  constexpr int carveout = (bytes + 1024) * 100 / (228 * 1024) + 1;  // per cent; the rest is L1 cache
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, carveout),
             "winograd_fused: shared memory");
  const std::int64_t most = static_cast<std::int64_t>(processors) * most_items;
  for (std::int64_t first = 0; first < config.items; first += most) {
    const std::int64_t items = std::min(most, config.items - first);
    params.first_item = static_cast<unsigned>(first);
    params.end_item = static_cast<unsigned>(first + items);
    const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(processors, items));
    kernel<<<blocks, block_threads, bytes, stream>>>(params, map);
    check_launch("winograd_fused");
  }
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
