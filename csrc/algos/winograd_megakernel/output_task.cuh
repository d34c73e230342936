// OTrans: Y = A^T M A of a segment of M, the scales undone, then the epilogue. From shared memory, like ITrans.
#pragma once

#include "algos/winograd_megakernel/input_task.cuh"

namespace fastconv::algos::winograd_megakernel {

// How y is written: two neighbouring filters (NHWC), four neighbouring columns (NCHW), or one by one.
enum class Output { pairs, quads, elements };

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
template <typename T, Output output, bool plain>
__device__ __forceinline__ void finish_output(const Params<T>& params, const StreamItem& item,
                                              const Values (&values)[6][6]) {
  constexpr int lanes = 32 / form<T>.segment_tiles, pieces = form<T>.segment_filters / 8;  // of a tile; see params.cuh
  const int lane = thread<T>() % 32, tile = item.tile + lane / lanes;
  const int k = item.channel + lane % pieces * 8 + lane / pieces % 4 * 2;
  const bool first = lane / lanes < item.tiles && k < params.k, second = first && k + 1 < params.k;
  // The exponent to which the tile's products were brought: that of its largest channels, so the least.
  int exponent = 127;
  if (lane / lanes < item.tiles) {
    const int* exponents = params.tile_exponents + static_cast<std::int64_t>(tile) * params.chunks;
#pragma unroll 2
    for (int i = lane % lanes; i < params.chunks; i += lanes) exponent = min(exponent, __ldcg(exponents + i));
  }
  const float bias[2] = {first ? params.epilogue.bias_of(k) : 0.0f, second ? params.epilogue.bias_of(k + 1) : 0.0f};
  const int filter_exponents[2] = {first ? params.filter_exponents[k] : 0, second ? params.filter_exponents[k + 1] : 0};
#pragma unroll
  for (int other = 1; other < lanes; other *= 2)
    exponent = min(exponent, __shfl_xor_sync(0xffffffffu, exponent, other));
  // Below -140 (C > 512, values near BF16's largest) y is infinite anyway, and the factors would not be floats.
  if constexpr (!is_split<T>) exponent = max(exponent - product_shift(params.chunks), -140);
  const Unscale scale0(exponent, filter_exponents[0]), scale1(exponent, filter_exponents[1]);
  unsigned rest = static_cast<unsigned>(tile);
  const int q = static_cast<int>(params.by_tiles_q.peel(rest)) * 4;
  const int p = static_cast<int>(params.by_tiles_p.peel(rest)) * 4;
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
    if (!plain && params.epilogue.residual != nullptr) {
      const T* const residual = params.epilogue.residual + index;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (i < rows && j < columns) {
          result[j].e[0] += to_float(residual[j * pixel]);
          if (second) result[j].e[1] += to_float(residual[j * pixel + filter]);
        }
      }
    }
    if (!plain && activate.is_silu) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        result[j].e[0] = ActivationFunction::silu(result[j].e[0]);
        result[j].e[1] = ActivationFunction::silu(result[j].e[1]);
      }
    } else if (!identity) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        result[j].e[0] = activate.piecewise(result[j].e[0]), result[j].e[1] = activate.piecewise(result[j].e[1]);
      }
    }
    if constexpr (output == Output::quads) {  // the number of columns is a multiple of 4
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
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (i >= rows || j >= columns) continue;
        if constexpr (output == Output::pairs) {
          store_pair_past(y + j * pixel, result[j]);  // the L2 cache has V and M to keep
        } else {
          y[j * pixel] = from_float<T>(result[j].e[0]);
          if (second) y[j * pixel + filter] = from_float<T>(result[j].e[1]);
        }
      }
    }
    index += params.y_row;
  }
}

}  // namespace fastconv::algos::winograd_megakernel
