// The operator max_pool2d: PyTorch's, of values alone, by a kernel of ours on CUDA where there is one.
#include <cstddef>
#include <string>

#include "ops/arguments.h"
#include "ops/convolution.h"
#include "ops/debug.h"
#include "ops/kernel_table.h"

namespace fastconv::ops {
namespace {

// x is as the pool says.
Tensor run(const Tensor& x, const MaxPool& pool, const DeviceInfo& device) {
  if (pool.is_faster_apart()) return run(run(x, pool.along_rows(), device), pool.along_columns(), device);
  GuardedOutput output(x, {pool.n, pool.c, pool.p, pool.q}, pool.layout);
  max_pool(pool, x.const_data_ptr(), output.data(), *make_runtime(device));
  return output.finish("max-pool");
}

// One integer for height and width, or one for each; none: `otherwise`.
IntList pair_of(const char* name, const IntList& values, std::int64_t least, const IntList& otherwise = {}) {
  if (values.empty() && !otherwise.empty()) return otherwise;
  const std::string wanted = text_of("; expected one or two integers of at least ", least);
  FASTCONV_REQUIRE(values.size() == 1 || values.size() == 2, name, " is ", to_text(values), wanted);
  for (const std::int64_t value : values) FASTCONV_REQUIRE(value >= least, name, " is ", to_text(values), wanted);
  return {values.front(), values.back()};
}

// PyTorch's rule: rounded up, a window may begin in x or in the padding before it, not behind x.
std::int64_t output_size(std::int64_t size, std::int64_t extent, std::int64_t stride, std::int64_t padding, bool ceil) {
  const std::int64_t rest = size + 2 * padding - extent;
  if (rest < 0 && !(ceil && rest + stride > 0)) return 0;
  const std::int64_t windows = (rest + (ceil ? stride - 1 : 0)) / stride + 1;
  return ceil && (windows - 1) * stride >= size + padding ? windows - 1 : windows;
}

Tensor max_pool2d(const Tensor& x, IntList kernel, IntList stride, IntList padding, IntList dilation, bool ceil_mode) {
  kernel = pair_of("kernel", kernel, 1), stride = pair_of("stride", stride, 1, kernel);
  padding = pair_of("padding", padding, 0, {0, 0}), dilation = pair_of("dilation", dilation, 1, {1, 1});
  const std::int64_t dimensions = x.dim();
  FASTCONV_REQUIRE(dimensions == 3 || dimensions == 4, "x has shape ", to_text(shape_of(x)),
                   "; expected [N, C, H, W] or [C, H, W]");
  IntList size(2);
  for (std::size_t i = 0; i < 2; ++i) {
    FASTCONV_REQUIRE(padding[i] <= kernel[i] / 2, "padding is ", to_text(padding),
                     "; expected at most half the kernel ", to_text(kernel));
    const std::int64_t given = x.size(dimensions - 2 + static_cast<std::int64_t>(i));
    size[i] = output_size(given, dilation[i] * (kernel[i] - 1) + 1, stride[i], padding[i], ceil_mode);
    FASTCONV_REQUIRE(size[i] > 0, "x has shape ", to_text(shape_of(x)), "; with padding ", to_text(padding),
                     " no window of kernel ", to_text(kernel), " and dilation ", to_text(dilation), " fits");
  }
  const DeviceInfo& device = device_of(x);
  MaxPool pool;
  if (dimensions == 4) {
    pool.layout = suggests_channels_last(x) ? Layout::nhwc : Layout::nchw;
    pool.n = x.size(0), pool.c = x.size(1), pool.h = x.size(2), pool.w = x.size(3);
    pool.p = size[0], pool.q = size[1], pool.r = kernel[0], pool.s = kernel[1];
    pool.stride_h = stride[0], pool.stride_w = stride[1], pool.pad_h = padding[0], pool.pad_w = padding[1];
    pool.dilation_h = dilation[0], pool.dilation_w = dilation[1];
    pool.dtype = dtype_of(x);
    if (pool.layout == Layout::nhwc && x.numel() > 0) pool.x_channels = channels_in_memory(x);
  }
  if (dimensions == 4 && x.numel() > 0 && pool.has_kernels(device)) {
    const auto guard = device_guard(x);
    return run(pool.x_channels != 0 ? x : aligned(in_layout(x, pool.layout)), pool, device);
  }
  return call_dispatcher("aten::max_pool2d", "", x, kernel, stride, padding, dilation, ceil_mode);
}

}  // namespace

Tensor pooled(const Tensor& y, const ConvProblem& problem) {
  const MaxPool pool = max_pool_of(problem);
  const DeviceInfo& device = device_of(y);
  if (y.numel() > 0 && pool.has_kernels(device)) return run(y, pool, device);
  const IntList two{2, 2};
  return in_layout(call_dispatcher("aten::max_pool2d", "", y, two, two, IntList{0, 0}, IntList{1, 1}, false),
                   problem.layout);
}

}  // namespace fastconv::ops

STABLE_TORCH_LIBRARY_FRAGMENT(fastconv, library) {
  library.def(
      "max_pool2d(Tensor x, int[2] kernel, int[2] stride, int[2] padding, int[2] dilation, bool ceil_mode) -> Tensor");
}

FASTCONV_IMPLEMENT({ library.impl("max_pool2d", TORCH_BOX(&fastconv::ops::max_pool2d)); })
