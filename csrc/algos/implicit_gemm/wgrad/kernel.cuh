// The main kernel of the weight gradient: one thread loads chunks of both operands into a ring of shared memory, two
// warpgroups multiply. Both operands lie as they are in memory, channels fast: wgmma reads them transposed.
#pragma once

#include "algos/implicit_gemm/wgrad/plan.h"
#include "core/fast_divide.h"
#include "device/image_scale.cuh"
#include "device/mma.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/ptx/mbarrier.cuh"
#include "hopper/ptx/tma.cuh"
#include "hopper/ptx/warp.cuh"
#include "hopper/ptx/wgmma.cuh"

namespace fastconv::algos::implicit_gemm::wgrad {

struct Params {
  float* partial;   // [split][K][taps][pitch_x]
  const int* sums;  // [groups of images] exponents of the products' scales; null: not scaled
  WaitReport* report;
  std::int64_t split_numel;
  int k, pitch_x, pitch_grad, taps, taps_s, channel_blocks, taps_groups;
  int tile_n, tile_p, tile_q, chunks, chunks_per_split, chunks_p, chunks_q;
  int stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
  int slots, steps, chunk_bytes, slot_bytes, grad_region, x_region;
  // Of x in shared memory: from a group of 8 pixels to the next, from a step to the next, from a column block to the
  // next
  int x_group_stride, x_step_stride, x_block_stride;
  FastDivide by_tiles, by_column_tiles, by_channel_blocks, by_taps_groups, by_taps_s, by_chunks_p, by_chunks_q;
};

template <typename Half_, int products_, int blocks_n_, bool rows_by_warps_, bool window_>
struct Shape {
  using Half = Half_;
  static constexpr int products = products_, limbs = products == 3 ? 2 : 1, blocks_n = blocks_n_;
  static constexpr bool rows_by_warps = rows_by_warps_, window = window_;
  static constexpr int blocks_m = rows_by_warps ? 2 : 1, boxes_x = window ? 1 : blocks_n;
  static constexpr int sums = 32 * blocks_n;  // of a thread: 64 x 64 blocks_n of a warpgroup
  static constexpr int threads = 128 * (multiply_warpgroups + 1);
  static constexpr int multiply_registers = 232, load_registers = 40;
};

using Barriers = hopper::Pipeline<max_slots>::Barriers;

// What a block computes: 64 or 128 filters from k0 on, its column blocks, its chunks.
template <typename S>
struct WorkTile {
  int k0, split, first_chunk, last_chunk;
  int tap[S::blocks_n], channel[S::blocks_n];  // of each column block; tap >= taps: none

  __device__ __forceinline__ explicit WorkTile(const Params& params) {
    unsigned split_index = blockIdx.x;
    unsigned row =
        params.by_tiles.divmod(split_index);  // the blocks of all tiles read the same pixels at the same time
    const unsigned column = params.by_column_tiles.divmod(row);
    k0 = static_cast<int>(row) * S::blocks_m * block_channels;
    split = static_cast<int>(split_index);
    first_chunk = split * params.chunks_per_split;
    last_chunk = min(first_chunk + params.chunks_per_split, params.chunks);
    if constexpr (S::window) {
      unsigned r = column;
      const unsigned group = params.by_taps_groups.divmod(r), block = params.by_channel_blocks.divmod(r);
#pragma unroll
      for (int i = 0; i < S::blocks_n; ++i) {
        const int s = static_cast<int>(group) * S::blocks_n + i;
        tap[i] = s < params.taps_s ? static_cast<int>(r) * params.taps_s + s : params.taps;
        channel[i] = static_cast<int>(block) * block_channels;
      }
    } else {
#pragma unroll
      for (int i = 0; i < S::blocks_n; ++i) {
        unsigned index = column * S::blocks_n + i;
        const unsigned block = params.by_channel_blocks.divmod(index);
        tap[i] = static_cast<int>(index);
        channel[i] = static_cast<int>(block) * block_channels;
      }
    }
  }
};

template <typename S>
__device__ __forceinline__ void load(const Params& params, const CUtensorMap& x, const CUtensorMap& grad,
                                     std::uint32_t ring, Barriers& barriers, const WorkTile<S>& work_tile) {
  const WaitSite site{params.report, kernel_implicit_gemm, role_load};
  int dh[S::boxes_x], dw[S::boxes_x], channel[S::boxes_x];
#pragma unroll
  for (int i = 0; i < S::boxes_x; ++i) {
    const bool exists = work_tile.tap[i] < params.taps;  // else any box: its columns are not stored
    unsigned r = exists ? work_tile.tap[i] : 0;
    const int s = static_cast<int>(params.by_taps_s.divmod(r));
    dh[i] = static_cast<int>(r) * params.dilation_h - params.pad_h;
    dw[i] = s * params.dilation_w - params.pad_w;
    channel[i] = work_tile.channel[i];
  }
  unsigned n = work_tile.first_chunk;
  unsigned q = params.by_chunks_q.divmod(n), p = params.by_chunks_p.divmod(n);
  hopper::RingPosition slot;
#pragma unroll 1
  for (int chunk = work_tile.first_chunk; chunk < work_tile.last_chunk; ++chunk) {
    const int p0 = static_cast<int>(p) * params.tile_p, q0 = static_cast<int>(q) * params.tile_q;
    const int n0 = static_cast<int>(n) * params.tile_n;
    const std::uint32_t full = shared_address(&barriers.full[slot.slot]);
    hopper::wait(barriers.free[slot.slot], slot.parity ^ 1, site);
    hopper::arrive_expecting(full, params.chunk_bytes);
    std::uint32_t target = ring + slot.slot * params.slot_bytes;
#pragma unroll
    for (int limb = 0; limb < S::limbs; ++limb) {
#pragma unroll
      for (int m = 0; m < S::blocks_m; ++m) {
        hopper::tma_load(target, grad, limb * params.pitch_grad + work_tile.k0 + m * block_channels, q0, p0, n0, full);
        target += params.grad_region;
      }
    }
#pragma unroll
    for (int limb = 0; limb < S::limbs; ++limb) {
#pragma unroll
      for (int i = 0; i < S::boxes_x; ++i) {
        hopper::tma_load(target, x, limb * params.pitch_x + channel[i], q0 * params.stride_w + dw[i],
                         p0 * params.stride_h + dh[i], n0, full);
        target += params.x_region;
      }
    }
    slot.advance(params.slots);
    if (++q == static_cast<unsigned>(params.chunks_q)) {
      q = 0;
      if (++p == static_cast<unsigned>(params.chunks_p)) p = 0, ++n;
    }
  }
}

// A chunk's products, from zero. Small ones first.
template <typename S>
__device__ __forceinline__ void multiply_chunk(const Params& params, std::uint32_t slot, int m, float (&sum)[S::sums]) {
  const std::uint32_t grad = slot + m * params.grad_region;
  const std::uint32_t x = slot + S::limbs * S::blocks_m * params.grad_region;
  std::uint64_t high_a = hopper::transposed_descriptor(grad, 0, 1024);
  std::uint64_t high_b = hopper::transposed_descriptor(x, params.x_block_stride, params.x_group_stride);
  const std::uint64_t to_low_a = S::blocks_m * params.grad_region / 16, to_low_b = S::boxes_x * params.x_region / 16;
  const std::uint64_t step_b = params.x_step_stride / 16;
#pragma unroll 1
  for (int step = 0; step < params.steps; ++step) {
    hopper::fence_products();
    if constexpr (S::products == 3) {
      hopper::multiply_transposed<typename S::Half>(sum, high_a + to_low_a, high_b, step > 0);
      hopper::multiply_transposed<typename S::Half>(sum, high_a, high_b + to_low_b, 1);
      hopper::multiply_transposed<typename S::Half>(sum, high_a, high_b, 1);
    } else {
      hopper::multiply_transposed<typename S::Half>(sum, high_a, high_b, step > 0);
    }
    high_a += 16 * row_bytes / 16, high_b += step_b;
  }
  hopper::commit_products();
  hopper::wait_for_products<0>();
  hopper::fence_operand(sum);
}

// Tensor cores truncate their sums, so a chunk's join totals that are rounded; here its scales are undone, too.
template <typename S>
__device__ __forceinline__ void multiply(const Params& params, std::uint32_t ring, Barriers& barriers,
                                         const WorkTile<S>& work_tile, float (&total)[S::sums]) {
  const WaitSite site{params.report, kernel_implicit_gemm, role_multiply};
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);  // known to be uniform
  float sum[S::sums];
#pragma unroll
  for (int i = 0; i < S::sums; ++i) total[i] = 0.0f, sum[i] = 0.0f;
  hopper::RingPosition slot;
  int chunk = work_tile.first_chunk;
  if (!S::rows_by_warps && warpgroup == 1) ++chunk, slot.advance(params.slots);
#pragma unroll 1
  for (; chunk < work_tile.last_chunk; chunk += S::rows_by_warps ? 1 : 2) {
    unsigned image = chunk;
    params.by_chunks_q.divmod(image), params.by_chunks_p.divmod(image);
    const Undo undo(params.sums == nullptr ? 0 : params.sums[image]);
    hopper::wait(barriers.full[slot.slot], slot.parity, site);
    multiply_chunk<S>(params, ring + slot.slot * params.slot_bytes, S::rows_by_warps ? warpgroup : 0, sum);
    hopper::arrive_for_warp(barriers.free[slot.slot]);
    slot.advance(params.slots);
    if constexpr (!S::rows_by_warps) slot.advance(params.slots);
    undo.add(sum, total);
  }
}

template <typename S>
__device__ __forceinline__ void store(const Params& params, const WorkTile<S>& work_tile,
                                      const float (&total)[S::sums]) {
  const int warpgroup = static_cast<int>(threadIdx.x) / 128, warp = static_cast<int>(threadIdx.x) / 32 % 4;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int k = work_tile.k0 + (S::rows_by_warps ? warpgroup * block_channels : 0) + warp * 16 + lane / 4;
  const int split_index = S::rows_by_warps ? work_tile.split : work_tile.split * multiply_warpgroups + warpgroup;
#pragma unroll
  for (int i = 0; i < S::blocks_n; ++i) {
    if (work_tile.tap[i] >= params.taps) continue;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      if (k + row * 8 >= params.k) continue;
      float* target = params.partial + split_index * params.split_numel +
                      (static_cast<std::int64_t>(k + row * 8) * params.taps + work_tile.tap[i]) * params.pitch_x;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int c = work_tile.channel[i] + j * 8 + lane % 4 * 2;
        const int at = i * 32 + j * 4 + row * 2;
        if (c < params.pitch_x) *reinterpret_cast<float2*>(target + c) = make_float2(total[at], total[at + 1]);
      }
    }
  }
}

template <typename S>
__global__ void __launch_bounds__(S::threads, 1)
    multiply_pixels(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap grad,
                    const __grid_constant__ Params params) {
#if defined(FASTCONV_HAS_WGMMA)
  extern __shared__ unsigned char memory[];
  const std::uint32_t start = shared_address(memory), ring = (start + sizeof(Barriers) + 1023) / 1024 * 1024;
  Barriers& barriers = *reinterpret_cast<Barriers*>(memory);
  // Pixels behind a box's last, up to whole steps, stay zero.
  auto* first = reinterpret_cast<uint4*>(memory + (ring - start));
  for (int i = static_cast<int>(threadIdx.x); i < params.slots * params.slot_bytes / 16; i += S::threads) {
    first[i] = uint4{0, 0, 0, 0};
  }
  hopper::fence_copies();
  if (threadIdx.x == 0) {
    for (int i = 0; i < params.slots; ++i) {
      hopper::barrier_init(barriers.full[i], 1);
      hopper::barrier_init(barriers.free[i], S::rows_by_warps ? 4 * multiply_warpgroups : 4);
    }
    hopper::barrier_init_fence();
  }
  __syncthreads();
  const WorkTile<S> work_tile(params);
  if (threadIdx.x / 128 < multiply_warpgroups) {
    hopper::setmaxnreg_inc<S::multiply_registers>();
    float total[S::sums];
    multiply<S>(params, ring, barriers, work_tile, total);
    store<S>(params, work_tile, total);
  } else {
    hopper::setmaxnreg_dec<S::load_registers>();
    if (threadIdx.x % 128 == 0) load<S>(params, x, grad, ring, barriers, work_tile);
  }
#endif
}

}  // namespace fastconv::algos::implicit_gemm::wgrad
