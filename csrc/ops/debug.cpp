#include "ops/debug.h"

#include <atomic>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#if __has_include(<sys/mman.h>)
#include <sys/mman.h>
#endif

#include "core/integers.h"
#include "ops/arguments.h"
#include "ops/aten.h"

namespace fastconv::ops {
namespace {

std::atomic<bool> enabled{false};

constexpr std::size_t guard_bytes = 4096;
constexpr int poison = 0xff;  // NaN as float32, float16 and bfloat16
constexpr int sentinel = 0xa5;

// What the allocator maps anew in every call, as glibc's does from 32 MiB on, the system clears page by page, which
// takes longer than packing a weight. A wish: where it is not granted all is as it was.
void ask_for_large_pages([[maybe_unused]] void* data, [[maybe_unused]] std::size_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr std::uintptr_t page = 4096;
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  if (bytes >= std::size_t{32} << 20)
    madvise(reinterpret_cast<void*>(round_up(begin, page)), bytes - page, MADV_HUGEPAGE);
#endif
}

}  // namespace

bool debug_enabled() { return enabled.load(std::memory_order_relaxed); }
void set_debug(bool value) { enabled.store(value, std::memory_order_relaxed); }

GuardedBytes::GuardedBytes(std::size_t bytes, const Tensor& like) : bytes_(bytes), guarded_(debug_enabled()) {
  if (bytes == 0 && !guarded_) return;
  storage_ = empty_bytes(bytes + (guarded_ ? guard_bytes : 0), like);
  if (!like.is_cuda()) ask_for_large_pages(data(), bytes);
  if (!guarded_) return;
  torch::stable::fill_(*storage_, poison);
  Tensor tail = *storage_;
  torch::stable::fill_(torch::stable::narrow(tail, 0, static_cast<std::int64_t>(bytes), guard_bytes), sentinel);
}

void GuardedBytes::check(const char* what, const char* algorithm) const {
  if (!guarded_) return;
  Tensor storage = *storage_;
  const Tensor tail =
      torch::stable::to(torch::stable::narrow(storage, 0, static_cast<std::int64_t>(bytes_), guard_bytes),
                        torch::stable::Device(torch::headeronly::DeviceType::CPU));
  const std::vector<unsigned char> expected(guard_bytes, sentinel);
  if (std::memcmp(tail.const_data_ptr(), expected.data(), guard_bytes) != 0) {
    throw std::runtime_error(std::string("fastconv: ") + algorithm + " wrote past the end of its " + what);
  }
}

GuardedOutput::GuardedOutput(const Tensor& like, const std::array<std::int64_t, 4>& shape, Layout layout)
    : GuardedOutput(empty(shape, layout, like)) {}

GuardedOutput::GuardedOutput(const Tensor& output) : tensor_(output) {
  if (!debug_enabled()) return;
  std::int64_t elements = tensor_.numel() > 0 ? 1 : 0;  // from the first to the last
  for (std::int64_t d = 0; elements > 0 && d < tensor_.dim(); ++d) {
    elements += (tensor_.size(d) - 1) * tensor_.stride(d);
  }
  poisoned_.emplace(static_cast<std::size_t>(elements) * size_of(dtype_of(tensor_)), tensor_);
}

Tensor GuardedOutput::finish(const char* algorithm) {
  if (poisoned_) {
    poisoned_->check("output", algorithm);
    const auto strides = tensor_.strides();
    const auto sizes = tensor_.sizes();
    torch::stable::copy_(
        tensor_, torch::stable::from_blob(poisoned_->data(), sizes, strides, tensor_.device(), tensor_.scalar_type()));
  }
  return tensor_;
}

}  // namespace fastconv::ops
