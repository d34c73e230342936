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

// Where a lane's outputs begin in y, and so in the residual; and how many rows and columns of the tile's 4 exist.
struct OutputPlace {
  std::int64_t index;
  int rows, columns;

  template <typename T>
  __device__ __forceinline__ OutputPlace(const Params<T>& params, const OutputLane<T>& its) {
    unsigned rest = static_cast<unsigned>(its.tile);
    const int q = static_cast<int>(params.by_tiles_q.divmod(rest)) * 4;
    const int p = static_cast<int>(params.by_tiles_p.divmod(rest)) * 4;
    index = rest * params.y_image + its.k * params.y_filter + p * params.y_row + q * params.y_pixel;
    rows = its.first ? params.p - p : 0, columns = params.q - q;
  }
  __device__ __forceinline__ int width(int row) const { return row < rows ? columns : 0; }  // of a row
};

// The residual of a lane's outputs, asked for while its segment of M is on its way: the warps are few, and must not
// wait for memory at every row. It waits in the registers of `values` that only inputs need, which hold three rows of
// float32 and all four of half types. elements: has no registers to spare, and reads each row where it is added.
template <typename T, StoreMode output>
class LaneResidual {
 public:
  static constexpr bool is_early = output != StoreMode::elements;
  static constexpr int ahead = sizeof(T) == 4 ? 3 : 4;  // rows

  static __device__ __forceinline__ void load_first(const Params<T>& params, const StreamTile& work_tile,
                                                    Values (&values)[6][6]) {
    const OutputLane<T> its(params, work_tile);
    const OutputPlace place(params, its);
#pragma unroll
    for (int i = 0; i < ahead; ++i) {
      load(params, i, place.index + i * params.y_row, place.width(i), its.second, values);
    }
  }
  // Row i, whose first output is y[index]; width: how many of its outputs exist.
  static __device__ __forceinline__ void load(const Params<T>& params, int i, std::int64_t index, int width,
                                              bool second, Values (&values)[6][6]) {
    if constexpr (!is_early) return;
    const T* source = params.epilogue.residual + index;
#pragma unroll
    for (int a = 0; a < accesses; ++a) {
      asm volatile("" : "+l"(source));  // an address at a time: registers are scarce
      const bool filters = output == StoreMode::filters;
      load_vector(filters ? a : 0, filters || a == 0 || second ? width : 0, source, i, a, values);
      source += filters ? params.y_pixel : params.y_filter;
    }
  }
  // At column j of row i: what has been loaded, or is now.
  static __device__ __forceinline__ Values at(const Params<T>& params, int i, int j, std::int64_t index, int width,
                                              bool second, Values (&values)[6][6]) {
    if constexpr (output == StoreMode::filters) return {element(values, i, j, 0), element(values, i, j, 1)};
    if constexpr (output == StoreMode::pixels) return {element(values, i, 0, j), element(values, i, 1, j)};
    if (j >= width) return {};
    const T* source = params.epilogue.residual + index + j * params.y_pixel;
    return {to_float(source[0]), second ? to_float(source[params.y_filter]) : 0.0f};
  }

 private:
  // Of a row: a pair of filters of each pixel, or the pixels of each filter.
  static constexpr int accesses = output == StoreMode::pixels ? 2 : 4;
  static constexpr int words = 2 * sizeof(T) / accesses;  // of 4 bytes, of an access
  static_assert(ahead * accesses * words <= 2 * 6 * 2);

  static __device__ __forceinline__ float& word(Values (&values)[6][6], int i, int access, int number) {
    const int at = (i % ahead * accesses + access) * words + number;
    return values[4 + at / 12][at % 12 / 2].e[at % 2];
  }
  static __device__ __forceinline__ float element(Values (&values)[6][6], int i, int access, int e) {
    constexpr int in_word = 4 / sizeof(T);
    return to_float(reinterpret_cast<const T*>(&word(values, i, access, e / in_word))[e % in_word]);
  }
  // If index < count, else zeros. Issued here, not where it is used, and predicated, not branched around.
  static __device__ __forceinline__ void load_vector(int index, int count, const T* source, int i, int access,
                                                     Values (&values)[6][6]) {
    const auto target = [&](int number) -> float& { return word(values, i, access, number); };
    if constexpr (words == 1) {
      asm volatile("{\n.reg .pred p;\nsetp.lt.s32 p, %2, %3;\nmov.b32 %0, 0;\n@p ld.global.cs.b32 %0, [%1];\n}"
                   : "=&f"(target(0))
                   : "l"(source), "r"(index), "r"(count));
    } else if constexpr (words == 2) {
      asm volatile(
          "{\n.reg .pred p;\nsetp.lt.s32 p, %3, %4;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\n"
          "@p ld.global.cs.v2.b32 {%0, %1}, [%2];\n}"
          : "=&f"(target(0)), "=&f"(target(1))
          : "l"(source), "r"(index), "r"(count));
    } else {
      asm volatile(
          "{\n.reg .pred p;\nsetp.lt.s32 p, %5, %6;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\n"
          "mov.b32 %3, 0;\n@p ld.global.cs.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
          : "=&f"(target(0)), "=&f"(target(1)), "=&f"(target(2)), "=&f"(target(3))
          : "l"(source), "r"(index), "r"(count));
    }
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
                                              const OutputScales& scales, Values (&values)[6][6]) {
  const OutputLane<T> its(params, work_tile);
  const bool second = its.second;
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
  const OutputPlace place(params, its);
  std::int64_t index = place.index;
  const std::int64_t pixel = params.y_pixel, filter = params.y_filter;
  const ActivationFunction& activate = params.epilogue.activate;
  const bool identity = activate.negative_slope == 1.0f && activate.cap == INFINITY;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int width = place.width(i);
    Values result[4];
    winograd::Transform<4>::output(values[i], result);
    T* y = params.y + index;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      result[j].e[0] = fmaf(result[j].e[0] * scale0.first, scale0.second, bias[0]);
      result[j].e[1] = fmaf(result[j].e[1] * scale1.first, scale1.second, bias[1]);
    }
    using Residual = LaneResidual<T, output>;
    const auto add_residual = [&] {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        result[j] = result[j] + Residual::at(params, i, j, index, width, second, values);
      }
    };
    if (!plain && params.epilogue.adds_before()) add_residual();
    apply<plain>(activate, identity, result);
    if (!plain && params.epilogue.adds_after()) add_residual();
    constexpr int ahead = Residual::ahead;
    if (!plain && params.epilogue.residual != nullptr && i + ahead < 4) {
      Residual::load(params, i + ahead, index + ahead * params.y_row, place.width(i + ahead), second, values);
    }
    if constexpr (output == StoreMode::pixels) {  // the number of columns is a multiple of 4
      const auto quad = [&result](int e) {
        return Aligned<T, 4>{from_float<T>(result[0].e[e]), from_float<T>(result[1].e[e]),
                             from_float<T>(result[2].e[e]), from_float<T>(result[3].e[e])};
      };
      if (i < place.rows) {
        *reinterpret_cast<Aligned<T, 4>*>(y) = quad(0);
        if (second) {
          *reinterpret_cast<Aligned<T, 4>*>(y + filter) = quad(1);
        }
      }
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
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
