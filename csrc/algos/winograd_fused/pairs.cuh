// The end of an item in NHWC without anything but bias and ReLU behind it: the even and odd sums of the pairs of points
// are all that the columns of a tile share (single_pairs.cuh), so that a warpgroup finishes two columns where its sums
// are. Straight-line code, which has no branches: they cost more than the arithmetic.
#pragma once

#include "algos/winograd_fused/multiply.cuh"
#include "device/winograd_matrices.h"

namespace fastconv::algos::winograd_fused {

__device__ __forceinline__ bool is_plain(const Epilogue<float>& epilogue) {
  const ActivationFunction& activate = epilogue.activate;
  return epilogue.residual == nullptr && !activate.is_silu && activate.cap == INFINITY &&
         (activate.negative_slope == 1.0f || activate.negative_slope == 0.0f);
}

// A thread's four sums of a row: [2 * filter + tile], of neighbouring filters and tiles.
template <int group>
__device__ __forceinline__ void finish_pairs(const Params& params, Shared& shared, const Totals& total,
                                             const Item& item, int slot) {
  // Frequencies 0, +a, -a and columns 0, 2, or +b, -b, infinity and columns 3, 1.
  constexpr int pair = group == 0 ? 1 : 0, extra = group == 0 ? 0 : 2;
  constexpr int columns[2] = {group == 0 ? 0 : 3, group == 0 ? 2 : 1};
  using Transform = winograd::Transform<4>;
  constexpr float first_own = group == 0 ? 1.0f : 2.0f * Transform::b;
  constexpr float first_other = group == 0 ? 1.0f : 0.5f * Transform::a;
  constexpr float second_own = group == 0 ? 0.5f : Transform::b, second_other = group == 0 ? 2.0f : Transform::a;

  const int thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32, tile = lane % 4 * 2;
  const int k = item.filter_block * filter_tile + warp * 16 + lane / 4 * 2;
  float bias[2], scale[4], second_scale[4];
#pragma unroll
  for (int b = 0; b < 2; ++b) {
    const bool inside = k + b < params.k;
    bias[b] = inside ? params.epilogue.bias_of(k + b) : 0.0f;
    const int exponent = inside ? __ldg(params.exponents + k + b) : 0;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const Unscale unscale(shared.exponents[slot][tile + e], exponent);
      scale[2 * b + e] = unscale.first, second_scale[2 * b + e] = unscale.second;
    }
  }
  const float least = params.epilogue.activate.negative_slope == 0.0f ? 0.0f : -INFINITY;
  float* y = params.y + item.n * params.y_image + item.p0 * params.y_row + item.q0 * params.y_column + k;
  int offset[2][2];  // [column][tile]; within an item 32 bits suffice (supports)
  bool inside[2][2];
#pragma unroll
  for (int which = 0; which < 2; ++which) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int q = (tile + e) * tile_outputs + columns[which];
      offset[which][e] = q * static_cast<int>(params.y_column);
      inside[which][e] = item.q0 + q < params.q && k < params.k;
    }
  }
  const int rows = params.p - item.p0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // Into what the same thread has received before; so nobody waits for it.
    float4(&given)[half_rows][128] = shared.pairs[half == 0 ? 1 - group : group];
    float4(&received)[half_rows][128] = shared.pairs[half == 0 ? group : 1 - group];
    float own[half_rows][4];
#pragma unroll
    for (int row = 0; row < half_rows; ++row) {
      float other[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float plus = total[pair][half][4 * row + i], minus = total[pair + 1][half][4 * row + i];
        own[row][i] = group == 0 ? plus + minus : plus - minus;
        other[i] = group == 0 ? plus - minus : plus + minus;
      }
      given[row][thread] = make_float4(other[0], other[1], other[2], other[3]);
    }
    hopper::synchronise(pair_barrier + warp, 64);
#pragma unroll
    for (int row = 0; row < half_rows; ++row) {
      const float4 four = received[row][thread];
      const float other[4] = {four.x, four.y, four.z, four.w};
      float value[2][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        value[0][i] = fmaf(own[row][i], first_own, fmaf(other[i], first_other, total[extra][half][4 * row + i]));
        value[1][i] = fmaf(own[row][i], second_own, other[i] * second_other);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float& v = value[i / 4][i % 4];
        v = fmaf(v * second_scale[i % 4], scale[i % 4], bias[i % 4 / 2]);
        asm("max.NaN.f32 %0, %0, %1;" : "+f"(v) : "f"(least));
      }
#pragma unroll
      for (int which = 0; which < 2; ++which) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (half * half_rows + row < rows && inside[which][e]) {
            *reinterpret_cast<float2*>(y + offset[which][e]) = make_float2(value[which][e], value[which][2 + e]);
          }
        }
      }
      y += params.y_row;
    }
  }
}

}  // namespace fastconv::algos::winograd_fused
