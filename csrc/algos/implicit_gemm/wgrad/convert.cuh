// The operands of the weight gradient as the main kernel reads them: [image][pixel][limb][pitch] halves, float32
// scaled and split. Three ways to read; one way to convert and to find the maxima.
#pragma once

#include <cstdint>

#include "algos/implicit_gemm/shared/half.h"
#include "core/fast_divide.h"
#include "device/image_scale.cuh"
#include "device/indexing.h"
#include "device/numeric.h"
#include "device/split_fp16.cuh"

namespace fastconv::algos::implicit_gemm::wgrad {

constexpr int convert_threads = 256;

// A guessed scale brings the largest sampled value to [2^10, 2^11), an exact one the largest to [2^14, 2^15).
constexpr int guessed_target = 10, exact_target = 14;

// Scales of float32 operands. Images that may lie in one chunk are a group.
struct Scales {
  PairScales pair;  // of x and dY
  int* sums;        // [groups]: the exponent of the scales' product, for the main kernel; null: not scaled
  int group_images;

  __device__ __forceinline__ PairScales::Group group(int index, bool maxima_known) const {
    const int first = index * group_images;
    return pair.group(first, min(first + group_images, pair.images) - 1, maxima_known);
  }
};

// Taps as channels: channel (r, s, c) of pixel (p, q) is x[p * stride - pad + r * dilation, ..., c].
struct Unroll {
  int h, w, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
  FastDivide by_q, by_s;
};

template <typename T>
struct Operand {
  const T* source;  // [N, C, H, W] by `strides`
  Half<T>* target;  // [N][pixels][limbs][pitch]
  Scales scales;    // float32 only
  bool is_x;        // or dY
  Strides4 strides;
  std::int64_t image_numel;  // of the source
  int images;
  int channels, target_channels, pitch, pixels;  // C; C or R S C; that rounded up to 8; of the target, per image
  Unroll unroll;
  FastDivide by_vectors, by_channels;  // pitch / 8; C
};

// Converts 8 values at a time for one image, and remembers the largest.
template <typename T, int limbs>
class Converter {
 public:
  __device__ __forceinline__ Converter(const Operand<T>& operand, bool retry) : operand_(operand) {
    if constexpr (std::is_same_v<T, float>) {
      const int index = image() / operand.scales.group_images;
      const PairScales::Group group = operand.scales.group(index, retry);
      needed_ = !retry || group.exact;
      factor_ = ldexpf(1.0f, operand.scales.pair.exponent(operand.is_x, image(), group));
      if (retry && image() % operand.scales.group_images == 0 && blockIdx.x == 0 && threadIdx.x == 0) {
        operand.scales.sums[index] = group.sum;
      }
    } else {
      needed_ = !retry;
    }
  }
  // Whether there is anything to do; the same for all threads of a block.
  __device__ __forceinline__ bool needed() const { return needed_; }
  __device__ __forceinline__ int image() const { return static_cast<int>(blockIdx.y); }

  __device__ __forceinline__ void store(int pixel, int channel, const T (&values)[8]) {
    Half<T>* target = operand_.target +
                      (static_cast<std::int64_t>(image()) * operand_.pixels + pixel) * limbs * operand_.pitch + channel;
    if constexpr (std::is_same_v<T, float>) {
      uint4 high, low;
      auto* highs = reinterpret_cast<std::uint32_t*>(&high);
      auto* lows = reinterpret_cast<std::uint32_t*>(&low);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float a = values[2 * i], b = values[2 * i + 1];
        largest_ = fmaxf(largest_, fmaxf(finite(a), finite(b)));
        const HalfLimbs split = split_fp16(a * factor_, b * factor_);
        highs[i] = bits(split.high), lows[i] = bits(split.low);
      }
      *reinterpret_cast<uint4*>(target) = high;
      if constexpr (limbs == 2) *reinterpret_cast<uint4*>(target + operand_.pitch) = low;
    } else {
      *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(values);
    }
  }

  // All threads, at the end.
  __device__ __forceinline__ void note_largest() const {
    if constexpr (std::is_same_v<T, float>) {
      const int largest = __reduce_max_sync(0xffffffffu, __float_as_int(largest_));
      const PairScales& pair = operand_.scales.pair;
      ImageScale& scale = (operand_.is_x ? pair.first : pair.second)[image()];
      if (threadIdx.x % 32 == 0 && largest > 0) atomicMax(&scale.largest, largest);
    }
  }

 private:
  static __device__ __forceinline__ std::uint32_t bits(__half2 value) {
    return *reinterpret_cast<const std::uint32_t*>(&value);
  }
  static __device__ __forceinline__ float finite(float value) {
    const float magnitude = fabsf(value);
    return magnitude < INFINITY ? magnitude : 0.0f;  // also of NaN
  }

  const Operand<T>& operand_;
  bool needed_;
  float factor_ = 1.0f, largest_ = 0.0f;
};

// NHWC, C a multiple of 8.
template <typename T, int limbs>
__global__ void __launch_bounds__(convert_threads)
    convert_vectors(const __grid_constant__ Operand<T> operand, bool retry) {
  Converter<T, limbs> converter(operand, retry);
  if (!converter.needed()) return;
  const T* source = operand.source + converter.image() * operand.image_numel;
  const unsigned count = static_cast<unsigned>(operand.image_numel / 8);
#pragma unroll 4
  for (unsigned i = blockIdx.x * convert_threads + threadIdx.x; i < count; i += gridDim.x * convert_threads) {
    alignas(16) T values[8];
#pragma unroll
    for (int j = 0; j < static_cast<int>(sizeof(values) / 16); ++j) {
      reinterpret_cast<uint4*>(values)[j] = __ldcs(reinterpret_cast<const uint4*>(source + i * std::int64_t{8}) + j);
    }
    unsigned pixel = i;
    const int channel = static_cast<int>(operand.by_vectors.divmod(pixel)) * 8;
    converter.store(static_cast<int>(pixel), channel, values);
  }
  converter.note_largest();
}

// NCHW: tiles of 64 pixels and 64 channels, transposed in shared memory.
template <typename T, int limbs>
__global__ void __launch_bounds__(convert_threads)
    convert_tiles(const __grid_constant__ Operand<T> operand, bool retry) {
  constexpr int tile = 64;
  __shared__ T transposed[tile][tile + 1];  // [channel][pixel]
  Converter<T, limbs> converter(operand, retry);
  if (!converter.needed()) return;
  const T* source = operand.source + converter.image() * operand.image_numel;
  const int channel_tiles = (operand.pitch + tile - 1) / tile, pixel_tiles = (operand.pixels + tile - 1) / tile;
  for (int index = static_cast<int>(blockIdx.x); index < channel_tiles * pixel_tiles; index += gridDim.x) {
    const int c0 = index % channel_tiles * tile, pixel0 = index / channel_tiles * tile;
    const int column = static_cast<int>(threadIdx.x) % tile, first = static_cast<int>(threadIdx.x) / tile;
#pragma unroll
    for (int c = first; c < tile; c += convert_threads / tile) {
      const bool inside = c0 + c < operand.channels && pixel0 + column < operand.pixels;
      transposed[c][column] =
          inside ? source[static_cast<std::int64_t>(c0 + c) * operand.pixels + pixel0 + column] : from_float<T>(0.0f);
    }
    __syncthreads();
#pragma unroll
    for (int i = static_cast<int>(threadIdx.x); i < tile * tile / 8; i += convert_threads) {
      const int c = i % (tile / 8) * 8, pixel = i / (tile / 8);
      if (c0 + c >= operand.pitch || pixel0 + pixel >= operand.pixels) continue;
      alignas(16) T values[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) values[j] = transposed[c + j][pixel];
      converter.store(pixel0 + pixel, c0 + c, values);
    }
    __syncthreads();
  }
  converter.note_largest();
}

// Element by element: any layout and number of channels, taps as channels.
template <typename T, int limbs, bool unrolled>
__global__ void __launch_bounds__(convert_threads)
    convert_elements(const __grid_constant__ Operand<T> operand, bool retry) {
  Converter<T, limbs> converter(operand, retry);
  if (!converter.needed()) return;
  const T* source = operand.source + converter.image() * operand.image_numel;
  const unsigned count = static_cast<unsigned>(operand.pixels) * static_cast<unsigned>(operand.pitch / 8);
  const Unroll& unroll = operand.unroll;
  for (unsigned i = blockIdx.x * convert_threads + threadIdx.x; i < count; i += gridDim.x * convert_threads) {
    unsigned pixel = i;
    const unsigned channel = operand.by_vectors.divmod(pixel) * 8;
    unsigned p = pixel;
    const unsigned q = unroll.by_q.divmod(p);
    alignas(16) T values[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      unsigned tap = channel + j;
      bool inside = tap < static_cast<unsigned>(operand.target_channels);
      int h = static_cast<int>(p), w = static_cast<int>(q);
      unsigned c = tap;
      if constexpr (unrolled) {
        c = operand.by_channels.divmod(tap);
        unsigned r = tap;
        const unsigned s = unroll.by_s.divmod(r);
        h = h * unroll.stride_h - unroll.pad_h + static_cast<int>(r) * unroll.dilation_h;
        w = w * unroll.stride_w - unroll.pad_w + static_cast<int>(s) * unroll.dilation_w;
        inside = inside && static_cast<unsigned>(h) < static_cast<unsigned>(unroll.h) &&
                 static_cast<unsigned>(w) < static_cast<unsigned>(unroll.w);
      }
      values[j] = inside ? source[operand.strides(0, c, h, w)] : from_float<T>(0.0f);
    }
    converter.store(static_cast<int>(pixel), static_cast<int>(channel), values);
  }
  converter.note_largest();
}

}  // namespace fastconv::algos::implicit_gemm::wgrad
