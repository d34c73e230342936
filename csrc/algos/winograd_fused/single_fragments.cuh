// The end of an item in NHWC: Y = A^T M where the sums are, in wgmma's fragments.
//
// With s_a = M[+a] + M[-a], d_a = M[+a] - M[-a] and s_b, d_b likewise, the columns 0 and 2 of a tile need nothing but
// s_b of the other warpgroup's sums, and columns 3 and 1 nothing but d_a:
//   y0 = M[0] + s_a + s_b, y2 = s_a / 2 + 2 s_b;   y3 = M[inf] + 2b d_b + a/2 d_a, y1 = b d_b + a d_a.
// So one value of a position and filter crosses shared memory each way, and each warpgroup finishes two columns in the
// registers of its sums. Half types then go through shared memory, transposed, into tensor copies of whole lines, which
// overlap the next item; float32 is stored as it is, by two neighbouring filters.
#pragma once

#include "algos/winograd_fused/single_multiply.cuh"
#include "algos/winograd_fused/single_output.cuh"

namespace fastconv::algos::winograd_fused::single {

// The columns of a warpgroup: the one with M[0] or M[inf] first.
__device__ __forceinline__ int own_column(int group, int which) { return group == 0 ? 2 * which : 3 - 2 * which; }

template <typename T>
__device__ __forceinline__ std::uint32_t pack_halves(float low, float high) {
  if constexpr (std::is_same_v<T, half_t>) {
    const __half2 two = __floats2half2_rn(low, high);
    return *reinterpret_cast<const std::uint32_t*>(&two);
  } else {
    const __nv_bfloat162 two = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const std::uint32_t*>(&two);
  }
}

template <typename T>
__device__ __forceinline__ float2 halves_as_floats(std::uint32_t two) {
  if constexpr (std::is_same_v<T, half_t>) {
    return __half22float2(*reinterpret_cast<const __half2*>(&two));
  } else {
    return make_float2(__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000));
  }
}

// Of a thread's two filters. Loaded before the sums are given away, used after.
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

// What undoes the scales of a thread's two filters.
struct FilterScales {
  float scale[2], second_scale[2], bias[2];
  bool two_factors;

  __device__ __forceinline__ FilterScales(const FilterTerms& terms, int item_exponent) {
    bool two = false;
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const int sum = item_exponent + terms.exponent[b], kept = max(-126, min(sum, 126));
      scale[b] = power_of_two(-kept);
      second_scale[b] = power_of_two(kept - sum);
      bias[b] = terms.bias[b];
      two |= kept != sum;
    }
    two_factors = __any_sync(~0u, two);
  }
};

// Two halves at a time.
template <typename T>
__device__ __forceinline__ std::uint32_t most_keeping_nan(std::uint32_t a, std::uint32_t b) {
  if constexpr (std::is_same_v<T, half_t>) {
    asm("max.NaN.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  } else {
    asm("max.NaN.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  }
  return a;
}
// sum + 0 a: NaN if a is not finite.
template <typename T>
__device__ __forceinline__ std::uint32_t add_unless_finite(std::uint32_t a, std::uint32_t sum) {
  if constexpr (std::is_same_v<T, half_t>) {
    asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(a), "r"(0));
  } else {
    asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(a), "r"(0));
  }
  return sum;
}

#ifndef GPT
#define GPT 1
#endif
#ifdef PROBE
__device__ unsigned probe[2][128][8];
#define STAMP(i) if (threadIdx.x % 128 == 0 && blockIdx.x == 17 && probe_item < 128) probe[group][probe_item][i] = clock()
#else
#define STAMP(i)
#endif
#ifdef NOLOOP
#define TURN_UNROLL _Pragma("unroll")
#else
#define TURN_UNROLL _Pragma("unroll 1")
#endif

// Two columns of a group of positions: [column][2 * filter + position].
template <typename T, int turn>
__device__ __forceinline__ void combine(const Sums& sum, const float (&received)[4], float first_own, float first_other,
                                        float second_own, Outputs<T>& value) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float kept = sum[0][4 * turn + i];
    value[0][i] = fmaf(kept, first_own, fmaf(received[i], first_other, sum[2][4 * turn + i]));
    value[1][i] = fmaf(kept, second_own, value[1][i]);
  }
}

// Where the values of 8 positions and 16 filters lie that a lane receives, and where it gives its own.
template <typename T>
__device__ __forceinline__ std::uint32_t given_to(Shared<T>& shared, int group, int warp, int lane) {
  if constexpr (has_lines<T>) {
    // Where the outputs will lie: column lane / 16, filters 8 (lane / 8 % 2), position lane % 8.
    return shared_address(shared.lines[own_column(group, lane / 16)]) + lane % 8 * line_bytes +
           ((2 * warp + lane / 8 % 2) ^ lane % 8) * 16;
  } else {
    return shared_address(&shared.given[group][0][warp * 32 + lane]);
  }
}

// visit(element of y, column, i) for the outputs that exist of a position and filters.
template <typename T, typename Visitor>
__device__ __forceinline__ void for_columns(const Params<T>& params, const Item& item, int group, int number, int k,
                                            const Visitor& visit) {
  const int row = number * 147 >> 10, tile = number - row * tile_columns;  // number / 7
  static_assert(tile_columns == 7 && products <= 104);
  if (item.p0 + row >= params.p || row >= tile_rows || k >= params.k) return;
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    const int q = item.q0 + tile * tile_outputs + own_column(group, which);
    if (q >= params.q) continue;
    visit(item.n * params.y_image + (item.p0 + row) * params.y_row + q * params.y_column + k, which);
  }
}

// Returns NaN if a sum of an output is not finite. A V that is not finite spoils every filter, so half of them are
// looked at. release: when sum[2] is finished.
template <typename T, typename Release>
__device__ __forceinline__ float finish_fragments(const Params<T>& params, const LineMaps& maps, Shared<T>& shared,
                                                  Sums& sum, unsigned number, int filter_block, int item_exponent, int group,
                                                  const Release& release, int probe_item) {
  const int thread = threadIdx.x % 128, lane = thread % 32, warp = __shfl_sync(~0u, thread / 32, 0);
  const std::uint32_t own = given_to(shared, group, warp, lane), other = given_to(shared, 1 - group, warp, lane);
  constexpr int group_bytes = has_lines<T> ? 8 * line_bytes : 128 * 16;
  const float sign = group == 0 ? 1.0f : -1.0f;
  using Transform = winograd::Transform<4>;
  const float first_own = group == 0 ? 1.0f : 2.0f * Transform::b, first_other = group == 0 ? 1.0f : 0.5f * Transform::a;
  const float second_own = group == 0 ? 0.5f : Transform::b, second_other = group == 0 ? 2.0f : Transform::a;
  if (has_lines<T> && lane == 0 && warp < 2) hopper::wait_for_reading<0>();  // by the copies of the item before
  synchronise<consumer_barrier, consumer_threads>();
  STAMP(1);
#pragma unroll
  for (int j = 0; j < position_groups; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float &kept = sum[0][4 * j + i], &given = sum[1][4 * j + i];
      const float minus = fmaf(given, -sign, kept);
      kept = fmaf(given, sign, kept);
      given = minus;
    }
    hopper::store_shared(other + j * group_bytes, &sum[1][4 * j]);
  }
  STAMP(2);
  const FilterTerms terms(params, filter_block * filter_tile + filter_of_row<T>(warp * 16 + lane / 4));
  release();
  hopper::synchronise(pair_barrier + warp, 64);
  STAMP(3);
  const FilterScales filters(terms, item_exponent);
  float bad = 0.0f;
  constexpr int turns = (position_groups + GPT - 1) / GPT;
  const auto finish = [&](Outputs<T>& value, int j) {
    // Positions behind the last row are sums of whatever shared memory held.
    if (j < position_groups - 1 || lane % 4 == 0) bad = fmaf(value[0][1], 0.0f, fmaf(value[0][0], 0.0f, bad));
    if (__builtin_expect(filters.two_factors, 0)) {
#pragma unroll
      for (int i = 0; i < 8; ++i) value[i / 4][i % 4] *= filters.second_scale[i % 4 / 2];
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float& v = value[i / 4][i % 4];
      v = fmaf(v, filters.scale[i % 4 / 2], filters.bias[i % 4 / 2]);
    }
  };
  Item item;
  const auto find = [&] {
    item = find_item<tile_rows, tile_width>(params, number);
    item.filter_block = filter_block;
  };
  const int warp_filter = filter_block * filter_tile + warp * 16;
  const auto add_residual = [&](Outputs<T>& value, int j) {
    const T* residual = params.epilogue.residual;
    if (has_lines<T>) find();
    int lane;  // read here, so that nothing that follows from it is kept in registers meanwhile
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    if constexpr (has_lines<T>) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        std::uint32_t others[2] = {};
        for_columns(params, item, group, 8 * j + lane / 4, warp_filter + 8 * b + lane % 4 * 2, [&](std::int64_t index, int which) {
          others[which] = *reinterpret_cast<const std::uint32_t*>(residual + index);
        });
#pragma unroll
        for (int which = 0; which < 2; ++which) {
          const float2 two = halves_as_floats<T>(hopper::transpose(others[which]));
          value[which][2 * b] += two.x, value[which][2 * b + 1] += two.y;
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        for_columns(params, item, group, 8 * j + lane % 4 * 2 + i, warp_filter + lane / 4 * 2, [&](std::int64_t index, int which) {
          const float2 two = *reinterpret_cast<const float2*>(residual + index);
          value[which][i] += two.x, value[which][2 + i] += two.y;
        });
      }
    }
  };
  const auto store = [&](Outputs<T>& value, int j) {
    if constexpr (has_lines<T>) {
      std::uint32_t halves[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) halves[i] = pack_halves<T>(value[i / 2][i % 2 * 2], value[i / 2][i % 2 * 2 + 1]);
      hopper::store_transposed(own + j * group_bytes, halves);
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        for_columns(params, item, group, 8 * j + lane % 4 * 2 + i, warp_filter + lane / 4 * 2, [&](std::int64_t index, int which) {
          *reinterpret_cast<float2*>(params.y + index) = make_float2(value[which][i], value[which][2 + i]);
        });
      }
    }
  };
#ifndef AHEAD
#define AHEAD 3
#endif
#ifndef REPS
#define REPS 1
#endif
  const ActivationFunction& activation = params.epilogue.activate;
  if constexpr (has_lines<T>) {
    if (__builtin_expect(!filters.two_factors && params.epilogue.residual == nullptr && !activation.is_silu && activation.cap == INFINITY && (activation.negative_slope == 1.0f || activation.negative_slope == 0.0f), 1)) {
      constexpr std::uint32_t least = std::is_same_v<T, half_t> ? 0xfc00fc00 : 0xff80ff80;  // -infinity
      const std::uint32_t floor = activation.negative_slope == 0.0f ? 0u : least;
      std::uint32_t bads = 0;
#pragma unroll 1
      for (int rep = 0; rep < REPS; ++rep) {
      if (REPS > 1 && rep == REPS - 1) { STAMP(3); }
#ifdef SWAP
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
#define FIRST_GROUP(h) ((h) * 7)
#define LAST_GROUP(h) ((h) == 0 ? 7 : position_groups)
#else
#define FIRST_GROUP(h) 0
#define LAST_GROUP(h) position_groups
#endif
      const auto run = [&]<int h>() {
#pragma unroll
        for (int j = FIRST_GROUP(h); j < FIRST_GROUP(h) + AHEAD; ++j) hopper::load_shared(&sum[1][4 * j], own + j * group_bytes);
#pragma unroll
        for (int j = FIRST_GROUP(h); j < LAST_GROUP(h); ++j) {
          if (j + AHEAD < LAST_GROUP(h)) hopper::load_shared(&sum[1][4 * (j + AHEAD)], own + (j + AHEAD) * group_bytes);
          std::uint32_t halves[4];
          float value[2][4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int b = i / 2;
            const float kept = sum[0][4 * j + i], received = sum[1][4 * j + i];
            const float first = fmaf(kept, first_own, fmaf(received, first_other, sum[2][4 * j + i]));
            const float second = fmaf(kept, second_own, received * second_other);
            value[0][i] = fmaf(first, filters.scale[b], filters.bias[b]);
            value[1][i] = fmaf(second, filters.scale[b], filters.bias[b]);
          }
#pragma unroll
          for (int i = 0; i < 4; ++i) halves[i] = pack_halves<T>(value[i / 2][i % 2 * 2], value[i / 2][i % 2 * 2 + 1]);
          if (j < position_groups - 1 || lane % 4 == 0) bads = add_unless_finite<T>(halves[0], bads);
#pragma unroll
          for (int i = 0; i < 4; ++i) halves[i] = most_keeping_nan<T>(halves[i], floor);
          hopper::store_transposed(own + j * group_bytes, halves);
        }
      };
#ifdef SWAP
      if (half == group) run.template operator()<0>(); else run.template operator()<1>();
      }
#else
      run.template operator()<0>();
#endif
      }
      if (bads != 0) bad = 1.0f;
      goto done;
    }
  }
  if (!has_lines<T>) find();
TURN_UNROLL
  for (int turn = 0; turn < turns; ++turn) {
    float received[GPT][4];
    Outputs<T> value[GPT];
#pragma unroll
    for (int h = 0; h < GPT; ++h) {
      hopper::load_shared(received[h], own + min(turn * GPT + h, position_groups - 1) * group_bytes);
    }
#pragma unroll
    for (int h = 0; h < GPT; ++h) {
#pragma unroll
      for (int i = 0; i < 4; ++i) value[h][1][i] = received[h][i] * second_other;
    }
    switch (turn) {  // a jump to the registers of the turn
#define FASTCONV_TURN(t)                                                                      \
  case t:                                                                                     \
    if constexpr (t * GPT < position_groups) combine<T, t * GPT>(sum, received[0], first_own, first_other, second_own, value[0]); \
    if constexpr (GPT > 1 && t * GPT + 1 < position_groups) combine<T, t * GPT + 1>(sum, received[GPT > 1], first_own, first_other, second_own, value[GPT > 1]); \
    break;
      FASTCONV_TURN(0)
      FASTCONV_TURN(1)
      FASTCONV_TURN(2)
      FASTCONV_TURN(3)
      FASTCONV_TURN(4)
      FASTCONV_TURN(5)
      FASTCONV_TURN(6)
#if GPT == 1
      FASTCONV_TURN(7)
      FASTCONV_TURN(8)
      FASTCONV_TURN(9)
      FASTCONV_TURN(10)
      FASTCONV_TURN(11)
      FASTCONV_TURN(12)
#endif
#undef FASTCONV_TURN
    }
    static_assert(position_groups == 13 && positions == 98);
#pragma unroll
    for (int h = 0; h < GPT; ++h) finish(value[h], turn * GPT + h);
    if (__builtin_expect(params.epilogue.residual != nullptr, 0)) {
#pragma unroll
      for (int h = 0; h < GPT; ++h) {
        if (GPT == 1 || h == 0 || turn < turns - 1) add_residual(value[h], turn * GPT + h);
      }
    }
    if (__builtin_expect(activation.is_silu || activation.negative_slope != 1.0f, 0)) {
#pragma unroll 1
      for (int h = 0; h < GPT; ++h) {
        if (h == 0) activate<T>(activation, value[0]); else activate<T>(activation, value[GPT > 1]);
      }
    }
#pragma unroll
    for (int h = 0; h < GPT; ++h) {
      if (GPT == 1 || h == 0 || turn < turns - 1) store(value[h], turn * GPT + h);
    }
  }
done:
  STAMP(4);
  if constexpr (has_lines<T>) {
    hopper::fence_copies();
    hopper::synchronise(group_barrier + group, 128);
    STAMP(5);
#ifndef NOSTORE
    if (lane == 0 && warp < 2) {
      find();
      const int column = own_column(group, warp);
      if (column < params.q) {
        hopper::store_box(maps.column[column], item.filter_block * filter_tile, item.q0 / tile_outputs, item.p0, item.n,
                          shared_address(shared.lines[column]));
      }
      hopper::commit_stores();
    }
#endif
  } else {
    STAMP(5);
  }
  STAMP(6);
  return bad;
}

}  // namespace fastconv::algos::winograd_fused::single
