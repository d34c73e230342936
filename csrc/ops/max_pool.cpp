// The operator max_pool2d: PyTorch's, of values alone, by a kernel of ours on CUDA where there is one.
#include "ops/max_pool.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "ops/arguments.h"
#include "ops/debug.h"
#include "ops/kernel_table.h"

namespace fastconv::ops {
namespace {

// x is dense in the pool's layout.
Tensor run(const Tensor& x, const MaxPool& pool, const DeviceInfo& device) {
  if (pool.is_faster_apart()) return run(run(x, pool.along_rows(), device), pool.along_columns(), device);
  GuardedOutput output(x, {pool.n, pool.c, pool.p, pool.q}, pool.layout);
  max_pool(pool, x.const_data_ptr(), output.data(), *make_runtime(device));
  return output.finish("max-pool");
}

using Pair = std::array<std::int64_t, 2>;  // of height and width

std::string to_text(const Pair& pair) { return ops::to_text(IntList(pair.begin(), pair.end())); }

void require_least(const char* name, const Pair& pair, std::int64_t least) {
  FASTCONV_REQUIRE(pair[0] >= least && pair[1] >= least,
                   name + (" is " + to_text(pair)) + "; expected integers of at least " + std::to_string(least));
}

// PyTorch's rule: rounded up, a window may begin in x or in the padding before it, not behind x.
std::int64_t output_size(std::int64_t size, std::int64_t extent, std::int64_t stride, std::int64_t padding, bool ceil) {
  const std::int64_t rest = size + 2 * padding - extent;
  if (rest < 0 && !(ceil && rest + stride > 0)) return 0;
  const std::int64_t windows = (rest + (ceil ? stride - 1 : 0)) / stride + 1;
  return ceil && (windows - 1) * stride >= size + padding ? windows - 1 : windows;
}

Tensor max_pool2d_of_pairs(const Tensor& x, const Pair& kernel, const Pair& stride, const Pair& padding,
                           const Pair& dilation, bool ceil_mode) {
  require_least("kernel", kernel, 1), require_least("stride", stride, 1);
  require_least("padding", padding, 0), require_least("dilation", dilation, 1);
  const std::int64_t dimensions = x.dim();
  FASTCONV_REQUIRE(dimensions == 3 || dimensions == 4,
                   "x has shape " + ops::to_text(shape_of(x)) + "; expected [N, C, H, W] or [C, H, W]");
  Pair size;
  for (std::size_t i = 0; i < 2; ++i) {
    FASTCONV_REQUIRE(padding[i] <= kernel[i] / 2,
                     "padding is " + to_text(padding) + "; expected at most half the kernel " + to_text(kernel));
    const std::int64_t given = x.size(dimensions - 2 + static_cast<std::int64_t>(i));
    size[i] = output_size(given, dilation[i] * (kernel[i] - 1) + 1, stride[i], padding[i], ceil_mode);
    FASTCONV_REQUIRE(size[i] > 0, "x has shape " + ops::to_text(shape_of(x)) + "; with padding " + to_text(padding) +
                                      " no window of kernel " + to_text(kernel) + " and dilation " + to_text(dilation) +
                                      " fits");
  }
  if (dimensions == 4 && x.is_cuda()) {
    MaxPool pool;
    pool.layout = suggests_channels_last(x) ? Layout::nhwc : Layout::nchw;
    pool.n = x.size(0), pool.c = x.size(1), pool.h = x.size(2), pool.w = x.size(3);
    pool.p = size[0], pool.q = size[1], pool.r = kernel[0], pool.s = kernel[1];
    pool.stride_h = stride[0], pool.stride_w = stride[1], pool.pad_h = padding[0], pool.pad_w = padding[1];
    pool.dilation_h = dilation[0], pool.dilation_w = dilation[1];
    pool.dtype = dtype_of(x);
    const DeviceInfo& device = device_of(x);
    if (x.numel() > 0 && has_max_pool(pool, device)) {
      const auto guard = device_guard(x);
      return run(aligned(in_layout(x, pool.layout)), pool, device);
    }
  }
  const auto list = [](const Pair& pair) { return IntList(pair.begin(), pair.end()); };
  return call_dispatcher("aten::max_pool2d", "", x, list(kernel), list(stride), list(padding), list(dilation),
                         ceil_mode);
}

// One integer for height and width, or one for each; none: `otherwise`.
Pair pair_of(const char* name, const IntList& values, const Pair* otherwise = nullptr) {
  if (values.empty() && otherwise != nullptr) return *otherwise;
  FASTCONV_REQUIRE(values.size() == 1 || values.size() == 2,
                   name + (" is " + ops::to_text(values)) + "; expected one or two integers");
  return {values.front(), values.back()};
}

Tensor max_pool2d(const Tensor& x, IntList kernel, IntList stride, IntList padding, IntList dilation, bool ceil_mode) {
  const Pair size = pair_of("kernel", kernel), zeros{0, 0}, ones{1, 1};
  return max_pool2d_of_pairs(x, size, pair_of("stride", stride, &size), pair_of("padding", padding, &zeros),
                             pair_of("dilation", dilation, &ones), ceil_mode);
}

// The same without lists, each of which takes a microsecond: of eager layers, below autograd.
Tensor max_pool2d_eager(const Tensor& x, std::int64_t r, std::int64_t s, std::int64_t stride_h, std::int64_t stride_w,
                        std::int64_t pad_h, std::int64_t pad_w, std::int64_t dilation_h, std::int64_t dilation_w,
                        bool ceil_mode) {
  return max_pool2d_of_pairs(x, {r, s}, {stride_h, stride_w}, {pad_h, pad_w}, {dilation_h, dilation_w}, ceil_mode);
}

}  // namespace

Tensor pooled(const Tensor& y, const ConvProblem& problem) {
  const MaxPool pool = max_pool_of(problem);
  const DeviceInfo& device = device_of(y);
  if (y.numel() > 0 && has_max_pool(pool, device)) return run(y, pool, device);
  const IntList two{2, 2};
  return in_layout(call_dispatcher("aten::max_pool2d", "", y, two, two, IntList{0, 0}, IntList{1, 1}, false),
                   problem.layout);
}

}  // namespace fastconv::ops

STABLE_TORCH_LIBRARY_FRAGMENT(fastconv, library) {
  library.def(
      "max_pool2d(Tensor x, int[2] kernel, int[2] stride, int[2] padding, int[2] dilation, bool ceil_mode) -> Tensor");
  library.def(
      "max_pool2d_eager(Tensor x, int r, int s, int stride_h, int stride_w, int pad_h, int pad_w, int dilation_h, "
      "int dilation_w, bool ceil_mode) -> Tensor");
}

#define FASTCONV_IMPLEMENT(DEVICE)                                                 \
  STABLE_TORCH_LIBRARY_IMPL(fastconv, DEVICE, library) {                           \
    library.impl("max_pool2d", TORCH_BOX(&fastconv::ops::max_pool2d));             \
    library.impl("max_pool2d_eager", TORCH_BOX(&fastconv::ops::max_pool2d_eager)); \
  }
FASTCONV_IMPLEMENT(CPU)
FASTCONV_IMPLEMENT(CUDA)
