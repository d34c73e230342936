// The A operand: gathered from x into the very registers that mma reads, split into halves on the way, never in shared
// memory. That works because the order of the reduction within a step is free: where mma's layout gives a lane the
// indices 2l, 2l+1, 2l+8, 2l+9 (l = lane % 4) of two instructions, we mean the neighbouring elements 8l .. 8l+7.
#pragma once

#include "algos/implicit_gemm/portable/tile.cuh"
#include "device/power_of_two.h"

namespace fastconv::algos::implicit_gemm::portable {

// |hi| of a pixel must reach 2 (else lo would lose bits to float16's subnormals) and stay finite. The guess brings the
// largest value of the first step to [2^4, 2^5): the rest may be 2^11 times as large. The correction is exact.
constexpr int guessed_target = 4, exact_target = 12;
constexpr float min_high = 2.0f;

// One limb of A, by 16 pixels and 16 elements.
template <typename S>
using Fragments = std::uint32_t[S::row_tiles][2][4];

template <typename S>
class Input {
 public:
  using T = typename S::T;

  // x for one step into registers; zeros in the padding and behind the end of the reduction.
  __device__ __forceinline__ void load(const Params<T>& params, const SharedTile<S>& shared, int step) {
    constexpr int count = S::vector ? 16 / static_cast<int>(sizeof(T)) : 1;  // elements of a load
    int j = step * depth_tile + static_cast<int>(threadIdx.x) % 4 * S::elements;
    unsigned tap = j;
    int c = params.by_c.divmod(tap);
    int s = params.by_s.divmod(tap), r = tap;
#pragma unroll
    for (int e = 0; e < S::elements; e += count) {
      const int dh = r * params.dilation_h, dw = s * params.dilation_w;
      const T* source =
          params.x + (static_cast<std::int64_t>(dh) * params.w + dw) * params.x_pixel + c * params.x_channel;
#pragma unroll
      for (int i = 0; i < S::rows; ++i) {
        const Row at = shared.rows[row_of_lane(i)];
        // Without branches, so that the loads of a step leave together.
        const bool inside = static_cast<int>(j < params.reduction) &
                            static_cast<int>(static_cast<unsigned>(at.h + dh) < static_cast<unsigned>(params.h)) &
                            static_cast<int>(static_cast<unsigned>(at.w + dw) < static_cast<unsigned>(params.w));
        if constexpr (S::vector) {
          const uint4 zero{0, 0, 0, 0};
          reinterpret_cast<uint4*>(raw_[i])[e / count] =
              inside ? __ldg(reinterpret_cast<const uint4*>(source + at.base)) : zero;
        } else {
          raw_[i][e] = inside ? source[at.base] : from_float<T>(0.0f);
        }
      }
      j += count;
      c += count;  // never beyond C by vectors: it is a multiple of theirs
      if (c == params.c) {
        c = 0;
        if (++s == params.s) s = 0, ++r;
      }
    }
  }

  // The loaded step as fragments: scaled and split (`low` only with two limbs). Notes the largest |hi| of each pixel.
  __device__ __forceinline__ void split(Fragments<S>& high, Fragments<S>& low) {
#pragma unroll
    for (int i = 0; i < S::rows; ++i) {
#pragma unroll
      for (int e = 0; e < S::elements; e += 2) {
        // Registers of an instruction: row l/4, row l/4 + 8, then both at k + 8.
        std::uint32_t& to = high[i / 2][e / 4][e % 4 / 2 * 2 + i % 2];
        if constexpr (S::scaled) {
          const float a = raw_[i][e] * scale_[i], b = raw_[i][e + 1] * scale_[i];
          const __half2 hi = __floats2half2_rn(a, b);
          to = bits(hi);
          largest_[i] = __hmax2(largest_[i], __habs2(hi));
          if constexpr (S::limbs == 2) {
            low[i / 2][e / 4][e % 4 / 2 * 2 + i % 2] =
                bits(__floats2half2_rn(a - __low2float(hi), b - __high2float(hi)));
          }
        } else {
          to = reinterpret_cast<const std::uint32_t*>(raw_[i])[e / 2];
        }
      }
    }
  }

  // ---- Scales, one per pixel. Four neighbouring lanes hold a pixel; all lanes call these together.

  // From the first step alone, which is loaded.
  __device__ __forceinline__ void guess_scales() {
#pragma unroll
    for (int i = 0; i < S::rows; ++i) set_scale(i, over_lanes(largest_input(i)), guessed_target);
  }

  // Whether the guess was wrong for a pixel of this lane.
  __device__ __forceinline__ bool is_off(int i) const {
    const float high = over_lanes(fmaxf(__low2float(largest_[i]), __high2float(largest_[i])));
    return !(high >= min_high && high < INFINITY);
  }

  // Reads the input once more for the exact scales. Returns whether any has changed for a pixel that is not zero: one
  // that sees nothing but zeros is right at any scale.
  __device__ __forceinline__ bool correct_scales(const Params<T>& params, const SharedTile<S>& shared) {
    float largest[S::rows] = {};
    for (int step = 0; step < params.steps; ++step) {
      load(params, shared, step);
#pragma unroll
      for (int i = 0; i < S::rows; ++i) largest[i] = fmaxf(largest[i], largest_input(i));
    }
    bool changed = false;
#pragma unroll
    for (int i = 0; i < S::rows; ++i) {
      const bool off = is_off(i);
      const float value = over_lanes(largest[i]);
      if (off && value > 0.0f) {
        set_scale(i, value, exact_target);
        changed = true;
      }
    }
    return changed;
  }

  __device__ __forceinline__ void launder_largest() {
#pragma unroll
    for (int i = 0; i < S::rows; ++i) largest_[i] = __half2half2(__ushort_as_half(0));
  }

  __device__ __forceinline__ int exponent(int i) const {
    return static_cast<int>(__float_as_uint(scale_[i]) >> 23) - 127;
  }

 private:
  static __device__ __forceinline__ std::uint32_t bits(__half2 value) {
    return *reinterpret_cast<const std::uint32_t*>(&value);
  }

  __device__ __forceinline__ float largest_input(int i) const {
    float largest = 0.0f;
#pragma unroll
    for (int e = 0; e < S::elements; ++e) largest = larger_finite(largest, to_float(raw_[i][e]));
    return largest;
  }

  static __device__ __forceinline__ float over_lanes(float value) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 1));
    return fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 2));
  }

  // Zeros so far: the scale for values around 1.
  __device__ __forceinline__ void set_scale(int i, float largest, int target) {
    scale_[i] = power_of_two(largest > 0.0f ? scale_exponent(largest, target) : target);
  }

  alignas(16) T raw_[S::rows][S::elements];
  float scale_[S::rows];
  __half2 largest_[S::rows];
};

}  // namespace fastconv::algos::implicit_gemm::portable
