// The end of a work tile: check of its scales; Y = A^T M, scales undone; epilogue; y.
#pragma once

#include "algos/winograd_fused/split/multiply.cuh"
#include "algos/winograd_fused/split/pairs.cuh"
#include "algos/winograd_fused/split/transform.cuh"

namespace fastconv::algos::winograd_fused::split {

// Whether a guessed scale has let something overflow, or has lost bits. A column of zeros is right.
template <Variant variant>
__device__ __forceinline__ bool must_retry(const Shared<variant>& shared, int slot) {
  const int lane = threadIdx.x % 32;
  unsigned bits = 0;
#pragma unroll
  for (int warp = 0; warp < producer_warps; ++warp) bits = max(bits, shared.watched[slot][warp][lane % scales]);
  const bool low = bits != 0 && bits < __float_as_uint(min_high);
  return __any_sync(~0u, low || shared.largest[slot][lane % producer_warps] >= __float_as_uint(INFINITY));
}

// Where a thread's outputs are: of two neighbouring positions, from filter k.
struct Target {
  std::int64_t index[2];
  int count[2], k;

  __device__ __forceinline__ Target(const Params& params, const Outputs* outputs, int filter) : k(filter) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      index[e] = outputs[e].index() + filter * params.y_channel;
      count[e] = outputs[e].count();
    }
  }
};

// Four outputs of two neighbouring positions for two neighbouring filters.
using Values = float[2][2][tile_outputs];  // [position][filter][output]

// visit(index of the element, position, filter, output) for those that exist.
template <StoreMode output, typename Visitor>
__device__ __forceinline__ void for_each_output(const Params& params, const Target& at, const Visitor& visit) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    if constexpr (output == StoreMode::pixels) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        if (at.count[e] > 0 && at.k + b < params.k) visit(at.index[e] + b * params.y_channel, e, b, 0);
      }
    } else {
#pragma unroll
      for (int i = 0; i < tile_outputs; ++i) {
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          if (i < at.count[e] && at.k + b < params.k) {
            visit(at.index[e] + i * params.y_column + b * params.y_channel, e, b, i);
          }
        }
      }
    }
  }
}

// Residual, activation and store. SiLU comes later (apply_silu), and with it a residual behind it: inlined for every
// output it would make the code larger than the instruction cache.
template <StoreMode output>
__device__ __forceinline__ void store(const Params& params, const Target& at, Values& value) {
  float* y = params.y;
  const ActivationFunction& activate = params.epilogue.activate;
  const auto add = [&](std::int64_t index, int e, int b, int i) {
    const float* residual = params.epilogue.residual + index;
    if constexpr (output == StoreMode::pixels) {
      const float4 other = *reinterpret_cast<const float4*>(residual);
      value[e][b][0] += other.x, value[e][b][1] += other.y, value[e][b][2] += other.z, value[e][b][3] += other.w;
    } else {
      value[e][b][i] += *residual;
    }
  };
  const auto write = [&](std::int64_t index, int e, int b, int i) {
    if constexpr (output == StoreMode::pixels) {
      *reinterpret_cast<float4*>(y + index) =
          make_float4(value[e][b][0], value[e][b][1], value[e][b][2], value[e][b][3]);
    } else {
      y[index] = value[e][b][i];
    }
  };
  if (params.epilogue.adds_before()) for_each_output<output>(params, at, add);
  if (!activate.is_silu && !activate.is_linear()) {
#pragma unroll
    for (int j = 0; j < 4 * tile_outputs; ++j) {
      float& v = value[j / tile_outputs / 2][j / tile_outputs % 2][j % tile_outputs];
      v = activate.piecewise(v);
    }
  }
  if (params.epilogue.adds_after() && !activate.is_silu) {  // together: else addresses would wait in registers
    for_each_output<output>(params, at, [&](std::int64_t index, int e, int b, int i) {
      add(index, e, b, i);
      write(index, e, b, i);
    });
  } else {
    for_each_output<output>(params, at, write);
  }
}

// In place, over what this thread has just stored: of its positions, two by two, 8 apart.
__device__ __forceinline__ void apply_silu(const Params& params, const Outputs* outputs, int k) {
#pragma unroll 1
  for (int j = 0; j < half_groups * 4 * tile_outputs; ++j) {
    const Outputs& at = outputs[j / (4 * tile_outputs) * 8 + j / (2 * tile_outputs) % 2];
    const int i = j / 2 % tile_outputs, filter = k + j % 2;
    if (i >= at.count() || filter >= params.k) continue;
    const std::int64_t index = at.index() + i * params.y_column + filter * params.y_channel;
    const float value = params.epilogue.activate(params.y[index]);
    params.y[index] = params.epilogue.adds_after() ? value + params.epilogue.residual[index] : value;
  }
}

// In NCHW, or where y is not aligned. Each warpgroup finishes half of the positions, with the other's sums of three
// points, 8 at a time.
template <int group, Variant variant>
__device__ __forceinline__ void finish_work_tile(const Params& params, Shared<variant>& shared, const Totals<2>& total,
                                                 int filter_block, int slot) {
  const int thread = threadIdx.x % 128, lane = thread % 32;
  const int k = filter_block * filter_tile + thread / 32 * 16 + lane / 4 * 2;
  const Outputs* outputs = shared.outputs[slot] + group * (positions / 2) + lane % 4 * 2;
  float bias[2], first[2], second[2];  // [filter]
#pragma unroll
  for (int b = 0; b < 2; ++b) {
    const bool inside = k + b < params.k;
    bias[b] = inside ? params.epilogue.bias_of(k + b) : 0.0f;
    const Unscale unscale(0, inside ? __ldg(params.exponents + k + b) : 0);
    first[b] = unscale.first, second[b] = unscale.second;
  }
#pragma unroll
  for (int j = 0; j < half_groups; ++j) {
#pragma unroll
    for (int f = 0; f < group_points; ++f) {
      const float* sum = total[f][1 - group] + j * 4;
      shared.exchange.sums[group][f][thread] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    }
    synchronise<consumer_barrier, consumer_threads>();
    float m[points][4];  // [f][2 * filter + position]
#pragma unroll
    for (int f = 0; f < group_points; ++f) {
      const float* sum = total[f][group] + j * 4;
      const float4 other = shared.exchange.sums[1 - group][f][thread];
      const int own = group * group_points + f, theirs = (1 - group) * group_points + f;
#pragma unroll
      for (int i = 0; i < 4; ++i) m[own][i] = sum[i];
      m[theirs][0] = other.x, m[theirs][1] = other.y, m[theirs][2] = other.z, m[theirs][3] = other.w;
    }
    Values value;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int b = i / 2, e = i % 2;
      float sums[points];
#pragma unroll
      for (int f = 0; f < points; ++f) sums[f] = m[f][i];
      winograd::Transform<4>::output(sums, value[e][b]);
      const float one = outputs[tile_columns * j + e].first * first[b],
                  two = outputs[tile_columns * j + e].second * second[b];
#pragma unroll
      for (int o = 0; o < tile_outputs; ++o) value[e][b][o] = value[e][b][o] * one * two + bias[b];
    }
    store<variant.output>(params, Target(params, outputs + tile_columns * j, k), value);
    synchronise<consumer_barrier, consumer_threads>();  // before the next ones are written
  }
  if (params.epilogue.activate.is_silu) apply_silu(params, outputs, k);
}

// Marks a work tile, for both blocks: each has seen its own points alone.
template <int group, Variant variant>
__device__ __forceinline__ void mark(Shared<variant>& shared, unsigned ordinal) {
  unsigned* const word = &shared.overflow_flags[ordinal / 32];
  const unsigned bit = 1u << ordinal % 32;
  if constexpr (variant.blocks == 1) {
    if (threadIdx.x == 0) *word |= bit;
  } else if (threadIdx.x == 0) {
    hopper::set_bits_in_block(shared_address(word), group, bit);
    hopper::set_bits_in_block(shared_address(word), 1 - group, bit);
  }
}

// One pass over the work tiles. group: of points, a warpgroup's or a block's.
template <int group, Variant variant>
__device__ __forceinline__ void consume(const Params& params, Shared<variant>& shared, bool retry,
                                        ConsumerState& state) {
  constexpr int blocks = variant.blocks, v_reuse = variant.v_reuse;
  constexpr StoreMode output = variant.output;
  // The filters of a work tile are its number's fastest part: the block of those of its first turn.
  const auto filter_block_of = [&](unsigned work_tile) {
    return static_cast<int>(params.by_filters.divmod(work_tile)) * v_reuse;
  };
  const auto filters_of = [&](int filter_block) {
    if (variant.filter_tiles > 1) {  // each warpgroup has half of them, of which the last may be none
      filter_block =
          min(variant.filter_tiles * filter_block + static_cast<int>(threadIdx.x) / 128, (params.k - 1) / filter_tile);
    }
    return params.u + static_cast<std::int64_t>(filter_block) * params.stages * (u_stage_bytes / 16) +
           group * group_points * (u_point_bytes / 16) + threadIdx.x % 128;
  };
  const int first_filter = first_filter_of_warp();
  WorkTileScheduler<Params, blocks> scheduler{params, retry ? shared.overflow_flags : nullptr};
  if (!scheduler.next()) return;
  Filters u[group_points];
  int filter_block = filter_block_of(scheduler.number());
  const uint4* source = filters_of(filter_block);
  load_filters(u[0], source);
  load_filters(u[1], source + u_point_bytes / 16);
  // In one block, first the end of a work tile without outputs is warmed up, while the first V is prepared: its code
  // comes from memory, which would take longer than all that it does. A cluster has less code there, in a loop, and
  // gains nothing.
#pragma unroll 1
  for (bool more = true, warming = Shared<variant>::warms_code && !retry; more; warming = false) {
    const bool last_turn = v_reuse == 1 || filter_block % v_reuse == v_reuse - 1;
    const unsigned ordinal = scheduler.ordinal;
    int next = filter_block;
    if (!warming) {
      if (last_turn) more = scheduler.next();
      next = !last_turn ? filter_block + 1 : more ? filter_block_of(scheduler.number()) : filter_block;
    }
    const uint4* next_source = filters_of(next);
    Totals<Shared<variant>::m_halves> total;
    // In clusters of 128 filters all count as present: to ask costs 0.4 % there.
    const bool present = variant.filter_tiles > 1 || filter_block * filter_tile + first_filter < params.k;
    accumulate<group>(params, shared, total, u, source, next_source, present, warming ? 0 : params.stages, last_turn,
                      state);
    const bool again = !retry && must_retry(shared, state.work_tile_slot);
    if (again) mark<group>(shared, ordinal);
    if (again && blocks == 1) {  // a cluster's other block may not know of it
    } else if constexpr (output == StoreMode::filters) {
      finish_pairs<group>(params, shared, total, filter_block, state);
    } else {
      finish_work_tile<group>(params, shared, total, filter_block, state.work_tile_slot);
    }
    if (last_turn || warming) {
      state.work_tile_slot = (state.work_tile_slot + 1) % Shared<variant>::work_tile_slots;
    } else {
      state.v.go_back(params.stages, Shared<variant>::v_stages);
    }
    filter_block = next;
    source = next_source;
  }
}

}  // namespace fastconv::algos::winograd_fused::split
