// The 16-bit type in which values of T are multiplied.
#pragma once

#include <type_traits>

#include "device/numeric.h"

namespace fastconv::algos::implicit_gemm {

template <typename T>
using Half = std::conditional_t<std::is_same_v<T, bfloat16_t>, bfloat16_t, half_t>;

}  // namespace fastconv::algos::implicit_gemm
