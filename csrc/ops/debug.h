// Memory of a call. In debug mode (fastconv.testing.poisoned_memory) workspace and output are filled with NaN before
// the kernels run and followed by a guard that must be intact after them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "core/kernels.h"
#include "ops/stable.h"

namespace fastconv::ops {

bool debug_enabled();
void set_debug(bool enabled);  // process-wide

// Uninitialised bytes from torch's allocator, on the device of `like`.
class GuardedBytes {
 public:
  GuardedBytes(std::size_t bytes, const Tensor& like);
  void* data() const { return storage_ ? storage_->mutable_data_ptr() : nullptr; }  // null if there are none
  // Throws std::runtime_error if a kernel wrote past the end. Debug mode only, where it waits for the device.
  void check(const char* what, const char* algorithm) const;

 private:
  std::size_t bytes_;
  bool guarded_;
  std::optional<Tensor> storage_;
};

// An output tensor of four dimensions in a layout: a problem's [N, K, P, Q], or the pooled or shuffled one.
class GuardedOutput {
 public:
  GuardedOutput(const Tensor& like, const std::array<std::int64_t, 4>& shape, Layout layout);
  GuardedOutput(const Tensor& like, const ConvProblem& problem)
      : GuardedOutput(like, {problem.n, problem.y_k(), problem.y_p(), problem.y_q()}, problem.layout) {}
  explicit GuardedOutput(const Tensor& output);  // one that is there already, perhaps a range of channels
  void* data() const { return poisoned_ ? poisoned_->data() : tensor_.mutable_data_ptr(); }
  Tensor finish(const char* algorithm);

 private:
  Tensor tensor_;
  std::optional<GuardedBytes> poisoned_;
};

}  // namespace fastconv::ops
