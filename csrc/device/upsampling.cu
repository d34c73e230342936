// A nearest-neighbour upsampling at memory bandwidth. PyTorch's computes the result element by element.
#include <cstdint>

#include "core/fast_divide.h"
#include "core/integers.h"
#include "device/cuda_check.h"
#include "device/indexing.h"
#include "device/launch.h"
#include "device/upsampling.h"

namespace fastconv {
namespace {

constexpr int block_threads = 256, vector_bytes = 16;

// Sizes in accesses.
struct Parameters {
  unsigned threads;     // accesses to all rows of x, each pixel scale_w times
  FastDivide length;    // of a row of y without what is around its channels
  FastDivide channels;  // of a pixel
  FastDivide scale_w;
  int scale_h;
  int x_pixel, y_pixel;  // from one to the next in memory
  int x_row, y_row;
};

// A thread reads one access and writes it to the scale_h rows of y that have it. Not to the scale_w columns too:
// consecutive threads write consecutive accesses, whole lines whatever a pixel has, and what they read scale_w times
// is in the first-level cache.
template <typename V>
__global__ void __launch_bounds__(block_threads)
    repeat_pixels(const V* __restrict__ x, V* __restrict__ y, const Parameters a) {
  const unsigned thread = blockIdx.x * block_threads + threadIdx.x;
  if (thread >= a.threads) return;
  const int index = static_cast<int>(thread), row = index / a.length, at = index - row * a.length;
  const int pixel = at / a.channels, channel = at - pixel * a.channels;
  const V value = x[static_cast<std::int64_t>(row) * a.x_row + pixel / a.scale_w * a.x_pixel + channel];
  V* target = y + static_cast<std::int64_t>(row) * a.scale_h * a.y_row + pixel * a.y_pixel + channel;
#pragma unroll 1  // two or four rows
  for (int i = 0; i < a.scale_h; ++i, target += a.y_row) *target = value;
}

template <typename V>
void launch(const Upsampling& u, std::int64_t vec, const void* x, void* y, Runtime& runtime) {
  const std::int64_t q = u.w * u.scale_w, channels = u.c / vec;
  Parameters a{};
  a.threads = static_cast<unsigned>(u.n * u.h * q * channels);
  a.length = q * channels, a.channels = channels, a.scale_w = u.scale_w, a.scale_h = as_int(u.scale_h);
  a.x_pixel = as_int(u.x_channels / vec), a.y_pixel = as_int(u.y_channels / vec);
  a.x_row = as_int(u.w * a.x_pixel), a.y_row = as_int(q * a.y_pixel);
  const auto blocks = ceil_div(a.threads, block_threads + 0u);
  repeat_pixels<V><<<blocks, block_threads, 0, stream_of(runtime)>>>(static_cast<const V*>(x), static_cast<V*>(y), a);
  check_launch("upsampling");
}

}  // namespace

void upsample(const Upsampling& upsampling, const void* x, void* y, Runtime& runtime) {
  const auto size = static_cast<std::int64_t>(size_of(upsampling.dtype)), vec = vector_bytes / size;
  if (upsampling.c % vec == 0 && upsampling.x_channels % vec == 0 && upsampling.y_channels % vec == 0) {
    launch<uint4>(upsampling, vec, x, y, runtime);
  } else if (size == 4) {
    launch<std::uint32_t>(upsampling, 1, x, y, runtime);
  } else {
    launch<std::uint16_t>(upsampling, 1, x, y, runtime);
  }
}

}  // namespace fastconv
