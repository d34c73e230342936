// What lives where: kernel parameters, a block's shared memory, its pixels.
#pragma once

#include <cstdint>

#include "algos/implicit_gemm/portable/plan.h"
#include "algos/implicit_gemm/shared/half.h"
#include "core/fast_divide.h"
#include "device/epilogue.h"
#include "device/numeric.h"

namespace fastconv::algos::implicit_gemm::portable {

template <typename T>
struct Params {
  const T* x;             // [N, C, H, W] by the strides below
  const Half<T>* weight;  // [groups][steps][limbs][K/G][32]
  const int* exponents;   // [K]
  T* y;                   // [N, K, P, Q], NCHW or NHWC
  Epilogue<T> epilogue;
  std::int64_t x_image, x_pixel, x_channel;  // strides of x, in elements
  int c, h, w, k, pixels_per_image;          // c, k: of a group
  int y_channels;                            // of the tensor of y: K, or those around a range
  unsigned pixels;                           // N P Q
  int reduction, steps;
  int s, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
  bool nchw;   // of y
  bool quads;  // y and residual can be accessed by four elements: their rows are multiples of it, and aligned
  FastDivide by_filter_tiles, by_pixels_per_image, by_q, by_c, by_s;
};

// A kernel instantiation. `vector`: x is loaded by 16 bytes of channels, else by element.
template <typename T_, int products_, int column_tiles_, bool vector_>
struct Shape {
  using T = T_;
  static constexpr int products = products_;
  static constexpr bool vector = vector_;
  static constexpr bool scaled = std::is_same_v<T, float>;
  static constexpr int limbs = products == 3 ? 2 : 1;
  static constexpr int row_tiles = 2, column_tiles = column_tiles_;  // of 16 pixels and 8 filters: a warp's part
  static constexpr int filter_tile = 8 * column_tiles;
  static_assert(pixel_tile == threads / 32 * 16 * row_tiles);

  // Which group the block works on.
  static __device__ __forceinline__ unsigned group() { return filter_tile < ungrouped_filter_tile ? blockIdx.y : 0; }

  // A lane of the fragments has 4 pixels, and 8 neighbouring elements of each step's reduction.
  static constexpr int rows = 2 * row_tiles, elements = depth_tile / 4;

  static constexpr int row_bytes = depth_tile * 2;
  static constexpr int limb_bytes = filter_tile * row_bytes, stage_bytes = limbs * limb_bytes, stages = 3;
  // The finished tile takes the filters' place. The pads spread its fragments over all banks.
  static constexpr int pitch_nhwc = filter_tile + 8, pitch_nchw = pixel_tile + 4;
  static constexpr int output_bytes =
      4 * (pixel_tile * pitch_nhwc > filter_tile * pitch_nchw ? pixel_tile * pitch_nhwc : filter_tile * pitch_nchw);
  static constexpr int tile_bytes = stages * stage_bytes > output_bytes ? stages * stage_bytes : output_bytes;
};

// An output pixel: where its window starts. Outside the image for a pixel beyond the last.
struct alignas(16) Row {
  std::int64_t base;  // offset in x of the window's first element, possibly in the padding
  int h, w;
};

template <typename S>
struct SharedTile {
  alignas(128) unsigned char filters[S::tile_bytes];  // [stage][limb][filter][32] halves; at the end the output
  Row rows[pixel_tile];
};

// The pixel, within the block, of a lane's row i: mma's rows l/4 and l/4 + 8 of each 16.
__device__ __forceinline__ int row_of_lane(int i) {
  return static_cast<int>(threadIdx.x / 32 * 32 + threadIdx.x % 32 / 4) + i * 8;
}

template <typename S>
__device__ __forceinline__ Row find_row(const Params<typename S::T>& params, unsigned pixel) {
  if (pixel >= params.pixels) return {0, -(1 << 30), -(1 << 30)};
  unsigned n = pixel;
  unsigned p = params.by_pixels_per_image.divmod(n);
  const unsigned q = params.by_q.divmod(p);
  const int h = static_cast<int>(p) * params.stride_h - params.pad_h;
  const int w = static_cast<int>(q) * params.stride_w - params.pad_w;
  const std::int64_t group = S::group() * params.c * params.x_channel;
  return {n * params.x_image + (static_cast<std::int64_t>(h) * params.w + w) * params.x_pixel + group, h, w};
}

}  // namespace fastconv::algos::implicit_gemm::portable
