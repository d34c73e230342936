// [batch][rows][columns] -> [batch][columns][rows]: NCHW to NHWC and back.
#pragma once

#include <cstdint>

#include "device/cuda_check.h"
#include "device/indexing.h"

namespace fastconv {

constexpr int transpose_tile = 64;

// Four neighbouring elements, moved by one instruction.
template <typename T>
struct alignas(4 * sizeof(T)) Four {
  T e[4];
};

// Rows and columns in fours: a thread turns 4 x 4 elements in registers, the block turns those in shared memory, where
// piece `row` of column c lies at row ^ (c / 4): writes and reads go through all banks.
template <typename T>
__global__ void __launch_bounds__(256) transpose_fours(const T* __restrict__ source,  // [batch][rows][columns]
                                                       T* __restrict__ target,        // [batch][columns][rows]
                                                       std::int64_t batch, std::int64_t rows, std::int64_t columns) {
  constexpr int fours = transpose_tile / 4;
  __shared__ Four<T> tile[transpose_tile][fours];
  const int inner = threadIdx.x % fours, outer = threadIdx.x / fours;
  const std::int64_t row0 = static_cast<std::int64_t>(blockIdx.y) * transpose_tile;
  const std::int64_t column0 = static_cast<std::int64_t>(blockIdx.x) * transpose_tile;
  const std::int64_t row = row0 + 4 * outer, column = column0 + 4 * inner, target_row = row0 + 4 * inner;
  for (std::int64_t b = blockIdx.z; b < batch; b += gridDim.z) {
    const T* from = source + b * rows * columns;
    T* to = target + b * rows * columns;
    if (row < rows && column < columns) {
      Four<T> in[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) in[i] = *reinterpret_cast<const Four<T>*>(from + (row + i) * columns + column);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        tile[4 * inner + j][outer ^ inner] = {in[0].e[j], in[1].e[j], in[2].e[j], in[3].e[j]};
      }
    }
    __syncthreads();
    if (target_row < rows) {
#pragma unroll
      for (int c = outer; c < transpose_tile; c += fours) {
        if (column0 + c < columns) {
          *reinterpret_cast<Four<T>*>(to + (column0 + c) * rows + target_row) = tile[c][inner ^ (c / 4)];
        }
      }
    }
    __syncthreads();
  }
}

template <typename T>
__global__ void __launch_bounds__(256, 4) transpose_any(const T* __restrict__ source,  // [batch][rows][columns]
                                                        T* __restrict__ target,        // [batch][columns][rows]
                                                        std::int64_t batch, std::int64_t rows, std::int64_t columns) {
  constexpr int lines = 256 / transpose_tile, steps = transpose_tile / lines;
  __shared__ T tile[transpose_tile][transpose_tile + 1];
  const int lane = threadIdx.x % transpose_tile, first = threadIdx.x / transpose_tile;
  const std::int64_t row0 = static_cast<std::int64_t>(blockIdx.y) * transpose_tile;
  const std::int64_t column0 = static_cast<std::int64_t>(blockIdx.x) * transpose_tile;
  for (std::int64_t b = blockIdx.z; b < batch; b += gridDim.z) {
    const T* from = source + b * rows * columns;
    T* to = target + b * rows * columns;
    T values[steps];  // first all loads, so that they are under way together
#pragma unroll
    for (int i = 0; i < steps; ++i) {
      const std::int64_t row = row0 + first + i * lines;
      if (row < rows && column0 + lane < columns) values[i] = from[row * columns + column0 + lane];
    }
#pragma unroll
    for (int i = 0; i < steps; ++i) tile[first + i * lines][lane] = values[i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < steps; ++i) {
      const int c = first + i * lines;
      if (column0 + c < columns && row0 + lane < rows) to[(column0 + c) * rows + row0 + lane] = tile[lane][c];
    }
    __syncthreads();
  }
}

template <typename T>
void transpose(const T* source, T* target, std::int64_t batch, std::int64_t rows, std::int64_t columns,
               cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(ceil_div<std::int64_t>(columns, transpose_tile)),
                  static_cast<unsigned>(ceil_div<std::int64_t>(rows, transpose_tile)),
                  static_cast<unsigned>(batch < 65535 ? batch : 65535));
  const auto aligned = [](const T* pointer) {
    return reinterpret_cast<std::uintptr_t>(pointer) % sizeof(Four<T>) == 0;
  };
  const bool fours = rows % 4 == 0 && columns % 4 == 0 && aligned(source) && aligned(target);
  (fours ? transpose_fours<T> : transpose_any<T>)<<<grid, 256, 0, stream>>>(source, target, batch, rows, columns);
  check_launch("transpose");
}

}  // namespace fastconv
