// ITrans: V = B^T d B of a tile and 64 channels, scaled by a power of two, split into two halves.
//
// The raw patch [6][6][64] lies in shared memory, where it is transformed in place: a lane has two channels and needs
// nobody else's. Loops over columns and rows instead of 72 registers keep the code short: a lone warp on its quarter of
// a multiprocessor waits for every instruction that its small cache has lost (docs/performance.md).
#pragma once

#include "algos/winograd_megakernel/params.cuh"
#include "algos/winograd_megakernel/stream_task.h"
#include "algos/winograd_megakernel/values.cuh"
#include "device/power_of_two.h"
#include "device/winograd_matrices.h"

namespace fastconv::algos::winograd_megakernel {

#ifndef MK_IR
#define MK_IR 2
#endif
constexpr int input_rows = MK_IR;  // of a turn

__device__ __forceinline__ Values load_values(const float* patch, int position) {
  const float2 pair = *reinterpret_cast<const float2*>(patch + position * chunk_channels);
  return {pair.x, pair.y};
}
__device__ __forceinline__ void store_values(float* patch, int position, const Values& values) {
  *reinterpret_cast<float2*>(patch + position * chunk_channels) = make_float2(values.e[0], values.e[1]);
}

// Brings the patch by ordinary loads, times `factor`: where no tensor copy can, or its values are too large.
template <typename T>
__device__ __forceinline__ void load_patch(const Params<T>& params, const StreamItem& item, float* patch,
                                           float factor) {
  const int c = item.channel + 2 * static_cast<int>(threadIdx.x % 32);
  const int h0 = item.p - params.pad_h, w0 = item.q - params.pad_w;
#pragma unroll 1
  for (int position = 0; position < 36; ++position) {
    const int h = h0 + position / 6, w = w0 + position % 6;
    Values values{};
    if (static_cast<unsigned>(h) < static_cast<unsigned>(params.h) &&
        static_cast<unsigned>(w) < static_cast<unsigned>(params.w)) {
      const T* x = params.x + ((static_cast<std::int64_t>(item.n) * params.h + h) * params.w + w) * params.c + c;
      if (c < params.c) values.e[0] = to_float(x[0]) * factor;
      if (c + 1 < params.c) values.e[1] = to_float(x[1]) * factor;
    }
    store_values(patch, position, values);
  }
}

// A tile half transformed, two channels of a lane in registers, which cannot be indexed: so its columns come three by
// three into `right` and move on to `left`, and its rows leave by the top.
template <int rows>
struct HalfTransformed {
  Values left[rows][3], right[rows][3];

  __device__ __forceinline__ void move_left() {
#pragma unroll
    for (int i = 0; i < rows; ++i) {
#pragma unroll
      for (int j = 0; j < 3; ++j) left[i][j] = right[i][j];
    }
  }
  template <int count>
  __device__ __forceinline__ void move_up() {
#pragma unroll
    for (int i = 0; i + count < rows; ++i) {
#pragma unroll
      for (int j = 0; j < 3; ++j) left[i][j] = left[i + count][j], right[i][j] = right[i + count][j];
    }
  }
  __device__ __forceinline__ void get_row(int i, Values (&row)[6]) const {
#pragma unroll
    for (int j = 0; j < 3; ++j) row[j] = left[i][j], row[j + 3] = right[i][j];
  }
};

// B^T of the patch's columns. Returns the largest |d|.
__device__ __forceinline__ float transform_columns(const float* patch, HalfTransformed<6>& half) {
  float largest = 0.0f;
#pragma unroll 1
  for (int turn = 0; turn < 2; ++turn, patch += 3 * chunk_channels) {
    half.move_left();
#pragma unroll
    for (int j = 0; j < 3; ++j) {
      Values column[6], result[6];
#pragma unroll
      for (int i = 0; i < 6; ++i) {
        column[i] = load_values(patch, i * 6 + j);
        largest = fmaxf(largest, fmaxf(fabsf(column[i].e[0]), fabsf(column[i].e[1])));
      }
      winograd::Transform<4>::input(column, result);
#pragma unroll
      for (int i = 0; i < 6; ++i) half.right[i][j] = result[i];
    }
  }
  // Bits of floats that are not negative are in the order of the floats.
  return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(largest)));
}

// A warp. patch: of its channels, [36][64], from the lane's first; release(): it is not needed any more.
template <typename T, typename Release>
__device__ __forceinline__ void transform_input(const Params<T>& params, const StreamItem& item, float* patch,
                                                const Release& release) {
  const int lane = threadIdx.x % 32;
  HalfTransformed<6> half{};
  int prescale = 0;
  float largest;
#pragma unroll 1
  while (true) {
    largest = transform_columns(patch, half);
    if (!(largest > 0x1p120f) || prescale != 0) break;
    prescale = -8;  // the transform may have overflown
    load_patch(params, item, patch, power_of_two(prescale));
    hopper::fence_copies();  // the next patch comes by a copy
  }
  release();
  const int exponent = scale_exponent(largest, input_target_exponent);
  const float scale = power_of_two(exponent);
  const int chunk = item.channel / chunk_channels;
  if (lane == 0) {
    params.tile_exponents[static_cast<std::int64_t>(item.tile) * params.chunks + chunk] = exponent + prescale;
  }
  // A lane's two channels: stage 2 chunk or the next, row item.row, 4 bytes of the lo half and 4 of the hi half.
  char* target = params.v + item.place * params.v_place_bytes() +
                 static_cast<std::int64_t>(2 * chunk + lane / 16) * operand_bytes + item.row * 128 + lane % 4 * 4;
  const int lo_piece = hopper::swizzle_128(item.row, lane % 16 / 4) * 16, hi_piece = lo_piece ^ 64;
  const int frequency = params.chunks * 2 * operand_bytes;
#pragma unroll 1
  for (int turn = 0; turn < 6; turn += input_rows) {
#pragma unroll
    for (int i = 0; i < input_rows; ++i) {
      Values row[6], result[6];
      half.get_row(i, row);
#pragma unroll
      for (int j = 0; j < 6; ++j) row[j] = row[j] * scale;
      winograd::Transform<4>::input(row, result);
#pragma unroll
      for (int j = 0; j < 6; ++j) {
        const half2 hi = __floats2half2_rn(result[j].e[0], result[j].e[1]);
        const float2 back = __half22float2(hi);
        const half2 lo = __floats2half2_rn(result[j].e[0] - back.x, result[j].e[1] - back.y);
        *reinterpret_cast<half2*>(target + lo_piece) = lo;
        *reinterpret_cast<half2*>(target + hi_piece) = hi;
        target += frequency;
      }
    }
    half.template move_up<input_rows>();
  }
}

}  // namespace fastconv::algos::winograd_megakernel
