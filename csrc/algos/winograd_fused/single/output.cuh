// The end of a wide work tile in NCHW, or where y is not aligned: all sums go through shared memory, to threads that
// each finish two filters.
#pragma once

#include <cstring>

#include "algos/winograd_fused/single/activation.cuh"
#include "algos/winograd_fused/single/multiply.cuh"
#include "winograd/matrices.h"

namespace fastconv::algos::winograd_fused::single {

// A thread finishes two filters of two of the positions that are exchanged at a time. More filters in fewer threads
// would store more bytes at once, but a warp of one position keeps what belongs to it in uniform registers.
constexpr int thread_filters = 2, pairs = filter_tile / thread_filters;
constexpr int position_step = consumer_threads / pairs;  // to a thread's next one
static_assert(pairs == 32);

// Elements that are read and written as one.
template <typename T, int count>
struct alignas(count * sizeof(T)) Vector {
  std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint16_t> bits[count];
};
template <typename T, int count>
__device__ __forceinline__ Vector<T, count> pack_vector(const float (&value)[count]) {
  Vector<T, count> result;
  T typed[count];
#pragma unroll
  for (int i = 0; i < count; ++i) typed[i] = from_float<T>(value[i]);
  static_assert(sizeof typed == sizeof result);
  memcpy(&result, typed, sizeof result);
  return result;
}

// A thread's part of a work tile.
template <typename T>
struct Finisher {
  int position, row;      // of those that are exchanged; the first of the thread's rows of sums
  int q0, rows, filters;  // how many rows of the work tile, and filters from the thread's first, exist
  std::int64_t base;      // element of y at the work tile's first output and the thread's first filter

  __device__ __forceinline__ Finisher(const Params<T>& params, const WorkTile& work_tile, bool along_filters)
      : q0(work_tile.q0), rows(min(wide.rows, params.p - work_tile.p0)) {
    // Filters or positions along the lanes, as y lies; without a bank conflict either way.
    const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
    position = along_filters ? warp : lane / 2 % 8;
    row = (along_filters ? lane : lane % 2 + lane / 16 * 2 + warp * 4) * thread_filters;
    const int k = work_tile.filter_block * filter_tile + filter_of_row<T>(row);
    filters = params.k - k;
    base = work_tile.n * params.y_image + work_tile.p0 * params.y_row + q0 * params.y_column + k * params.y_channel;
  }
};

// By the first 64 threads; the others see it after the next barrier.
template <typename T>
__device__ __forceinline__ void prepare_ends(const Params<T>& params, FilterEnds& ends, const WorkTile& work_tile,
                                             int work_tile_exponent) {
  const int thread = threadIdx.x, k = work_tile.filter_block * filter_tile + filter_of_row<T>(thread);
  if (thread >= filter_tile) return;
  const int sum = work_tile_exponent + (k < params.k ? __ldg(params.exponents + k) : 0),
            kept = max(-126, min(sum, 126));
  ends.scale[thread] = power_of_two(-kept);
  ends.second_scale[thread] = power_of_two(kept - sum);
  ends.bias[thread] = k < params.k ? params.epilogue.bias_of(k) : 0.0f;
  const bool two = __any_sync(~0u, kept != sum);
  if (thread % 32 == 0) ends.two_factors[thread / 32] = two;
}

// Eight positions' sums of one warpgroup to shared memory: without a bank conflict, and from the registers as they are.
template <int position_group>
__device__ __forceinline__ void hand_over(float* target, const Sums<wide>& sum) {
#pragma unroll
  for (int f = 0; f < group_points; ++f) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int position = f * 8 * exchanged_groups + position_group % exchanged_groups * 8 + i % 2;
      target[position * exchange_pitch + i / 2 * 8] = sum[f][4 * position_group + i];
    }
  }
}

template <typename T>
using Outputs = float[thread_filters][tile_outputs];  // of a position

// Y = A^T M, without the scales. Returns NaN if a sum is not finite, else 0.
template <typename T>
__device__ __forceinline__ float transform_sums(const float (&m)[points][thread_filters], Outputs<T>& value) {
  float bad = 0.0f;
#pragma unroll
  for (int b = 0; b < thread_filters; ++b) {
    float sums[points];
#pragma unroll
    for (int f = 0; f < points; ++f) sums[f] = m[f][b];
    winograd::Transform<4>::output(sums, value[b]);
    bad = fmaf(value[b][0] + value[b][3], 0.0f, bad);  // the first and the last output hold all six sums
  }
  return bad;
}

template <typename T>
__device__ __forceinline__ void activate(const ActivationFunction& activation, Outputs<T>& value) {
  const auto for_each = [&](const auto& function) {
#pragma unroll
    for (int j = 0; j < thread_filters * tile_outputs; ++j) {
      float& v = value[j / tile_outputs][j % tile_outputs];
      v = function(v);
    }
  };
  if (__builtin_expect(activation.is_silu, 0)) {
    for_each([&](float v) { return activation.silu(v); });
  } else if (activation.clamps) {
    for_each([&](float v) { return min_keeping_nan(max_keeping_nan(v, 0.0f), activation.cap); });
  } else if (activation.negative_slope != 1.0f) {
    for_each([&](float v) { return activation.piecewise(v); });
  }
}

// The position numbered `number` of a work tile: scales, bias, residual, activation, store.
template <typename T, StoreMode output>
__device__ __forceinline__ void store_position(const Params<T>& params, const FilterEnds& ends, const Finisher<T>& mine,
                                               int number, Outputs<T>& value) {
  const int row = row_of<wide>(number), column = (number - row * wide.tiles) * tile_outputs;
  const int columns = params.q - mine.q0 - column;  // that exist
  if (row >= mine.rows || columns <= 0 || mine.filters <= 0) return;
  const auto of_filters = [&](const float (&values)[filter_tile]) {
    return *reinterpret_cast<const Vector<float, thread_filters>*>(&values[mine.row]);
  };
  if (__builtin_expect(ends.two_factors[0] | ends.two_factors[1], 0)) {
    const auto second = of_filters(ends.second_scale);
#pragma unroll
    for (int b = 0; b < thread_filters; ++b) {
#pragma unroll
      for (int i = 0; i < tile_outputs; ++i) value[b][i] *= __uint_as_float(second.bits[b]);
    }
  }
  const auto scale = of_filters(ends.scale), bias = of_filters(ends.bias);
#pragma unroll
  for (int b = 0; b < thread_filters; ++b) {
#pragma unroll
    for (int i = 0; i < tile_outputs; ++i) {
      value[b][i] = fmaf(value[b][i], __uint_as_float(scale.bits[b]), __uint_as_float(bias.bits[b]));
    }
  }
  // Within a work tile 32 bits suffice (launch).
  const int y_column = static_cast<int>(params.y_column), y_filter = static_cast<int>(params.y_channel);
  const std::int64_t base = mine.base + (row * static_cast<int>(params.y_row) + column * y_column);
  constexpr int next_filter = has_lines<T> ? 1 : 2;  // of two rows of sums
  // visit(offset, filter, output) for what exists, from `first` on.
  const auto for_each = [&](std::int64_t first, const auto& visit) {
#pragma unroll
    for (int b = 0; b < thread_filters; ++b) {
      if (b * next_filter >= mine.filters) continue;
      const std::int64_t start = first + b * next_filter * y_filter;
      if constexpr (output == StoreMode::pixels) {
        visit(start, b, 0);
      } else {
#pragma unroll
        for (int i = 0; i < tile_outputs; ++i) {
          if (i < columns) visit(start + i * y_column, b, i);
        }
      }
    }
  };
  const auto add = [&](std::int64_t index, int b, int i) {
    const T* residual = params.epilogue.residual + index;
    if constexpr (output == StoreMode::pixels) {
      T others[tile_outputs];
      memcpy(others, __builtin_assume_aligned(residual, sizeof others), sizeof others);
#pragma unroll
      for (int j = 0; j < tile_outputs; ++j) value[b][j] += to_float(others[j]);
    } else {
      value[b][i] += to_float(*residual);
    }
  };
  const auto write = [&](std::int64_t index, int b, int i) {
    if constexpr (output == StoreMode::pixels) {
      *reinterpret_cast<Vector<T, tile_outputs>*>(params.y + index) = pack_vector<T, tile_outputs>(value[b]);
    } else {
      params.y[index] = from_float<T>(value[b][i]);
    }
  };
  if (__builtin_expect(params.epilogue.adds_before(), 0)) for_each(base, add);
  activate<T>(params.epilogue.activate, value);
  // An output's residual and its store stand together, so that addresses do not wait in registers.
  const bool adds_after = __builtin_expect(params.epilogue.adds_after(), 0);
  if (output == StoreMode::pixels && adds_after) {
    std::int64_t first = base;
    asm volatile("" : "+l"(first));  // nor are computed for both ways at once
    for_each(first, [&](std::int64_t index, int b, int i) {
      add(index, b, i);
      write(index, b, i);
    });
  } else {
    for_each(base, [&](std::int64_t index, int b, int i) {
      if (output == StoreMode::elements && adds_after) add(index, b, i);
      write(index, b, i);
    });
  }
}

// U of a point into registers of sums that have been handed over, and from there.
__device__ __forceinline__ void load_filters(float* registers, const uint4* source) {
#pragma unroll
  for (int r = 0; r < taps; ++r) {
    asm volatile("ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(registers[4 * r]), "=f"(registers[4 * r + 1]), "=f"(registers[4 * r + 2]),
                   "=f"(registers[4 * r + 3])
                 : "l"(source + r * (u_fragment_bytes / 16)));
  }
}
__device__ __forceinline__ void take_filters(Filters& u, const float* registers) {
#pragma unroll
  for (int i = 0; i < 4 * taps; ++i) u[i / 4][i % 4] = __float_as_uint(registers[i]);
}

// Two groups of positions at a time. A loop with a jump to the registers of its turn: straight-line code, run once an
// work tile, waits for the instruction cache at every step (docs/log/34-fused-one-product-2-item-end.md). Returns
// NaN if a sum of an output is not finite. next: U of the next work tile; its first three points are in u at the end.
template <typename T, StoreMode output>
__device__ __forceinline__ float finish_work_tile(const Params<T>& params, Shared<T, wide>& shared, Sums<wide>& sum,
                                                  const FilterEnds& ends, const Finisher<T>& mine, int group,
                                                  Filters (&u)[group_points], const uint4* next) {
  const int fragment = threadIdx.x % 128, first_filter = fragment / 32 * 16 + fragment % 32 / 4;
  float bad = 0.0f;
  constexpr int groups = position_groups(wide);
  constexpr int v_reuse = (groups + exchanged_groups - 1) / exchanged_groups;
#pragma unroll 1
  for (int turn = 0; turn < v_reuse; ++turn) {
    float* target = &shared.exchange[group * group_points][fragment % 4 * 2][first_filter];
    switch (turn) {
#define FASTCONV_TURN(i)                                                 \
  case i:                                                                \
    hand_over<2 * i>(target, sum);                                       \
    if constexpr (2 * i + 1 < groups) hand_over<2 * i + 1>(target, sum); \
    break;
      FASTCONV_TURN(0)
      FASTCONV_TURN(1)
      FASTCONV_TURN(2)
      FASTCONV_TURN(3)
      FASTCONV_TURN(4)
      FASTCONV_TURN(5)
      FASTCONV_TURN(6)
#undef FASTCONV_TURN
    }
    static_assert(groups == 13);
    if (turn == 3) {  // of point 0, groups 0 to 5 are gone: 24 registers
      load_filters(&sum[0][0], next);
      load_filters(&sum[0][12], next + u_point);
    }
    synchronise<consumer_barrier, consumer_threads>();
    constexpr int step = position_step;
#pragma unroll
    for (int position = 0; position < exchanged_positions; position += step) {
      float m[points][thread_filters];
#pragma unroll
      for (int f = 0; f < points; ++f) {
        const auto sums = *reinterpret_cast<const Vector<float, thread_filters>*>(
            &shared.exchange[point_order(f)][position + mine.position][mine.row]);
#pragma unroll
        for (int b = 0; b < thread_filters; ++b) m[f][b] = __uint_as_float(sums.bits[b]);
      }
      // The next sums may be handed over.
      if (position + step >= exchanged_positions) synchronise<consumer_barrier, consumer_threads>();
      Outputs<T> value;
      const float seen = transform_sums<T>(m, value);
      // Positions behind the last row are sums of whatever shared memory held.
      const int number = turn * exchanged_positions + position + mine.position;
      if (number < wide.positions()) bad += seen;
      store_position<T, output>(params, ends, mine, number, value);
    }
  }
  take_filters(u[0], &sum[0][0]);
  take_filters(u[1], &sum[0][12]);
  load_filters(u[2], next + 2 * u_point);
  return bad;
}

}  // namespace fastconv::algos::winograd_fused::single
