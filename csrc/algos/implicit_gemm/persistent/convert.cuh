// Class tf32: x rounded to halves in the workspace, so that the main kernel does not convert for each of its tiles and
// reads half as many bytes. One scale per image, guessed from a sample; a flag per block says whether some values do
// not fit it.
#pragma once

#include "algos/implicit_gemm/persistent/operand.cuh"

namespace fastconv::algos::implicit_gemm::persistent {

// A guess brings the largest sampled value to [2^6, 2^7). It fits 64 channels of a pixel that are zero, or the largest
// of which is in [2^-12, 2^16): what float16's subnormals then lose is less than TF32's own rounding of that.
constexpr int convert_threads = 256, sample_target = 6;
constexpr float min_converted = 1.0f / 4096, max_converted = 65504.0f;

// Block (image, part of it). Of each 64 channels, the 16-byte pieces lie in the order 0 4 1 5 2 6 3 7: the lane that
// reads two neighbours has the same channels of both packed blocks of 32 (plan.h). range: x has `gap` more elements
// between its pixels.
template <typename Half, bool range>
__global__ void __launch_bounds__(convert_threads)
    convert(const float* __restrict__ x,  // [N][H W C]
            Half* __restrict__ target,    // [N][H W C]
            int* __restrict__ exponents,  // [N]
            int* __restrict__ flags,      // [N][blocks]
            std::int64_t values, FastDivide by_blocks, int blocks, FastDivide by_pixel_pieces, std::int64_t gap) {
  constexpr int samples = 2 * convert_threads;
  unsigned image = blockIdx.x;
  const unsigned part = by_blocks.divmod(image);
  x += image * values, target += image * values;
  if constexpr (range) x += image * (values / (8 * by_pixel_pieces.divisor())) * gap;
  const auto skipped = [&](unsigned piece) { return range ? by_pixel_pieces.quotient(piece) * gap : std::int64_t{0}; };
  const auto stride = static_cast<unsigned>(min(values / samples, std::int64_t{1} << 22));
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < samples / convert_threads; ++i) {
    const unsigned sample = i * convert_threads + threadIdx.x;
    // At a scattered place in its part, so that samples do not line up with a stride of the tensor.
    const unsigned within = stride > 0 ? (sample * 2654435761u >> 8) % stride : 0;
    const std::int64_t at = sample * std::int64_t{stride} + within;
    largest = larger_finite(largest, at < values ? x[at + skipped(static_cast<unsigned>(at / 8))] : 0.0f);
  }
  __shared__ int of_warps[convert_threads / 32];
  const int of_warp = __reduce_max_sync(0xffffffffu, __float_as_int(largest));
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = of_warp;
  __syncthreads();
  int of_block = of_warps[0];
#pragma unroll
  for (int i = 1; i < convert_threads / 32; ++i) of_block = max(of_block, of_warps[i]);
  // Moderate, so that one factor undoes it; what that does not fit is flagged.
  const int exponent = max(-60, min(60, scale_exponent(__int_as_float(of_block), sample_target)));
  if (part == 0 && threadIdx.x == 0) exponents[image] = exponent;

  const float scale = power_of_two(exponent);
  bool fits = true;
  constexpr int batch = 4;
  const auto pieces = static_cast<unsigned>(values / 8), step = static_cast<unsigned>(blocks) * convert_threads;
#pragma unroll 1
  for (unsigned first = part * convert_threads + threadIdx.x; first < pieces; first += step * batch) {
    uint4 raw[batch][2];
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      const unsigned piece = min(first + i * step, pieces - 1);
      const auto* source = reinterpret_cast<const uint4*>(x + std::int64_t{piece} * 8 + skipped(piece));
      raw[i][0] = __ldcs(source), raw[i][1] = __ldcs(source + 1);
    }
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      const unsigned piece = first + i * step;
      float of_channels = larger(larger(0.0f, raw[i][0]), raw[i][1]) * scale;
#pragma unroll
      for (int lanes = 1; lanes < 8; lanes *= 2) {
        of_channels = fmaxf(of_channels, __shfl_xor_sync(__activemask(), of_channels, lanes));
      }
      fits = fits && (of_channels == 0.0f || (of_channels >= min_converted && of_channels <= max_converted));
      const uint4 a = split_piece(raw[i][0], scale), b = split_piece(raw[i][1], scale);
      if (piece < pieces) {
        const unsigned position = (piece & ~7u) + (piece % 4) * 2 + piece % 8 / 4;
        *reinterpret_cast<uint4*>(target + std::int64_t{position} * 8) = {a.x, a.y, b.x, b.y};
      }
    }
  }
  const int misfits = __syncthreads_or(!fits);
  if (threadIdx.x == 0) flags[image * blocks + part] = misfits;
}

}  // namespace fastconv::algos::implicit_gemm::persistent
