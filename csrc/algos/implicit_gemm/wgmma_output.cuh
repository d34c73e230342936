// The epilogue of the Hopper kernel: sums from registers, unscaled, to y; or to partial sums, which a second kernel
// adds.
#pragma once

#include "algos/implicit_gemm/wgmma_tile.cuh"
#include "device/power_of_two.h"

namespace fastconv::algos::implicit_gemm::wgmma {

template <typename S>
__device__ __forceinline__ std::int64_t output_index(const Params<typename S::T>& params, const Work& work, int row) {
  unsigned pixel = pixel_of_lane<S>(row);
  const int q = work.q + static_cast<int>(params.by_tile_q.peel(pixel));
  const int p = work.p + static_cast<int>(params.by_tile_p.peel(pixel));
  const int n = work.n + static_cast<int>(pixel);
  if (static_cast<int>(pixel) >= params.tile_n || n >= params.n || p >= params.p || q >= params.q) return -1;
  if (params.flat_nchw) {  // q counts the pixels of all images, and NCHW wants them apart
    unsigned image = static_cast<unsigned>(q);
    const unsigned within = params.by_image.peel(image);
    return image * params.y_image + within;
  }
  return n * params.y_image + p * params.y_row + q * params.y_pixel;
}

// One factor can hold the scales of a pixel and a filter if both exponents are smaller: all but always.
constexpr int moderate_exponent = 64;

template <typename T>
struct alignas(4 * sizeof(T)) Quad {
  T e[4];
};

// Some quads, each of four neighbours in y (or in the partial sums), without scales; index -1: not in y. Everything is
// done for all of them at once: the warps are too few to hide the latency of one after the other.
template <typename T, int count>
__device__ __forceinline__ void store_quads(const Params<T>& params, int split, const std::int64_t (&index)[count],
                                            float (&value)[count][4], const float (&bias)[count][4]) {
  if (params.splits > 1) {
    float* partial = params.partial + split * params.y_numel;
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const Quad<float> quad{value[i][0], value[i][1], value[i][2], value[i][3]};
      if (index[i] >= 0) *reinterpret_cast<Quad<float>*>(partial + index[i]) = quad;
    }
    return;
  }
  const Epilogue<T>& epilogue = params.epilogue;
#pragma unroll
  for (int i = 0; i < count; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) value[i][e] += bias[i][e];
  }
  if (epilogue.residual != nullptr) {
    Quad<T> residual[count];
#pragma unroll
    for (int i = 0; i < count; ++i) {
      residual[i] = *reinterpret_cast<const Quad<T>*>(epilogue.residual + (index[i] >= 0 ? index[i] : 0));
    }
#pragma unroll
    for (int i = 0; i < count; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) value[i][e] += to_float(residual[i].e[e]);
    }
  }
  if (epilogue.activate.is_silu) {
#pragma unroll
    for (int i = 0; i < count; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) value[i][e] = ActivationFunction::silu(value[i][e]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < count; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) value[i][e] = epilogue.activate.piecewise(value[i][e]);
    }
  }
#pragma unroll
  for (int i = 0; i < count; ++i) {
    Quad<T> result;
#pragma unroll
    for (int e = 0; e < 4; ++e) result.e[e] = from_float<T>(value[i][e]);
    if (index[i] >= 0) *reinterpret_cast<Quad<T>*>(params.y + index[i]) = result;
  }
}

// The stage's rows, filters [first_k, first_k + width), by quads of filters: NHWC.
template <typename S, int width>
__device__ __forceinline__ void store_filter_quads(const Params<typename S::T>& params, int split,
                                                   const FilterData<S>& filters, const OutputStage& stage, int first,
                                                   int first_k) {
  constexpr int groups = width / 4, count = width / 8;
  const int lane = threadIdx.x % 32, column = lane % groups * 4, k = first_k + column;
  float factor[4], bias[count][4], value[count][4];
  std::int64_t index[count];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    factor[e] = S::scaled ? power_of_two(-filters.exponent[first + column + e]) : 1.0f;
#pragma unroll
    for (int i = 0; i < count; ++i) bias[i][e] = to_float(filters.bias[first + column + e]);
  }
#pragma unroll
  for (int i = 0; i < count; ++i) {
    const int row = lane / groups + i * (32 / groups);
    index[i] = k < params.k && stage.index[row] >= 0 ? stage.index[row] + k : -1;
    const float4 sums = *reinterpret_cast<const float4*>(&stage.values[row][column]);
    value[i][0] = sums.x, value[i][1] = sums.y, value[i][2] = sums.z, value[i][3] = sums.w;
    if constexpr (S::scaled) {
      const float of_row = power_of_two(-stage.exponent[row]);
#pragma unroll
      for (int e = 0; e < 4; ++e) value[i][e] *= of_row * factor[e];
    }
  }
  store_quads(params, split, index, value, bias);
}

// The same by quads of pixels: NCHW. Four pixels exist and are neighbours, or none of them exists.
template <typename S, int width>
__device__ __forceinline__ void store_pixel_quads(const Params<typename S::T>& params, int split,
                                                  const FilterData<S>& filters, const OutputStage& stage, int first,
                                                  int first_k) {
  constexpr int count = width / 8;
  const int lane = threadIdx.x % 32, row = lane % 4 * 4;
  float factor[4], bias[count][4], value[count][4];
  std::int64_t index[count];
#pragma unroll
  for (int e = 0; e < 4; ++e) factor[e] = S::scaled ? power_of_two(-stage.exponent[row + e]) : 1.0f;
#pragma unroll
  for (int i = 0; i < count; ++i) {
    const int column = lane / 4 + 8 * i, k = first_k + column;
    index[i] = k < params.k && stage.index[row] >= 0 ? stage.index[row] + k * params.y_filter : -1;
    const float of_filter = S::scaled ? power_of_two(-filters.exponent[first + column]) : 1.0f;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      bias[i][e] = to_float(filters.bias[first + column]);
      value[i][e] = stage.values[row + e][column];
      if constexpr (S::scaled) value[i][e] *= factor[e] * of_filter;
    }
  }
  store_quads(params, split, index, value, bias);
}

// The same one by one, in any order of y, for any scales.
template <typename S, int width>
__device__ __forceinline__ void store_single(const Params<typename S::T>& params, int split,
                                             const FilterData<S>& filters, const OutputStage& stage, int first,
                                             int first_k) {
  using T = typename S::T;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x) % 32; i < OutputStage::rows * width; i += 32) {
    const int row = params.along_filters ? i / width : i % OutputStage::rows;
    const int column = params.along_filters ? i % width : i / OutputStage::rows, k = first_k + column;
    if (k >= params.k || stage.index[row] < 0) continue;
    const std::int64_t index = stage.index[row] + k * params.y_filter;
    float value = stage.values[row][column];
    if constexpr (S::scaled) value = Unscale(stage.exponent[row], filters.exponent[first + column])(value);
    if (params.splits > 1) {
      params.partial[split * params.y_numel + index] = value;
    } else {
      params.y[index] = params.epilogue.finish(value + to_float(filters.bias[first + column]), index);
    }
  }
}

// For the whole warp.
template <typename S>
__device__ __forceinline__ bool are_moderate(const FilterData<S>& filters) {
  bool moderate = true;
  if constexpr (S::scaled) {
    for (int k = static_cast<int>(threadIdx.x) % 32; k < S::filter_tile; k += 32) {
      moderate &= abs(filters.exponent[k]) < moderate_exponent;
    }
  }
  return __all_sync(0xffffffffu, moderate);
}

// The lane's pixels, all filters of the tile. The values pass through the warp's stage, some filters of 16 pixels at a
// time. Registers cannot be indexed, so the next ones move up after each turn: unrolled instead, the code would run
// once a tile and never from the instruction cache.
template <typename S, int rows>
__device__ __forceinline__ void store_tile(const Params<typename S::T>& params, const Work& work,
                                           const FilterData<S>& filters, OutputStage& stage,
                                           float (&sums)[S::row_blocks][S::sums], const int (&exponents)[rows]) {
  constexpr int width = S::filter_tile % 32 == 0 ? 32 : 16;  // filters of a turn
  constexpr int values = width / 2, turns = S::filter_tile / width;
  const int lane = threadIdx.x % 32, row = lane / 4, pair = lane % 4 * 2;
  bool moderate = are_moderate(filters);
#pragma unroll
  for (int i = 0; i < rows; ++i) moderate = moderate && __all_sync(0xffffffffu, abs(exponents[i]) < moderate_exponent);
#pragma unroll 1
  for (int m = 0; m < S::row_blocks; ++m) {
    if (pair == 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        stage.index[row + 8 * i] = output_index<S>(params, work, 2 * m + i);
        stage.exponent[row + 8 * i] = m == 0 ? exponents[i] : exponents[rows - 2 + i];
      }
    }
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
#pragma unroll
      for (int j = 0; j < width / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          *reinterpret_cast<float2*>(&stage.values[row + 8 * i][8 * j + pair]) =
              make_float2(sums[0][4 * j + 2 * i], sums[0][4 * j + 2 * i + 1]);
        }
      }
      __syncwarp();
      const int first = turn * width, first_k = work.filter_tile * S::filter_tile + first;
      if (!params.quads || !moderate) {
        store_single<S, width>(params, work.split, filters, stage, first, first_k);
      } else if (params.along_filters) {
        store_filter_quads<S, width>(params, work.split, filters, stage, first, first_k);
      } else {
        store_pixel_quads<S, width>(params, work.split, filters, stage, first, first_k);
      }
      __syncwarp();
#pragma unroll
      for (int i = values; i < S::row_blocks * S::sums; ++i) {
        sums[(i - values) / S::sums][(i - values) % S::sums] = sums[i / S::sums][i % S::sums];
      }
    }
  }
}

// y = the sum of the partial ones, in their order, through the epilogue.
template <typename T>
__global__ void __launch_bounds__(256)
    add_parts(int splits, std::int64_t numel, FastDivide by_inner, FastDivide by_k, const float* __restrict__ partial,
              Epilogue<T> epilogue, T* __restrict__ y) {
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * 256;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * 256 + threadIdx.x; i < numel; i += stride) {
    float sum = 0.0f;
    for (int split = 0; split < splits; ++split) sum += partial[split * numel + i];
    unsigned k = by_inner.quotient(static_cast<unsigned>(i));
    k = by_k.peel(k);
    y[i] = epilogue(sum, i, k);
  }
}

}  // namespace fastconv::algos::implicit_gemm::wgmma
