// The kernel: four warpgroups in three roles, two passes over the work tiles.
#pragma once

#include <type_traits>

#include "algos/winograd_fused/split/output.cuh"

namespace fastconv::algos::winograd_fused::split {

// All roles of a block, or of a cluster, meet.
template <int blocks>
__device__ __forceinline__ void meet() {
  if constexpr (blocks == 1) {
    synchronise<pass_barrier, block_threads>();
  } else {
    hopper::arrive_in_cluster();
    hopper::wait_for_cluster_arrival();
  }
}

// Whether any work tile must be repeated. After the first pass, when all roles have marked those that they know of.
template <Variant variant>
__device__ __forceinline__ bool end_pass(const Shared<variant>& shared) {
  meet<variant.blocks>();
  return any_overflow(shared.overflow_flags);
}

// A role's two passes, with separate code, so that the first has all registers to itself. After the second, too, no
// role accesses another block.
template <Variant variant, typename Pass>
__device__ __forceinline__ void run_passes(const Shared<variant>& shared, const Pass& pass) {
  pass(std::false_type{});
  if (!end_pass(shared)) return;
  pass(std::true_type{});
  meet<variant.blocks>();
}

template <Variant variant>
__device__ __forceinline__ void initialise(Shared<variant>& shared) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shared<variant>::raw_stages; ++i) {
      hopper::barrier_init(shared.raw_full[i], 1);
      hopper::barrier_init(shared.raw_empty[i], variant.blocks * producer_warps);
    }
    for (int i = 0; i < Shared<variant>::v_stages; ++i) {
      hopper::barrier_init(shared.v_full[i], producer_warps);
      hopper::barrier_init(shared.v_empty[i], consumer_threads / 32);
    }
    hopper::barrier_init(shared.prepared, preparing_warps);
    hopper::barrier_init(shared.last_stage, producer_warps);
    if constexpr (variant.blocks == 2) {
      for (int i = 0; i < consumer_threads / 32; ++i) {
        for (hopper::Barrier& barrier : shared.exchange.full[i / 4][i % 4]) {
          hopper::barrier_init(barrier, 1);
        }
        hopper::barrier_init(shared.exchange.read[i / 4][i % 4], 1);
      }
    }
    hopper::barrier_init_fence();
  }
  for (int i = threadIdx.x; i < max_work_tiles / 32; i += block_threads) shared.overflow_flags[i] = 0;
  if constexpr (Shared<variant>::warms_code) {
    constexpr int slot = Shared<variant>::warm_code_slot;
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < positions) shared.outputs[slot][thread] = {};
    if (thread < producer_warps * scales) (&shared.watched[slot][0][0])[thread] = 0;
    if (thread < producer_warps) shared.largest[slot][thread] = 0;
  }
  if constexpr (variant.blocks == 1) {
    __syncthreads();
  } else {
    meet<variant.blocks>();  // the other block arrives at these barriers, too
  }
}

template <int group, Variant variant>
__device__ __forceinline__ void run_consumers(const Params& params, Shared<variant>& shared) {
  ConsumerState state{.work_tile_slot = Shared<variant>::warms_code ? Shared<variant>::warm_code_slot : 0};
  if constexpr (variant.blocks == 1) {
    run_passes(shared, [&](bool retry) { consume<group>(params, shared, retry, state); });
  } else {  // the same code: for products in two places ptxas finds no registers
#pragma unroll 1
    for (bool retry = false;; retry = true) {
      consume<group>(params, shared, retry, state);
      if (!end_pass(shared) || retry) break;
    }
  }
}

template <int rank, Variant variant>
__device__ __forceinline__ void run_producers(const Params& params, Shared<variant>& shared) {
  TransformState<variant> state;
  // The same in all lanes, so that it takes none of the lanes' registers.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32 - consumer_threads / 32, 0);
  run_passes(shared, [&](bool retry) { transform_work_tiles<rank>(params, shared, retry, warp, state); });
}

template <Variant variant>
__device__ __forceinline__ void run_preparation(const Params& params, const Maps& maps, Shared<variant>& shared,
                                                int rank) {
  PrepareState<variant> state;
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32 - (consumer_threads + producer_threads) / 32, 0);
  run_passes(shared, [&](auto retry) {
    if (warp < preparing_warps) {
      prepare_work_tiles<retry()>(params, shared, warp, state);
    } else if (variant.use_tma && warp == loader_warp) {
      load_work_tiles<retry()>(params, maps, shared, rank, state.raw);
    }
    __syncwarp();
  });
}

// maps: of x. In a cluster, whose blocks share the points, a warpgroup has half of the filters, or of the
// positions, instead of half of the points.
template <Variant variant>
__global__ void __launch_bounds__(block_threads, 1)
    convolve(const __grid_constant__ Params params, const __grid_constant__ Maps maps) {
  static_assert(variant.blocks == 1 || variant.output == StoreMode::filters);
  static_assert(variant.filter_tiles == 1 || variant.filter_tiles == variant.blocks);
  static_assert(variant.strips == 1 || (variant.blocks == 2 && variant.use_tma));
  static_assert(variant.v_reuse == 1 ||
                (variant.blocks == 1 && variant.use_tma && variant.output == StoreMode::filters));
  static_assert(sizeof(Shared<variant>) <= (variant.v_reuse == 1 ? max_shared_bytes : max_kept_bytes));
#if defined(FASTCONV_HAS_WGMMA)
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<variant>*>(memory);
  initialise(shared);
  if (threadIdx.x == block_threads - 32) {
    const unsigned tiles = (params.k + filter_tile - 1) / filter_tile;
    hopper::prefetch_pieces<u_stage_bytes / 8>(params.u, tiles * params.stages * 8);
  }
  const int role = static_cast<int>(threadIdx.x) / 128;
  const int group = variant.blocks == 1 ? role : hopper::block_rank();
  if (role == consumer_groups) {
    hopper::setmaxnreg_dec<producer_registers>();
    if (variant.blocks == 1 || group == 0) {
      run_producers<0>(params, shared);
    } else {
      run_producers<variant.blocks - 1>(params, shared);
    }
  } else if (role > consumer_groups) {
    hopper::setmaxnreg_dec<preparing_registers>();
    run_preparation(params, maps, shared, group);
  } else if (group == 0) {
    hopper::setmaxnreg_inc<consumer_registers>();
    run_consumers<0>(params, shared);
  } else {
    hopper::setmaxnreg_inc<consumer_registers>();
    run_consumers<1>(params, shared);
  }
#endif
}

}  // namespace fastconv::algos::winograd_fused::split
