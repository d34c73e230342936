// Copies between parts of tensors.
#pragma once

#include <cstdint>

#include "ops/arguments.h"
#include "ops/stable.h"

namespace fastconv::ops {

// A part of a tensor, in elements. The last dimension is the channel's.
struct View {
  const Tensor& tensor;
  std::int64_t offset;
  IntList strides;
};

// Contiguous channels are copied 16 bytes at a time, which PyTorch's copy of strided tensors does not do.
void copy(const View& target, const View& source, IntList sizes);

}  // namespace fastconv::ops
