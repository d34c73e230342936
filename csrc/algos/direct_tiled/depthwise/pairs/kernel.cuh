// Two neighbouring channels a thread, whose rows come through a ring in shared memory (depthwise/plan.h, `pairs`).
#pragma once

#include "algos/direct_tiled/depthwise/plan.h"
#include "core/fast_divide.h"
#include "device/epilogue.h"
#include "device/fast_gates.cuh"
#include "device/fast_silu.cuh"
#include "device/mma.cuh"

namespace fastconv::algos::direct_tiled::depthwise::pairs {

template <typename T>
struct Params {
  const T* x;       // [N, H, W, C]
  const T* weight;  // [C, 1, R, S]
  T* y;             // [N, P, Q, C]
  Epilogue<T> epilogue;
  std::int64_t x_image, y_image;  // strides, in elements
  int c, h, w, p, q, pad_h, pad_w, strip;
  unsigned threads;  // with work
  FastDivide by_pairs, by_columns, by_strips;
};

// Two elements, as they lie in memory.
template <typename T>
struct alignas(2 * sizeof(T)) Pair {
  T first, second;

  __device__ __forceinline__ float2 floats() const { return {to_float(first), to_float(second)}; }
  static __device__ __forceinline__ Pair of(float2 values) {
    return {from_float<T>(values.x), from_float<T>(values.y)};
  }
};

__device__ __forceinline__ float2 multiply_add(float2 a, float2 b, float2 c) {
  return {fmaf(a.x, b.x, c.x), fmaf(a.y, b.y, c.y)};
}

template <typename T>
__device__ __forceinline__ float silu(float value) {
  return sizeof(T) == 2 ? fast_silu(value) : ActivationFunction::silu(value);
}

// What a block has in shared memory: of each thread the filter, unless it is in registers, and the input rows of
// `stages` turns. A thread reads what it wrote itself, so that nobody waits for anybody.
template <typename T, int r, int stride>
struct Shape {
  static constexpr int stages = pairs::stages(stride);
  static constexpr int inputs = pairs::inputs(r, stride);
  static constexpr int open = (r + stride - 1) / stride;  // output rows whose windows hold the same input row
  static constexpr bool filter_in_registers = pairs::filter_in_registers(r);

  Pair<T> ring[stages][stride][inputs][threads];
  float2 filter[filter_in_registers ? 1 : r * r][threads];
};

// The filters of channels 2 pair and 2 pair + 1.
template <int taps, typename T, typename Put>
__device__ __forceinline__ void load_filter(const T* weight, int pair, const Put& put) {
  const Pair<T>* source = reinterpret_cast<const Pair<T>*>(weight) + static_cast<std::int64_t>(pair) * taps;
  T values[2 * taps];
#pragma unroll
  for (int i = 0; i < taps; ++i) {
    const Pair<T> value = source[i];
    values[2 * i] = value.first, values[2 * i + 1] = value.second;
  }
#pragma unroll
  for (int t = 0; t < taps; ++t) put(t, float2{to_float(values[t]), to_float(values[taps + t])});
}

// To a row of outputs, whose first is y[at].
template <typename T>
__device__ __forceinline__ void add_residual(const Params<T>& params, std::int64_t at, int q0, float2 (&out)[columns]) {
#pragma unroll
  for (int j = 0; j < columns; ++j) {
    if (q0 + j >= params.q) continue;
    const float2 other = reinterpret_cast<const Pair<T>*>(params.epilogue.residual + at + j * params.c)->floats();
    out[j].x += other.x, out[j].y += other.y;
  }
}

template <typename T, bool gated>
__device__ __forceinline__ void activate(const ActivationFunction& activate, float2 (&out)[columns]) {
  const auto apply_to_all = [&](const auto& apply) {
#pragma unroll
    for (int j = 0; j < columns; ++j) out[j] = {apply(out[j].x), apply(out[j].y)};
  };
  if constexpr (gated) {
    apply_gated(activate.gated, apply_to_all);
  } else if (activate.is_silu) {
    apply_to_all([](float value) { return silu<T>(value); });
  } else {
    apply_to_all([&](float value) { return activate.piecewise(value); });
  }
}

// Turn i brings the input rows i * stride .. i * stride + stride - 1 of the strip; then output row i - open + 1 is
// complete. gated: it ends with the activations that are is_gated().
template <typename T, int r, int stride, bool gated>
__global__ void __launch_bounds__(threads, pairs::blocks_by_registers(r))
    convolve(const __grid_constant__ Params<T> params) {
  using S = Shape<T, r, stride>;
  extern __shared__ __align__(16) unsigned char memory[];
  S& shared = *reinterpret_cast<S*>(memory);
  const int thread = static_cast<int>(threadIdx.x);
  unsigned task = blockIdx.x * threads + threadIdx.x;
  if (task >= params.threads) return;
  const int pair = static_cast<int>(params.by_pairs.divmod(task));
  const int q0 = static_cast<int>(params.by_columns.divmod(task)) * columns;
  const int first_p = static_cast<int>(params.by_strips.divmod(task)) * params.strip;  // what is left is the image
  const int rows = min(params.strip, params.p - first_p), turns = rows + S::open - 1;
  const int h0 = first_p * stride - params.pad_h, w0 = q0 * stride - params.pad_w;

  unsigned inside = 0;  // a bit for each input column
#pragma unroll
  for (int j = 0; j < S::inputs; ++j) {
    inside |= static_cast<unsigned>(static_cast<unsigned>(w0 + j) < static_cast<unsigned>(params.w)) << j;
  }
  const T* x = params.x + task * params.x_image + 2 * pair;
  const auto fetch = [&](int i, int stage) {
#pragma unroll
    for (int row = 0; row < stride; ++row) {
      const int h = h0 + i * stride + row;
      const unsigned here = i < turns && static_cast<unsigned>(h) < static_cast<unsigned>(params.h) ? inside : 0;
      const T* source = x + static_cast<std::int64_t>((h * params.w + w0) * params.c);
      const std::uint32_t target = shared_address(&shared.ring[stage][row][0][thread]);
      constexpr int pitch = threads * sizeof(Pair<T>);
#pragma unroll
      for (int j = 0; j < S::inputs; ++j) {
        copy_async<sizeof(Pair<T>)>(target + j * pitch, source, (here >> j & 1) * sizeof(Pair<T>));
        source += params.c;
      }
    }
    commit_copies();
  };
#pragma unroll
  for (int stage = 0; stage < S::stages; ++stage) fetch(stage, stage);

  float2 filter[S::filter_in_registers ? r * r : 1];
  load_filter<r * r>(params.weight, pair, [&](int t, float2 value) {
    if constexpr (S::filter_in_registers) {
      filter[t] = value;
    } else {
      shared.filter[t][thread] = value;
    }
  });
  const auto tap_of = [&](int t) {
    if constexpr (S::filter_in_registers) {
      return filter[t];
    } else {
      return shared.filter[t][thread];
    }
  };
  const float2 bias{params.epilogue.bias_of(2 * pair), params.epilogue.bias_of(2 * pair + 1)};
  const std::int64_t y_index = task * params.y_image + 2 * pair;
  float2 sum[S::open][columns] = {};
  int stage = 0;
#pragma unroll 1  // more would not fit the instruction cache
  for (int i = 0; i < turns; ++i) {
    wait_for_copies<S::stages - 1>();
#pragma unroll
    for (int row = 0; row < stride; ++row) {
      float2 input[S::inputs];
#pragma unroll
      for (int j = 0; j < S::inputs; ++j) input[j] = shared.ring[stage][row][j][thread].floats();
#pragma unroll
      for (int a = 0; a < S::open; ++a) {
        const int tap_row = row + (S::open - 1 - a) * stride;
        if (tap_row >= r) continue;
#pragma unroll
        for (int s = 0; s < r; ++s) {
          const float2 tap = tap_of(tap_row * r + s);
#pragma unroll
          for (int j = 0; j < columns; ++j) sum[a][j] = multiply_add(input[j * stride + s], tap, sum[a][j]);
        }
      }
    }
    fetch(i + S::stages, stage);  // into the rows that were just read
    if (++stage == S::stages) stage = 0;
    const int done = i - S::open + 1;
    if (done >= 0) {
      const std::int64_t at = y_index + ((first_p + done) * params.q + q0) * params.c;
      float2 out[columns];
#pragma unroll
      for (int j = 0; j < columns; ++j) out[j] = {sum[0][j].x + bias.x, sum[0][j].y + bias.y};
      params.epilogue.in_order([&] { add_residual(params, at, q0, out); },
                               [&] { activate<T, gated>(params.epilogue.activate, out); });
#pragma unroll
      for (int j = 0; j < columns; ++j) {
        if (q0 + j < params.q) *reinterpret_cast<Pair<T>*>(params.y + at + j * params.c) = Pair<T>::of(out[j]);
      }
    }
#pragma unroll
    for (int a = 0; a < S::open; ++a) {
#pragma unroll
      for (int j = 0; j < columns; ++j) sum[a][j] = a + 1 < S::open ? sum[a + 1][j] : float2{0.0f, 0.0f};
    }
  }
}

}  // namespace fastconv::algos::direct_tiled::depthwise::pairs
