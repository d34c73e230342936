// ITrans: V = B^T d B of a tile and 64 channels, scaled by a power of two, in one half or split into two.
//
// The raw patch [6][6][64] comes through shared memory into the registers of a warp: a lane has two channels and needs
// nobody else's.
#pragma once

#include "algos/winograd_megakernel/shared/values.cuh"
#include "algos/winograd_megakernel/wgmma/params.cuh"
#include "algos/winograd_megakernel/wgmma/stream_task.h"
#include "device/power_of_two.h"
#include "winograd/matrices.h"

namespace fastconv::algos::winograd_megakernel::wgmma {

// The raw patch of a tile: its image, and the input's row and column at its first corner (may lie outside).
struct TileCorner {
  int n, h, w;
};
template <typename T>
__device__ __forceinline__ TileCorner corner_of(const Params<T>& params, int tile) {
  unsigned rest = static_cast<unsigned>(tile);
  const int tq = static_cast<int>(params.by_tiles_q.divmod(rest)),
            tp = static_cast<int>(params.by_tiles_p.divmod(rest));
  return {static_cast<int>(rest), 4 * tp - params.pad_h, 4 * tq - params.pad_w};
}

// x or M, [36][64], from the lane's first value.
template <typename E>
__device__ __forceinline__ Values load_values(const E* patch, int position) {
  return load_pair(patch + position * chunk_channels);
}

// Brings the patch by ordinary loads, times `factor`: where no tensor copy can, or its values are too large.
template <typename T>
__device__ __forceinline__ void load_patch(const Params<T>& params, const StreamTile& work_tile, T* patch,
                                           float factor) {
  const int c = work_tile.channel + 2 * static_cast<int>(threadIdx.x % 32);
  const TileCorner corner = corner_of(params, work_tile.tile);
#pragma unroll 1
  for (int position = 0; position < 36; ++position) {
    const int h = corner.h + position / 6, w = corner.w + position % 6;
    Values values{};
    if (static_cast<unsigned>(h) < static_cast<unsigned>(params.h) &&
        static_cast<unsigned>(w) < static_cast<unsigned>(params.w)) {
      const T* x =
          params.x + ((static_cast<std::int64_t>(corner.n) * params.h + h) * params.w + w) * params.x_pixel + c;
      if (c < params.c) values.e[0] = to_float(x[0]) * factor;
      if (c + 1 < params.c) values.e[1] = to_float(x[1]) * factor;
    }
    store_pair(patch + position * chunk_channels, values);
  }
}

// B^T of the patch's columns. Returns the largest finite |d|.
template <typename T>
__device__ __forceinline__ float transform_columns(const T* patch, Values (&values)[6][6]) {
  float largest = 0.0f;
#pragma unroll
  for (int j = 0; j < 6; ++j) {
    Values column[6], result[6];
#pragma unroll
    for (int i = 0; i < 6; ++i) {
      column[i] = load_values(patch, i * 6 + j);
      largest = larger_finite(larger_finite(largest, column[i].e[0]), column[i].e[1]);
    }
    winograd::Transform<4>::input(column, result);
#pragma unroll
    for (int i = 0; i < 6; ++i) values[i][j] = result[i];
  }
  // Bits of floats that are not negative are in the order of the floats.
  return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(largest)));
}

// A warp. patch: of its channels, [36][64], from the lane's first, loaded here if no copy could; not needed afterwards.
// Returns the tile's scale.
template <typename T>
__device__ __forceinline__ float begin_input(const Params<T>& params, const StreamTile& work_tile, T* patch,
                                             Values (&values)[6][6]) {
  int prescale = 0;
  bool loads = !params.use_tma;
  float largest;
#pragma unroll 1
  while (true) {
    if (loads) {
      load_patch(params, work_tile, patch, power_of_two(prescale));
      hopper::fence_copies();  // the next patch comes by a copy
    }
    largest = transform_columns(patch, values);
    if (!(largest > 0x1p120f) || prescale != 0) break;
    prescale = -8, loads = true;  // the transform may have overflown
  }
  const int exponent = scale_exponent(largest, input_target_exponent);
  const int fitting = !is_split<T> && largest == 0.0f ? zero_exponent : exponent + prescale;
  if (threadIdx.x % 32 == 0) {
    params.tile_exponents[static_cast<std::int64_t>(work_tile.tile) * params.chunks +
                          work_tile.channel / chunk_channels] = fitting;
    if constexpr (!is_split<T>) {
      if (v_exponent(fitting) != common_exponent) params.own_scales[work_tile.tile / tile_m] = 1;
    }
  }
  return power_of_two(is_split<T> ? exponent : v_exponent(fitting) - prescale);
}

template <typename T>
__device__ __forceinline__ void finish_input(const Params<T>& params, const StreamTile& work_tile, float scale,
                                             const Values (&values)[6][6]) {
  const int lane = thread<T>() % 32, chunk = work_tile.channel / chunk_channels;
  // A lane's two channels: a stage of the chunk, row work_tile.row, 4 bytes of the lo half and 4 of the hi half.
  constexpr int lanes = form<T>.stage_channels() / 2;
  const int piece = hopper::swizzle_128(work_tile.row, lane % lanes / 4);
  char* low_target = params.v + work_tile.place * params.v_place_bytes() +
                     static_cast<std::int64_t>(form<T>.limbs * chunk + lane / lanes) * operand_bytes +
                     work_tile.row * 128 + lane % 4 * 4 + piece * 16;
  const std::int64_t to_high = (piece & 4) != 0 ? -64 : 64;
  const int point = params.stages() * operand_bytes;
#pragma unroll
  for (int i = 0; i < 6; ++i) {
    Values row[6], result[6];
#pragma unroll
    for (int j = 0; j < 6; ++j) row[j] = values[i][j] * scale;
    winograd::Transform<4>::input(row, result);
#pragma unroll
    for (int j = 0; j < 6; ++j) {
      const half2 high = __floats2half2_rn(result[j].e[0], result[j].e[1]);
      if constexpr (is_split<T>) {
        const float2 back = __half22float2(high);
        const half2 low = __floats2half2_rn(result[j].e[0] - back.x, result[j].e[1] - back.y);
        *reinterpret_cast<half2*>(low_target) = low;
        *reinterpret_cast<half2*>(low_target + to_high) = high;
      } else {
        *reinterpret_cast<half2*>(low_target) = high;
      }
      low_target += point;
    }
  }
}

}  // namespace fastconv::algos::winograd_megakernel::wgmma
