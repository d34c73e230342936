// What the roles of the kernel share: parameters, a block's part of the work, shared memory.
#pragma once

#include <cstdint>

#include "algos/implicit_gemm/wgrad/pointwise/plan.h"
#include "core/fast_divide.h"
#include "device/image_scale.cuh"
#include "device/mma.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/ptx/mbarrier.cuh"
#include "hopper/ptx/tma.cuh"
#include "hopper/ptx/warp.cuh"
#include "hopper/ptx/wgmma.cuh"

namespace fastconv::algos::implicit_gemm::wgrad::pointwise {

constexpr int multiply_warpgroups = 2, convert_warpgroups = 2;
constexpr int multiply_threads = 128 * multiply_warpgroups, convert_threads = 128 * convert_warpgroups;
constexpr int convert_warps = convert_threads / 32;
constexpr int kernel_threads = multiply_threads + convert_threads + 128;

struct Params {
  PairScales pair;  // of x and dY
  bool transposed;  // rows are channels of x, columns filters
  bool retry;       // the first pass is complete: do again what scales did not fit
  float* partial;   // [split][rows][columns]
  WaitReport* report;
  int rows, columns, chunks, chunks_per_split;
  FastDivide by_tiles, by_column_tiles, by_image_pixels;

  __device__ __forceinline__ ImageScale* scales_of_rows() const { return transposed ? pair.first : pair.second; }
  __device__ __forceinline__ ImageScale* scales_of_columns() const { return transposed ? pair.second : pair.first; }
  __device__ __forceinline__ int image_of(int pixel) const { return min(pixel / by_image_pixels, pair.images - 1); }
};

template <int limbs_, Warpgroups warpgroups_, int warpgroup_columns_>
struct Shape {
  static constexpr Tile tile{limbs_, warpgroups_, warpgroup_columns_};
  static constexpr int row_boxes = tile.rows() / box_channels, column_boxes = tile.columns() / box_channels;
  static constexpr int sums = warpgroup_columns_ / 2;  // of a thread, of 64 rows
  // A block has what its threads begin with, a multiple of 8 each.
  static constexpr int multiply_registers = 160, convert_registers = 64, load_registers = 32;
  static_assert(multiply_registers * multiply_threads + convert_registers * convert_threads + load_registers * 128 <=
                65536 / kernel_threads / 8 * 8 * kernel_threads);
};

// What a block computes. The blocks of all tiles read the same pixels at the same time.
template <typename S>
struct WorkTile {
  int row0, column0, split, first_chunk, last_chunk;

  __device__ __forceinline__ explicit WorkTile(const Params& params) {
    unsigned part = blockIdx.x;
    unsigned row = params.by_tiles.divmod(part);
    const unsigned column = params.by_column_tiles.divmod(row);
    row0 = static_cast<int>(row) * S::tile.rows(), column0 = static_cast<int>(column) * S::tile.columns();
    split = static_cast<int>(part);
    first_chunk = split * params.chunks_per_split;
    last_chunk = min(first_chunk + params.chunks_per_split, params.chunks);
  }
};

struct ChunkScales {
  float of_rows[chunk_pixels], of_columns[chunk_pixels];  // factors of each pixel
  int image[chunk_pixels];
  int sum;  // the exponent of the products' scale
};

template <typename S>
struct Control {
  hopper::Pipeline<S::tile.staged_slots()>::Barriers staged;     // of chunks as they come
  hopper::Pipeline<S::tile.operand_slots()>::Barriers operands;  // of converted ones
  ChunkScales scales[S::tile.staged_slots()];
  int sums[S::tile.operand_slots()];

  __device__ __forceinline__ void initialise() {
    hopper::initialise(staged.full, staged.free, convert_warps, 2);  // the copies, the scales
    hopper::initialise(operands.full, operands.free, multiply_threads / 32, convert_warps);
    hopper::barrier_init_fence();
  }
};

template <typename S>
struct Memory {
  Control<S>& control;
  std::uint32_t staged, operands;  // rings: [slot][rows' and columns' boxes], [slot][limb][rows', columns' channels]

  static constexpr int bytes = sizeof(Control<S>) + 1024 + S::tile.staged_slots() * S::tile.staged_bytes() +
                               S::tile.operand_slots() * S::tile.operand_bytes();
  static_assert(bytes <= shared_limit);

  __device__ __forceinline__ explicit Memory(unsigned char* memory)
      : control(*reinterpret_cast<Control<S>*>(memory)),
        staged((shared_address(memory) + static_cast<std::uint32_t>(sizeof(Control<S>)) + 1023) / 1024 * 1024),
        operands(staged + S::tile.staged_slots() * S::tile.staged_bytes()) {}
};

}  // namespace fastconv::algos::implicit_gemm::wgrad::pointwise
