// How the end of a kernel writes y.
#pragma once

#include <cstdint>

#include "core/problem.h"

namespace fastconv {

enum class StoreMode : int {
  filters,   // NHWC, by vectors of neighbouring filters
  pixels,    // NCHW, by four neighbouring outputs of a row
  elements,  // either, value by value
};

// The widest mode that the sizes allow, for a kernel that stores so many filters at once.
inline StoreMode select_store_mode(const ConvProblem& problem, std::int64_t filters) {
  if (problem.layout == Layout::nhwc) return problem.k % filters == 0 ? StoreMode::filters : StoreMode::elements;
  return problem.q() % 4 == 0 ? StoreMode::pixels : StoreMode::elements;
}

}  // namespace fastconv
