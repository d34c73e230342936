// The 16-bit type in which values of T are multiplied.
#pragma once

#include <type_traits>

#include "algos/implicit_gemm/plan.h"
#include "device/numeric.h"

namespace fastconv::algos::implicit_gemm {

// The type of tensors in a mode.
template <Mode mode>
using ElementOf =
    std::conditional_t<mode == Mode::fp16, half_t, std::conditional_t<mode == Mode::bf16, bfloat16_t, float>>;

template <typename T>
using Half = std::conditional_t<std::is_same_v<T, bfloat16_t>, bfloat16_t, half_t>;

}  // namespace fastconv::algos::implicit_gemm
