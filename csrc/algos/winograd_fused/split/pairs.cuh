// The end of a work tile in NHWC: the even and odd sums of the pairs of points are all that the columns of a tile share
// (single/pairs.cuh), so that the owner of three points, a warpgroup or a block, finishes two columns where its sums
// are. With nothing but bias and ReLU behind them without a branch, which costs more than arithmetic.
#pragma once

#include "algos/winograd_fused/split/multiply.cuh"
#include "device/activation.cuh"
#include "hopper/ptx/cluster.cuh"
#include "winograd/matrices.h"

namespace fastconv::algos::winograd_fused::split {

// What a thread needs to finish its outputs: two neighbouring filters, at neighbouring positions, two columns of each
// tile. group: of points.
template <int group>
struct Finisher {
  // Points 0, +a, -a and columns 0, 2, or +b, -b, infinity and columns 3, 1.
  static constexpr int pair = group == 0 ? 1 : 0, extra = group == 0 ? 0 : 2;
  static constexpr int column(int which) { return group == 0 ? 2 * which : 3 - 2 * which; }

  const Epilogue<float>& epilogue;
  float bias[2], scale[2], second_scale[2];  // [filter]
  float least, slope;                        // of ReLU; of a leaky one, else 1
  char* y[2];                                // where element 0 of a column would be
  int most;                                  // columns that a filter beyond K has too many

  __device__ __forceinline__ Finisher(const Params& params, int k)
      : epilogue(params.epilogue),
        least(params.epilogue.activate.clamps ? 0.0f : -INFINITY),
        slope(params.epilogue.activate.clamps ? 1.0f : params.epilogue.activate.negative_slope),
        most(k < params.k ? 0 : tile_outputs) {
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const bool inside = k + b < params.k;
      bias[b] = inside ? epilogue.bias_of(k + b) : 0.0f;
      const Unscale unscale(0, inside ? __ldg(params.exponents + k + b) : 0);
      scale[b] = unscale.first, second_scale[b] = unscale.second;
      y[b] = reinterpret_cast<char*>(params.y + column(b) * params.y_column + k);
    }
  }

  // Of a thread's sums of 8 positions, [2 * filter + position]: what is needed here, or by the other owner.
  __device__ __forceinline__ static void combine(const float* plus, const float* minus, bool theirs, float (&sums)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] = (group == 0) != theirs ? plus[i] + minus[i] : plus[i] - minus[i];
  }

  // The residual of two positions: [column][position] of both filters, -0 where there is none. Not .nc: loads of what
  // nobody writes are moved behind the next barrier, where all wait for them one after the other.
  using Residuals = float2[2][2];
  __device__ __forceinline__ void load_residuals(const Params& params, const Outputs* at, Residuals& result) const {
    const std::int64_t to_residual =
        reinterpret_cast<const char*>(epilogue.residual) - reinterpret_cast<const char*>(params.y);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const std::int64_t offset = at[e].even_bytes() + to_residual;
      const int count = epilogue.residual != nullptr ? at[e].count() : 0;
#pragma unroll
      for (int which = 0; which < 2; ++which) {  // without a branch
        float2& two = result[which][e];
        two = make_float2(-0.0f, -0.0f);
        asm volatile("{\n.reg .pred p;\nsetp.lt.s32 p, %2, %3;\n@p ld.global.v2.f32 {%0, %1}, [%4];\n}"
                     : "+f"(two.x), "+f"(two.y)
                     : "r"(column(which) + most), "r"(count), "l"(y[which] + offset)
                     : "memory");
      }
    }
  }

  template <End what>
  __device__ __forceinline__ void finish(const float* own, const float4& received, const float* extras,
                                         const Outputs* at, const Residuals& residuals) const {
    using Transform = winograd::Transform<4>;
    constexpr float first_own = group == 0 ? 1.0f : 2.0f * Transform::b;
    constexpr float first_other = group == 0 ? 1.0f : 0.5f * Transform::a;
    constexpr float second_own = group == 0 ? 0.5f : Transform::b, second_other = group == 0 ? 2.0f : Transform::a;
    const float other[4] = {received.x, received.y, received.z, received.w};
    float value[2][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      value[0][i] = fmaf(own[i], first_own, fmaf(other[i], first_other, extras[i]));
      value[1][i] = fmaf(own[i], second_own, other[i] * second_other);
      const float one = at[i % 2].first * scale[i / 2], two = at[i % 2].second * second_scale[i / 2];
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        float& v = value[which][i];
        v = fmaf(v * two, one, bias[i / 2]);
        if constexpr (what == End::plain) v = max_keeping_nan(v, least);
        if constexpr (what == End::leaky) v = max_keeping_nan(v, v * slope);
        if constexpr (what == End::residual) v = end_with_residual(v, residuals[which][i % 2], i / 2);
      }
    }
    if constexpr (what == End::any) end(residuals, value);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const std::int64_t offset = at[e].even_bytes();
      const int count = at[e].count();
#pragma unroll
      for (int which = 0; which < 2; ++which) {  // without a branch
        asm volatile("{\n.reg .pred p;\nsetp.lt.s32 p, %0, %1;\n@p st.global.v2.f32 [%2], {%3, %4};\n}" ::"r"(
                         column(which) + most),
                     "r"(count), "l"(y[which] + offset), "f"(value[which][e]), "f"(value[which][2 + e])
                     : "memory");
      }
    }
  }

 private:
  __device__ __forceinline__ float end_with_residual(float v, const float2& residual, int filter) const {
    const float other = filter == 0 ? residual.x : residual.y;
    if (!epilogue.residual_after) v += other;
    v = max_keeping_nan(max_keeping_nan(v, v * slope), least);
    return epilogue.residual_after ? v + other : v;
  }

  // Activation and residual, [column][2 * filter + position]. What they are is asked for once: most of the code is
  // skipped, and none of that has to be fetched.
  __device__ __forceinline__ void end(const Residuals& residuals, float (&value)[2][4]) const {
    const auto for_each = [&](const auto& function) {
#pragma unroll
      for (int which = 0; which < 2; ++which) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2& two = residuals[which][i % 2];
          value[which][i] = function(value[which][i], i < 2 ? two.x : two.y);
        }
      }
    };
    const ActivationFunction& activate = epilogue.activate;
    const float slope = activate.negative_slope;
    if (epilogue.adds_before()) for_each([](float v, float other) { return v + other; });
    if (activate.is_silu) {
      for_each([](float v, float) { return ActivationFunction::silu(v); });
    } else if (slope > 0.0f && slope < 1.0f) {
      for_each([&](float v, float) { return max_keeping_nan(v, v * slope); });
    } else if (!activate.is_linear()) {
      for_each([&](float v, float) { return activate.piecewise(v); });
    }
    if (epilogue.adds_after()) for_each([](float v, float other) { return v + other; });
  }
};

// In one block. group: of points. The residual of two rows is on its way while those before are finished.
template <int group, Variant variant>
  requires(variant.blocks == 1)
__device__ __forceinline__ void finish_pairs(const Params& params, Shared<variant>& shared, const Totals<2>& total,
                                             int filter_block, ConsumerState& state) {
  using Finish = Finisher<group>;
  constexpr bool adds = variant.end == End::residual || variant.end == End::any;
  int thread_here = static_cast<int>(threadIdx.x);
  launder(thread_here);  // as below: else the next U is loaded behind the last products, for want of registers
  const int thread = thread_here % 128, lane = thread % 32, warp = thread / 32;
  const Finish finisher(params, filter_block * filter_tile + warp * 16 + lane / 4 * 2);
  const Outputs* outputs = shared.outputs[state.work_tile_slot] + lane % 4 * 2;
  typename Finish::Residuals residuals[2];
  const auto load = [&](int slice, int j) {
    if constexpr (adds) finisher.load_residuals(params, outputs + (slice * 2 + j) * 8, residuals[j]);
  };
  load(0, 0), load(0, 1);
#pragma unroll
  for (int slice = 0; slice < tile_rows / 2; ++slice) {
    // Into what the same thread has received before; so nobody waits for it.
    float4(&given)[2][128] = shared.exchange.pairs[slice % 2 == 0 ? 1 - group : group];
    float4(&received)[2][128] = shared.exchange.pairs[slice % 2 == 0 ? group : 1 - group];
    const int half = slice / 2;
    float own[2][4];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int first = 4 * (slice % 2 * 2 + j);
      float other[4];
      Finish::combine(total[Finish::pair][half] + first, total[Finish::pair + 1][half] + first, false, own[j]);
      Finish::combine(total[Finish::pair][half] + first, total[Finish::pair + 1][half] + first, true, other);
      given[j][thread] = make_float4(other[0], other[1], other[2], other[3]);
    }
    hopper::synchronise(pair_barrier + warp, 64);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int first = 4 * (slice % 2 * 2 + j);
      finisher.template finish<variant.end>(own[j], received[j][thread], total[Finish::extra][half] + first,
                                            outputs + (slice * 2 + j) * 8, residuals[j]);
      if (slice + 1 < tile_rows / 2) load(slice + 1, j);
    }
  }
}

// The same with the warp of the same number in the cluster's other block. In a loop, since code that
// runs once a work tile has to be fetched each time: the sums move up.
template <int group, Variant variant>
  requires(variant.blocks == 2)
__device__ __forceinline__ void finish_pairs(const Params& params, Shared<variant>& shared,
                                             const Totals<Shared<variant>::m_halves>& total, int filter_block,
                                             ConsumerState& state) {
  using Finish = Finisher<group>;
  using Exchange = decltype(shared.exchange);
  constexpr bool adds = variant.end == End::residual || variant.end == End::any;
  constexpr int m_halves = variant.m_halves(), slices = Exchange::slices, other_rank = 1 - group;
  int thread_here = static_cast<int>(threadIdx.x);
  launder(thread_here);  // nothing of what follows is kept in registers from work tile to work tile
  const int thread = thread_here % 128, lane = thread % 32, warp = thread / 32, warpgroup = thread_here / 128;
  Exchange& exchange = shared.exchange;
  const std::uint32_t full = shared_address(exchange.full[warpgroup][warp]);
  if (lane == 0) {
#pragma unroll
    for (int slice = 0; slice < slices; ++slice) {
      hopper::arrive_expecting(full + slice * sizeof(hopper::Barrier), 2 * 32 * sizeof(float4));
    }
  }
  // Until the other warp has read what the work tile before gave it.
  wait<role_multiply>(shared_address(&exchange.read[warpgroup][warp]), state.exchanged ^ 1, params.report);
  const std::uint32_t target =
      hopper::address_in_block(shared_address(&exchange.pairs[0][warpgroup][0][thread]), other_rank);
  const std::uint32_t there = hopper::address_in_block(full, other_rank);
  float own[m_halves * half_groups * 4], extra[m_halves * half_groups * 4];
#pragma unroll
  for (int j = 0; j < 2 * slices; ++j) {
    const int first = 4 * (j % half_groups);
    const float *plus = total[Finish::pair][j / half_groups] + first,
                *minus = total[Finish::pair + 1][j / half_groups] + first;
    float sums[4];
    Finish::combine(plus, minus, true, sums);
    hopper::store_in_block(target + j / 2 * sizeof(exchange.pairs[0]) + j % 2 * sizeof(exchange.pairs[0][0][0]), sums,
                           there + j / 2 * sizeof(hopper::Barrier));
    Finish::combine(plus, minus, false, sums);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      own[4 * j + i] = sums[i];
      extra[4 * j + i] = total[Finish::extra][j / half_groups][first + i];
    }
  }
  // Its own filters, or its own half of the positions.
  const int filters = m_halves == 2 ? filter_block * variant.filter_tiles + warpgroup : filter_block;
  const Finish finisher(params, filters * filter_tile + warp * 16 + lane / 4 * 2);
  const Outputs* outputs =
      shared.outputs[state.work_tile_slot] + (m_halves == 2 ? 0 : warpgroup * (positions / 2)) + lane % 4 * 2;
#pragma unroll 1
  for (int slice = 0; slice < slices; ++slice) {
    typename Finish::Residuals residuals[2];
    if constexpr (adds) {
#pragma unroll
      for (int j = 0; j < 2; ++j) finisher.load_residuals(params, outputs + (slice * 2 + j) * 8, residuals[j]);
    }
    wait<role_multiply>(full + slice * sizeof(hopper::Barrier), state.exchanged, params.report);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      finisher.template finish<variant.end>(own + 4 * j, exchange.pairs[slice][warpgroup][j][thread], extra + 4 * j,
                                            outputs + (slice * 2 + j) * 8, residuals[j]);
    }
#pragma unroll
    for (int i = 8; i < m_halves * half_groups * 4; ++i) own[i - 8] = own[i], extra[i - 8] = extra[i];
  }
  __syncwarp();
  if (lane == 0) hopper::arrive_remote(shared_address(&exchange.read[warpgroup][warp]), other_rank);
  state.exchanged ^= 1;
}

}  // namespace fastconv::algos::winograd_fused::split
