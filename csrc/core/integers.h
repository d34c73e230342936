// Arithmetic of sizes, for planners and launches.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fastconv {

// Pieces of b that a fills, the last one perhaps in part.
template <typename A, typename B>
constexpr auto ceil_div(A a, B b) {
  return (a + b - 1) / b;
}

template <typename A, typename B>
constexpr auto round_up(A value, B multiple) {
  return ceil_div(value, multiple) * multiple;
}

// Parts of a workspace or packed weight are aligned to this, which suffices for copies and vectors of any width.
constexpr std::size_t align_bytes(std::size_t bytes) { return round_up(bytes, std::size_t{256}); }

// No padded input is larger: its height and width are below 2^62, and padding on each side below half of that.
constexpr std::int64_t max_extent = std::int64_t{1} << 62;

// dilation (size - 1) + 1, or max_extent where that is more: it does not overflow.
inline std::int64_t kernel_extent(std::int64_t size, std::int64_t dilation) {
  return size > 1 && dilation > max_extent / size ? max_extent : dilation * (size - 1) + 1;
}

}  // namespace fastconv
