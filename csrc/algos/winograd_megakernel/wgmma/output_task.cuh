// OTrans: Y = A^T M A of a segment of M, the scales undone, then the epilogue. From shared memory, like ITrans.
#pragma once

#include "algos/winograd_megakernel/wgmma/input_task.cuh"

namespace fastconv::algos::winograd_megakernel::wgmma {

// A^T of the columns. patch: M, [36][64], from the lane's values; not needed afterwards.
template <typename E>
__device__ __forceinline__ void begin_output(const E* patch, Values (&values)[6][6]) {
#pragma unroll
  for (int j = 0; j < 6; ++j) {
    Values column[6], result[4];
#pragma unroll
    for (int i = 0; i < 6; ++i) column[i] = load_values(patch, i * 6 + j);
    winograd::Transform<4>::output(column, result);
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i][j] = result[i];
  }
}

// A warp: a lane has a tile and two neighbouring filters.
template <typename T>
struct OutputLane {
  static constexpr int lanes = 32 / form<T>.segment_tiles, pieces = form<T>.segment_filters / 8;  // of a tile
  int tile, k;
  bool first, second;  // whether the filters exist

  __device__ __forceinline__ OutputLane(const Params<T>& params, const StreamTile& work_tile) {
    const int lane = thread<T>() % 32;
    tile = work_tile.tile + lane / lanes;
    k = work_tile.channel + lane % pieces * 8 + lane / pieces % 4 * 2;
    first = lane / lanes < work_tile.tiles && k < params.k, second = first && k + 1 < params.k;
  }
};

// What a lane needs beside M, asked for early.
struct OutputScales {
  int exponent;          // of the tile's products; a part of its chunks, until all lanes have been asked
  int filter_exponents;  // both, 16 bits each: registers are scarce
  float bias[2];
};
template <typename T>
__device__ __forceinline__ OutputScales load_scales(const Params<T>& params, const StreamTile& work_tile) {
  const OutputLane<T> its(params, work_tile);
  constexpr int lanes = OutputLane<T>::lanes;
  const int lane = thread<T>() % 32;
  // The exponent to which the tile's products were brought: that of its largest channels, so the least.
  OutputScales scales;
  scales.exponent = 127;
  if (lane / lanes < work_tile.tiles) {
    const int* exponents = params.tile_exponents + static_cast<std::int64_t>(its.tile) * params.chunks;
#pragma unroll 2
    for (int i = lane % lanes; i < params.chunks; i += lanes) {
      scales.exponent = min(scales.exponent, __ldcg(exponents + i));
    }
  }
  scales.bias[0] = its.first ? params.epilogue.bias_of(its.k) : 0.0f;
  scales.bias[1] = its.second ? params.epilogue.bias_of(its.k + 1) : 0.0f;
  const int first = its.first ? params.filter_exponents[its.k] : 0;
  const int second = its.second ? params.filter_exponents[its.k + 1] : 0;
  scales.filter_exponents = (first & 0xffff) | second << 16;
  return scales;
}

template <typename T, StoreMode output, bool plain>
__device__ __forceinline__ void finish_output(const Params<T>& params, const StreamTile& work_tile,
                                              const OutputScales& scales, const Values (&values)[6][6]) {
  const OutputLane<T> its(params, work_tile);
  const int tile = its.tile, k = its.k;
  const bool first = its.first, second = its.second;
  constexpr int lanes = OutputLane<T>::lanes;
  int exponent = scales.exponent;
  const auto& bias = scales.bias;
  const int filter_exponents[2] = {static_cast<short>(scales.filter_exponents), scales.filter_exponents >> 16};
#pragma unroll
  for (int other = 1; other < lanes; other *= 2)
    exponent = min(exponent, __shfl_xor_sync(0xffffffffu, exponent, other));
  // Below -140 (C > 512, values near BF16's largest) y is infinite anyway, and the factors would not be floats.
  if constexpr (!is_split<T>) exponent = max(exponent - product_shift(params.chunks), -140);
  const Unscale scale0(exponent, filter_exponents[0]), scale1(exponent, filter_exponents[1]);
  unsigned rest = static_cast<unsigned>(tile);
  const int q = static_cast<int>(params.by_tiles_q.divmod(rest)) * 4;
  const int p = static_cast<int>(params.by_tiles_p.divmod(rest)) * 4;
  std::int64_t index = rest * params.y_image + k * params.y_filter + p * params.y_row + q * params.y_pixel;
  const int rows = first ? params.p - p : 0, columns = params.q - q;
  const std::int64_t pixel = params.y_pixel, filter = params.y_filter;
  const ActivationFunction& activate = params.epilogue.activate;
  const bool identity = activate.negative_slope == 1.0f && activate.cap == INFINITY;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    Values result[4];
    winograd::Transform<4>::output(values[i], result);
    T* const y = params.y + index;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      result[j].e[0] = fmaf(result[j].e[0] * scale0.first, scale0.second, bias[0]);
      result[j].e[1] = fmaf(result[j].e[1] * scale1.first, scale1.second, bias[1]);
    }
    const auto add_residual = [&](int j) {
      if (i >= rows || j >= columns) return;
      const T* const residual = params.epilogue.residual + index + j * pixel;
      if constexpr (output == StoreMode::filters) {
        const auto pair = *reinterpret_cast<const Aligned<T, 2>*>(residual);
        result[j].e[0] += to_float(pair.e[0]), result[j].e[1] += to_float(pair.e[1]);
      } else {
        result[j].e[0] += to_float(residual[0]);
        if (second) result[j].e[1] += to_float(residual[filter]);
      }
    };
    if (!plain && params.epilogue.adds_before()) {
#pragma unroll
      for (int j = 0; j < 4; ++j) add_residual(j);
    }
    apply<plain>(activate, identity, result);
    if (output == StoreMode::pixels && !plain && params.epilogue.adds_after()) {
#pragma unroll
      for (int j = 0; j < 4; ++j) add_residual(j);
    }
    if constexpr (output == StoreMode::pixels) {  // the number of columns is a multiple of 4
      const auto quad = [&result](int e) {
        return Aligned<T, 4>{from_float<T>(result[0].e[e]), from_float<T>(result[1].e[e]),
                             from_float<T>(result[2].e[e]), from_float<T>(result[3].e[e])};
      };
      if (i < rows) {
        *reinterpret_cast<Aligned<T, 4>*>(y) = quad(0);
        if (second) {
          *reinterpret_cast<Aligned<T, 4>*>(y + filter) = quad(1);
        }
      }
    } else {
      const int width = i < rows ? columns : 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (!plain && params.epilogue.adds_after()) add_residual(j);  // beside the store, whose address it has
        if constexpr (output == StoreMode::filters) {
          store_pair_past(j, width, y + j * pixel, result[j]);  // the L2 cache has V and M to keep
        } else if (j < width) {
          y[j * pixel] = from_float<T>(result[j].e[0]);
          if (second) y[j * pixel + filter] = from_float<T>(result[j].e[1]);
        }
      }
    }
    index += params.y_row;
  }
}

}  // namespace fastconv::algos::winograd_megakernel::wgmma
