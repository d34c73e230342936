// Element types and their conversion to and from float: one spelling for host code (g++) and device code (nvcc).
// The host types are bit patterns with software conversion: round to nearest even, subnormals, infinities and NaN kept.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/device_error.h"
#include "core/problem.h"

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define FASTCONV_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FASTCONV_HOST_DEVICE inline __attribute__((always_inline))
#endif

namespace fastconv {

#ifdef __CUDACC__

using half_t = __half;
using bfloat16_t = __nv_bfloat16;

FASTCONV_HOST_DEVICE float to_float(float value) { return value; }
FASTCONV_HOST_DEVICE float to_float(half_t value) { return __half2float(value); }
FASTCONV_HOST_DEVICE float to_float(bfloat16_t value) { return __bfloat162float(value); }

template <typename T>
FASTCONV_HOST_DEVICE T from_float(float value);
template <>
FASTCONV_HOST_DEVICE float from_float<float>(float value) {
  return value;
}
template <>
FASTCONV_HOST_DEVICE half_t from_float<half_t>(float value) {
  return __float2half_rn(value);
}
template <>
FASTCONV_HOST_DEVICE bfloat16_t from_float<bfloat16_t>(float value) {
  return __float2bfloat16_rn(value);
}

#else

struct half_t {
  std::uint16_t bits;
};
struct bfloat16_t {
  std::uint16_t bits;
};

namespace detail {
FASTCONV_HOST_DEVICE float float_of_bits(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
FASTCONV_HOST_DEVICE std::uint32_t bits_of_float(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
}  // namespace detail

FASTCONV_HOST_DEVICE float to_float(float value) { return value; }
FASTCONV_HOST_DEVICE float to_float(bfloat16_t value) {
  return detail::float_of_bits(static_cast<std::uint32_t>(value.bits) << 16);
}
// Branch-free: moving the exponent by a multiplication with 2^112 also normalises subnormals.
FASTCONV_HOST_DEVICE float to_float(half_t value) {
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000u) << 16;
  const std::uint32_t magnitude = static_cast<std::uint32_t>(value.bits & 0x7fffu) << 13;
  const float scaled = detail::float_of_bits(magnitude) * detail::float_of_bits((254u - 15u) << 23);
  const std::uint32_t infinite = (value.bits & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
  return detail::float_of_bits(sign | detail::bits_of_float(scaled) | infinite);
}

template <typename T>
FASTCONV_HOST_DEVICE T from_float(float value);
template <>
FASTCONV_HOST_DEVICE float from_float<float>(float value) {
  return value;
}
template <>
FASTCONV_HOST_DEVICE bfloat16_t from_float<bfloat16_t>(float value) {
  const std::uint32_t bits = detail::bits_of_float(value);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return {static_cast<std::uint16_t>(nan ? (bits >> 16) | 0x40u : rounded)};
}
template <>
FASTCONV_HOST_DEVICE half_t from_float<half_t>(float value) {
  const std::uint32_t bits = detail::bits_of_float(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<std::uint16_t>(sign | 0x7e00u)};
  if (magnitude >= 0x47800000u) return {static_cast<std::uint16_t>(sign | 0x7c00u)};  // >= 2^16
  if (magnitude < 0x38800000u) {  // subnormal in half: let the FP32 adder round at bit 2^-24
    const float aligned = detail::float_of_bits(magnitude) + 0.5f;
    return {static_cast<std::uint16_t>(sign | (detail::bits_of_float(aligned) - 0x3f000000u))};
  }
  const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return {static_cast<std::uint16_t>(sign | ((rounded - (112u << 23)) >> 13))};
}

#endif

// Calls `visit` with the one of these constants that the value equals, as a std::integral_constant.
template <auto... constants, typename Value, typename Visitor>
void dispatch_value(Value value, const Visitor& visit) {
  const bool found =
      ((value == constants && (visit(std::integral_constant<decltype(constants), constants>{}), true)) || ...);
  if (!found) throw_not_compiled(static_cast<long long>(value));
}

// Calls `visit` with a value of the element type: dispatch(dtype, [&](auto zero) { using T = decltype(zero); ... }).
template <typename Visitor>
void dispatch_dtype(DType dtype, Visitor&& visit) {
  switch (dtype) {
    case DType::f32: visit(float{}); break;
    case DType::f16: visit(half_t{}); break;
    case DType::bf16: visit(bfloat16_t{}); break;
    case DType::other: break;  // no algorithm but PyTorch's own supports it: never reached
  }
}

}  // namespace fastconv
