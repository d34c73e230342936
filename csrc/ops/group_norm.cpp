// The operator group_norm: PyTorch's with an activation behind it, by kernels of ours on CUDA in channels_last.
#include "core/group_norm.h"

#include <optional>
#include <string>

#include "core/names.h"
#include "ops/arguments.h"
#include "ops/convolution.h"
#include "ops/debug.h"
#include "ops/kernel_table.h"

namespace fastconv::ops {
namespace {

void require_parameter(const char* name, const std::optional<Tensor>& parameter, const Tensor& x) {
  if (!parameter) return;
  FASTCONV_REQUIRE(parameter->dim() == 1 && parameter->size(0) == x.size(1), name, " has shape ",
                   to_text(shape_of(*parameter)), "; expected [C] = [", x.size(1), "]");
  require_same_kind(x, *parameter, name, "x");
}

Tensor normed(const Tensor& x, std::optional<Tensor> weight, std::optional<Tensor> bias, std::int64_t groups,
              double epsilon, std::string activation_name) {
  FASTCONV_REQUIRE(x.dim() == 4, "x has shape ", to_text(shape_of(x)), "; expected [N, C, H, W]");
  FASTCONV_REQUIRE(groups > 0 && x.size(1) % groups == 0, "groups is ", groups, "; expected a divisor of x's ",
                   x.size(1), " channels");
  FASTCONV_REQUIRE(epsilon >= 0.0, "epsilon is ", epsilon, "; expected 0 or more");
  require_parameter("weight", weight, x), require_parameter("bias", bias, x);
  GroupNorm norm;
  norm.activation = activation_from_name(activation_name);
  FASTCONV_REQUIRE(norm.activation <= Activation::silu, "activation is '", activation_name,
                   "'; expected none, relu, relu6 or silu");
  norm.n = x.size(0), norm.c = x.size(1), norm.pixels = x.size(2) * x.size(3);
  norm.groups = groups, norm.epsilon = epsilon, norm.dtype = dtype_of(x);
  const DeviceInfo& device = device_of(x);
  const Layout layout = suggests_channels_last(x) ? Layout::nhwc : Layout::nchw;
  if (layout == Layout::nchw || x.numel() == 0 || !norm.has_kernels(device)) {
    const Tensor y = call_dispatcher("aten::group_norm", "", x, groups, weight, bias, epsilon, false);
    return in_layout(activate(y, norm.activation), layout);
  }
  const auto guard = device_guard(x);
  const Tensor dense = aligned(in_layout(x, layout));
  if (weight) weight = torch::stable::contiguous(*weight);
  if (bias) bias = torch::stable::contiguous(*bias);
  GuardedBytes workspace(norm.workspace_bytes(device), x);
  GuardedOutput output(x, {norm.n, norm.c, x.size(2), x.size(3)}, layout);
  group_norm(norm, dense.const_data_ptr(), weight ? weight->const_data_ptr() : nullptr,
             bias ? bias->const_data_ptr() : nullptr, output.data(), workspace.data(), *make_runtime(device));
  workspace.check("workspace", "group norm");
  return output.finish("group norm");
}

}  // namespace
}  // namespace fastconv::ops

STABLE_TORCH_LIBRARY_FRAGMENT(fastconv, library) {
  library.def(
      "group_norm(Tensor x, Tensor? weight, Tensor? bias, int groups, float epsilon, str activation) -> Tensor");
}
FASTCONV_IMPLEMENT({ library.impl("group_norm", TORCH_BOX(&fastconv::ops::normed)); })
