// The kernel of the one-product classes: three warpgroups in two roles, two passes over the work tiles.
#pragma once

#include "algos/winograd_fused/single/consume.cuh"
#include "algos/winograd_fused/single/transform.cuh"

namespace fastconv::algos::winograd_fused::single {

// threadIdx.x, for the kernel's first lines only: if later ones shared it, ptxas would keep it in local memory.
__device__ __forceinline__ int thread_now() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// By the consumers (barriers of raw input: start_loading). The block's barrier follows.
template <typename T, Shape shape>
__device__ __forceinline__ void initialise(Shared<T, shape>& shared, int thread) {
  if (thread == 0) {
    for (int i = 0; i < Stage<T, shape>::v_stages; ++i) {
      hopper::barrier_init(shared.v_full[i], producer_warps);
      hopper::barrier_init(shared.v_empty[i], consumer_threads / 32);
    }
    hopper::barrier_init(shared.pass_done, block_threads);
    hopper::barrier_init_fence();
  }
  static_assert(max_work_tiles / 32 <= consumer_threads);
  if (thread < max_work_tiles / 32) shared.overflow_flags[thread] = 0;
}

// Whether any work tile must be repeated. Between the passes, after every thread has marked those that it knows of.
template <int role, typename T, Shape shape>
__device__ __forceinline__ bool end_pass(const Params<T>& params, Shared<T, shape>& shared) {
  hopper::arrive(shared.pass_done);
  wait<role>(shared_address(&shared.pass_done), 0, params.report);
  return any_overflow(shared.overflow_flags);
}

// number: of the shape. use_tma: x is loaded by tensor copies, through `input`; else by element. end: of outputs by
// filters.
template <typename T, int number, bool use_tma, StoreMode output, End end>
__global__ void __launch_bounds__(block_threads, 1)
    convolve(const __grid_constant__ Params<T> params,
             const __grid_constant__ InputMaps<input_maps(shapes[number])> input,
             const __grid_constant__ LineMaps<line_maps(shapes[number])> lines) {
#if defined(FASTCONV_HAS_WGMMA)
  extern __shared__ __align__(1024) unsigned char memory[];
  constexpr Shape shape = shapes[number];  // nvcc 13.0 takes no structure as a kernel's template argument
  auto& shared = *reinterpret_cast<Shared<T, shape>*>(memory);
  const int thread = thread_now();
  if (thread >= consumer_threads) {
    hopper::setmaxnreg_dec<producer_registers(shape)>();
    if (thread == consumer_threads) start_loading<T, shape, use_tma>(params, input.map, shared);
    if (thread == block_threads - 32) prefetch_filters<T, shape>(params);
    __syncthreads();
    ProducerState<T, shape> state;
    constexpr bool by_lines = output == StoreMode::filters;
    const CUtensorMap* residual =
        by_lines && end == End::any && params.epilogue.residual != nullptr ? &lines.residual : nullptr;
    // The passes have separate code, so that the second takes no registers of the first.
    produce<T, shape, use_tma, !by_lines>(params, input.map, residual, shared, false, state);
    if (end_pass<role_transform>(params, shared)) {
      produce<T, shape, use_tma, !by_lines>(params, input.map, residual, shared, true, state);
    }
  } else {
    hopper::setmaxnreg_inc<consumer_registers(shape)>();
    initialise(shared, thread);
    __syncthreads();
    ConsumerState state;
    if constexpr (consumes_apart(shape, sizeof(T))) {
      consume<T, shape, output, end>(params, lines, shared, false, state);
      if (end_pass<role_multiply>(params, shared)) consume<T, shape, output, end>(params, lines, shared, true, state);
    } else {
#pragma unroll 1
      for (int pass = 0; pass < 2; ++pass) {
        consume<T, shape, output, end>(params, lines, shared, pass == 1, state);
        if (pass == 0 && !end_pass<role_multiply>(params, shared)) break;
      }
    }
    if constexpr (output == StoreMode::filters) hopper::wait_for_reading<0>();
  }
#endif
}

}  // namespace fastconv::algos::winograd_fused::single
