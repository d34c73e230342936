// The few torch calls that fastconv makes beside the stable ABI's own wrappers.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <stdexcept>
#include <string>
#include <utility>

#ifndef STABLE_TORCH_ERROR_CODE_CHECK  // its name since torch 2.13
#define STABLE_TORCH_ERROR_CODE_CHECK(call) TORCH_ERROR_CODE_CHECK(call)
#endif

// Registers operators for both devices; `library` in the block that it is given.
#define FASTCONV_IMPLEMENT(...)                                                                                    \
  STABLE_TORCH_LIBRARY_IMPL(fastconv, CPU, library) __VA_ARGS__ STABLE_TORCH_LIBRARY_IMPL(fastconv, CUDA, library) \
  __VA_ARGS__

namespace fastconv::ops {

using torch::headeronly::MemoryFormat;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Calls an operator of `Outputs...` results through the dispatcher: no wrapper for it exists in the stable ABI.
template <typename... Args>
Tensor call_dispatcher(const char* name, const char* overload, const Args&... args) {
  std::array<StableIValue, sizeof...(Args)> stack{torch::stable::detail::from(args)...};
  try {
    STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, overload, stack.data(), TORCH_ABI_VERSION));
  } catch (const std::runtime_error& error) {  // whose text names this line alone
    throw std::runtime_error(std::string(error.what()) + " in " + name);
  }
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// A tensor over memory that somebody else owns.
inline Tensor borrow(const void* data, std::initializer_list<std::int64_t> sizes,
                     std::initializer_list<std::int64_t> strides, const torch::stable::Device& device,
                     ScalarType dtype) {
  return torch::stable::from_blob(const_cast<void*>(data), {sizes.begin(), sizes.size()},
                                  {strides.begin(), strides.size()}, device, dtype);
}

}  // namespace fastconv::ops
