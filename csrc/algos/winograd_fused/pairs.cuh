// The end of an item in NHWC, in one block without anything but bias and ReLU behind it: the even and odd sums of the
// pairs of points are all that the columns of a tile share (single_pairs.cuh), so that the owner of three frequencies,
// a warpgroup or a block, finishes two columns where its sums are. Straight-line code: branches cost more than
// arithmetic.
#pragma once

#include "algos/winograd_fused/multiply.cuh"
#include "device/cluster.cuh"
#include "device/winograd_matrices.h"

namespace fastconv::algos::winograd_fused {

__device__ __forceinline__ bool is_plain(const Epilogue<float>& epilogue) {
  const ActivationFunction& activate = epilogue.activate;
  return epilogue.residual == nullptr && !activate.is_silu && activate.cap == INFINITY &&
         (activate.negative_slope == 1.0f || activate.negative_slope == 0.0f);
}

// SiLU in place, over what this thread has just stored: inlined for every output it would make the code larger than the
// instruction cache.
__device__ __forceinline__ void apply_silu(const Params& params, const Outputs* outputs, const int (&columns)[2],
                                           int k) {
#pragma unroll 1
  for (int i = 0; i < 8 * tile_rows; ++i) {
    const Outputs& at = outputs[i / 8 * tile_columns + i % 2];
    const int column = i / 2 % 2 == 0 ? columns[0] : columns[1], filter = k + i / 4 % 2;
    if (column >= at.count() || filter >= params.k) continue;
    float* target = params.y + at.index() + column * params.y_column + filter;
    *target = params.epilogue.activate(*target);
  }
}

// A thread's four sums of 8 positions: [2 * filter + position], of neighbouring filters and positions.
// group: of frequencies. Two blocks: with the warp of the same number in the cluster's other one. plain: is_plain.
template <int group, bool plain, int blocks>
__device__ __forceinline__ void finish_pairs(const Params& params, Shared<blocks>& shared, const Totals& total,
                                             int filter_block, ConsumerState& state) {
  // Frequencies 0, +a, -a and columns 0, 2, or +b, -b, infinity and columns 3, 1.
  constexpr int pair = group == 0 ? 1 : 0, extra = group == 0 ? 0 : 2;
  constexpr int columns[2] = {group == 0 ? 0 : 3, group == 0 ? 2 : 1};
  using Transform = winograd::Transform<4>;
  constexpr float first_own = group == 0 ? 1.0f : 2.0f * Transform::b;
  constexpr float first_other = group == 0 ? 1.0f : 0.5f * Transform::a;
  constexpr float second_own = group == 0 ? 0.5f : Transform::b, second_other = group == 0 ? 2.0f : Transform::a;
  constexpr int parts = tile_rows / 2, groups = 2;

  const int thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
  const int half = blocks == 1 ? 0 : static_cast<int>(threadIdx.x) / 128;  // of the filters
  const int k = (filter_block * blocks + half) * filter_tile + warp * 16 + lane / 4 * 2;
  const Outputs* outputs = shared.outputs[state.item_slot] + lane % 4 * 2;
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

  // What the other owner needs of group j of a part, or what is needed here.
  const auto sums_of = [&](int part, int j, bool theirs, float (&sums)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = 4 * (part % 2 * groups + j) + i;
      const float plus = total[pair][part / 2][at], minus = total[pair + 1][part / 2][at];
      sums[i] = (group == 0) != theirs ? plus + minus : plus - minus;
    }
  };
  const auto finish = [&](int part, const float4(&received)[groups][128]) {
#pragma unroll
    for (int j = 0; j < groups; ++j) {
      const int first = 4 * (part % 2 * groups + j);
      float own[4];
      sums_of(part, j, false, own);
      const float4 four = received[j][thread];
      const float other[4] = {four.x, four.y, four.z, four.w};
      const Outputs at[2] = {outputs[(part * groups + j) * 8], outputs[(part * groups + j) * 8 + 1]};
      float value[2][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        value[0][i] = fmaf(own[i], first_own, fmaf(other[i], first_other, total[extra][part / 2][first + i]));
        value[1][i] = fmaf(own[i], second_own, other[i] * second_other);
        const float one = at[i % 2].first * scale[i / 2], two = at[i % 2].second * second_scale[i / 2];
#pragma unroll
        for (int which = 0; which < 2; ++which) {
          float& v = value[which][i];
          v = fmaf(v * two, one, bias[i / 2]);
          if constexpr (plain) asm("max.NaN.f32 %0, %0, %1;" : "+f"(v) : "f"(least));
        }
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
#pragma unroll
        for (int which = 0; which < 2; ++which) {
          if (columns[which] + most < at[e].count()) {
            float2 two = make_float2(value[which][e], value[which][2 + e]);
            float* const target = y[which] + at[e].index();
            if constexpr (!plain) {
              if (params.epilogue.residual != nullptr) {
                const float2 more = *reinterpret_cast<const float2*>(params.epilogue.residual + (target - params.y));
                two.x += more.x, two.y += more.y;
              }
              const ActivationFunction& activate = params.epilogue.activate;
              if (!activate.is_silu) two.x = activate.piecewise(two.x), two.y = activate.piecewise(two.y);
            }
            *reinterpret_cast<float2*>(target) = two;
          }
        }
      }
    }
  };

  if constexpr (blocks == 1) {
#pragma unroll
    for (int part = 0; part < parts; ++part) {
      // Into what the same thread has received before; so nobody waits for it.
      float4(&given)[groups][128] = shared.exchange.pairs[part % 2 == 0 ? 1 - group : group];
#pragma unroll
      for (int j = 0; j < groups; ++j) {
        float sums[4];
        sums_of(part, j, true, sums);
        given[j][thread] = make_float4(sums[0], sums[1], sums[2], sums[3]);
      }
      hopper::synchronise(pair_barrier + warp, 64);
      finish(part, shared.exchange.pairs[part % 2 == 0 ? group : 1 - group]);
    }
  } else {
    Exchange<2>& exchange = shared.exchange;
    constexpr int other_rank = 1 - group;
    if (lane == 0) {
#pragma unroll
      for (int part = 0; part < parts; ++part) {
        hopper::arrive_expecting(shared_address(&exchange.full[half][warp][part]), groups * 32 * sizeof(float4));
      }
    }
    // Until the other warp has read what the item before gave it.
    wait_bounded(shared_address(&exchange.read[half][warp]), state.exchanged ^ 1, params.report, role_multiply);
    const std::uint32_t target =
        hopper::address_in_block(shared_address(&exchange.pairs[0][half][0][thread]), other_rank);
    const std::uint32_t full = hopper::address_in_block(shared_address(exchange.full[half][warp]), other_rank);
#pragma unroll
    for (int part = 0; part < parts; ++part) {
#pragma unroll
      for (int j = 0; j < groups; ++j) {
        float sums[4];
        sums_of(part, j, true, sums);
        hopper::store_in_block(target + part * sizeof(exchange.pairs[0]) + j * sizeof(exchange.pairs[0][0][0]), sums,
                               full + part * sizeof(std::uint64_t));
      }
    }
#pragma unroll
    for (int part = 0; part < parts; ++part) {
      wait_bounded(shared_address(&exchange.full[half][warp][part]), state.exchanged, params.report, role_multiply);
      finish(part, exchange.pairs[part][half]);
    }
    __syncwarp();
    if (lane == 0) hopper::notify_block(shared_address(&exchange.read[half][warp]), other_rank);
    state.exchanged ^= 1;
    if constexpr (!plain) {
      if (params.epilogue.activate.is_silu) apply_silu(params, outputs, columns, k);
    }
  }
}

}  // namespace fastconv::algos::winograd_fused
