#include "ops/aten.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <algorithm>
#include <string>

#include "device/indexing.h"

// Declared here, because PyTorch's header of a GPU's functions is for builds with CUDA. Missing in a CPU-only torch.
extern "C" decltype(aoti_torch_cpu_convolution) aoti_torch_cuda_convolution;
extern "C" decltype(aoti_torch_cpu_convolution_backward) aoti_torch_cuda_convolution_backward;
#pragma weak aoti_torch_cuda_convolution
#pragma weak aoti_torch_cuda_convolution_backward

namespace fastconv::ops {
namespace {

// The result of one of PyTorch's C functions; what failed is known by its name (fastconv/failures.py).
void check(AOTITorchError status, const char* name) {
  try {
    STABLE_TORCH_ERROR_CODE_CHECK(status);
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(std::string(error.what()) + " in " + name);
  }
}

Tensor empty_strided(std::int64_t dimensions, const std::int64_t* shape, const std::int64_t* strides,
                     std::int32_t dtype, const Tensor& like) {
  std::int32_t type = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &type));
  AtenTensorHandle made = nullptr;
  check(aoti_torch_empty_strided(dimensions, shape, strides, dtype, type, like.get_device_index(), &made),
        "aten::empty");
  return Tensor(made);
}

struct Geometry {
  Geometry(const ConvProblem& p, const std::optional<OutputPadding>& transposed)
      : stride{p.stride_h, p.stride_w},
        padding{p.pad_h, p.pad_w},
        dilation{p.dilation_h, p.dilation_w},
        output_padding(transposed.value_or(OutputPadding{})),
        is_transposed(transposed.has_value()) {}
  std::array<std::int64_t, 2> stride, padding, dilation;
  OutputPadding output_padding;
  std::int32_t is_transposed;
};

}  // namespace

Tensor empty(const std::array<std::int64_t, 4>& shape, Layout layout, const Tensor& like) {
  // As PyTorch's, whose contiguous tensors count a size of zero as one.
  const auto counted = [&](int d) { return layout == Layout::nchw ? std::max<std::int64_t>(shape[d], 1) : shape[d]; };
  const Strides4 dense = dense_strides(layout, counted(1), counted(2), counted(3));
  const std::array<std::int64_t, 4> strides{dense.n, dense.c, dense.h, dense.w};
  std::int32_t dtype = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &dtype));
  return empty_strided(4, shape.data(), strides.data(), dtype, like);
}

Tensor empty_bytes(std::size_t bytes, const Tensor& like) {
  const auto size = static_cast<std::int64_t>(bytes);
  const std::int64_t stride = 1;
  return empty_strided(1, &size, &stride, aoti_torch_dtype_uint8(), like);
}

Tensor aten_convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                        const ConvProblem& problem, const std::optional<OutputPadding>& transposed) {
  const Geometry g(problem, transposed);
  AtenTensorHandle given = bias ? bias->get() : nullptr, made = nullptr;
  const auto convolve = input.is_cuda() ? aoti_torch_cuda_convolution : aoti_torch_cpu_convolution;
  check(convolve(input.get(), weight.get(), bias ? &given : nullptr, g.stride.data(), 2, g.padding.data(), 2,
                 g.dilation.data(), 2, g.is_transposed, g.output_padding.data(), 2, problem.groups, &made),
        "aten::convolution");
  return Tensor(made);
}

std::array<Tensor, 3> aten_convolution_backward(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                                const ConvProblem& problem, const std::array<bool, 3>& wanted,
                                                const std::optional<OutputPadding>& transposed) {
  const Geometry g(problem, transposed);
  const std::array<std::int32_t, 3> mask{wanted[0], wanted[1], wanted[2]};
  const std::int64_t filters = transposed ? weight.size(1) * problem.groups : weight.size(0);
  const std::int64_t* bias_sizes = &filters;
  std::array<AtenTensorHandle, 3> made{};
  const auto differentiate =
      grad.is_cuda() ? aoti_torch_cuda_convolution_backward : aoti_torch_cpu_convolution_backward;
  check(differentiate(grad.get(), input.get(), weight.get(), &bias_sizes, 1, g.stride.data(), 2, g.padding.data(), 2,
                      g.dilation.data(), 2, g.is_transposed, g.output_padding.data(), 2, problem.groups, mask.data(), 3,
                      &made[0], &made[1], &made[2]),
        "aten::convolution_backward");
  return {Tensor(made[0]), Tensor(made[1]), Tensor(made[2])};
}

}  // namespace fastconv::ops
