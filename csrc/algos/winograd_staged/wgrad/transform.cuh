// The weight gradient's transforms: V = B^T d B of the input, W = A dy A^T of the output's gradient, each scaled by its
// image and split into two halves, and at the end dW = G^T (sum of V W) G.
#pragma once

#include <type_traits>

#include "algos/winograd_staged/transforms/tile_math.cuh"
#include "algos/winograd_staged/wgrad/plan.h"
#include "core/fast_divide.h"
#include "device/dependent_launch.cuh"
#include "device/image_scale.cuh"
#include "device/split_fp16.cuh"

namespace fastconv::algos::winograd_staged::wgrad {

// The largest |x| and |dy| are brought into [2^e, 2^(e+1)), so that |V| and |W| stay below 65504; a guess leaves room.
constexpr int exact_x = 10, exact_grad = 9, guess_room = 5;
constexpr float gain_x = winograd::Transform<4>::input_gain, gain_grad = winograd::Transform<4>::output_gain;
static_assert(gain_x * gain_x * (2 << exact_x) < 65504.0f && gain_grad * gain_grad * (2 << exact_grad) < 65504.0f);

struct TileGrid {
  int tiles, stages;  // of the batch
  FastDivide by_tiles_q, by_tiles_p, by_image;

  // A stage is a group of the scales.
  __device__ __forceinline__ PairScales::Group group(const PairScales& scales, int stage, bool maxima_known) const {
    const int first = stage * stage_tiles, last = min(first + stage_tiles, tiles) - 1;
    return scales.group(static_cast<int>(by_image.quotient(first)), static_cast<int>(by_image.quotient(last)),
                        maxima_known);
  }
};

struct Operand {
  const float* source;  // [N, H, W, C]: x, or dy [N, P, Q, K]
  half_t* target;       // V, or W
  int h, w, channels, pad_h, pad_w;
  bool pairs;  // C is even, so that two channels are one load
  FastDivide by_blocks;
  std::int64_t target_pitch;  // halves of a point
};

// One dimension of a transform: the rows of `tile` become those of `result`.
template <bool of_x, typename Value>
__device__ __forceinline__ void transform_line(const Value (&line)[of_x ? 6 : 4], Value (&result)[6]) {
  if constexpr (of_x) {
    winograd::Transform<4>::input(line, result);
  } else {
    winograd::Transform<4>::output_transposed(line, result);
  }
}

// A warp takes a tile and 64 channels, a lane two of them. group: of the tile's stage, if this is a repetition.
template <bool of_x, bool retry>
__device__ __forceinline__ void transform_tile(const TileGrid& grid, const Operand& operand, const PairScales& scales,
                                               PairScales::Group group, unsigned tile, unsigned block) {
  constexpr int size = of_x ? alpha : m;
  const unsigned lane = threadIdx.x % 32;
  unsigned tp = tile;
  const unsigned tq = grid.by_tiles_q.divmod(tp);
  unsigned image = tp;
  tp = grid.by_tiles_p.divmod(image);
  const bool exists = tile < static_cast<unsigned>(grid.tiles);
  const int h0 = static_cast<int>(tp) * m - operand.pad_h, w0 = static_cast<int>(tq) * m - operand.pad_w;
  const int c = static_cast<int>(block * block_channels + 2 * lane);
  const float* corner =
      operand.source + ((static_cast<std::int64_t>(image) * operand.h + h0) * operand.w + w0) * operand.channels + c;

  Pack<2> d[size][size];
#pragma unroll
  for (int i = 0; i < size; ++i) {
    const bool inside =
        exists && c < operand.channels && static_cast<unsigned>(h0 + i) < static_cast<unsigned>(operand.h);
#pragma unroll
    for (int j = 0; j < size; ++j) {
      d[i][j] = Pack<2>{};
      if (inside && static_cast<unsigned>(w0 + j) < static_cast<unsigned>(operand.w)) {
        const float* pixel = corner + (i * operand.w + j) * operand.channels;
        if (operand.pairs) {
          d[i][j] = load_pack<2>(pixel);
        } else {
          d[i][j].e[0] = pixel[0];
          d[i][j].e[1] = c + 1 < operand.channels ? pixel[1] : 0.0f;
        }
      }
    }
  }
  if constexpr (!retry) wait_for_predecessor();
  if constexpr (!retry) group = grid.group(scales, static_cast<int>(tile) / stage_tiles, false);
  float scale = 1.0f;
  if (exists) scale = ldexpf(1.0f, scales.exponent(of_x, static_cast<int>(image), group));
  if constexpr (!retry) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < size; ++i) {
#pragma unroll
      for (int j = 0; j < size; ++j) {
        largest = larger_finite(larger_finite(largest, d[i][j].e[0]), d[i][j].e[1]);
      }
    }
    const int bits = __reduce_max_sync(0xffffffffu, __float_as_int(largest));
    if (lane == 0 && exists) {
      int* known = &(of_x ? scales.first : scales.second)[image].largest;
      if (bits > *reinterpret_cast<volatile int*>(known)) atomicMax(known, bits);
    }
  }
#pragma unroll
  for (int i = 0; i < size; ++i) {
#pragma unroll
    for (int j = 0; j < size; ++j) d[i][j] = d[i][j] * scale;
  }

  Pack<2> columns[alpha][size];
#pragma unroll
  for (int j = 0; j < size; ++j) {
    Pack<2> line[size], result[alpha];
#pragma unroll
    for (int i = 0; i < size; ++i) line[i] = d[i][j];
    transform_line<of_x>(line, result);
#pragma unroll
    for (int i = 0; i < alpha; ++i) columns[i][j] = result[i];
  }
  const unsigned stage = tile / stage_tiles, row = tile % stage_tiles;
  auto* target = reinterpret_cast<char*>(operand.target) +
                 (static_cast<std::int64_t>(stage) * operand.by_blocks.divisor() + block) * block_bytes +
                 row * row_bytes + ((lane / 4 ^ row % 8) * 16 + lane % 4 * 4);
  const std::int64_t pitch = 2 * operand.target_pitch;
#pragma unroll
  for (int i = 0; i < alpha; ++i) {
    Pack<2> result[alpha];
    transform_line<of_x>(columns[i], result);
#pragma unroll
    for (int j = 0; j < alpha; ++j, target += pitch) {
      const HalfLimbs split = split_fp16(result[j].e[0], result[j].e[1]);
      *reinterpret_cast<__half2*>(target) = split.high;
      *reinterpret_cast<__half2*>(target + limb_bytes) = split.low;
    }
  }
}

constexpr int transform_threads = 64;

// The blocks below `x_blocks` take x, the others dy.
__global__ void __launch_bounds__(transform_threads)
    transform(const __grid_constant__ TileGrid grid, const __grid_constant__ Operand x,
              const __grid_constant__ Operand grad, const __grid_constant__ PairScales scales, unsigned x_blocks) {
  launch_dependents();
  const bool of_x = blockIdx.x < x_blocks;
  const unsigned row = ((of_x ? blockIdx.x : blockIdx.x - x_blocks) * transform_threads + threadIdx.x) / 32;
  unsigned stage = row / stage_tiles;
  const unsigned block = (of_x ? x : grad).by_blocks.divmod(stage);
  const unsigned tile = stage * stage_tiles + row % stage_tiles;
  if (of_x) {
    transform_tile<true, false>(grid, x, scales, {}, tile, block);
  } else {
    transform_tile<false, false>(grid, grad, scales, {}, tile, block);
  }
}

constexpr int retry_threads = 256;

// What the products need to know of the scales; and the stages again in which a guess did not fit.
__global__ void __launch_bounds__(retry_threads)
    retry_transforms(const __grid_constant__ TileGrid grid, const __grid_constant__ Operand x,
                     const __grid_constant__ Operand grad, const __grid_constant__ PairScales scales,
                     int* sums) {  // [stages], and the floor of all
  wait_for_predecessor();
  launch_dependents();
  constexpr int warps = retry_threads / 32;
  __shared__ bool again[warps];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (blockIdx.x == 0 && warp == 0) {
    const int floor = scales.floor();
    if (threadIdx.x == 0) sums[grid.stages] = floor;
  }
  for (int first = static_cast<int>(blockIdx.x) * warps; first < grid.stages; first += gridDim.x * warps) {
    if (first + warp < grid.stages) {
      const PairScales::Group group = grid.group(scales, first + warp, true);
      if (threadIdx.x % 32 == 0) sums[first + warp] = group.sum, again[warp] = group.exact;
    }
    __syncthreads();
#pragma unroll 1
    for (int stage = first; stage < min(first + warps, grid.stages); ++stage) {
      if (!again[stage - first]) continue;
      const PairScales::Group group = grid.group(scales, stage, true);
      const auto retry = [&](auto of_x, const Operand& operand) {
#pragma unroll 1
        for (unsigned row = warp; row < stage_tiles * operand.by_blocks.divisor(); row += warps) {
          unsigned tile = row;
          const unsigned block = operand.by_blocks.divmod(tile);
          transform_tile<of_x(), true>(grid, operand, scales, group, stage * stage_tiles + tile, block);
        }
      };
      retry(std::true_type{}, x), retry(std::false_type{}, grad);
    }
    __syncthreads();
  }
}

struct Output {
  const float* partial;  // [splits][36][rows][pitch]
  float* dw;
  int split_k, rows, columns, pitch;
  std::int64_t stride_row, stride_column, stride_tap;
  const int* floor;  // the exponent of the sums' scale
};

// Sums the splits in order. A thread takes a row, a column and six points, of which it makes three; then three
// threads make nine weights of what the six of a row and column have.
constexpr int output_columns = 32;
__global__ void __launch_bounds__(output_columns* alpha)
    transform_output(const __grid_constant__ Output output, FastDivide by_columns) {
  wait_for_predecessor();
  __shared__ float lines[alpha][3][output_columns];
  unsigned row = blockIdx.x * output_columns + threadIdx.x;
  const unsigned column = by_columns.divmod(row);
  const bool exists = row < static_cast<unsigned>(output.rows);
  if (exists) {
    const std::int64_t point = static_cast<std::int64_t>(output.rows) * output.pitch;
    const float* source = output.partial + static_cast<int>(threadIdx.y) * alpha * point +
                          static_cast<std::int64_t>(row) * output.pitch + column;
    float u[alpha] = {}, result[3];
#pragma unroll 4
    for (int split = 0; split < output.split_k; ++split, source += points * point) {
#pragma unroll
      for (int j = 0; j < alpha; ++j) u[j] += __ldcg(source + j * point);
    }
    winograd::Transform<m>::filter_transposed(u, result);
#pragma unroll
    for (int j = 0; j < 3; ++j) lines[threadIdx.y][j][threadIdx.x] = result[j];
  }
  __syncthreads();
  if (!exists || threadIdx.y >= 3) return;
  const Undo undo(*output.floor);
  float u[alpha], result[3];
#pragma unroll
  for (int i = 0; i < alpha; ++i) u[i] = lines[i][threadIdx.y][threadIdx.x];
  winograd::Transform<m>::filter_transposed(u, result);
  float* target = output.dw + row * output.stride_row + column * output.stride_column;
#pragma unroll
  for (int i = 0; i < 3; ++i) target[(3 * i + static_cast<int>(threadIdx.y)) * output.stride_tap] = undo(result[i]);
}

}  // namespace fastconv::algos::winograd_staged::wgrad
