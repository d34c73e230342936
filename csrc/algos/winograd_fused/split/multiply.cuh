// The consumers: three points of 64 filters x 64 tiles each, U in registers, V in shared memory.
#pragma once

#include <type_traits>

#include "algos/winograd_fused/shared/layout.cuh"

namespace fastconv::algos::winograd_fused::split {

using Half = float[half_groups * 4];  // of one point: 64 filters x 4 rows x 8 tiles
template <int m_halves>
using Totals = Half[group_points][m_halves];
using Filters = std::uint32_t[taps][2][4];  // U of one point and stage: [r][hi, lo]

// 16 bytes of U for each filter row, hi and lo. Volatile: issued here, not where it is used.
__device__ __forceinline__ void load_filters(Filters& u, const uint4* source) {
#pragma unroll
  for (int r = 0; r < taps; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(u[r][half][0]), "=r"(u[r][half][1]), "=r"(u[r][half][2]), "=r"(u[r][half][3])
                   : "l"(source + (r * 2 + half) * (u_fragment_bytes / 16)));
    }
  }
}

// Core matrices of 8 rows x 16 bytes without a swizzle.
__device__ __forceinline__ std::uint64_t core_descriptor(std::uint32_t address) {
  return static_cast<std::uint64_t>(v_row_bytes / 16) << 32 | static_cast<std::uint64_t>(core_bytes / 16) << 16 |
         (address & 0x3ffff) >> 4;
}

// Rows of V from those of the first half of the positions to those of the second.
template <int strips>
constexpr int half_rows = strips == 1 ? half_groups : strip_input_rows(strips);

// sum = the products of one point and stage, of half of the rows or of all: nine, the small ones first, because the
// tensor cores truncate their accumulator at every instruction (docs/concepts/numerics.md).
template <int strips, int point, int half, int count>
__device__ __forceinline__ void multiply_rows(float (&sum)[count], const Filters& u, std::uint64_t stage) {
  constexpr int high = 2 * point * v_limb_bytes<strips> + half * half_rows<strips> * v_row_bytes;
  constexpr int low = high + v_limb_bytes<strips>;
  hopper::fence_products();
  hopper::multiply<half_t, false>(sum, u[0][1], hopper::advance_descriptor(stage, high));
#pragma unroll
  for (int r = 1; r < taps; ++r) {
    hopper::multiply<half_t, true>(sum, u[r][1], hopper::advance_descriptor(stage, high + r * v_row_bytes));
  }
#pragma unroll
  for (int r = 0; r < taps; ++r) {
    hopper::multiply<half_t, true>(sum, u[r][0], hopper::advance_descriptor(stage, low + r * v_row_bytes));
  }
#pragma unroll
  for (int r = 0; r < taps; ++r) {
    hopper::multiply<half_t, true>(sum, u[r][0], hopper::advance_descriptor(stage, high + r * v_row_bytes));
  }
  hopper::commit_products();
}

// The sum of a finished group joins the total, by an addition that rounds.
__device__ __forceinline__ void promote(Half& total, Half& sum) {
  hopper::fence_operand(sum);
#pragma unroll
  for (int i = 0; i < half_groups * 4; ++i) total[i] += sum[i];
}

// One point of one stage, f of three, which lie in V from `first` on, in halves. On entry the second half of the
// point before is under way; on exit that of this one. While one half is promoted the other keeps the tensor cores
// busy. before_is_done: called when the point before has read V.
template <int strips, int first, int f, typename Function>
__device__ __forceinline__ void multiply_in_halves(Totals<2>& total, Half (&sum)[2], const Filters& u, Filters& next,
                                                   const uint4* next_source, bool loads, std::uint64_t stage,
                                                   const Function& before_is_done) {
  constexpr int point = first + f, before = (f + group_points - 1) % group_points;
  multiply_rows<strips, point, 0>(sum[0], u, stage);
  hopper::wait_for_products<1>();
  before_is_done();
  promote(total[before][1], sum[1]);
  if (loads) load_filters(next, next_source);  // into registers that the point before has just left
  multiply_rows<strips, point, 1>(sum[1], u, stage);
  hopper::wait_for_products<1>();
  promote(total[f][0], sum[0]);
}

// The same with all that a warpgroup has at once. While it is promoted the other's keep the tensor cores busy.
template <int strips, int first, int f, int m_halves>
__device__ __forceinline__ void multiply_whole(Totals<m_halves>& total, float (&sum)[m_halves * half_groups * 4],
                                               const Filters& u, Filters& next, const uint4* next_source, bool loads,
                                               std::uint64_t stage) {
  multiply_rows<strips, first + f, 0>(sum, u, stage);
  if (loads) load_filters(next, next_source);
  hopper::wait_for_products<0>();
  hopper::fence_operand(sum);
#pragma unroll
  for (int i = 0; i < m_halves * half_groups * 4; ++i) total[f][i / (half_groups * 4)][i % (half_groups * 4)] += sum[i];
}

struct ConsumerState {
  hopper::RingPosition v;
  int work_tile_slot;
  unsigned exchanged = 0;  // parity of the work tiles exchanged with another block
};

// The whole reduction of a work tile (stages: all of its, or none). u[0] holds its first point, and at the end that of
// the next work tile. present: whether any of the warp's 16 filters exists. Else it keeps the first stage's U, since
// nobody looks at its sums: fewer bytes through the L1 cache, which bounds this kernel. In one block, and of half of
// the positions, the warpgroups' products take turns: fewer instructions, and 4 to 6 % less time; in a cluster with all
// positions halves take 2 % less. last_turn: V is not needed again.
template <int group, Variant variant>
__device__ __forceinline__ void accumulate(const Params& params, Shared<variant>& shared,
                                           Totals<Shared<variant>::m_halves>& total, Filters (&u)[group_points],
                                           const uint4* source, const uint4* next_work_tile, bool present, int stages,
                                           bool last_turn, ConsumerState& state) {
  using Memory = Shared<variant>;
  constexpr int strips = variant.strips, m_halves = Memory::m_halves;
  constexpr bool whole = variant.blocks == 1 || m_halves == 1;
  constexpr int first = variant.blocks == 1 ? group * group_points : 0;
  constexpr int point_step = u_point_bytes / 16, stage_step = u_stage_bytes / 16;
  // Of V, where a warpgroup has half of the positions: the same in all lanes.
  const int own = m_halves == 2 ? 0 : __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0) * half_rows<strips>;
  std::conditional_t<whole, float[m_halves * half_groups * 4], Half[2]> sum;
#pragma unroll
  for (int i = 0; i < half_groups * 4; ++i) {
    if constexpr (!whole) sum[1][i] = 0.0f;
#pragma unroll
    for (int f = 0; f < group_points; ++f) {
#pragma unroll
      for (int half = 0; half < m_halves; ++half) total[f][half][i] = 0.0f;
    }
  }
  int previous = -1;  // slot of the stage before
  const auto release = [&](int slot) {
    if (last_turn) hopper::arrive_for_warp(shared.v_empty[slot]);
  };
#pragma unroll 1
  for (int i = 0; i < stages; ++i) {
    wait<role_multiply>(shared_address(&shared.v_full[state.v.slot]), state.v.parity, params.report);
    const std::uint64_t stage =
        core_descriptor(shared_address(shared.v[0]) + state.v.slot * Memory::v_stage_bytes + own * v_row_bytes);
    const bool last = i + 1 == stages, loads = present || i == 0, next_loads = present || last;
    const uint4* const next = last ? next_work_tile : source + stage_step;
    if constexpr (whole) {
      multiply_whole<strips, first, 0>(total, sum, u[0], u[2], source + 2 * point_step, loads, stage);
      multiply_whole<strips, first, 1>(total, sum, u[1], u[0], next, next_loads, stage);
      multiply_whole<strips, first, 2>(total, sum, u[2], u[1], next + point_step, next_loads, stage);
      release(state.v.slot);
    } else {
      // The stage before is released as soon as it has been read: the producers need every clock of two stages.
      multiply_in_halves<strips, first, 0>(total, sum, u[0], u[2], source + 2 * point_step, loads, stage, [&] {
        if (i > 0) release(previous);
      });
      previous = state.v.slot;
      multiply_in_halves<strips, first, 1>(total, sum, u[1], u[0], next, next_loads, stage, [] {});
      multiply_in_halves<strips, first, 2>(total, sum, u[2], u[1], next + point_step, next_loads, stage, [] {});
    }
    source = next;
    state.v.advance(Memory::v_stages);
  }
  if constexpr (!whole) {
    hopper::wait_for_products<0>();
    promote(total[group_points - 1][1], sum[1]);
    release(previous);
  }
}

}  // namespace fastconv::algos::winograd_fused::split
