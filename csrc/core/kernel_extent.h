// The extent of a dilated kernel, for sizes that a user may give.
#pragma once

#include <cstdint>

namespace fastconv {

// No padded input is larger: its height and width are below 2^62, and padding on each side below half of that.
constexpr std::int64_t max_extent = std::int64_t{1} << 62;

// dilation (size - 1) + 1, or max_extent where that is more: it does not overflow.
inline std::int64_t kernel_extent(std::int64_t size, std::int64_t dilation) {
  return size > 1 && dilation > max_extent / size ? max_extent : dilation * (size - 1) + 1;
}

}  // namespace fastconv
