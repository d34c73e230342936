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

// A thread's four sums of 8 positions: [2 * filter + position], of neighbouring filters and positions.
template <int group>
__device__ __forceinline__ void finish_pairs(const Params& params, Shared& shared, const Totals& total,
                                             int filter_block, int slot) {
  // Frequencies 0, +a, -a and columns 0, 2, or +b, -b, infinity and columns 3, 1.
  constexpr int pair = group == 0 ? 1 : 0, extra = group == 0 ? 0 : 2;
  constexpr int columns[2] = {group == 0 ? 0 : 3, group == 0 ? 2 : 1};
  using Transform = winograd::Transform<4>;
  constexpr float first_own = group == 0 ? 1.0f : 2.0f * Transform::b;
  constexpr float first_other = group == 0 ? 1.0f : 0.5f * Transform::a;
  constexpr float second_own = group == 0 ? 0.5f : Transform::b, second_other = group == 0 ? 2.0f : Transform::a;

  const int thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
  const int k = filter_block * filter_tile + warp * 16 + lane / 4 * 2;
  const Outputs* outputs = shared.outputs[slot] + lane % 4 * 2;
  float bias[2], scale[2], second_scale[2];
#pragma unroll
  for (int b = 0; b < 2; ++b) {
    const bool inside = k + b < params.k;
    bias[b] = inside ? params.epilogue.bias_of(k + b) : 0.0f;
    const Unscale unscale(0, inside ? __ldg(params.exponents + k + b) : 0);
    scale[b] = unscale.first, second_scale[b] = unscale.second;
  }
  const float least = params.epilogue.activate.negative_slope == 0.0f ? 0.0f : -INFINITY;
  float* const y[2] = {params.y + columns[0] * params.y_column + k, params.y + columns[1] * params.y_column + k};
  const int most = k < params.k ? 0 : tile_outputs;  // columns that a filter beyond K has too many
#pragma unroll
  for (int part = 0; part < tile_rows / 2; ++part) {
    constexpr int groups = 2;
    const int half = part / 2;
    // Into what the same thread has received before; so nobody waits for it.
    float4(&given)[groups][128] = shared.pairs[part % 2 == 0 ? 1 - group : group];
    float4(&received)[groups][128] = shared.pairs[part % 2 == 0 ? group : 1 - group];
    float own[groups][4];
#pragma unroll
    for (int j = 0; j < groups; ++j) {
      const int first = 4 * (part % 2 * groups + j);
      float other[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float plus = total[pair][half][first + i], minus = total[pair + 1][half][first + i];
        own[j][i] = group == 0 ? plus + minus : plus - minus;
        other[i] = group == 0 ? plus - minus : plus + minus;
      }
      given[j][thread] = make_float4(other[0], other[1], other[2], other[3]);
    }
    hopper::synchronise(pair_barrier + warp, 64);
#pragma unroll
    for (int j = 0; j < groups; ++j) {
      const int first = 4 * (part % 2 * groups + j);
      const float4 four = received[j][thread];
      const float other[4] = {four.x, four.y, four.z, four.w};
      const Outputs at[2] = {outputs[(part * groups + j) * 8], outputs[(part * groups + j) * 8 + 1]};
      float value[2][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        value[0][i] = fmaf(own[j][i], first_own, fmaf(other[i], first_other, total[extra][half][first + i]));
        value[1][i] = fmaf(own[j][i], second_own, other[i] * second_other);
        const float one = at[i % 2].first * scale[i / 2], two = at[i % 2].second * second_scale[i / 2];
#pragma unroll
        for (int which = 0; which < 2; ++which) {
          float& v = value[which][i];
          v = fmaf(v * two, one, bias[i / 2]);
          asm("max.NaN.f32 %0, %0, %1;" : "+f"(v) : "f"(least));
        }
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
#pragma unroll
        for (int which = 0; which < 2; ++which) {
          if (columns[which] + most < at[e].count()) {
            *reinterpret_cast<float2*>(y[which] + at[e].index()) = make_float2(value[which][e], value[which][2 + e]);
          }
        }
      }
    }
  }
}

}  // namespace fastconv::algos::winograd_fused
