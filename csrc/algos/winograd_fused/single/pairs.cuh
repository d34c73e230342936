// Y = A^T M in NHWC: where the sums are, in wgmma's fragments.
//
// With s_a = M[+a] + M[-a], d_a = M[+a] - M[-a] and s_b, d_b likewise, the columns 0 and 2 of a tile need nothing but
// s_b of the other warpgroup's sums, and columns 3 and 1 nothing but d_a:
//   y0 = M[0] + s_a + s_b, y2 = s_a / 2 + 2 s_b;   y3 = M[inf] + 2b d_b + a/2 d_a, y1 = b d_b + a d_a.
// So one value of a position and filter crosses shared memory each way, and each warpgroup finishes two columns in the
// registers of its sums.
#pragma once

#include "algos/winograd_fused/single/multiply.cuh"
#include "winograd/matrices.h"

namespace fastconv::algos::winograd_fused::single {

// The columns of a warpgroup: the one with M[0] or M[inf] first.
__device__ __forceinline__ int own_column(int group, int which) { return group == 0 ? 2 * which : 3 - 2 * which; }

// first = own * first_own + other * first_other + extra, second = own * second_own + other * second_other, of the
// warpgroup's even (odd) sum and the other's.
struct PairSums {
  float sign, first_own, first_other, second_own, second_other;

  __device__ __forceinline__ explicit PairSums(int group) {
    using Transform = winograd::Transform<4>;
    sign = group == 0 ? 1.0f : -1.0f;
    first_own = group == 0 ? 1.0f : 2.0f * Transform::b, first_other = group == 0 ? 1.0f : 0.5f * Transform::a;
    second_own = group == 0 ? 0.5f : Transform::b, second_other = group == 0 ? 2.0f : Transform::a;
  }
  __device__ __forceinline__ float first(float own, float other, float extra) const {
    return fmaf(own, first_own, fmaf(other, first_other, extra));
  }
  __device__ __forceinline__ float second(float own, float other) const {
    return fmaf(own, second_own, other * second_other);
  }
};

// Where a lane finds what it receives of 8 positions and its warp's 16 filters; the next 8 are group_bytes further.
// Half types: where the same warp's outputs will lie, column lane / 16, filters 8 (lane / 8 % 2), position lane % 8.
template <typename T>
constexpr int group_bytes = has_lines<T> ? 8 * line_bytes : 128 * 16;
template <typename T, Shape shape>
__device__ __forceinline__ std::uint32_t received_at(Shared<T, shape>& shared, int group, int warp, int lane) {
  if constexpr (has_lines<T>) {
    return shared_address(shared.lines[own_column(group, lane / 16)]) + lane % 8 * line_bytes +
           ((2 * warp + lane / 8 % 2) ^ lane % 8) * 16;
  } else {
    return shared_address(&shared.given[group][0][warp * 32 + lane]);
  }
}

// The difference (warpgroup 0; else the sum) of sum[0] and sum[1] to the other warpgroup, the rest stays in sum[0].
template <typename T, Shape shape>
__device__ __forceinline__ void give(Sums<shape>& sum, float sign, std::uint32_t target) {
#pragma unroll
  for (int j = 0; j < position_groups(shape); ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float &kept = sum[0][4 * j + i], &given = sum[1][4 * j + i];
      const float other = fmaf(given, -sign, kept);
      kept = fmaf(given, sign, kept);
      given = other;
    }
    hopper::store_shared(target + j * group_bytes<T>, &sum[1][4 * j]);
  }
}

// Of a thread's two filters.
struct FilterTerms {
  int exponent[2] = {};
  float bias[2] = {};

  template <typename T>
  __device__ __forceinline__ FilterTerms(const Params<T>& params, int first_filter) {
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const int k = first_filter + b * filter_step<T>;
      if (k >= params.k) continue;
      exponent[b] = __ldg(params.exponents + k);
      bias[b] = params.epilogue.bias_of(k);
    }
  }
};

// The exponents of the input's scales for a thread's two positions, if they may differ.
template <Shape shape>
using SumExponents = int[sums_segments(shape)];
template <typename T, Shape shape>
__device__ __forceinline__ void find_exponents(const Params<T>& params, const WorkTile& work_tile,
                                               const int (&of_segments)[segments(shape)], int lane,
                                               SumExponents<shape>& result) {
#pragma unroll
  for (int e = 0; e < sums_segments(shape); ++e) {
    if constexpr (shape.packs_columns) {
      result[e] = of_segments[lane % 4 * 2 + e < left_tiles(params, work_tile) ? 0 : 1];
    } else {
      static_assert(shape.images == 1 || (8 % shape.row_positions() == 0 && shape.tiles % 2 == 0));
      result[e] = of_segments[shape.images == 1 ? 0 : lane % 4 * 2 / shape.tiles];
    }
  }
}

// What undoes the scales of a thread's sums.
template <Shape shape>
struct FilterScales {
  static constexpr int count = 2 * sums_segments(shape);  // [2 * filter + position], or [filter]
  float scale[count], second_scale[count], bias[2];
  bool two_factors;  // of any filter of the warp

  __device__ __forceinline__ FilterScales(const FilterTerms& terms, const SumExponents<shape>& exponents) {
    bool two = false;
#pragma unroll
    for (int b = 0; b < 2; ++b) {
#pragma unroll
      for (int e = 0; e < sums_segments(shape); ++e) {
        const int sum = exponents[e] + terms.exponent[b], kept = max(-126, min(sum, 126));
        scale[b * sums_segments(shape) + e] = power_of_two(-kept);
        second_scale[b * sums_segments(shape) + e] = power_of_two(kept - sum);
        two |= kept != sum;
      }
      bias[b] = terms.bias[b];
    }
    two_factors = __any_sync(~0u, two);
  }
  // Of sum i of a thread's four of 8 positions, [2 * filter + position].
  static constexpr int index(int i) { return i * count / 4; }
};

// What a thread must know to finish its outputs of a work tile.
template <typename T, Shape shape>
struct Fragment {
  PairSums pairs;
  FilterScales<shape> filters;
  const WorkTile& work_tile;  // in shared memory
  int group, warp, lane;
  std::uint32_t received;

  __device__ __forceinline__ int first_filter() const { return work_tile.filter_block * filter_tile + warp * 16; }
};

// Where what undoes a scale is more than a power of two that float32 has: the second of two factors, to all sums and
// what has been received, each in its place, so that the code that follows need not know of it.
template <typename T, Shape shape>
__device__ __forceinline__ void apply_second_scale(const Fragment<T, shape>& mine, Sums<shape>& sum) {
#pragma unroll
  for (int j = 0; j < position_groups(shape); ++j) {
    const std::uint32_t received = mine.received + j * group_bytes<T>;
    float four[4];
    hopper::load_shared(four, received);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float factor = mine.filters.second_scale[FilterScales<shape>::index(i)];
      four[i] *= factor, sum[0][4 * j + i] *= factor, sum[2][4 * j + i] *= factor;
    }
    hopper::store_shared(received, four);
  }
}

}  // namespace fastconv::algos::winograd_fused::single
