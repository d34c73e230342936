// OTrans: Y = A^T M A of a tile and 64 filters, the scales undone, then the epilogue. In shared memory, like ITrans.
#pragma once

#include "algos/winograd_megakernel/input_task.cuh"

namespace fastconv::algos::winograd_megakernel {

// A warp. patch: M of the tile, [36][64], from the lane's first filter.
template <typename T, bool vectors>
__device__ __forceinline__ void transform_output(const Params<T>& params, const StreamItem& item, float* patch) {
  const int lane = threadIdx.x % 32, k = item.channel + 2 * lane;
  const bool first = k < params.k, second = k + 1 < params.k;
  // The exponent to which the tile's products were brought: that of its largest channels, so the least.
  const int* exponents = params.tile_exponents + static_cast<std::int64_t>(item.tile) * params.chunks;
  int exponent = 127;
#pragma unroll 1
  for (int i = lane; i < params.chunks; i += 32) exponent = min(exponent, __ldcg(exponents + i));
  const float bias[2] = {first ? params.epilogue.bias_of(k) : 0.0f, second ? params.epilogue.bias_of(k + 1) : 0.0f};
  const int filter_exponents[2] = {first ? params.filter_exponents[k] : 0,
                                   second ? params.filter_exponents[k + 1] : 0};
#pragma unroll 2
  for (int j = 0; j < 6; ++j) {
    Values column[6], result[4];
#pragma unroll
    for (int i = 0; i < 6; ++i) column[i] = load_values(patch, i * 6 + j);
    winograd::Transform<4>::output(column, result);
#pragma unroll
    for (int i = 0; i < 4; ++i) store_values(patch, i * 6 + j, result[i]);
  }
  exponent = __reduce_min_sync(0xffffffffu, exponent);
  const Unscale scale0(exponent, filter_exponents[0]), scale1(exponent, filter_exponents[1]);
  std::int64_t index =
      ((static_cast<std::int64_t>(item.n) * params.p + item.p) * params.q + item.q) * params.k + k;
  const int rows = min(4, params.p - item.p), columns = first ? params.q - item.q : 0;
#pragma unroll 1
  for (int i = 0; i < rows; ++i) {
    Values row[6], result[4];
#pragma unroll
    for (int j = 0; j < 6; ++j) row[j] = load_values(patch, i * 6 + j);
    winograd::Transform<4>::output(row, result);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j >= columns) continue;
      const std::int64_t at = index + j * params.k;
      winograd::Aligned<T, 2> y;
      y.e[0] = params.epilogue.finish(scale0(result[j].e[0]) + bias[0], at);
      if constexpr (vectors) {
        y.e[1] = params.epilogue.finish(scale1(result[j].e[1]) + bias[1], at + 1);
        *reinterpret_cast<winograd::Aligned<T, 2>*>(params.y + at) = y;
      } else {
        params.y[at] = y.e[0];
        if (second) params.y[at + 1] = params.epilogue.finish(scale1(result[j].e[1]) + bias[1], at + 1);
      }
    }
    index += static_cast<std::int64_t>(params.q) * params.k;
  }
}

}  // namespace fastconv::algos::winograd_megakernel
