// How sums become values of y: bias and activation, 16 bytes of filters at a time.
#pragma once

#include "algos/implicit_gemm/persistent/tile.cuh"
#include "algos/implicit_gemm/shared/activation.cuh"
#include "device/power_of_two.h"

namespace fastconv::algos::implicit_gemm::persistent {

template <typename T, int size>
struct alignas(size * sizeof(T) < 16 ? size * sizeof(T) : 16) Vector {
  T e[size];
};
template <typename T, int count>
__device__ __forceinline__ uint4 pack_vec(const float (&values)[count]) {
  static_assert(count * sizeof(T) == 16);
  if constexpr (std::is_same_v<T, float>) {
    return {__float_as_uint(values[0]), __float_as_uint(values[1]), __float_as_uint(values[2]),
            __float_as_uint(values[3])};
  } else {
    const auto pair = [&](int e) {
      if constexpr (std::is_same_v<T, bfloat16_t>) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(values[e], values[e + 1]);
        return *reinterpret_cast<const unsigned*>(&pair);
      } else {
        const __half2 pair = __floats2half2_rn(values[e], values[e + 1]);
        return *reinterpret_cast<const unsigned*>(&pair);
      }
    };
    return {pair(0), pair(2), pair(4), pair(6)};
  }
}
template <typename T, int count>
__device__ __forceinline__ void store_vec(T* target, const float (&values)[count]) {
  if constexpr (std::is_same_v<T, float>) {  // partial sums of half types are more than 16 bytes
#pragma unroll
    for (int e = 0; e < count; e += 4) {
      *reinterpret_cast<float4*>(target + e) = {values[e], values[e + 1], values[e + 2], values[e + 3]};
    }
  } else {
    *reinterpret_cast<uint4*>(target) = pack_vec<T>(values);
  }
}

// How an output is finished.
enum class Finish {
  partial,  // not at all: it goes to the partial sums
  plain,    // bias
  clamped,  // bias, ReLU or ReLU6
  leaky,    // bias, leaky_relu with a slope in (0, 1)
  general,  // the rest
};
template <Finish finish>
constexpr std::integral_constant<Finish, finish> is{};

template <typename T>
__device__ __forceinline__ Finish finish_of(const Params<T>& params) {
  const ActivationFunction& activate = params.epilogue.activate;
  if (params.partial != nullptr) return Finish::partial;
  if (params.epilogue.residual != nullptr || activate.is_silu) return Finish::general;
  if (activate.clamps) return Finish::clamped;
  if (activate.negative_slope == 1.0f) return Finish::plain;
  return leaks(activate) ? Finish::leaky : Finish::general;
}

// 16 bytes of filters of a lane, finished, for all of its pixels: store(row, values).
template <typename S, Finish finish, int rows, typename Store>
__device__ __forceinline__ void finish_vec(const Params<typename S::T>& params, const FilterData<S>& filters,
                                           const float (&sums)[S::row_blocks][S::sums], const float (&factor)[rows],
                                           int column, int first_row, int last_row, Store&& store) {
  using T = typename S::T;
  constexpr int vec = vec_of<T>;
  const int of_lane = static_cast<int>(threadIdx.x) % 4 * vec;
  float scale[vec], bias[vec];
  if constexpr (S::scaled) {
    const float4 scales = *reinterpret_cast<const float4*>(filters.exponent + column + of_lane);
    scale[0] = scales.x, scale[1] = scales.y, scale[2] = scales.z, scale[3] = scales.w;
  }
  if constexpr (finish != Finish::partial) {
    const auto of_filters = *reinterpret_cast<const Vector<T, vec>*>(filters.bias + column + of_lane);
#pragma unroll
    for (int e = 0; e < vec; ++e) bias[e] = to_float(of_filters.e[e]);
  }
#pragma unroll
  for (int i = first_row; i < last_row; ++i) {
    float values[vec];
#pragma unroll
    for (int e = 0; e < vec; ++e) {
      float value = sums[i / 2][(column / 8 + e / 2) * 4 + i % 2 * 2 + e % 2];
      if constexpr (S::scaled && !S::transforms) value *= factor[i];
      if constexpr (S::scaled && finish == Finish::partial) value *= scale[e];
      if constexpr (S::scaled && finish != Finish::partial) value = fmaf(value, scale[e], bias[e]);
      if constexpr (!S::scaled && finish != Finish::partial) value += bias[e];
      if constexpr (finish == Finish::clamped) value = clamp(value, params.epilogue.activate.cap);
      if constexpr (finish == Finish::leaky) value = leak(value, params.epilogue.activate.negative_slope);
      values[e] = value;
    }
    store(i, values);
  }
}

}  // namespace fastconv::algos::implicit_gemm::persistent
