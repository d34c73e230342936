// The end of an item: are its scales right; Y = A^T M, the scales undone, the epilogue, y.
#pragma once

#include "algos/winograd_fused/multiply.cuh"
#include "algos/winograd_fused/pairs.cuh"
#include "algos/winograd_fused/transform.cuh"

namespace fastconv::algos::winograd_fused {

// Whether the guessed scale of a column has lost bits, or let something overflow. A column of zeros is right, and one
// without outputs does not matter.
__device__ __forceinline__ bool must_repeat(const Params& params, const Shared& shared, const Item& item, int slot) {
  bool off = false;
#pragma unroll
  for (int column = 0; column < tile_columns; ++column) {
    float largest = 0.0f;
#pragma unroll
    for (int warp = column / (tile_columns / 2); warp < producer_warps; warp += 2) {
      const float other = shared.largest[slot][warp][column % (tile_columns / 2)];
      largest = !(other <= largest) ? other : largest;  // NaN wins
    }
    off |=
        largest != 0.0f && !(largest >= least_high && largest < INFINITY) && item.q0 + column * tile_outputs < params.q;
  }
  return off;
}

// How y is written.
enum class Output : int {
  pairs,     // NHWC, by two neighbouring filters
  quads,     // NCHW, by four neighbouring outputs
  elements,  // either, where alignment forbids both
};

struct Position {
  int p, q, k;
};

// A thread's part of a row: four outputs of two neighbouring tiles for two neighbouring filters.
using Outputs = float[2][2][tile_outputs];  // [tile][filter][output]

// visit(index of the element, tile, filter, output) for those that exist.
template <Output output, typename Visitor>
__device__ __forceinline__ void for_each_output(const Params& params, const Position& at, const Visitor& visit) {
  if (at.p >= params.p) return;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int q = at.q + e * tile_outputs;
    const std::int64_t base = at.p * params.y_row + q * params.y_column + at.k * params.y_channel;
    if constexpr (output == Output::quads) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        if (q < params.q && at.k + b < params.k) visit(base + b * params.y_channel, e, b, 0);
      }
    } else {
#pragma unroll
      for (int i = 0; i < tile_outputs; ++i) {
        const bool inside = q + i < params.q && at.k < params.k;
        if constexpr (output == Output::pairs) {
          if (inside) visit(base + i * params.y_column, e, 0, i);
        } else {
#pragma unroll
          for (int b = 0; b < 2; ++b) {
            if (inside && at.k + b < params.k) visit(base + i * params.y_column + b * params.y_channel, e, b, i);
          }
        }
      }
    }
  }
}

// Residual, activation and store. y and residual point at the image. SiLU comes later (apply_silu): inlined for every
// output it would make the code larger than the instruction cache.
template <Output output>
__device__ __forceinline__ void store(const Params& params, const Position& at, float* y, const float* residual,
                                      Outputs& value) {
  if (residual != nullptr) {
    for_each_output<output>(params, at, [&](std::int64_t index, int e, int b, int i) {
      if constexpr (output == Output::pairs) {
        const float2 other = *reinterpret_cast<const float2*>(residual + index);
        value[e][0][i] += other.x, value[e][1][i] += other.y;
      } else if constexpr (output == Output::quads) {
        const float4 other = *reinterpret_cast<const float4*>(residual + index);
        value[e][b][0] += other.x, value[e][b][1] += other.y, value[e][b][2] += other.z, value[e][b][3] += other.w;
      } else {
        value[e][b][i] += residual[index];
      }
    });
  }
  const ActivationFunction& activate = params.epilogue.activate;
  if (!activate.is_silu && (activate.negative_slope != 1.0f || activate.cap != INFINITY)) {
#pragma unroll
    for (int j = 0; j < 4 * tile_outputs; ++j) {
      float& v = value[j / tile_outputs / 2][j / tile_outputs % 2][j % tile_outputs];
      const float positive = v > activate.cap ? activate.cap : v;
      const float negative = activate.negative_slope == 0.0f ? 0.0f : v * activate.negative_slope;
      v = v < 0.0f ? negative : positive;
    }
  }
  for_each_output<output>(params, at, [&](std::int64_t index, int e, int b, int i) {
    if constexpr (output == Output::pairs) {
      *reinterpret_cast<float2*>(y + index) = make_float2(value[e][0][i], value[e][1][i]);
    } else if constexpr (output == Output::quads) {
      *reinterpret_cast<float4*>(y + index) =
          make_float4(value[e][b][0], value[e][b][1], value[e][b][2], value[e][b][3]);
    } else {
      y[index] = value[e][b][i];
    }
  });
}

// In place, over what this thread has just stored.
__device__ __forceinline__ void apply_silu(const Params& params, const Position& first, float* y) {
#pragma unroll 1
  for (int j = 0; j < half_rows * 4 * tile_outputs; ++j) {
    const int row = first.p + j / (4 * tile_outputs), q = first.q + j / 2 % (2 * tile_outputs), k = first.k + j % 2;
    if (row >= params.p || q >= params.q || k >= params.k) continue;
    float* target = y + row * params.y_row + q * params.y_column + k * params.y_channel;
    *target = params.epilogue.activate(*target);
  }
}

// Each warpgroup finishes half of the rows, with the other's sums of three frequencies, a row at a time.
template <int group, Output output>
__device__ __forceinline__ void finish_item(const Params& params, Shared& shared, const Totals& total, const Item& item,
                                            int slot) {
  const int thread = threadIdx.x % 128, lane = thread % 32, column = lane % 4 * 2;
  const Position first_position{item.p0 + group * half_rows, item.q0 + column * tile_outputs,
                                item.filter_block * filter_tile + thread / 32 * 16 + lane / 4 * 2};
  float* y = params.y + item.n * params.y_image;
  const float* residual = params.epilogue.residual;
  if (residual != nullptr) residual += item.n * params.y_image;
  float bias[2], first[2][2], second[2][2];  // [filter][tile]
#pragma unroll
  for (int b = 0; b < 2; ++b) {
    const int k = first_position.k + b;
    const bool inside = k < params.k;
    bias[b] = inside ? params.epilogue.bias_of(k) : 0.0f;
    const int exponent = inside ? __ldg(params.exponents + k) : 0;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const Unscale unscale(shared.exponents[slot][column + e], exponent);
      first[b][e] = unscale.first;
      second[b][e] = unscale.second;
    }
  }
#pragma unroll
  for (int row = 0; row < half_rows; ++row) {
#pragma unroll
    for (int f = 0; f < group_frequencies; ++f) {
      const float* sum = total[f][1 - group] + row * 4;
      shared.exchange[group][f][thread] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    }
    synchronise<consumer_barrier, consumer_threads>();
    float m[frequencies][4];  // [f][2 * filter + tile]
#pragma unroll
    for (int f = 0; f < group_frequencies; ++f) {
      const float* sum = total[f][group] + row * 4;
      const float4 other = shared.exchange[1 - group][f][thread];
      const int own = group * group_frequencies + f, theirs = (1 - group) * group_frequencies + f;
#pragma unroll
      for (int j = 0; j < 4; ++j) m[own][j] = sum[j];
      m[theirs][0] = other.x, m[theirs][1] = other.y, m[theirs][2] = other.z, m[theirs][3] = other.w;
    }
    Outputs value;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int b = j / 2, e = j % 2;
      float sums[frequencies];
#pragma unroll
      for (int f = 0; f < frequencies; ++f) sums[f] = m[f][j];
      winograd::Transform<4>::output(sums, value[e][b]);
#pragma unroll
      for (int o = 0; o < tile_outputs; ++o) value[e][b][o] = value[e][b][o] * first[b][e] * second[b][e] + bias[b];
    }
    Position at = first_position;
    at.p += row;
    store<output>(params, at, y, residual, value);
    synchronise<consumer_barrier, consumer_threads>();  // before the next row is written
  }
  if (params.epilogue.activate.is_silu) apply_silu(params, first_position, y);
}

// One pass over the items.
template <int group, Output output>
__device__ __forceinline__ void consume(const Params& params, Shared& shared, bool repeated, ConsumerState& state) {
  const auto filters_of = [&](const Item& item) {
    return params.u + static_cast<std::int64_t>(item.filter_block) * params.stages * (u_stage_bytes / 16) +
           group * group_frequencies * (u_frequency_bytes / 16) + threadIdx.x % 128;
  };
  Walk<Params> walk{params, repeated ? shared.repeat : nullptr};
  if (!walk.next()) return;
  Filters u[group_frequencies];
  Item item = find_item<tile_rows, tile_width>(params, walk.number());
  const uint4* source = filters_of(item);
  load_filters(u[0], source);
  load_filters(u[1], source + u_frequency_bytes / 16);
#pragma unroll 1
  for (bool more = true; more;) {
    const unsigned ordinal = walk.ordinal;
    more = walk.next();
    const Item next = more ? find_item<tile_rows, tile_width>(params, walk.number()) : item;
    const uint4* next_source = filters_of(next);
    Totals total;
    accumulate<group>(params, shared, total, u, source, next_source, state);
    if (!repeated && must_repeat(params, shared, item, state.item_slot)) {
      if (threadIdx.x == 0) shared.repeat[ordinal / 32] |= 1u << ordinal % 32;
    } else if (output == Output::pairs && is_plain(params.epilogue)) {
      finish_pairs<group>(params, shared, total, item, state.item_slot);
    } else {
      finish_item<group, output>(params, shared, total, item, state.item_slot);
    }
    state.item_slot = (state.item_slot + 1) % item_slots;
    item = next;
    source = next_source;
  }
}

}  // namespace fastconv::algos::winograd_fused
