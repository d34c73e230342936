// Sums in a warp's stage of shared memory that go to y, or to the partial sums, one by one.
#pragma once

#include "algos/implicit_gemm/persistent/finish.cuh"
#include "device/power_of_two.h"

namespace fastconv::algos::implicit_gemm::persistent {

// NHWC, where four filters of a pixel are not one access: a lane has one filter, of a few pixels at a time.
template <typename S, int width>
__device__ __forceinline__ void store_columns(const Params<typename S::T>& params, int split,
                                              const FilterData<S>& filters, const OutputStage& stage, int first,
                                              int first_k) {
  using T = typename S::T;
  constexpr int batch = 4, step = 32 / width;  // pixels; from one of a lane to the next
  const int lane = threadIdx.x % 32, column = lane % width, k = first_k + column;
  if (k >= params.k) return;
  const Epilogue<T>& epilogue = params.epilogue;
  const float bias = to_float(filters.bias[first + column]);
  const float of_filter = S::scaled ? power_of_two(-filters.exponent[first + column]) : 1.0f;
#pragma unroll 1
  for (int row = lane / width; row < OutputStage::rows; row += batch * step) {
    std::int64_t index[batch];
    float value[batch], other[batch];
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      const int at = row + i * step;
      index[i] = stage.index[at] >= 0 ? stage.index[at] + k : -1;
      value[i] = stage.values[at][column];
      if constexpr (S::scaled) value[i] *= power_of_two(-stage.exponent[at]) * of_filter;
    }
    if (params.partial != nullptr) {
#pragma unroll
      for (int i = 0; i < batch; ++i) {
        if (index[i] >= 0) params.partial[split * params.y_numel + index[i]] = value[i];
      }
      continue;
    }
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      other[i] = epilogue.residual != nullptr && index[i] >= 0 ? to_float(epilogue.residual[index[i]]) : -0.0f;
    }
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      T result;
      if constexpr (S::gated) {
        result = finish_one<S>(epilogue, value[i] + bias, index[i]);
      } else {
        result = from_float<T>(epilogue.finish_value(value[i] + bias, other[i]));
      }
      if (index[i] >= 0) params.y[index[i]] = result;
    }
  }
}

// The same of so few filters that most lanes would have none: each has an element of y in its turn, of all pixels.
template <typename S>
__device__ __forceinline__ void store_few(const Params<typename S::T>& params, int split, const FilterData<S>& filters,
                                          const OutputStage& stage) {
  const int lane = threadIdx.x % 32, elements = OutputStage::rows * params.k;
#pragma unroll 1
  for (int i = lane; i < elements; i += 32) {
    unsigned row = static_cast<unsigned>(i);
    const int k = static_cast<int>(params.by_k.divmod(row));
    if (stage.index[row] < 0) continue;
    const std::int64_t index = stage.index[row] + k;
    float value = stage.values[row][k];
    if constexpr (S::scaled) value *= power_of_two(-stage.exponent[row]) * power_of_two(-filters.exponent[k]);
    if (params.partial != nullptr) {
      params.partial[split * params.y_numel + index] = value;
    } else {
      params.y[index] = finish_one<S>(params.epilogue, value + to_float(filters.bias[k]), index);
    }
  }
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
    if (params.partial != nullptr) {
      params.partial[split * params.y_numel + index] = value;
    } else {
      params.y[index] = finish_one<S>(params.epilogue, value + to_float(filters.bias[first + column]), index);
    }
  }
}

}  // namespace fastconv::algos::implicit_gemm::persistent
