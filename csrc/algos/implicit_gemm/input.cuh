// The A operand: gathered from x into registers, split into halves, stored for ldmatrix. And its scales.
#pragma once

#include "algos/implicit_gemm/tile.cuh"
#include "device/power_of_two.h"

namespace fastconv::algos::implicit_gemm {

template <typename S>
class InputLoader {
 public:
  using T = typename S::T;

  __device__ __forceinline__ explicit InputLoader(SharedTile<S>& shared)
      : shared_(shared),
        // By vectors: neighbouring lanes along the channels. By element: along the pixels, so that the walk over
        // (r, s, c) is the same in a whole warp.
        row_(S::vector ? threadIdx.x / S::chunks_per_row : threadIdx.x % pixel_tile),
        first_(S::chunk * (S::vector ? threadIdx.x % S::chunks_per_row : threadIdx.x / pixel_tile)) {}

  __device__ __forceinline__ int row(int i) const { return row_ + i * row_step; }

  // x for one step into registers; zeros in the padding and behind the end of the reduction.
  __device__ __forceinline__ void load(const Params<T>& params, int step) {
    int j = step * depth_tile + first_;
    unsigned tap = j;
    int c = params.by_c.peel(tap);
    int s = params.by_s.peel(tap), r = tap;
    if constexpr (S::vector) {
      const int dh = r * params.dilation_h, dw = s * params.dilation_w;
      const T* source = params.x + offset(params, dh, dw, c);
#pragma unroll
      for (int i = 0; i < S::rows; ++i) {
        const Row at = shared_.rows[row(i)];
        const bool inside = j < params.reduction && contains(params, at, dh, dw);
        const uint4 zero{0, 0, 0, 0};
        reinterpret_cast<uint4*>(raw_)[i] =
            inside ? __ldg(reinterpret_cast<const uint4*>(source + at.base)) : zero;
      }
    } else {
      const Row at = shared_.rows[row(0)];
#pragma unroll
      for (int e = 0; e < S::chunk; ++e, ++j) {
        const int dh = r * params.dilation_h, dw = s * params.dilation_w;
        const bool inside = j < params.reduction && contains(params, at, dh, dw);
        raw_[e] = inside ? params.x[at.base + offset(params, dh, dw, c)] : from_float<T>(0.0f);
        if (++c == params.c) {
          c = 0;
          if (++s == params.s) s = 0, ++r;
        }
      }
    }
  }

  // Registers to the A stage at `target`, scaled and split. Keeps the largest |hi| of each pixel.
  __device__ __forceinline__ void store(unsigned char* target) {
#pragma unroll
    for (int i = 0; i < S::rows; ++i) {
      std::uint32_t high[S::chunk / 2];
      if constexpr (S::scaled) {
        const float scale = shared_.scale[row(i)];
        [[maybe_unused]] std::uint32_t low[S::chunk / 2];
#pragma unroll
        for (int e = 0; e < S::chunk / 2; ++e) {
          const float a = raw_[i * S::chunk + 2 * e] * scale, b = raw_[i * S::chunk + 2 * e + 1] * scale;
          const __half2 hi = __floats2half2_rn(a, b);
          high[e] = bits(hi);
          largest_[i] = __hmax2(largest_[i], __habs2(hi));
          if constexpr (S::planes == 2) {
            low[e] = bits(__floats2half2_rn(a - __low2float(hi), b - __high2float(hi)));
          }
        }
        if constexpr (S::planes == 2) put(target + S::a_plane, row(i), low);
      } else {
#pragma unroll
        for (int e = 0; e < S::chunk / 2; ++e) {
          high[e] = reinterpret_cast<const std::uint32_t*>(raw_)[i * (S::chunk / 2) + e];
        }
      }
      put(target, row(i), high);
    }
  }

  // ---- Scales: all threads of the block call these together.

  __device__ __forceinline__ void forget_largest() {
#pragma unroll
    for (int i = 0; i < S::rows; ++i) largest_[i] = __half2half2(__ushort_as_half(0));
  }

  // shared.largest[row] = max over the loaded step of |x|; infinities left out if `finite`. Before: zero, or more steps.
  __device__ __forceinline__ void merge_largest_input(bool finite) {
#pragma unroll
    for (int i = 0; i < S::rows; ++i) {
      float largest = 0.0f;
#pragma unroll
      for (int e = 0; e < S::chunk; ++e) {
        const float value = fabsf(to_float(raw_[i * S::chunk + e]));
        largest = fmaxf(largest, finite && isinf(value) ? 0.0f : value);
      }
      merge(row(i), largest);
    }
  }

  // shared.largest[row] = max of |hi| as far as stored
  __device__ __forceinline__ void merge_largest_stored() {
#pragma unroll
    for (int i = 0; i < S::rows; ++i) {
      merge(row(i), fmaxf(__low2float(largest_[i]), __high2float(largest_[i])));
    }
  }

 private:
  static constexpr int row_step = S::vector ? threads / S::chunks_per_row : 0;

  static __device__ __forceinline__ std::uint32_t bits(__half2 value) {
    return *reinterpret_cast<const std::uint32_t*>(&value);
  }
  static __device__ __forceinline__ bool contains(const Params<T>& params, const Row& at, int dh, int dw) {
    return static_cast<unsigned>(at.h + dh) < static_cast<unsigned>(params.h) &&
           static_cast<unsigned>(at.w + dw) < static_cast<unsigned>(params.w);
  }
  static __device__ __forceinline__ std::int64_t offset(const Params<T>& params, int dh, int dw, int c) {
    return (static_cast<std::int64_t>(dh) * params.w + dw) * params.x_pixel + c * params.x_channel;
  }

  // `chunk` halves of a row, by 8 or 16 bytes.
  __device__ __forceinline__ void put(unsigned char* plane, int row, const std::uint32_t (&value)[S::chunk / 2]) const {
    if constexpr (S::chunk == 4) {
      const int at = swizzled(row, first_ / 8) + first_ % 8 * 2;
      *reinterpret_cast<uint2*>(plane + at) = make_uint2(value[0], value[1]);
    } else {
#pragma unroll
      for (int e = 0; e < S::chunk / 2; e += 4) {
        *reinterpret_cast<uint4*>(plane + swizzled(row, first_ / 8 + e / 4)) =
            make_uint4(value[e], value[e + 1], value[e + 2], value[e + 3]);
      }
    }
  }

  __device__ __forceinline__ void merge(int row, float value) {
    if constexpr (S::vector) {
#pragma unroll
      for (int lanes = S::chunks_per_row / 2; lanes > 0; lanes /= 2) {
        value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, lanes));
      }
      if (threadIdx.x % S::chunks_per_row != 0) return;
    }
    atomicMax(&shared_.largest[row], __float_as_int(value));
  }

  SharedTile<S>& shared_;
  int row_, first_;
  alignas(16) T raw_[S::elements];
  __half2 largest_[S::rows];
};

// The scale that brings |largest| to [2^target, 2^(target+1)); a pixel of zeros gets the one for values around 1.
template <typename S>
__device__ __forceinline__ void set_scale(SharedTile<S>& shared, int row, float largest, int target) {
  const int exponent = largest > 0.0f ? scale_exponent(largest, target) : target;
  shared.exponent[row] = exponent;
  shared.scale[row] = power_of_two(exponent);
}

}  // namespace fastconv::algos::implicit_gemm
