// The end of an item of the one-product classes: Y = A^T M, the scales undone, the epilogue, y.
#pragma once

#include "algos/winograd_fused/output.cuh"
#include "algos/winograd_fused/single_multiply.cuh"

namespace fastconv::algos::winograd_fused::single {

// How y is written.
enum class Output : int {
  filters,   // NHWC, by two neighbouring filters; a warp writes whole pixels
  columns,   // NCHW, by four neighbouring outputs
  elements,  // either, where alignment forbids both
};

template <typename T>
struct alignas(4 * sizeof(T)) Four {
  T value[4];
};
template <typename T>
struct alignas(2 * sizeof(T)) Two {
  T value[2];
};

// What a thread knows of its two filters of an item.
template <typename T>
struct Finisher {
  int lane_position, filter;  // of the eight positions that are exchanged at a time; of the 64 filters, the first of two
  int p0, q0, k;
  std::int64_t image;
  float bias[2], first[2], second[2];

  __device__ __forceinline__ Finisher(const Params<T>& params, const Item& item, int exponent, bool along_filters)
      : p0(item.p0), q0(item.q0), image(item.n * params.y_image) {
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    // A warp reads one position, or eight: without a bank conflict either way.
    lane_position = along_filters ? warp : lane >> 1 & 7;
    filter = 2 * (along_filters ? lane : (lane & 1) + (lane >> 4) * 2 + warp * 4);
    k = item.filter_block * filter_tile + filter;
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const bool inside = k + b < params.k;
      bias[b] = inside ? params.epilogue.bias_of(k + b) : 0.0f;
      const Unscale unscale(exponent, inside ? __ldg(params.exponents + k + b) : 0);
      first[b] = unscale.first, second[b] = unscale.second;
    }
  }
};

// Eight positions' sums of one warpgroup to shared memory. A thread's two rows of a fragment are neighbouring filters
// (pack.cuh).
template <int group8>
__device__ __forceinline__ void hand_over(float (&exchange)[frequencies][8][exchange_pitch], const Sums& sum,
                                          int group) {
  const int thread = threadIdx.x % 128, filter = thread / 32 * 16 + thread % 32 / 4 * 2, position = thread % 4 * 2;
  float* target = &exchange[group * group_frequencies][position][filter];
#pragma unroll
  for (int f = 0; f < group_frequencies; ++f) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      *reinterpret_cast<float2*>(target + (f * 8 + e) * exchange_pitch) =
          make_float2(sum[f][4 * group8 + e], sum[f][4 * group8 + 2 + e]);
    }
  }
}

// The position numbered `number` of an item, for two filters. Returns NaN if a sum was not finite, else 0.
template <typename T, Output output>
__device__ __forceinline__ float finish_position(const Params<T>& params, const Finisher<T>& mine,
                                                 const float (&exchange)[frequencies][8][exchange_pitch], int number) {
  const int row = number * 147 >> 10, column = number - row * tile_columns;  // number / 7
  static_assert(tile_columns == 7 && products <= 104);
  const int p = mine.p0 + row, q = mine.q0 + column * tile_outputs;
  if (row >= tile_rows || p >= params.p || q >= params.q) return 0.0f;
  float value[2][tile_outputs];
  {
    float2 m[frequencies];
#pragma unroll
    for (int f = 0; f < frequencies; ++f) {
      m[f] = *reinterpret_cast<const float2*>(&exchange[f][mine.lane_position][mine.filter]);
    }
    float a[frequencies], b[frequencies];
#pragma unroll
    for (int f = 0; f < frequencies; ++f) a[f] = m[f].x, b[f] = m[f].y;
    winograd::Transform<4>::output(a, value[0]);
    winograd::Transform<4>::output(b, value[1]);
  }
  float bad = 0.0f;
#pragma unroll
  for (int b = 0; b < 2; ++b) {
    bad = fmaf(value[b][0] + value[b][3], 0.0f, bad);  // these two hold all six sums
#pragma unroll
    for (int i = 0; i < tile_outputs; ++i) value[b][i] = value[b][i] * mine.first[b] * mine.second[b] + mine.bias[b];
  }
  if (mine.k >= params.k) return 0.0f;
  const std::int64_t base = mine.image + p * params.y_row + q * params.y_column + mine.k * params.y_channel;
  const int columns = min(tile_outputs, params.q - q), filters = min(2, params.k - mine.k);
  // visit(offset, filter, output) for what exists.
  const auto for_each = [&](const auto& visit) {
    if constexpr (output == Output::columns) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        if (b < filters) visit(base + b * params.y_channel, b, 0);
      }
    } else {
#pragma unroll
      for (int i = 0; i < tile_outputs; ++i) {
        if (i >= columns) continue;
        if constexpr (output == Output::filters) {
          visit(base + i * params.y_column, 0, i);
        } else {
#pragma unroll
          for (int b = 0; b < 2; ++b) {
            if (b < filters) visit(base + i * params.y_column + b * params.y_channel, b, i);
          }
        }
      }
    }
  };
  if (params.epilogue.residual != nullptr) {
    for_each([&](std::int64_t index, int b, int i) {
      const T* residual = params.epilogue.residual + index;
      if constexpr (output == Output::filters) {
        const auto two = *reinterpret_cast<const Two<T>*>(residual);
        value[0][i] += to_float(two.value[0]), value[1][i] += to_float(two.value[1]);
      } else if constexpr (output == Output::columns) {
        const auto four = *reinterpret_cast<const Four<T>*>(residual);
#pragma unroll
        for (int j = 0; j < 4; ++j) value[b][j] += to_float(four.value[j]);
      } else {
        value[b][i] += to_float(*residual);
      }
    });
  }
  const ActivationFunction& activate = params.epilogue.activate;
  if (activate.is_silu || activate.negative_slope != 1.0f || activate.cap != INFINITY) {
#pragma unroll
    for (int j = 0; j < 2 * tile_outputs; ++j) {
      float& v = value[j / tile_outputs][j % tile_outputs];
      v = activate(v);
    }
  }
  for_each([&](std::int64_t index, int b, int i) {
    if constexpr (output == Output::filters) {
      *reinterpret_cast<Two<T>*>(params.y + index) = {from_float<T>(value[0][i]), from_float<T>(value[1][i])};
    } else if constexpr (output == Output::columns) {
      *reinterpret_cast<Four<T>*>(params.y + index) = {from_float<T>(value[b][0]), from_float<T>(value[b][1]),
                                                       from_float<T>(value[b][2]), from_float<T>(value[b][3])};
    } else {
      params.y[index] = from_float<T>(value[b][i]);
    }
  });
  return bad;
}

// Groups of eight positions first .. last - 1. A loop with a jump to the registers of its turn: unrolled, the code would
// not stay in the instruction cache.
template <typename T, Output output, int first, int last>
__device__ __forceinline__ float finish_groups(const Params<T>& params, Shared<T>& shared, const Sums& sum,
                                               const Finisher<T>& mine, int group, unsigned turn) {
  float bad = 0.0f;
#pragma unroll 1
  for (int i = first; i < last; ++i) {
    auto& exchange = shared.exchange[(turn + i) & 1];  // the other one is still read
#define FASTCONV_CASE(j) \
  case j:                \
    if constexpr (j >= first && j < last) hand_over<j>(exchange, sum, group); \
    break;
    switch (i) {
      FASTCONV_CASE(0)
      FASTCONV_CASE(1)
      FASTCONV_CASE(2)
      FASTCONV_CASE(3)
      FASTCONV_CASE(4)
      FASTCONV_CASE(5)
      FASTCONV_CASE(6)
      FASTCONV_CASE(7)
      FASTCONV_CASE(8)
      FASTCONV_CASE(9)
      FASTCONV_CASE(10)
      FASTCONV_CASE(11)
      FASTCONV_CASE(12)
    }
#undef FASTCONV_CASE
    static_assert(position_groups == 13);
    synchronise<consumer_barrier, consumer_threads>();
    bad += finish_position<T, output>(params, mine, exchange, i * 8 + mine.lane_position);
  }
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
    // The first group by itself: its registers are free for what follows.
    constexpr int half = position_groups / 2;
    float bad = finish_groups<T, output, 0, 1>(params, shared, sum, mine, group, state.turn);
    bad += finish_groups<T, output, 1, half>(params, shared, sum, mine, group, state.turn);
    const unsigned ordinal = walk.ordinal;
    more = walk.next();
    if (more) {  // the next item's, into the registers of sums that have been handed over
      source = filters();
      load_filters(u[0], source);
      load_filters(u[1], source + u_frequency);
    }
    bad += finish_groups<T, output, half, position_groups>(params, shared, sum, mine, group, state.turn);
    state.turn += position_groups;
    if (!repeated && bad != 0.0f) atomicOr(&shared.repeat[ordinal / 32], 1u << ordinal % 32);
    state.item_slot = (state.item_slot + 1) % Shared<T>::item_slots;
  }
}

}  // namespace fastconv::algos::winograd_fused::single
