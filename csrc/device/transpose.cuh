// [batch][rows][columns] -> [batch][columns][rows]: NCHW to NHWC and back.
#pragma once

#include <cstdint>

#include "device/cuda_check.h"
#include "device/indexing.h"

namespace fastconv {

constexpr int transpose_tile = 64;

template <typename T>
__global__ void __launch_bounds__(256) transpose_kernel(const T* __restrict__ source,  // [batch][rows][columns]
                                                        T* __restrict__ target,        // [batch][columns][rows]
                                                        std::int64_t batch, std::int64_t rows, std::int64_t columns) {
  __shared__ T tile[transpose_tile][transpose_tile + 1];
  const int lane = threadIdx.x % transpose_tile, first = threadIdx.x / transpose_tile;
  const int step = blockDim.x / transpose_tile;
  const std::int64_t row0 = static_cast<std::int64_t>(blockIdx.y) * transpose_tile;
  const std::int64_t column0 = static_cast<std::int64_t>(blockIdx.x) * transpose_tile;
  for (std::int64_t b = blockIdx.z; b < batch; b += gridDim.z) {
    const T* from = source + b * rows * columns;
    T* to = target + b * rows * columns;
    if (column0 + lane < columns) {
#pragma unroll
      for (int r = first; r < transpose_tile; r += step) {
        if (row0 + r < rows) tile[r][lane] = from[(row0 + r) * columns + column0 + lane];
      }
    }
    __syncthreads();
    if (row0 + lane < rows) {
#pragma unroll
      for (int c = first; c < transpose_tile; c += step) {
        if (column0 + c < columns) to[(column0 + c) * rows + row0 + lane] = tile[lane][c];
      }
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
  transpose_kernel<<<grid, 256, 0, stream>>>(source, target, batch, rows, columns);
  check_launch("transpose");
}

}  // namespace fastconv
