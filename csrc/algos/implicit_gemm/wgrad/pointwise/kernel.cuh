// The weight gradient of a 1x1 convolution in one pass over its operands: a thread copies chunks of float32 into a
// ring, a warp finds their scales, two warpgroups convert them into a second ring, two multiply.
#pragma once

#include "algos/implicit_gemm/wgrad/pointwise/convert.cuh"
#include "algos/implicit_gemm/wgrad/pointwise/tile.cuh"
#include "device/dependent_launch.cuh"

namespace fastconv::algos::implicit_gemm::wgrad::pointwise {

// By one thread. Channels that do not exist come as zeros.
template <typename S>
__device__ __forceinline__ void load(const Params& params, const CUtensorMap& rows, const CUtensorMap& columns,
                                     const Memory<S>& memory, const WorkTile<S>& work_tile) {
  hopper::RingPosition slot;
#pragma unroll 1
  for (int chunk = work_tile.first_chunk; chunk < work_tile.last_chunk; ++chunk) {
    const std::uint32_t full = shared_address(&memory.control.staged.full[slot.slot]);
    hopper::wait_in_place<kernel_implicit_gemm, role_load>(memory.control.staged.free[slot.slot], slot.parity ^ 1,
                                                           params.report);
    hopper::arrive_expecting(full, S::tile.staged_bytes());
    const std::uint32_t target = memory.staged + slot.slot * S::tile.staged_bytes();
#pragma unroll
    for (int i = 0; i < S::row_boxes; ++i) {
      hopper::tma_load(target + i * box_bytes, rows, work_tile.row0 + i * box_channels, chunk * chunk_pixels, 0, 0,
                       full);
    }
#pragma unroll
    for (int i = 0; i < S::column_boxes; ++i) {
      hopper::tma_load(target + (S::row_boxes + i) * box_bytes, columns, work_tile.column0 + i * box_channels,
                       chunk * chunk_pixels, 0, 0, full);
    }
    slot.advance(S::tile.staged_slots());
  }
}

// By one warp, a lane for each pixel. The images of a chunk are a group.
template <typename S>
__device__ __forceinline__ void find_scales(const Params& params, const Memory<S>& memory,
                                            const WorkTile<S>& work_tile) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  hopper::RingPosition slot;
#pragma unroll 1
  for (int chunk = work_tile.first_chunk; chunk < work_tile.last_chunk; ++chunk) {
    const int image = params.image_of(chunk * chunk_pixels + lane);
    const PairScales::Group group =
        params.pair.group(__shfl_sync(0xffffffffu, image, 0), __shfl_sync(0xffffffffu, image, 31), params.retry);
    const float of_rows = ldexpf(1.0f, params.pair.exponent(params.transposed, image, group));
    const float of_columns = ldexpf(1.0f, params.pair.exponent(!params.transposed, image, group));
    hopper::wait_in_place<kernel_implicit_gemm, role_load>(memory.control.staged.free[slot.slot], slot.parity ^ 1,
                                                           params.report);
    ChunkScales& scales = memory.control.scales[slot.slot];
    scales.of_rows[lane] = of_rows, scales.of_columns[lane] = of_columns, scales.image[lane] = image;
    if (lane == 0) scales.sum = group.sum;
    __syncwarp();
    if (lane == 0) hopper::arrive(memory.control.staged.full[slot.slot]);
    slot.advance(S::tile.staged_slots());
  }
}

// A chunk's products, from zero. Small ones first.
template <typename S>
__device__ __forceinline__ void multiply_chunk(std::uint32_t operands, int warpgroup, float (&sum)[S::sums]) {
  constexpr bool by_rows = S::tile.warpgroups == Warpgroups::rows, by_pixels = S::tile.warpgroups == Warpgroups::pixels;
  constexpr bool by_columns = S::tile.warpgroups == Warpgroups::columns;
  constexpr int steps = by_pixels ? 1 : chunk_pixels / 16, step_bytes = 16 * row_bytes;
  const std::uint32_t rows = operands + (by_rows ? warpgroup * box_bytes : by_pixels ? warpgroup * step_bytes : 0);
  const std::uint32_t columns = operands + S::row_boxes / 2 * box_bytes +
                                (by_columns  ? warpgroup * S::tile.warpgroup_columns / half_channels * box_bytes
                                 : by_pixels ? warpgroup * step_bytes
                                             : 0);
  const std::uint64_t a = hopper::transposed_descriptor(rows, 0, 8 * row_bytes);
  const std::uint64_t b = hopper::transposed_descriptor(columns, box_bytes, 8 * row_bytes);
  constexpr std::uint64_t to_low = S::tile.limb_bytes() / 16;
  hopper::fence_operand(sum);
  hopper::fence_products();
#pragma unroll
  for (int step = 0; step < steps; ++step) {
    const std::uint64_t high_a = hopper::advance_descriptor(a, step * step_bytes);
    const std::uint64_t high_b = hopper::advance_descriptor(b, step * step_bytes);
    if constexpr (S::tile.limbs == 2) {
      hopper::multiply_transposed<half_t>(sum, high_a + to_low, high_b, step > 0);
      hopper::multiply_transposed<half_t>(sum, high_a, high_b + to_low, 1);
      hopper::multiply_transposed<half_t>(sum, high_a, high_b, 1);
    } else {
      hopper::multiply_transposed<half_t>(sum, high_a, high_b, step > 0);
    }
  }
  hopper::commit_products();
  hopper::wait_for_products<0>();
  hopper::fence_operand(sum);
}

// Tensor cores truncate their sums, so a chunk's join totals that are rounded; here its scales are undone, too.
template <typename S>
__device__ __forceinline__ void multiply(const Params& params, const Memory<S>& memory, const WorkTile<S>& work_tile,
                                         int warpgroup, float (&total)[S::sums]) {
  float sum[S::sums];
#pragma unroll
  for (int i = 0; i < S::sums; ++i) total[i] = 0.0f, sum[i] = 0.0f;
  hopper::RingPosition slot;
#pragma unroll 1
  for (int chunk = work_tile.first_chunk; chunk < work_tile.last_chunk; ++chunk) {
    hopper::wait_in_place<kernel_implicit_gemm, role_multiply>(memory.control.operands.full[slot.slot], slot.parity,
                                                               params.report);
    const Undo undo(memory.control.sums[slot.slot]);
    multiply_chunk<S>(memory.operands + slot.slot * S::tile.operand_bytes(), warpgroup, sum);
    hopper::arrive_for_warp(memory.control.operands.free[slot.slot]);
    slot.advance(S::tile.operand_slots());
    undo.add(sum, total);
  }
}

template <typename S>
__device__ __forceinline__ void store(const Params& params, const WorkTile<S>& work_tile, int warpgroup,
                                      const float (&total)[S::sums]) {
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4, lane = static_cast<int>(threadIdx.x) % 32;
  const int row0 = work_tile.row0 + (S::tile.warpgroups == Warpgroups::rows ? warpgroup * 64 : 0);
  const int column0 =
      work_tile.column0 + (S::tile.warpgroups == Warpgroups::columns ? warpgroup * S::tile.warpgroup_columns : 0);
  const int split = work_tile.split * S::tile.warpgroup_splits() + (S::tile.warpgroup_splits() == 2 ? warpgroup : 0);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = row0 + warp * 16 + half * 8 + lane / 4;
    if (row >= params.rows) continue;
    float* target = params.partial + (static_cast<std::int64_t>(split) * params.rows + row) * params.columns;
#pragma unroll
    for (int j = 0; j < S::tile.warpgroup_columns / 8; ++j) {
      const int column = column0 + j * 8 + lane % 4 * 2, at = j * 4 + half * 2;
      if (column < params.columns) *reinterpret_cast<float2*>(target + column) = make_float2(total[at], total[at + 1]);
    }
  }
}

// Whether a scale of the block's images does not fit; the same for all its warps.
template <typename S>
__device__ __forceinline__ bool is_wrong(const Params& params, const WorkTile<S>& work_tile) {
  const int first = params.image_of(work_tile.first_chunk * chunk_pixels);
  return params.pair.group(first, params.image_of(work_tile.last_chunk * chunk_pixels - 1), true).exact;
}

template <typename S>
__global__ void __launch_bounds__(kernel_threads, 1)
    multiply_pointwise(const __grid_constant__ CUtensorMap rows, const __grid_constant__ CUtensorMap columns,
                       const __grid_constant__ Params params) {
#if defined(FASTCONV_HAS_WGMMA)
  extern __shared__ unsigned char shared[];
  launch_dependents();
  if (params.retry) {
    wait_for_predecessor();
    if (!is_wrong(params, WorkTile<S>(params))) return;
  }
  const Memory<S> memory(shared);
  if (threadIdx.x == 0) memory.control.initialise();
  __syncthreads();
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);  // known to be uniform
  if (warp < multiply_threads / 32) {
    hopper::setmaxnreg_inc<S::multiply_registers>();
    const WorkTile<S> work_tile(params);
    float total[S::sums];
    multiply(params, memory, work_tile, warp / 4, total);
    store(params, work_tile, warp / 4, total);
  } else if (warp < (multiply_threads + convert_threads) / 32) {
    hopper::setmaxnreg_dec<S::convert_registers>();
    convert(params, memory, WorkTile<S>(params));
  } else {
    hopper::setmaxnreg_dec<S::load_registers>();
    if (warp == (multiply_threads + convert_threads) / 32) {
      if (threadIdx.x % 32 == 0) load(params, rows, columns, memory, WorkTile<S>(params));
    } else if (warp == (multiply_threads + convert_threads) / 32 + 1) {
      wait_for_predecessor();  // the guesses; the operands were there before
      find_scales(params, memory, WorkTile<S>(params));
    }
  }
#endif
}

// dW from its splits, in an order that is always the same: a warp takes 32 outputs and every eighth split.
constexpr int sum_threads = 256;
static __global__ void __launch_bounds__(sum_threads)
    reduce_split_k(const float* partial,  // [split][rows][columns]
                   float* dw, int splits, std::int64_t numel, std::int64_t stride_row, std::int64_t stride_column,
                   FastDivide by_columns) {
  constexpr int warps = sum_threads / 32;
  __shared__ float sums[warps][32];
  wait_for_predecessor();
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  for (std::int64_t first = blockIdx.x * std::int64_t{32}; first < numel; first += gridDim.x * std::int64_t{32}) {
    float sum = 0.0f;
    if (first + lane < numel) {
#pragma unroll 16
      for (int split = warp; split < splits; split += warps) sum += __ldcg(partial + split * numel + first + lane);
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp == 0 && first + lane < numel) {
      float total = sums[0][lane];
#pragma unroll
      for (int i = 1; i < warps; ++i) total += sums[i][lane];
      unsigned row = static_cast<unsigned>(first + lane);
      const unsigned column = by_columns.divmod(row);
      dw[row * stride_row + column * stride_column] = total;
    }
    __syncthreads();
  }
}

}  // namespace fastconv::algos::implicit_gemm::wgrad::pointwise
