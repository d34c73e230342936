// A max-pool at the memory's rate. PyTorch's counts in 64 bits and finds the winner's place, which it writes, too.
#include <cmath>
#include <type_traits>

#include "core/fast_divide.h"
#include "core/integers.h"
#include "device/cuda_check.h"
#include "device/indexing.h"
#include "device/launch.h"
#include "device/max_pool.h"

namespace fastconv {
namespace {

constexpr int block_threads = 256, vector_bytes = 16;
// Of a row of y that a block takes, beside as many rows as it has threads for: where windows overlap, what the block
// reads more than once is in its first-level cache.
constexpr int max_lanes = 64;

// What a register holds of a type: one element (float, std::uint16_t) or two halves (std::uint32_t), as bits.
#define FASTCONV_MAX_NAN(TYPE, WORD, CONSTRAINT, PTX_TYPE)                                           \
  __device__ __forceinline__ WORD max_nan(TYPE, WORD a, WORD b) {                                    \
    WORD result;                                                                                     \
    asm("max.NaN." PTX_TYPE " %0, %1, %2;" : "=" CONSTRAINT(result) : CONSTRAINT(a), CONSTRAINT(b)); \
    return result;                                                                                   \
  }
FASTCONV_MAX_NAN(float, float, "f", "f32")
FASTCONV_MAX_NAN(half_t, std::uint16_t, "h", "f16")
FASTCONV_MAX_NAN(half_t, std::uint32_t, "r", "f16x2")
FASTCONV_MAX_NAN(bfloat16_t, std::uint16_t, "h", "bf16")
FASTCONV_MAX_NAN(bfloat16_t, std::uint32_t, "r", "bf16x2")
#undef FASTCONV_MAX_NAN

template <typename T, typename Word>
__device__ Word least() {  // -infinity
  if constexpr (std::is_same_v<T, float>) return -INFINITY;
  constexpr std::uint32_t bits = std::is_same_v<T, half_t> ? 0xfc00fc00u : 0xff80ff80u;
  return static_cast<Word>(bits);
}

// Of a pixel, as many channels as one access has.
template <typename T, typename Word, int count>
struct alignas(sizeof(Word) * count) Elements {
  Word e[count];

  __device__ static Elements least() {
    Elements result;
#pragma unroll
    for (Word& word : result.e) word = fastconv::least<T, Word>();
    return result;
  }
  __device__ void take(const Elements& other) {
#pragma unroll
    for (int i = 0; i < count; ++i) e[i] = max_nan(T{}, e[i], other.e[i]);
  }
};

// Sizes in accesses.
struct Parameters {
  int h, w;
  int pixel, pitch;      // of x: from one pixel to the next, from one row to the next
  std::int64_t image;    // of x
  int rows, length;      // of y: all of its rows; one of them
  FastDivide channels;   // of a pixel: NHWC, or 1
  FastDivide p, chunks;  // chunks: blocks along a row
  int r, s, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
};

// x [images][h][w][channels] -> y [images][p][q][channels]: NHWC, or NCHW as images of one channel. x may be a range of
// the channels of a larger tensor. A thread makes one
// access to y, a block a tile of rows and columns. fixed_r, fixed_s: the window, without dilation; 0: that of
// Parameters.
template <typename V, int fixed_r, int fixed_s>
__global__ void __launch_bounds__(block_threads)
    pool_windows(const V* __restrict__ x, V* __restrict__ y, const Parameters a) {
  const int block = static_cast<int>(blockIdx.x), tile = block / a.chunks;
  const int row = tile * static_cast<int>(blockDim.y) + static_cast<int>(threadIdx.y);
  const int at = (block - tile * a.chunks) * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x);
  if (row >= a.rows || at >= a.length) return;
  const int image = row / a.p, pixel = at / a.channels;
  const int top = (row - image * a.p) * a.stride_h - a.pad_h, left = pixel * a.stride_w - a.pad_w;
  const V* const source = x + image * a.image + (at - pixel * a.channels);
  V result = V::least();
  if constexpr (fixed_r > 0) {
    // For a pixel outside stands the nearest one inside, which without dilation is the window's, too.
    V values[fixed_r][fixed_s];
#pragma unroll
    for (int r = 0; r < fixed_r; ++r) {
      const V* const line = source + min(max(top + r, 0), a.h - 1) * a.pitch;
#pragma unroll
      for (int s = 0; s < fixed_s; ++s) values[r][s] = line[min(max(left + s, 0), a.w - 1) * a.pixel];
    }
#pragma unroll
    for (int i = 0; i < fixed_r * fixed_s; ++i) result.take(values[i / fixed_s][i % fixed_s]);
  } else {
    for (int r = 0, i = top; r < a.r; ++r, i += a.dilation_h) {
      if (i < 0 || i >= a.h) continue;
      const V* const line = source + i * a.pitch;
#pragma unroll 4
      for (int s = 0, j = left; s < a.s; ++s, j += a.dilation_w) {
        if (j < 0 || j >= a.w) continue;
        const V value = line[j * a.pixel];
        result.take(value);
      }
    }
  }
  y[static_cast<std::int64_t>(row) * a.length + at] = result;
}

template <typename V>
void launch(const MaxPool& pool, const void* x, void* y, std::int64_t images, std::int64_t channels, std::int64_t pixel,
            Runtime& runtime) {
  Parameters a{};
  set_sizes(a, pool);
  a.pixel = as_int(pixel), a.pitch = as_int(pool.w * pixel), a.image = pool.h * a.pitch;
  a.rows = as_int(images * pool.p), a.length = as_int(pool.q * channels);
  a.channels = channels, a.p = pool.p;
  int lanes = 8;
  while (lanes < a.length && lanes < max_lanes) lanes *= 2;
  const dim3 block(lanes, block_threads / lanes);
  a.chunks = ceil_div(a.length, lanes);
  const auto tiles = ceil_div<std::int64_t>(a.rows, block.y);
  const bool fixed = !pool.is_dilated() && pool.r == pool.s;
  const auto kernel = fixed && pool.r == 2   ? pool_windows<V, 2, 2>
                      : fixed && pool.r == 3 ? pool_windows<V, 3, 3>
                                             : pool_windows<V, 0, 0>;
  kernel<<<static_cast<unsigned>(tiles * a.chunks), block, 0, stream_of(runtime)>>>(static_cast<const V*>(x),
                                                                                    static_cast<V*>(y), a);
  check_launch("max-pool");
}

}  // namespace

void max_pool(const MaxPool& pool, const void* x, void* y, Runtime& runtime) {
  dispatch_dtype(pool.dtype, [&](auto zero) {
    using T = decltype(zero);
    using Word = std::conditional_t<std::is_same_v<T, float>, float, std::uint32_t>;
    using Scalar = Elements<T, std::conditional_t<std::is_same_v<T, float>, float, std::uint16_t>, 1>;
    constexpr int vec = vector_bytes / sizeof(T);
    if (pool.layout == Layout::nhwc && pool.c % vec == 0) {
      launch<Elements<T, Word, vector_bytes / sizeof(Word)>>(pool, x, y, pool.n, pool.c / vec, pool.x_pitch() / vec,
                                                             runtime);
    } else if (pool.layout == Layout::nhwc) {
      launch<Scalar>(pool, x, y, pool.n, pool.c, pool.x_pitch(), runtime);
    } else {
      launch<Scalar>(pool, x, y, pool.n * pool.c, 1, 1, runtime);
    }
  });
}

}  // namespace fastconv
