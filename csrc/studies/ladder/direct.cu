#include "studies/ladder/shared.cuh"

namespace fastconv::studies::ladder {
namespace {

constexpr int tile = 16;  // pixels of a block in height and width

// The textbook's: a thread per output, serial over C, R, S. Grid: tiles of the map, K, N.
template <typename Kernel>
__global__ void convolve(Sizes sizes, Pointer<const float, Kernel::restricted> x,  // [N, C, H, W]
                         Pointer<const float, Kernel::restricted> weight,          // [K, C, R, R]
                         Pointer<float, Kernel::restricted> y) {                   // [N, y_channels, P, Q]
  const int size = Kernel::size > 0 ? Kernel::size : sizes.r;
  const int tiles_q = (sizes.q + tile - 1) / tile, k = static_cast<int>(blockIdx.y);
  const int p = static_cast<int>(blockIdx.x) / tiles_q * tile + static_cast<int>(threadIdx.y);
  const int q = static_cast<int>(blockIdx.x) % tiles_q * tile + static_cast<int>(threadIdx.x);
  if (p >= sizes.p || q >= sizes.q) return;
  const int h0 = p * sizes.stride - sizes.pad, w0 = q * sizes.stride - sizes.pad;
  for (std::int64_t n = blockIdx.z; n < sizes.n; n += gridDim.z) {
    float sum = 0.0f;
#pragma unroll 1
    for (int c = 0; c < sizes.c; ++c) {
#pragma unroll
      for (int r = 0; r < size; ++r) {
#pragma unroll
        for (int s = 0; s < size; ++s) {
          const int h = h0 + r, w = w0 + s;
          const bool inside = h >= 0 && h < sizes.h && w >= 0 && w < sizes.w;
          const float value = inside ? x[((n * sizes.c + c) * sizes.h + h) * sizes.w + w] : 0.0f;
          sum += value * filters_of<float, Kernel>(weight)[((k * sizes.c + c) * size + r) * size + s];
        }
      }
    }
    y[((n * sizes.y_channels + k) * sizes.p + p) * sizes.q + q] = sum;
  }
}

}  // namespace

void run_direct(const Sizes& sizes, const Rung& rung, const float* x, const float* weight, float* y,
                cudaStream_t stream) {
  with_flags(rung, sizes.r, [&](auto flags) {
    in_slices(rung.constant_filters, sizes, weight, y, stream, [&](const Sizes& slice, const float* w, float* target) {
      const dim3 grid(ceil_div(slice.p, tile) * ceil_div(slice.q, tile), slice.k, std::min(slice.n, max_blocks));
      convolve<decltype(flags)><<<grid, dim3(tile, tile), 0, stream>>>(slice, x, w, target);
      check_launch("ladder direct");
    });
  });
}

}  // namespace fastconv::studies::ladder
