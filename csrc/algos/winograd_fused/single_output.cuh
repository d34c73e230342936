// The end of an item of the one-product classes: Y = A^T M, the scales undone, the epilogue, y.
#pragma once

#include <cstring>

#include "algos/winograd_fused/single_multiply.cuh"
#include "device/winograd_matrices.h"

namespace fastconv::algos::winograd_fused::single {

// How y is written.
enum class Output : int {
  filters,   // NHWC, by two neighbouring filters; a warp writes whole pixels
  columns,   // NCHW, by four neighbouring outputs
  elements,  // either, where alignment forbids both
};

// What a thread knows of its two filters of an item.
template <typename T>
struct Finisher {
  int lane_position, filter;  // of the eight positions of a group; of the 64 filters, the first of two
  int q0, rows, filters;      // how many rows of the item, and filters of the two, exist
  bool two_factors;           // whether the scales' exponents exceed what one float can hold
  float bias[2], first[2], second[2];
  std::int64_t base;  // element of y at the item's first output and filter k

  __device__ __forceinline__ Finisher(const Params<T>& params, const Item& item, int exponent, bool along_filters)
      : q0(item.q0), rows(min(tile_rows, params.p - item.p0)) {
    const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);  // uniform
    // A warp reads one position, or eight: without a bank conflict either way.
    lane_position = along_filters ? warp : lane >> 1 & 7;
    filter = 2 * (along_filters ? lane : (lane & 1) + (lane >> 4) * 2 + warp * 4);
    const int k = item.filter_block * filter_tile + filter;
    filters = params.k - k;
    two_factors = false;
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      bias[b] = b < filters ? params.epilogue.bias_of(k + b) : 0.0f;
      const int sum = exponent + (b < filters ? __ldg(params.exponents + k + b) : 0);
      const int kept = max(-126, min(sum, 126));
      first[b] = power_of_two(-kept), second[b] = power_of_two(kept - sum);
      two_factors |= kept != sum;
    }
    two_factors = __any_sync(~0u, two_factors);
    base = item.n * params.y_image + item.p0 * params.y_row + q0 * params.y_column + k * params.y_channel;
  }
};

// Eight positions' sums of one warpgroup to shared memory: without a bank conflict, and from the registers as they are.
template <int position_group>
__device__ __forceinline__ void hand_over(float* target, const Sums& sum) {
#pragma unroll
  for (int f = 0; f < group_frequencies; ++f) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int position = f * 8 * exchanged_groups + position_group % exchanged_groups * 8 + i % 2;
      target[position * exchange_pitch + i / 2 * 8] = sum[f][4 * position_group + i];
    }
  }
}

using Outputs = float[2][tile_outputs];  // [filter][output] of a position

// Y = A^T M, without the scales. Returns NaN if a sum is not finite, else 0.
template <typename T>
__device__ __forceinline__ float transform_sums(const Finisher<T>& mine, const float2 (&m)[frequencies],
                                                Outputs& value) {
  float a[frequencies], b[frequencies];
#pragma unroll
  for (int f = 0; f < frequencies; ++f) a[f] = m[f].x, b[f] = m[f].y;
  winograd::Transform<4>::output(a, value[0]);
  winograd::Transform<4>::output(b, value[1]);
  // The first and the last output hold all six sums.
  const float bad = fmaf(value[0][0] + value[0][3], 0.0f, fmaf(value[1][0] + value[1][3], 0.0f, 0.0f));
#pragma unroll
  for (int b = 0; b < 2; ++b) {
    if (__builtin_expect(mine.two_factors, 0)) {
#pragma unroll
      for (int i = 0; i < tile_outputs; ++i) value[b][i] *= mine.second[b];
    }
#pragma unroll
    for (int i = 0; i < tile_outputs; ++i) value[b][i] = fmaf(value[b][i], mine.first[b], mine.bias[b]);
  }
  return bad;
}

__device__ __forceinline__ float clamp_keeping_nan(float value, float least, float most) {
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(value) : "f"(least));
  asm("min.NaN.f32 %0, %0, %1;" : "+f"(value) : "f"(most));
  return value;
}

__device__ __forceinline__ void activate(const ActivationFunction& activation, Outputs& value) {
  const auto for_each = [&](const auto& function) {
#pragma unroll
    for (int j = 0; j < 2 * tile_outputs; ++j) {
      float& v = value[j / tile_outputs][j % tile_outputs];
      v = function(v);
    }
  };
  if (__builtin_expect(activation.is_silu, 0)) {
    for_each([&](float v) { return activation.silu(v); });
  } else if (activation.negative_slope == 0.0f) {
    for_each([&](float v) { return clamp_keeping_nan(v, 0.0f, activation.cap); });
  } else if (activation.negative_slope != 1.0f) {
    for_each([&](float v) { return activation.piecewise(v); });
  }
}

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

// The position numbered `number` of an item, for two filters: residual, activation, store.
template <typename T, Output output>
__device__ __forceinline__ void store_position(const Params<T>& params, const Finisher<T>& mine, int number,
                                               Outputs& value) {
  const int row = number * 147 >> 10, column = (number - row * tile_columns) * tile_outputs;  // number / 7
  static_assert(tile_columns == 7 && products <= 104);
  const int columns = params.q - mine.q0 - column;  // that exist
#ifdef KO_S
  if (value[0][0] != 123.456f) return;
#endif
  if (row >= mine.rows || columns <= 0 || mine.filters <= 0) return;
  // Within an item 32 bits suffice (launch).
  const int y_column = static_cast<int>(params.y_column), y_filter = static_cast<int>(params.y_channel);
  const std::int64_t base = mine.base + (row * static_cast<int>(params.y_row) + column * y_column);
  // visit(offset, filter, output) for what exists.
  const auto for_each = [&](const auto& visit) {
    if constexpr (output == Output::columns) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        if (b < mine.filters) visit(base + b * y_filter, b, 0);
      }
    } else {
#pragma unroll
      for (int i = 0; i < tile_outputs; ++i) {
        if (i >= columns) continue;
        if constexpr (output == Output::filters) {
          visit(base + i * y_column, 0, i);
        } else {
#pragma unroll
          for (int b = 0; b < 2; ++b) {
            if (b < mine.filters) visit(base + i * y_column + b * y_filter, b, i);
          }
        }
      }
    }
  };
  if (__builtin_expect(params.epilogue.residual != nullptr, 0)) {
    for_each([&](std::int64_t index, int b, int i) {
      const T* residual = params.epilogue.residual + index;
      if constexpr (output == Output::filters) {
        T two[2];
        memcpy(two, __builtin_assume_aligned(residual, 2 * sizeof(T)), sizeof two);
        value[0][i] += to_float(two[0]), value[1][i] += to_float(two[1]);
      } else if constexpr (output == Output::columns) {
        T four[4];
        memcpy(four, __builtin_assume_aligned(residual, 4 * sizeof(T)), sizeof four);
#pragma unroll
        for (int j = 0; j < 4; ++j) value[b][j] += to_float(four[j]);
      } else {
        value[b][i] += to_float(*residual);
      }
    });
  }
  activate(params.epilogue.activate, value);
  for_each([&](std::int64_t index, int b, int i) {
    if constexpr (output == Output::filters) {
      *reinterpret_cast<Vector<T, 2>*>(params.y + index) = pack_vector<T, 2>({value[0][i], value[1][i]});
    } else if constexpr (output == Output::columns) {
      *reinterpret_cast<Vector<T, 4>*>(params.y + index) = pack_vector<T, 4>(value[b]);
    } else {
      params.y[index] = from_float<T>(value[b][i]);
    }
  });
}

// U of a frequency into registers of sums that have been handed over, and from there.
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
// item, waits for the instruction cache at every step (docs/performance.md). Returns NaN if a sum of an output is not
// finite. next: U of the next item; its first two frequencies are in u at the end.
template <typename T, Output output>
__device__ __forceinline__ float finish_item(const Params<T>& params, Shared<T>& shared, Sums& sum,
                                             const Finisher<T>& mine, int group, Filters (&u)[group_frequencies],
                                             const uint4* next, ConsumerState& state) {
  const int fragment = threadIdx.x % 128, first_filter = fragment / 32 * 16 + fragment % 32 / 4;
  float bad = 0.0f;
  constexpr int turns = (position_groups + exchanged_groups - 1) / exchanged_groups;
#pragma unroll 1
  for (int turn = 0; turn < turns; ++turn, ++state.turn) {
    const int buffer = exchange_buffers == 2 ? state.turn & 1 : 0;
    float* target = &shared.exchange[buffer][group * group_frequencies][fragment % 4 * 2][first_filter];
    switch (turn) {
#define FASTCONV_TURN(i)                                                                        \
  case i:                                                                                       \
    if constexpr (exchanged_groups * i < position_groups) hand_over<exchanged_groups * i>(target, sum);                                              \
    if constexpr (exchanged_groups == 2 && 2 * i + 1 < position_groups) hand_over<2 * i + 1>(target, sum); \
    break;
      FASTCONV_TURN(0)
      FASTCONV_TURN(1)
      FASTCONV_TURN(2)
      FASTCONV_TURN(3)
      FASTCONV_TURN(4)
      FASTCONV_TURN(5)
      FASTCONV_TURN(6)
#if EG == 1
      FASTCONV_TURN(7)
      FASTCONV_TURN(8)
      FASTCONV_TURN(9)
      FASTCONV_TURN(10)
      FASTCONV_TURN(11)
      FASTCONV_TURN(12)
#endif
#undef FASTCONV_TURN
    }
    static_assert(position_groups == 13);
    if (turn == 6 / exchanged_groups) {  // of frequency 0, groups 0 to 5 are gone: 24 registers
      load_filters(&sum[0][0], next);
      load_filters(&sum[0][12], next + u_frequency);
    }
#ifdef KO_B
    __syncwarp();
#else
    synchronise<consumer_barrier, consumer_threads>();
#endif
    Outputs value[exchanged_groups];
#pragma unroll
    for (int e = 0; e < exchanged_groups; ++e) {
      float2 m[frequencies];
#pragma unroll
      for (int f = 0; f < frequencies; ++f) {
        m[f] = *reinterpret_cast<const float2*>(&shared.exchange[buffer][f][e * 8 + mine.lane_position][mine.filter]);
      }
      const float seen = transform_sums(mine, m, value[e]);
      // Positions behind the last row are sums of whatever shared memory held.
      if ((turn * exchanged_groups + e) * 8 + mine.lane_position < positions) bad += seen;
    }
    if (exchange_buffers == 1) synchronise<consumer_barrier, consumer_threads>();
    // before the next ones are handed over
#pragma unroll
    for (int e = 0; e < exchanged_groups; ++e) {
      store_position<T, output>(params, mine, (turn * exchanged_groups + e) * 8 + mine.lane_position, value[e]);
    }
  }
  take_filters(u[0], &sum[0][0]);
  take_filters(u[1], &sum[0][12]);
  return bad;
}

// One pass over the items.
template <typename T, Output output>
__device__ __forceinline__ void consume(const Params<T>& params, Shared<T>& shared, bool repeated,
                                        ConsumerState& state) {
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  // Of the walk's item; it is worked out again where it is needed, to keep registers free for the products.
  Walk<Params<T>> walk{params, repeated ? shared.repeat : nullptr};
  const auto filters = [&] {
    const std::int64_t block = find_item(params, walk.number()).filter_block;
    return params.u + block * params.stages * (Stage<T>::steps * u_step) + group * group_frequencies * u_frequency +
           threadIdx.x % 128;
  };
  if (!walk.next()) return;
  Filters u[group_frequencies];
  const uint4* source = filters();
  load_filters(u[0], source);
  load_filters(u[1], source + u_frequency);
#pragma unroll 1
  for (bool more = true; more;) {
    Sums sum;
    accumulate(params, shared, sum, u, source, group, state);
    const Finisher<T> mine(params, find_item(params, walk.number()), shared.exponents[state.item_slot],
                           output == Output::filters || (output == Output::elements && params.y_channel == 1));
    const unsigned ordinal = walk.ordinal;
    more = walk.next();
    source = more ? filters() : params.u + threadIdx.x % 128;  // any, if there is no next item
    const float bad = finish_item<T, output>(params, shared, sum, mine, group, u, source, state);
    if (!repeated && bad != 0.0f) atomicOr(&shared.repeat[ordinal / 32], 1u << ordinal % 32);
    state.item_slot = (state.item_slot + 1) % Shared<T>::item_slots;
  }
}

}  // namespace fastconv::algos::winograd_fused::single
