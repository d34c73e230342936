// The input patch of a tile: copied as it lies in memory, then turned into halves, padding included.
#pragma once

#include "algos/implicit_gemm/few_channels/tile.cuh"

namespace fastconv::algos::implicit_gemm::few_channels {

constexpr int target_exponent = 14;  // of the patch's largest |x|: below 2^15, so that hi is finite

// The rows and columns of x under a tile.
template <typename T>
struct Window {
  int h, w;                // of the patch's first pixel, perhaps in the padding
  int first_w, end_w;      // columns that exist
  std::int64_t first;      // element of x at image n, channel 0, row h, column first_w: row h may not exist

  __device__ Window(const Params<T>& params, const Origin& at)
      : h(at.p * params.stride_h - params.pad_h),
        w(at.q * params.stride_w - params.pad_w),
        first_w(max(w, 0)),
        end_w(min(w + params.plan.patch_w, params.w)),
        first(at.n * params.image_in + static_cast<std::int64_t>(h) * params.in_row + first_w * params.in_pixel) {}
};

// Into `raw`, [line][line_chunks] 16 bytes: each line from the multiple of 16 bytes on that its first element lies in.
template <typename T>
__device__ __forceinline__ void fetch(const Params<T>& params, const Origin& at, std::uint32_t raw) {
  const Window<T> window(params, at);
  const int length = (window.end_w - window.first_w) * params.in_pixel;
  const auto x = reinterpret_cast<std::uint64_t>(params.x);
#pragma unroll 1
  for (int index = threadIdx.x; index < params.plan.lines * params.plan.line_chunks; index += blockDim.x) {
    std::uint32_t line = index;
    const std::uint32_t chunk = params.by_line_chunks.divmod(line);
    std::uint32_t channel = line;
    const std::uint32_t row = params.by_patch_h.divmod(channel);  // NHWC: channel 0
    if (static_cast<unsigned>(window.h + static_cast<int>(row)) >= static_cast<unsigned>(params.h)) continue;
    const std::int64_t first = window.first + static_cast<std::int64_t>(row) * params.in_row +
                               static_cast<std::int64_t>(channel) * params.in_channel;
    const std::uint64_t begin = first * sizeof(T), from = begin / 16 * 16 + chunk * 16;
    if (length <= 0 || from >= begin + length * sizeof(T)) continue;
    const std::uint64_t left = params.x_bytes - from;
    copy_async<16>(raw + index * 16, reinterpret_cast<const void*>(x + from), left < 16 ? static_cast<int>(left) : 16);
  }
}

// Calls visit(unit, values) for each of the thread's pairs of neighbouring pixels: [2][pitch] values, zeros in the padding,
// beyond the patch and beyond C.
template <int c, int pitch, typename T, typename Visit>
__device__ __forceinline__ void for_each_unit(const Params<T>& params, const Origin& at, const unsigned char* raw,
                                              const Visit& visit) {
  const Window<T> window(params, at);
  const int line_bytes = params.plan.line_chunks * 16;
  const auto first = static_cast<std::uint32_t>(window.first);  // modulo 2^32: what counts is its place in 16 bytes
#pragma unroll 1
  for (int unit = threadIdx.x; unit < params.plan.patch_h * params.plan.row_units; unit += blockDim.x) {
    std::uint32_t row = unit;
    const int column = static_cast<int>(params.by_row_units.divmod(row)) * 2;
    const bool row_exists = static_cast<unsigned>(window.h + static_cast<int>(row)) < static_cast<unsigned>(params.h);
    const std::uint32_t begin = first + row * params.in_row;
    float values[2 * pitch] = {};
#pragma unroll
    for (int channel = 0; channel < c; ++channel) {
      const std::uint32_t line = params.nhwc ? row : row + channel * params.plan.patch_h;
      const std::uint32_t shift = (begin + (params.nhwc ? 0 : channel * params.in_channel)) * sizeof(T) % 16;
      const int from = window.w + column - window.first_w;
      const unsigned char* source = raw + line * line_bytes + shift + (params.nhwc ? channel : 0) * sizeof(T);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int w = window.w + column + i;
        const bool exists = row_exists && w >= window.first_w && w < window.end_w;
        const int offset = exists ? (from + i) * params.in_pixel * static_cast<int>(sizeof(T)) : 0;
        const T value = *reinterpret_cast<const T*>(source + offset);
        values[i * pitch + channel] = exists ? to_float(value) : 0.0f;
      }
    }
    visit(unit, values);
  }
}

__device__ __forceinline__ bool is_finite(float value) { return fabsf(value) < INFINITY; }

// The words of a unit, to shared memory.
template <int count>
__device__ __forceinline__ void store_words(unsigned char* target, const std::uint32_t (&words)[count]) {
  if constexpr (count == 4) {
    *reinterpret_cast<uint4*>(target) = make_uint4(words[0], words[1], words[2], words[3]);
  } else if constexpr (count == 2) {
    *reinterpret_cast<uint2*>(target) = make_uint2(words[0], words[1]);
  } else {
#pragma unroll
    for (int i = 0; i < count; ++i) reinterpret_cast<std::uint32_t*>(target)[i] = words[i];
  }
}

template <typename H>
__device__ __forceinline__ std::uint32_t pack_halves(H a, H b) {
  return static_cast<std::uint32_t>(*reinterpret_cast<const std::uint16_t*>(&a)) |
         static_cast<std::uint32_t>(*reinterpret_cast<const std::uint16_t*>(&b)) << 16;
}

// What converting tells: the exponent of the patch's scale, and whether a value is infinite or NaN (of this thread).
struct Converted {
  int exponent;
  bool special;
};

// patch: [limb][patch_h][row_units][2][pitch] halves. All threads call it.
template <typename S, int c, int pitch>
__device__ __forceinline__ Converted convert(const Params<typename S::T>& params, const Origin& at,
                                             const unsigned char* raw, unsigned char* patch, std::uint32_t* largest) {
  using T = typename S::T;
  using H = Half<T>;
  Converted result{0, false};
  float scale = 1.0f;
  if constexpr (S::scaled) {
    float most = 0.0f;
    for_each_unit<c, pitch>(params, at, raw, [&](int, const float (&values)[2 * pitch]) {
#pragma unroll
      for (int i = 0; i < 2 * pitch; ++i) most = larger_finite(most, values[i]);
    });
    const std::uint32_t bits = __reduce_max_sync(0xffffffffu, __float_as_uint(most));
    if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = bits;
    __syncthreads();
    std::uint32_t block_bits = 0;
    for (int warp = 0; warp < params.plan.warps; ++warp) block_bits = max(block_bits, largest[warp]);
    result.exponent = scale_exponent(__uint_as_float(block_bits), target_exponent);
    scale = power_of_two(result.exponent);
  }
  const int plane_bytes = params.plan.plane_bytes;
  for_each_unit<c, pitch>(params, at, raw, [&](int unit, const float (&values)[2 * pitch]) {
    std::uint32_t high[pitch];
    [[maybe_unused]] std::uint32_t low[pitch];
#pragma unroll
    for (int word = 0; word < pitch; ++word) {
      H halves[2];
      [[maybe_unused]] H rest[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float value = values[2 * word + i] * scale;
        result.special |= !is_finite(value);
        halves[i] = from_float<H>(value);
        if constexpr (S::scaled) {
          // Never zero unless the value is: what a pixel sees is zero, or told from it.
          if (value != 0.0f && fabsf(value) < 0x1p-24f) halves[i] = __ushort_as_half(1);
          if constexpr (S::limbs == 2) rest[i] = from_float<H>(value - to_float(halves[i]));
        }
      }
      high[word] = pack_halves(halves[0], halves[1]);
      if constexpr (S::limbs == 2) low[word] = pack_halves(rest[0], rest[1]);
    }
    unsigned char* target = patch + unit * pitch * 4;
    store_words(target, high);
    if constexpr (S::limbs == 2) store_words(target + plane_bytes, low);
  });
  return result;
}

template <typename S>
__device__ __forceinline__ Converted convert(const Params<typename S::T>& params, const Origin& at,
                                             const unsigned char* raw, unsigned char* patch, std::uint32_t* largest) {
  const bool dense = params.plan.dense;
  switch (params.c) {
    case 1: return dense ? convert<S, 1, 1>(params, at, raw, patch, largest)
                         : convert<S, 1, 2>(params, at, raw, patch, largest);
    case 2: return convert<S, 2, 2>(params, at, raw, patch, largest);
    case 3: return dense ? convert<S, 3, 3>(params, at, raw, patch, largest)
                         : convert<S, 3, 4>(params, at, raw, patch, largest);
    default: return convert<S, 4, 4>(params, at, raw, patch, largest);
  }
}

}  // namespace fastconv::algos::implicit_gemm::few_channels
