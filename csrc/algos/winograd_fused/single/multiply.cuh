// The consumers: three points of 64 filters x all positions each, U in registers, V in shared memory.
#pragma once

#include "algos/winograd_fused/single/layout.cuh"

namespace fastconv::algos::winograd_fused::single {

template <Shape shape>
using Sums = float[group_points][shape.products() / 2];  // of 64 filters; [f][4 * group of 8 positions + register]
using Filters = std::uint32_t[taps][4];                  // U of one point and 16 channels

constexpr int u_step = points * taps * u_fragment_bytes / 16, u_point = taps * u_fragment_bytes / 16;

// Volatile: issued here, not where it is used.
__device__ __forceinline__ void load_filter(Filters& u, const uint4* source, int r) {
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(u[r][0]), "=r"(u[r][1]), "=r"(u[r][2]), "=r"(u[r][3])
               : "l"(source + r * (u_fragment_bytes / 16)));
}
__device__ __forceinline__ void load_filters(Filters& u, const uint4* source) {
#pragma unroll
  for (int r = 0; r < taps; ++r) load_filter(u, source, r);
}

// Core matrices of 8 positions x 16 bytes without a swizzle, one behind the other.
template <typename T, Shape shape>
__device__ __forceinline__ std::uint64_t core_descriptor(std::uint32_t address) {
  return static_cast<std::uint64_t>(128 / 16) << 32 |
         static_cast<std::uint64_t>(Stage<T, shape>::plane_bytes / 16) << 16 | (address & 0x3ffff) >> 4;
}

struct ConsumerState {
  hopper::RingPosition v;
  unsigned work_tile = 0;
};

// One point of 16 channels. On exit its products are under way, those before are done.
template <Shape shape>
__device__ __forceinline__ void multiply_point(float (&sum)[shape.products() / 2], const Filters& u,
                                               std::uint64_t descriptor) {
  hopper::fence_products();
#pragma unroll
  for (int r = 0; r < taps; ++r) {
    hopper::multiply<half_t, true>(sum, u[r], hopper::advance_descriptor(descriptor, r * shape.row_positions() * 16));
  }
  hopper::commit_products();
  hopper::wait_for_products<1>();
}

// Points of U that are in registers: the one that multiplies, and those under way.
constexpr int u_depth(Shape shape) { return shape == small ? 2 * group_points : group_points; }

// U's piece i of a work tile, three of them a point: where it lies, from the work tile's first.
__device__ __forceinline__ const uint4* piece_of(const uint4* source, int i) {
  return source + i / (group_points * taps) * u_step + i / taps % group_points * u_point;
}

// A warp's part of U of a work tile. If its 16 filters are beyond K, it loads the first points, zeros, and keeps them.
struct Source {
  const uint4* first;
  int stages;  // that are loaded: all or none
};

// The whole reduction of a work tile, but for the last point's last products, which are still under way. u holds its
// first points.
template <typename T, Shape shape>
__device__ __forceinline__ void accumulate(const Params<T>& params, Shared<T, shape>& shared, Sums<shape>& sum,
                                           Filters (&u)[u_depth(shape)], Source source, int group,
                                           ConsumerState& state) {
  using Stage = single::Stage<T, shape>;
#pragma unroll
  for (int f = 0; f < group_points; ++f) {
#pragma unroll
    for (int i = 0; i < shape.products() / 2; ++i) sum[f][i] = 0.0f;
  }
  const auto release_previous = [&] {  // the stage before the current one has been read
    const int slot = state.v.slot == 0 ? Stage::v_stages - 1 : state.v.slot - 1;
    hopper::arrive_for_warp(shared.v_empty[slot]);
  };
  constexpr int stage_points = Stage::steps * group_points, depth = u_depth(shape);
  constexpr int phases = (depth + stage_points - 1) / stage_points;  // stages until u is in its old place
  const auto run_stage = [&]<int phase>(int i) {
    wait<role_multiply>(shared_address(&shared.v_full[state.v.slot]), state.v.parity, params.report);
    const std::uint64_t stage = core_descriptor<T, shape>(
        shared_address(shared.v[0]) + state.v.slot * Stage::v_stage_bytes + group * group_points * Stage::point_bytes);
#pragma unroll
    for (int j = 0; j < stage_points; ++j) {
      const int step = j / group_points, f = j % group_points, now = phase * stage_points + j;
      multiply_point<shape>(sum[f], u[now % depth],
                            hopper::advance_descriptor(stage, step * Stage::step_bytes + f * Stage::point_bytes));
      if (j == 0 && i > 0) release_previous();
      // Into registers that the point before has just left.
      const int next = j + depth - 1, stages_ahead = next / stage_points;
      if ((j > 0 || i > 0) && i + stages_ahead < source.stages) {
        load_filters(u[(now + depth - 1) % depth], piece_of(source.first, next * taps));
      }
    }
    source.first += Stage::steps * u_step;
    state.v.advance(Stage::v_stages);
  };
#pragma unroll 1
  for (int i = 0; i < params.stages; i += phases) {
    run_stage.template operator()<0>(i);
    if constexpr (phases == 2) {
      if (i + 1 < params.stages) run_stage.template operator()<1>(i + 1);
    }
  }
#pragma unroll
  for (int f = 0; f + 1 < group_points; ++f) hopper::fence_operand(sum[f]);
}

// The last point's products are done, and V has been read.
template <typename T, Shape shape>
__device__ __forceinline__ void finish_products(Shared<T, shape>& shared, Sums<shape>& sum,
                                                const ConsumerState& state) {
  hopper::wait_for_products<0>();
  hopper::fence_operand(sum[group_points - 1]);
  const int slot = state.v.slot == 0 ? Stage<T, shape>::v_stages - 1 : state.v.slot - 1;
  hopper::arrive_for_warp(shared.v_empty[slot]);
}

}  // namespace fastconv::algos::winograd_fused::single
