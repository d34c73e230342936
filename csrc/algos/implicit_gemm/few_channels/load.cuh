// The input patch of a tile: copied as it lies in memory, then turned into halves, padding included.
#pragma once

#include "algos/implicit_gemm/few_channels/tile.cuh"
#include "device/split_fp16.cuh"

namespace fastconv::algos::implicit_gemm::few_channels {

constexpr int target_exponent = 14;  // of the patch's largest |x|: below 2^15, so that hi is finite

// The rows and columns of x under a tile. Its places in memory are bytes from `x` on, a multiple of 16 at or before the
// image, modulo 2^32: below that where they exist.
template <typename T>
struct Window {
  std::uint64_t x;
  std::uint32_t left;   // bytes of the tensor from there on, if that many
  std::uint32_t begin;  // of channel 0, row h, column first_w
  int h, w;             // of the patch's first pixel, perhaps in the padding
  int first_w, end_w;   // columns that exist

  __device__ Window(const Params<T>& params, const Origin& at)
      : h(at.p * params.stride_h - params.pad_h),
        w(at.q * params.stride_w - params.pad_w),
        first_w(max(w, 0)),
        end_w(min(w + params.plan.patch_w, params.w)) {
    const std::uint64_t image = static_cast<std::uint64_t>(at.n) * params.image_in * sizeof(T),
                        rest = params.x_bytes - image;
    const std::uint32_t shift = static_cast<std::uint32_t>(image) % 16;
    x = reinterpret_cast<std::uint64_t>(params.x) + image - shift;
    left = static_cast<std::uint32_t>(min(rest + shift, std::uint64_t{0xffffffff}));
    begin = shift + static_cast<std::uint32_t>(h * params.in_row + first_w * params.in_pixel) * sizeof(T);
  }

  // Of a row of a channel.
  __device__ std::uint32_t line(const Params<T>& params, std::uint32_t row, std::uint32_t channel) const {
    return begin + (row * params.in_row + channel * params.in_channel) * static_cast<std::uint32_t>(sizeof(T));
  }
  __device__ bool has_row(const Params<T>& params, std::uint32_t row) const {
    return static_cast<unsigned>(h) + row < static_cast<unsigned>(params.h);
  }
  __device__ bool has_column(int column) const { return w + column >= first_w && w + column < end_w; }
};

// Into `raw`, [line][line_chunks] 16 bytes: each line from the multiple of 16 bytes on that its first element lies in.
template <typename T>
__device__ __forceinline__ void fetch(const Params<T>& params, const Origin& at, std::uint32_t raw) {
  const Window<T> window(params, at);
  const int length = (window.end_w - window.first_w) * params.in_pixel * static_cast<int>(sizeof(T));
  std::uint32_t line = threadIdx.x;
  const std::uint32_t chunk = params.by_line_chunks.divmod(line) * 16;
  if (line >= params.lines_at_once || length <= 0) return;
  const int line_bytes = params.plan.line_chunks * 16;
#pragma unroll 1
  for (; line < params.plan.lines; line += params.lines_at_once) {
    std::uint32_t channel = line;
    const std::uint32_t row = params.by_patch_h.divmod(channel);  // NHWC: channel 0
    const std::uint32_t begin = window.line(params, row, channel), from = (begin & ~15u) + chunk;
    if (!window.has_row(params, row) || from >= begin + length) continue;
    copy_async<16>(raw + line * line_bytes + chunk, reinterpret_cast<const void*>(window.x + from),
                   static_cast<int>(min(window.left - from, 16u)));
  }
}

// Calls visit(offset, values) for each of the thread's pairs of neighbouring pixels: [2][pitch] values, zeros in the
// padding, beyond the patch and beyond C; offset: in the patch.
template <int c, int pitch, typename T, typename Visit>
__device__ __forceinline__ void for_each_pixel_pair(const Params<T>& params, const Window<T>& window,
                                                    const unsigned char* raw, const Visit& visit) {
  const int line_bytes = params.plan.line_chunks * 16;
  std::uint32_t row = threadIdx.x;
  const int column = static_cast<int>(params.by_pixel_pairs.divmod(row)) * 2;
  if (row >= params.rows_at_once) return;
  const bool exists[2] = {window.has_column(column), window.has_column(column + 1)};
  const int first = (window.w + column - window.first_w) * params.in_pixel * static_cast<int>(sizeof(T));
#pragma unroll 1
  for (; row < params.plan.patch_h; row += params.rows_at_once) {
    T values[2 * pitch];
#pragma unroll
    for (int i = 0; i < 2 * pitch; ++i) values[i] = from_float<T>(0.0f);
    const auto load = [&](const unsigned char* line, int channel, int pixel_elements) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (exists[i]) values[i * pitch + channel] = reinterpret_cast<const T*>(line)[i * pixel_elements];
      }
    };
    if (!window.has_row(params, row)) {
    } else if (params.nhwc) {
      const unsigned char* line = raw + row * line_bytes + window.line(params, row, 0) % 16 + first;
#pragma unroll
      for (int channel = 0; channel < c; ++channel) load(line + channel * sizeof(T), channel, c);
    } else {
#pragma unroll
      for (int channel = 0; channel < c; ++channel) {
        load(raw + (row + channel * params.plan.patch_h) * line_bytes + window.line(params, row, channel) % 16 + first,
             channel, 1);
      }
    }
    visit(static_cast<int>(row) * params.plan.row_bytes + column * pitch * 2, values);
  }
}

// The words of a pair of pixels, to shared memory.
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

// What converting tells of a patch.
struct Converted {
  int exponent;  // of its scale
  bool special;  // a value is infinite or NaN
  bool tiny;     // a value that is not zero becomes zero in halves
};

// The range of |x| that each warp has seen, as integers in the same order: the largest, NaN above infinity, and the
// smallest but zero, less 1 (float32 alone). [max_warps]; a warp that does not exist has seen nothing.
constexpr std::uint32_t nothing = 0xffffffffu;
__device__ __forceinline__ void note_range(std::uint32_t largest, std::uint32_t smallest, uint2* ranges) {
  const uint2 range{__reduce_max_sync(0xffffffffu, largest), __reduce_min_sync(0xffffffffu, smallest)};
  if (threadIdx.x % 32 == 0) ranges[threadIdx.x / 32] = range;
  __syncthreads();
}
template <typename T>
__device__ __forceinline__ Converted converted_from(const uint2* ranges) {
  std::uint32_t largest = 0, smallest = nothing;
#pragma unroll
  for (int warp = 0; warp < max_warps; ++warp) {
    const uint2 seen = ranges[warp];
    largest = max(largest, seen.x), smallest = min(smallest, seen.y);
  }
  Converted result{};
  if constexpr (std::is_same_v<T, float>) {
    result.special = largest >= 0x7f800000u;
    result.exponent = result.special ? 0 : scale_exponent(__uint_as_float(largest), target_exponent);
    result.tiny = smallest != nothing && !(__uint_as_float(smallest + 1) * power_of_two(result.exponent) > 0x1p-25f);
  } else {
    result.special = largest >= (std::is_same_v<T, half_t> ? 0x7c00u : 0x7f80u);
  }
  return result;
}

// Half types: the patch as it is.
template <typename T, int c, int pitch>
__device__ __forceinline__ void convert_16bit(const Params<T>& params, const Window<T>& window,
                                              const unsigned char* raw, unsigned char* patch, uint2* ranges) {
  std::uint32_t largest = 0;
  for_each_pixel_pair<c, pitch>(params, window, raw, [&](int offset, const T(&values)[2 * pitch]) {
    std::uint32_t words[pitch];
#pragma unroll
    for (int word = 0; word < pitch; ++word) {
      words[word] = static_cast<std::uint32_t>(reinterpret_cast<const std::uint16_t&>(values[2 * word])) |
                    static_cast<std::uint32_t>(reinterpret_cast<const std::uint16_t&>(values[2 * word + 1])) << 16;
      largest = __vmaxu2(largest, words[word] & 0x7fff7fff);
    }
    store_words(patch + offset, words);
  });
  note_range(max(largest % 65536, largest / 65536), nothing, ranges);
}

// float32: scaled, hi and lo.
template <int limbs, int c, int pitch>
__device__ __forceinline__ void convert_floats(const Params<float>& params, const Window<float>& window,
                                               const unsigned char* raw, unsigned char* patch, uint2* ranges) {
  std::uint32_t largest = 0, smallest = nothing;
  for_each_pixel_pair<c, pitch>(params, window, raw, [&](int, const float (&values)[2 * pitch]) {
#pragma unroll
    for (int i = 0; i < 2 * pitch; ++i) {
      if (i % pitch >= c) continue;
      const std::uint32_t bits = __float_as_uint(values[i]) & 0x7fffffff;
      largest = max(largest, bits), smallest = min(smallest, bits - 1);
    }
  });
  note_range(largest, smallest, ranges);
  const float scale = power_of_two(converted_from<float>(ranges).exponent);
  const int patch_limb_bytes = params.plan.patch_limb_bytes;
  for_each_pixel_pair<c, pitch>(params, window, raw, [&](int offset, const float (&values)[2 * pitch]) {
    std::uint32_t high[pitch];
    [[maybe_unused]] std::uint32_t low[pitch];
#pragma unroll
    for (int word = 0; word < pitch; ++word) {
      const HalfLimbs split = split_fp16(values[2 * word] * scale, values[2 * word + 1] * scale);
      high[word] = reinterpret_cast<const std::uint32_t&>(split.high);
      if constexpr (limbs == 2) low[word] = reinterpret_cast<const std::uint32_t&>(split.low);
    }
    store_words(patch + offset, high);
    if constexpr (limbs == 2) store_words(patch + patch_limb_bytes + offset, low);
  });
  __syncthreads();
}

// patch: [limb][patch_h] rows of [pixel_pairs][2][pitch] halves, complete on return, as is what converted_from() reads.
// All threads call it.
template <typename S>
__device__ __forceinline__ void convert(const Params<typename S::T>& params, const Origin& at, const unsigned char* raw,
                                        unsigned char* patch, uint2* ranges) {
  const Window<typename S::T> window(params, at);
  const auto with = [&]<int c, int pitch>() {
    if constexpr (S::scaled) {
      convert_floats<S::limbs, c, pitch>(params, window, raw, patch, ranges);
    } else {
      convert_16bit<typename S::T, c, pitch>(params, window, raw, patch, ranges);
    }
  };
  switch (params.c) {
    case 1: return params.plan.dense ? with.template operator()<1, 1>() : with.template operator()<1, 2>();
    case 2: return with.template operator()<2, 2>();
    case 3: return params.plan.dense ? with.template operator()<3, 3>() : with.template operator()<3, 4>();
    default: return with.template operator()<4, 4>();
  }
}

}  // namespace fastconv::algos::implicit_gemm::few_channels
