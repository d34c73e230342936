// What the transform kernels share: the tiles of a chunk, short vectors of channels, power-of-two scales.
#pragma once

#include <bit>
#include <cstdint>

#include "algos/winograd_staged/plan.h"
#include "core/fast_divide.h"
#include "device/indexing.h"
#include "device/numeric.h"
#include "device/power_of_two.h"
#include "winograd/matrices.h"

namespace fastconv::algos::winograd_staged {

// A chunk of tiles of one problem. Tile numbers fit 31 bits (supports() sees to it), element offsets need 64.
struct Chunk {
  int c, h, w, k;
  int p, q;  // of y: behind the pool, if there is one
  int pad_h, pad_w;
  int tiles_p, tiles_q;
  FastDivide by_tiles_p, by_tiles_q, by_groups, by_filter_blocks;
  int c_pad, k_pad, depth;
  int groups, group_channels;
  int first_tile, tiles;  // this chunk: [first_tile, first_tile + tiles)
  Strides4 in, out;
};

struct TilePosition {
  int n, tp, tq;
};

__device__ __forceinline__ TilePosition tile_position(const Chunk& chunk, int tile_in_chunk) {
  unsigned rest = static_cast<unsigned>(chunk.first_tile + tile_in_chunk);
  const int tq = static_cast<int>(chunk.by_tiles_q.divmod(rest)), tp = static_cast<int>(chunk.by_tiles_p.divmod(rest));
  return {static_cast<int>(rest), tp, tq};
}

// The type of V's and U's elements.
template <Mode mode>
struct Operand {
  using type = half_t;
};
template <>
struct Operand<Mode::fp32> {
  using type = float;
};
template <>
struct Operand<Mode::bf16> {
  using type = bfloat16_t;
};

// `count` neighbouring channels, computed in float.
template <int count>
struct Pack {
  float e[count];

  friend __device__ __forceinline__ Pack operator+(const Pack& a, const Pack& b) {
    Pack c;
#pragma unroll
    for (int i = 0; i < count; ++i) c.e[i] = a.e[i] + b.e[i];
    return c;
  }
  friend __device__ __forceinline__ Pack operator-(const Pack& a, const Pack& b) {
    Pack c;
#pragma unroll
    for (int i = 0; i < count; ++i) c.e[i] = a.e[i] - b.e[i];
    return c;
  }
  friend __device__ __forceinline__ Pack operator*(const Pack& a, float b) {
    Pack c;
#pragma unroll
    for (int i = 0; i < count; ++i) c.e[i] = a.e[i] * b;
    return c;
  }
};

// `count` neighbouring elements in memory, moved by one instruction.
template <typename T, int count>
struct alignas(sizeof(T) * count) Aligned {
  T e[count];
};

template <int count, typename T>
__device__ __forceinline__ Pack<count> load_pack(const T* source) {
  const auto raw = *reinterpret_cast<const Aligned<T, count>*>(source);
  Pack<count> pack;
#pragma unroll
  for (int i = 0; i < count; ++i) pack.e[i] = to_float(raw.e[i]);
  return pack;
}

template <int count, typename T>
__device__ __forceinline__ void store_pack(T* target, const Pack<count>& pack) {
  Aligned<T, count> raw;
#pragma unroll
  for (int i = 0; i < count; ++i) raw.e[i] = from_float<T>(pack.e[i]);
  *reinterpret_cast<Aligned<T, count>*>(target) = raw;
}
// Two halves: one instruction to round them.
__device__ __forceinline__ void store_pack(half_t* target, const Pack<2>& pack) {
  *reinterpret_cast<half2*>(target) = __floats2half2_rn(pack.e[0], pack.e[1]);
}

// What a half cannot hold of it.
template <int count>
__device__ __forceinline__ Pack<count> low_limb(const Pack<count>& value) {
  Pack<count> low;
  if constexpr (count == 2) {
    const float2 high = __half22float2(__floats2half2_rn(value.e[0], value.e[1]));
    low = {{value.e[0] - high.x, value.e[1] - high.y}};
  } else {
#pragma unroll
    for (int i = 0; i < count; ++i) low.e[i] = value.e[i] - to_float(from_float<half_t>(value.e[i]));
  }
  return low;
}

// Writes transformed values to a row of V or U (`row` points at the first limb of a channel of that row); in split mode
// as plan.h says: limbs lie so many elements apart, and for the library hi is repeated. The small products lo*hi and
// hi*lo come first in the reduction: the tensor cores truncate their accumulator at every step, and while it is small
// that costs nothing (docs/concepts/numerics.md).
template <Mode mode, bool is_filter, int count>
__device__ __forceinline__ void store_operand(typename Operand<mode>::type* row, int apart, bool doubles_high,
                                              const Pack<count>& value) {
  if constexpr (mode != Mode::split) {
    store_pack(row, value);
  } else {
    const Pack<count> low = low_limb(value);
    const bool high_first = is_filter && doubles_high;
    store_pack(row + (high_first ? apart : 0), low);
    store_pack(row + (high_first ? 0 : apart), value);
    if (doubles_high) store_pack(row + 2 * apart, value);
  }
}

// B^T d B (or G g G^T), in place: columns, then rows.
template <int m, typename Value>
__device__ __forceinline__ void transform_input_tile(Value (&tile)[m + 2][m + 2]) {
  constexpr int alpha = m + 2;
#pragma unroll
  for (int j = 0; j < alpha; ++j) {
    Value column[alpha], result[alpha];
#pragma unroll
    for (int i = 0; i < alpha; ++i) column[i] = tile[i][j];
    winograd::Transform<m>::input(column, result);
#pragma unroll
    for (int i = 0; i < alpha; ++i) tile[i][j] = result[i];
  }
#pragma unroll
  for (int i = 0; i < alpha; ++i) {
    Value result[alpha];
    winograd::Transform<m>::input(tile[i], result);
#pragma unroll
    for (int j = 0; j < alpha; ++j) tile[i][j] = result[j];
  }
}

// ---- Scales (docs/concepts/numerics.md): operands are brought near the top of float16's range by exact powers of two.

// Exponent to which the largest |d| of a raw tile is brought, the largest with |V| <= gain^2 * 2^(target + 1) <= 65504:
// 12 of F(2x2), 10 of F(4x4).
template <int m>
constexpr int input_target_exponent =
    std::bit_width(
        static_cast<unsigned>(65504.0f / (winograd::Transform<m>::input_gain * winograd::Transform<m>::input_gain))) -
    2;
constexpr int filter_target_exponent = 13;

// Maximum over `lanes` neighbouring threads, a power of two, or of a warp if there are more.
__device__ __forceinline__ float lanes_max(float value, int lanes) {
  for (int offset = min(lanes, 32) / 2; offset > 0; offset /= 2) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, offset));
  }
  return value;
}

// Maximum over `lanes` threads of one row of the block, given those of its warps (lanes_max): a power of two up to 32,
// or a multiple of 32; then `scratch` holds a value per warp, and every thread of the block must take part.
__device__ __forceinline__ float row_max(float value, int lanes, float* scratch) {
  if (lanes <= 32) return value;
  const int warps = lanes / 32;
  float* row = scratch + threadIdx.y * warps;
  if (threadIdx.x % 32 == 0) row[threadIdx.x / 32] = value;
  __syncthreads();
  for (int i = 0; i < warps; ++i) value = fmaxf(value, row[i]);
  return value;
}

}  // namespace fastconv::algos::winograd_staged
