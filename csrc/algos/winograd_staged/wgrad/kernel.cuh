// The products of the weight gradient: one thread copies stages of both operands into a ring of shared memory, two or
// three warpgroups multiply 64 rows each. Both operands have their channels fast and the reduction slow; wgmma reads
// them transposed.
#pragma once

#include "algos/winograd_staged/wgrad/plan.h"
#include "core/fast_divide.h"
#include "device/dependent_launch.cuh"
#include "device/mma.cuh"
#include "device/power_of_two.h"
#include "hopper/pipeline.cuh"
#include "hopper/ptx/mbarrier.cuh"
#include "hopper/ptx/tma.cuh"
#include "hopper/ptx/warp.cuh"
#include "hopper/ptx/wgmma.cuh"

namespace fastconv::algos::winograd_staged::wgrad {

struct Params {
  const half_t *rows, *columns;  // [36][stages][blocks][2][64][64]
  float* partial;                // [splits][36][rows][pitch]
  const int* sums;               // [stages] exponents of the stages' scales, and one below all of them: the totals'
  WaitReport* report;
  std::int64_t split_numel;
  int row_blocks, column_blocks, row_count, pitch;
  int stages, stages_per_split;
  unsigned work_tiles;
  FastDivide by_column_tiles, by_row_tiles, by_split_k;
};

template <int blocks_m_, int blocks_n_>
struct Shape {
  static constexpr int blocks_m = blocks_m_;  // rows: a multiplying warpgroup for each
  static constexpr int blocks_n = blocks_n_, sums = 32 * blocks_n;
  static constexpr int slot_bytes = (blocks_m + blocks_n) * block_bytes;
  static constexpr int shared_bytes = slots * slot_bytes + 2048;  // alignment, barriers
  static constexpr int threads = 128 * (blocks_m + 1);
  static constexpr int multiply_registers = blocks_m == 2 ? 232 : 152, load_registers = 40;
};

using Pipeline = hopper::Pipeline<slots>;
using Barriers = Pipeline::Barriers;

// Work tiles in the order (column tile, row tile, split, point), the first fastest: blocks that run at the same time
// share stages.
template <typename S>
struct WorkTile {
  int row_block, column_block, split, point, first_stage, last_stage;

  __device__ __forceinline__ WorkTile(const Params& params, unsigned index) {
    column_block = static_cast<int>(params.by_column_tiles.divmod(index)) * S::blocks_n;
    row_block = static_cast<int>(params.by_row_tiles.divmod(index)) * S::blocks_m;
    split = static_cast<int>(params.by_split_k.divmod(index));
    point = static_cast<int>(index);
    first_stage = split * params.stages_per_split;
    last_stage = min(first_stage + params.stages_per_split, params.stages);
  }
};

template <typename S>
__device__ __forceinline__ void load(const Params& params, std::uint32_t ring, Barriers& barriers) {
  Pipeline pipeline{barriers, slots, {params.report, kernel_winograd_products, role_load}};
#pragma unroll 1
  for (unsigned index = blockIdx.x; index < params.work_tiles; index += gridDim.x) {
    const WorkTile<S> work_tile(params, index);
    const int row_blocks = min(S::blocks_m, params.row_blocks - work_tile.row_block);
    const int column_blocks = min(S::blocks_n, params.column_blocks - work_tile.column_block);
    const std::int64_t stage = static_cast<std::int64_t>(work_tile.point) * params.stages + work_tile.first_stage;
    const auto* rows =
        reinterpret_cast<const char*>(params.rows) + (stage * params.row_blocks + work_tile.row_block) * block_bytes;
    const auto* columns = reinterpret_cast<const char*>(params.columns) +
                          (stage * params.column_blocks + work_tile.column_block) * block_bytes;
#pragma unroll 1
    for (int i = work_tile.first_stage; i < work_tile.last_stage; ++i) {
      const std::uint32_t target = ring + pipeline.slot() * S::slot_bytes;
      const std::uint32_t full = pipeline.acquire((row_blocks + column_blocks) * block_bytes);
      hopper::copy_bulk(target, rows, row_blocks * block_bytes, full);
      hopper::copy_bulk(target + S::blocks_m * block_bytes, columns, column_blocks * block_bytes, full);
      rows += params.row_blocks * block_bytes, columns += params.column_blocks * block_bytes;
      pipeline.advance();
    }
  }
}

// A stage's products, from zero: the small ones first.
template <typename S>
__device__ __forceinline__ void multiply_stage(std::uint32_t slot, int warpgroup, float (&sums)[S::sums]) {
  constexpr int steps = stage_tiles / 16, step = 16 * row_bytes / 16, low = limb_bytes / 16;
  const std::uint64_t a = hopper::transposed_descriptor(slot + warpgroup * block_bytes, 0, 8 * row_bytes);
  const std::uint64_t b = hopper::transposed_descriptor(slot + S::blocks_m * block_bytes, block_bytes, 8 * row_bytes);
  hopper::fence_products();
#pragma unroll
  for (int i = 0; i < steps; ++i) {
    hopper::multiply_transposed<half_t>(sums, a + low + i * step, b + i * step, i > 0);
    hopper::multiply_transposed<half_t>(sums, a + i * step, b + low + i * step, 1);
  }
#pragma unroll
  for (int i = 0; i < steps; ++i) hopper::multiply_transposed<half_t>(sums, a + i * step, b + i * step, 1);
  hopper::commit_products();
  hopper::wait_for_products<0>();
  hopper::fence_operand(sums);
}

// Writes the totals by a short loop, eight columns of each lane's two rows at a turn, and leaves zeros: straight-line
// code that runs once a work tile is fetched anew each time.
template <typename S>
__device__ __forceinline__ void store(const Params& params, const WorkTile<S>& work_tile, int warpgroup,
                                      float (&totals)[S::sums]) {
  constexpr int turn = 16;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32 % 4;
  const int row = (work_tile.row_block + warpgroup) * block_channels + warp * 16 + lane / 4;
  int column = work_tile.column_block * block_channels + lane % 4 * 2;
  float* target = params.partial + work_tile.split * (points * params.split_numel) +
                  work_tile.point * params.split_numel + static_cast<std::int64_t>(row) * params.pitch;
#pragma unroll 1
  for (int i = 0; i < S::sums; i += turn, column += turn * 2) {
#pragma unroll
    for (int j = 0; j < turn / 4; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (row + half * 8 < params.row_count && column + j * 8 < params.pitch) {
          *reinterpret_cast<float2*>(target + half * 8 * params.pitch + column + j * 8) =
              make_float2(totals[j * 4 + half * 2], totals[j * 4 + half * 2 + 1]);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < S::sums; ++j) totals[j] = j + turn < S::sums ? totals[j + turn] : 0.0f;
  }
}

// Tensor cores truncate their sums, so a stage's join totals that are rounded; here its scale becomes theirs.
template <typename S>
__device__ __forceinline__ void multiply(const Params& params, std::uint32_t ring, Barriers& barriers, int warpgroup) {
  float totals[S::sums], sums[S::sums];
#pragma unroll
  for (int i = 0; i < S::sums; ++i) totals[i] = 0.0f, sums[i] = 0.0f;
  const int floor = params.sums[params.stages];
  Pipeline pipeline{barriers, slots, {params.report, kernel_winograd_products, role_multiply}};
#pragma unroll 1
  for (unsigned index = blockIdx.x; index < params.work_tiles; index += gridDim.x) {
    const WorkTile<S> work_tile(params, index);
    const bool exists = work_tile.row_block + warpgroup < params.row_blocks;
#pragma unroll 1
    for (int i = work_tile.first_stage; i < work_tile.last_stage; ++i) {
      const int exponent = params.sums[i];
      pipeline.wait();
      if (exists) multiply_stage<S>(ring + pipeline.slot() * S::slot_bytes, warpgroup, sums);
      __syncwarp();
      pipeline.release();
      pipeline.advance();
      if (exists) {
        // A stage of zeros has exponent 0, which may lie far below the floor.
        const float factor = power_of_two(max(min(floor - exponent, 127), -126));
#pragma unroll
        for (int j = 0; j < S::sums; ++j) totals[j] = fmaf(sums[j], factor, totals[j]);
      }
    }
    if (exists) store<S>(params, work_tile, warpgroup, totals);
  }
}

template <typename S>
__global__ void __launch_bounds__(S::threads, 1) multiply_tiles(const __grid_constant__ Params params) {
#if defined(FASTCONV_HAS_WGMMA)
  extern __shared__ unsigned char memory[];
  const std::uint32_t start = shared_address(memory), ring = (start + sizeof(Barriers) + 1023) / 1024 * 1024;
  Barriers& barriers = *reinterpret_cast<Barriers*>(memory);
  if (threadIdx.x == 0) {
    hopper::initialise(barriers.full, barriers.free, 4 * S::blocks_m);
    hopper::barrier_init_fence();
  }
  __syncthreads();
  wait_for_predecessor();
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);  // known to be uniform
  if (warpgroup < S::blocks_m) {
    hopper::setmaxnreg_inc<S::multiply_registers>();
    multiply<S>(params, ring, barriers, warpgroup);
  } else {
    hopper::setmaxnreg_dec<S::load_registers>();
    if (threadIdx.x % 128 == 0) load<S>(params, ring, barriers);
  }
#endif
}

}  // namespace fastconv::algos::winograd_staged::wgrad
