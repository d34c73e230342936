// The kernel: four warpgroups in three roles, two passes over the items.
#pragma once

#include <type_traits>

#include "algos/winograd_fused/output.cuh"

namespace fastconv::algos::winograd_fused {

// All roles of a block, or of a cluster, meet.
template <int blocks>
__device__ __forceinline__ void end_pass() {
  if constexpr (blocks == 1) {
    synchronise<pass_barrier, block_threads>();
  } else {
    hopper::arrive_in_cluster();
    hopper::wait_for_cluster_arrival();
  }
}

template <bool boxes, int blocks>
__device__ __forceinline__ void initialise(Shared<blocks>& shared) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shared<blocks>::raw_stages; ++i) {
      hopper::barrier_init(shared_address(&shared.raw_full[i]), 1);
      hopper::barrier_init(shared_address(&shared.raw_empty[i]), blocks * producer_warps);
    }
    for (int i = 0; i < Shared<blocks>::v_stages; ++i) {
      hopper::barrier_init(shared_address(&shared.v_full[i]), producer_warps);
      hopper::barrier_init(shared_address(&shared.v_empty[i]), consumer_threads / 32);
    }
    hopper::barrier_init(shared_address(&shared.prepared), preparing_warps);
    hopper::barrier_init(shared_address(&shared.last_stage), producer_warps);
    if constexpr (blocks == 2) {
      for (int i = 0; i < consumer_threads / 32; ++i) {
        for (std::uint64_t& barrier : shared.exchange.full[i / 4][i % 4]) {
          hopper::barrier_init(shared_address(&barrier), 1);
        }
        hopper::barrier_init(shared_address(&shared.exchange.read[i / 4][i % 4]), 1);
      }
    }
    hopper::barrier_init_fence();
  }
  for (int i = threadIdx.x; i < most_items / 32; i += block_threads) shared.repeat[i] = 0;
  if constexpr (blocks == 1) {
    __syncthreads();
  } else {
    end_pass<blocks>();  // the other block arrives at these barriers, too
  }
}

template <int group, Output output, int blocks>
__device__ __forceinline__ void run_consumers(const Params& params, Shared<blocks>& shared) {
  ConsumerState state;
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
    consume<group, output>(params, shared, pass == 1, state);
    end_pass<blocks>();
  }
}

template <bool boxes, int rank, int blocks>
__device__ __forceinline__ void run_producers(const Params& params, Shared<blocks>& shared) {
  TransformState<blocks> state;
  // The same in all lanes, so that it takes none of the lanes' registers.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32 - consumer_threads / 32, 0);
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
    transform_items<boxes, rank>(params, shared, pass == 1, warp, state);
    end_pass<blocks>();  // behind it, nobody reaches into another block any more
  }
}

template <bool boxes, int blocks>
__device__ __forceinline__ void run_preparation(const Params& params, const Maps& maps, Shared<blocks>& shared,
                                                int rank) {
  PrepareState<blocks> state;
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32 - (consumer_threads + producer_threads) / 32, 0);
  const auto run_pass = [&](auto repeated) {
    if (warp < preparing_warps) {
      prepare_items<repeated()>(params, shared, warp, state);
    } else if (boxes && warp == loader_warp) {
      load_items<repeated()>(params, maps, shared, rank, state.raw);
    }
    __syncwarp();
    end_pass<blocks>();
  };
  run_pass(std::false_type{});
  run_pass(std::true_type{});
}

// boxes: x is loaded by tensor copies, through `maps`; else by element. blocks: of a cluster, which share the
// frequencies, so that a warpgroup has half of the filters instead of half of the frequencies.
template <int blocks, bool boxes, Output output>
__global__ void __launch_bounds__(block_threads, 1)
    convolve(const __grid_constant__ Params params, const __grid_constant__ Maps maps) {
  static_assert(blocks == 1 || output == Output::pairs);
#if defined(FASTCONV_HAS_WGMMA)
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<blocks>*>(memory);
  initialise<boxes>(shared);
  const int role = static_cast<int>(threadIdx.x) / 128;
  const int group = blocks == 1 ? role : hopper::block_rank();
  if (role == consumer_groups) {
    hopper::shrink_registers<producer_registers>();
    if (blocks == 1 || group == 0) {
      run_producers<boxes, 0>(params, shared);
    } else {
      run_producers<boxes, blocks - 1>(params, shared);
    }
  } else if (role > consumer_groups) {
    hopper::shrink_registers<preparing_registers>();
    run_preparation<boxes>(params, maps, shared, group);
  } else if (group == 0) {
    hopper::grow_registers<consumer_registers>();
    run_consumers<0, output>(params, shared);
  } else {
    hopper::grow_registers<consumer_registers>();
    run_consumers<1, output>(params, shared);
  }
#endif
}

}  // namespace fastconv::algos::winograd_fused
