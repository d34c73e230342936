// The kernel of the one-product classes: three warpgroups in two roles, two passes over the items.
#pragma once

#include "algos/winograd_fused/single_consume.cuh"
#include "algos/winograd_fused/single_transform.cuh"

namespace fastconv::algos::winograd_fused::single {

template <typename T, Shape shape>
__device__ __forceinline__ void initialise(Shared<T, shape>& shared) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < Stage<T, shape>::raw_stages; ++i) {
      hopper::barrier_init(shared_address(&shared.raw_full[i]), 1);
      hopper::barrier_init(shared_address(&shared.raw_empty[i]), producer_warps);
    }
    for (int i = 0; i < Stage<T, shape>::v_stages; ++i) {
      hopper::barrier_init(shared_address(&shared.v_full[i]), producer_warps);
      hopper::barrier_init(shared_address(&shared.v_empty[i]), consumer_threads / 32);
    }
    hopper::barrier_init(shared_address(&shared.pass_done), block_threads);
    hopper::barrier_init_fence();
    shared.loader.raw = {};
  }
  for (int i = threadIdx.x; i < most_items / 32; i += block_threads) shared.repeat[i] = 0;
  __syncthreads();
}

// U into the L2 cache: in the first round of items, memory is too far away for the few pieces of U that the registers
// look ahead.
template <typename T, Shape shape>
__device__ __forceinline__ void prefetch_filters(const Params<T>& params) {
  const std::int64_t tiles = (params.k + filter_tile - 1) / filter_tile;
  hopper::prefetch_share(params.u,
                         tiles * params.stages * (Stage<T, shape>::steps * u_step * std::int64_t{sizeof(uint4)}));
}

// Between the passes every thread has said all that it knows of items to be repeated.
template <typename T, Shape shape>
__device__ __forceinline__ void end_pass(const Params<T>& params, Shared<T, shape>& shared, int role) {
  hopper::arrive(shared_address(&shared.pass_done));
  wait_bounded(shared_address(&shared.pass_done), 0, params.report, role);
}

// number: of the shape. boxes: x is loaded by tensor copies, through `input`; else by element.
template <typename T, int number, bool boxes, Output output>
__global__ void __launch_bounds__(block_threads, 1)
    convolve(const __grid_constant__ Params<T> params,
             const __grid_constant__ InputMaps<input_maps(shapes[number])> input,
             const __grid_constant__ LineMaps<line_maps(shapes[number])> lines) {
#if defined(FASTCONV_HAS_WGMMA)
  extern __shared__ __align__(1024) unsigned char memory[];
  constexpr Shape shape = shapes[number];  // nvcc 13.0 takes no structure as a kernel's template argument
  auto& shared = *reinterpret_cast<Shared<T, shape>*>(memory);
  initialise(shared);
  if (threadIdx.x == block_threads - 32) prefetch_filters<T, shape>(params);
  if (static_cast<int>(threadIdx.x) >= consumer_threads) {
    hopper::shrink_registers<producer_registers(shape)>();
    ProducerState<T, shape> state;
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {
      produce<T, shape, boxes, output != Output::filters>(params, input.map, shared, pass == 1, state);
      if (pass == 0) end_pass(params, shared, role_transform);
    }
  } else {
    hopper::grow_registers<consumer_registers(shape)>();
    ConsumerState state;
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {
      consume<T, shape, output>(params, lines, shared, pass == 1, state);
      if (pass == 0) end_pass(params, shared, role_multiply);
    }
  }
#endif
}

}  // namespace fastconv::algos::winograd_fused::single
