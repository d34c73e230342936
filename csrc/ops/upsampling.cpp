// The operators upsample_nearest2d and upsample_nearest2d_into: PyTorch's, by integers, and by a kernel of ours on CUDA
// where there is one.
#include "core/upsampling.h"

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "ops/arguments.h"
#include "ops/debug.h"
#include "ops/kernel_table.h"

namespace fastconv::ops {
namespace {

// The output's shape.
IntList checked(const Tensor& x, std::int64_t scale_h, std::int64_t scale_w) {
  FASTCONV_REQUIRE(x.dim() == 4, "x has shape ", to_text(shape_of(x)), "; expected [N, C, H, W]");
  const auto require = [](const char* name, std::int64_t scale) {
    FASTCONV_REQUIRE(scale >= 1 && scale <= std::numeric_limits<std::int32_t>::max(), name, " is ", scale,
                     "; expected 1 to 2147483647");
  };
  require("scale_h", scale_h), require("scale_w", scale_w);
  return {x.size(0), x.size(1), x.size(2) * scale_h, x.size(3) * scale_w};
}

Tensor by_pytorch(const Tensor& x, std::int64_t scale_h, std::int64_t scale_w) {
  const std::vector<double> scales{static_cast<double>(scale_h), static_cast<double>(scale_w)};
  return call_dispatcher("aten::upsample_nearest2d", "vec", x, std::optional<IntList>(), std::optional(scales));
}

// None: it is PyTorch's. x that kernels cannot read as it is will be copied.
std::optional<Upsampling> upsampling_of(const Tensor& x, std::int64_t scale_h, std::int64_t scale_w,
                                        std::int64_t y_channels) {
  if (x.numel() == 0 || !suggests_channels_last(x) || y_channels == 0) return std::nullopt;
  const std::int64_t x_channels = channels_in_memory(x);
  Upsampling upsampling;
  upsampling.n = x.size(0), upsampling.c = x.size(1), upsampling.h = x.size(2), upsampling.w = x.size(3);
  upsampling.scale_h = scale_h, upsampling.scale_w = scale_w;
  upsampling.x_channels = x_channels > 0 ? x_channels : x.size(1), upsampling.y_channels = y_channels;
  upsampling.dtype = dtype_of(x);
  return upsampling.has_kernels(device_of(x)) ? std::optional(upsampling) : std::nullopt;
}

Tensor run(const Upsampling& upsampling, const Tensor& given, GuardedOutput output) {
  const Tensor x = channels_in_memory(given) > 0 ? given : aligned(in_layout(given, Layout::nhwc));
  upsample(upsampling, x.const_data_ptr(), output.data(), *make_runtime(device_of(x)));
  return output.finish("upsampling");
}

Tensor upsample_nearest2d(const Tensor& x, std::int64_t scale_h, std::int64_t scale_w) {
  const IntList shape = checked(x, scale_h, scale_w);
  const auto upsampling = upsampling_of(x, scale_h, scale_w, x.size(1));
  if (!upsampling) return by_pytorch(x, scale_h, scale_w);
  const auto guard = device_guard(x);
  return run(*upsampling, x, GuardedOutput(x, {shape[0], shape[1], shape[2], shape[3]}, Layout::nhwc));
}

// out: in any memory format, also a range of channels of a larger tensor. By 1 x 1 it is a copy.
void upsample_nearest2d_into(Tensor out, const Tensor& x, std::int64_t scale_h, std::int64_t scale_w) {
  const IntList shape = checked(x, scale_h, scale_w);
  FASTCONV_REQUIRE(shape_of(out) == shape, "out has shape ", to_text(shape_of(out)), "; expected ", to_text(shape));
  require_same_kind(x, out, "out", "x");
  const bool is_copy = scale_h == 1 && scale_w == 1;
  const bool copies_twice = is_copy && channels_in_memory(x) == 0;  // first into what the kernel reads
  if (const auto upsampling = upsampling_of(x, scale_h, scale_w, copies_twice ? 0 : channels_in_memory(out))) {
    const auto guard = device_guard(x);
    run(*upsampling, x, GuardedOutput(out));
  } else {
    torch::stable::copy_(out, is_copy ? x : by_pytorch(x, scale_h, scale_w));
  }
}

}  // namespace
}  // namespace fastconv::ops

STABLE_TORCH_LIBRARY_FRAGMENT(fastconv, library) {
  library.def("upsample_nearest2d(Tensor x, int scale_h, int scale_w) -> Tensor");
  library.def("upsample_nearest2d_into(Tensor(a!) out, Tensor x, int scale_h, int scale_w) -> ()");
}

FASTCONV_IMPLEMENT({
  library.impl("upsample_nearest2d", TORCH_BOX(&fastconv::ops::upsample_nearest2d));
  library.impl("upsample_nearest2d_into", TORCH_BOX(&fastconv::ops::upsample_nearest2d_into));
})
