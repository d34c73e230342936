// The elementwise passes around the GEMM. Indices inside a chunk are below 2^31 (plan.h), offsets into x and y
// 64-bit.
#pragma once

#include "algos/im2col_gemm/chunks.h"
#include "core/fast_divide.h"
#include "device/epilogue.h"

namespace fastconv::algos::im2col_gemm {

constexpr int unroll_threads = 256;

// One thread per (sample, channel, pixel); it writes all R*S taps. Consecutive threads take consecutive pixels: stores
// coalesce, and so do the loads up to the stride; the overlap of the taps is met by the L1 cache.
template <typename T>
__global__ void __launch_bounds__(unroll_threads)
    unroll_nchw(ConvProblem problem, Chunk chunk, std::uint32_t total,  // samples * C * rows * Q
                FastDivide by_pixels, FastDivide by_q,
                const T* __restrict__ x,    // [N, C, H, W]
                T* __restrict__ columns) {  // [samples, C*R*S, rows*Q]
  const std::uint32_t index = blockIdx.x * unroll_threads + threadIdx.x;
  if (index >= total) return;
  std::uint32_t map = index;  // sample * C + channel
  const std::uint32_t pixel = by_pixels.divmod(map);
  std::uint32_t p = pixel;
  const std::uint32_t q = by_q.divmod(p);
  const auto r_size = static_cast<int>(problem.r), s_size = static_cast<int>(problem.s);
  const auto pixels = static_cast<std::uint32_t>(chunk.rows * problem.q());
  const std::int64_t h0 = (chunk.p0 + p) * problem.stride_h - problem.pad_h;
  const std::int64_t w0 = static_cast<std::int64_t>(q) * problem.stride_w - problem.pad_w;
  const T* source = x + (chunk.n0 * problem.c + map) * problem.h * problem.w;
  T* target = columns + map * static_cast<std::uint32_t>(r_size * s_size) * pixels + pixel;
  for (int r = 0; r < r_size; ++r) {
    const std::int64_t h = h0 + r * problem.dilation_h;
    const bool row_inside = h >= 0 && h < problem.h;
    for (int s = 0; s < s_size; ++s) {
      const std::int64_t w = w0 + s * problem.dilation_w;
      const bool inside = row_inside && w >= 0 && w < problem.w;
      *target = inside ? source[h * problem.w + w] : from_float<T>(0.0f);
      target += pixels;
    }
  }
}

// One thread per element of the columns, so that stores coalesce. The loads of a warp touch 32/(R*S) neighbouring
// channels of each tap; the next warps take the rest of those sectors from the L1 cache.
template <typename T>
__global__ void __launch_bounds__(unroll_threads)
    unroll_nhwc(ConvProblem problem, Chunk chunk, std::uint32_t total,  // samples * rows * Q * C*R*S
                FastDivide by_s, FastDivide by_r, FastDivide by_c, FastDivide by_q, FastDivide by_rows,
                const T* __restrict__ x,    // [N, H, W, C]
                T* __restrict__ columns) {  // [samples*rows*Q, C*R*S]
  const std::uint32_t index = blockIdx.x * unroll_threads + threadIdx.x;
  if (index >= total) return;
  std::uint32_t n = index;
  const std::uint32_t s = by_s.divmod(n), r = by_r.divmod(n), c = by_c.divmod(n), q = by_q.divmod(n),
                      p = by_rows.divmod(n);
  const std::int64_t h = (chunk.p0 + p) * problem.stride_h + r * problem.dilation_h - problem.pad_h;
  const std::int64_t w = q * problem.stride_w + s * problem.dilation_w - problem.pad_w;
  const bool inside = h >= 0 && h < problem.h && w >= 0 && w < problem.w;
  columns[index] = inside ? x[(((chunk.n0 + n) * problem.h + h) * problem.w + w) * problem.c + c] : from_float<T>(0.0f);
}

// y = epilogue(product), one thread per element. product: [view.lines, view.length], or null: y holds it.
template <typename T>
__global__ void __launch_bounds__(unroll_threads)
    finish_chunk(OutputView view, std::uint32_t total, bool nhwc, FastDivide by_length, FastDivide by_k,
                 const float* product, T* y, Epilogue<T> epilogue) {
  const std::uint32_t linear = blockIdx.x * unroll_threads + threadIdx.x;
  if (linear >= total) return;
  std::uint32_t line = linear;
  const std::uint32_t i = by_length.divmod(line);
  const std::int64_t index = view.offset + line * view.pitch + i;
  const std::uint32_t k = nhwc ? i : by_k.divmod(line);
  y[index] = epilogue(product != nullptr ? product[linear] : to_float(y[index]), index, k);
}

}  // namespace fastconv::algos::im2col_gemm
