// The kernel: one persistent block per multiprocessor, whose warps have roles.
//
//   warp 0          loads the operands of the products
//   warp 1          hands out transforms
//   warp 2          one thread raises the counters of what is finished
//   warps 4 to 11   two warpgroups that multiply: 128 tiles x 128 filters of one frequency at a time
//   warps 12 to 15  transform inputs and outputs, a tile and 64 channels or 4 tiles and 16 filters each
//
// So the transforms, which wait for memory, run beside the products, which keep the tensor cores busy.
#pragma once

#include "algos/winograd_megakernel/publish.cuh"

namespace fastconv::algos::winograd_megakernel {

constexpr int first_multiplying_warp = 4, first_streaming_warp = first_multiplying_warp + multiplying_warps;
constexpr int threads = 32 * (first_streaming_warp + streaming_warps);
// Of the 128 registers that a thread starts with, some of those who do not multiply go to those who do. No call may
// stand anywhere in this kernel: with one, even on a rare path, ptxas 13.0 finds no registers for the products (C7600).
constexpr int multiply_registers = 152, helper_registers = 64, stream_registers = 144;
static_assert(threads == 512 && 2 * multiply_registers + helper_registers + stream_registers == 4 * 128);

struct Shared {
  ProductStorage products;
  Patches patches;
  StreamControl stream;
};
constexpr int shared_bytes = sizeof(Shared) + 1024;  // room to align
static_assert(shared_bytes <= 227 * 1024);

template <typename T, Output output, bool plain>
__global__ void __launch_bounds__(threads, 1)
    convolve(const __grid_constant__ Params<T> params, const __grid_constant__ StreamMaps maps) {
#if defined(FASTCONV_HAS_WGMMA)
  extern __shared__ unsigned char dynamic[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic + (-shared_address(dynamic) & 1023));
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  const bool leads = threadIdx.x % 32 == 0;
  if (threadIdx.x == 0) {
    shared.products.init();
    shared.stream.init();
    hopper::barrier_init_fence();
  }
  __syncthreads();
  if (warp >= first_multiplying_warp && warp < first_streaming_warp) {
    hopper::grow_registers<multiply_registers>();
    Multiplier<T>(params, shared.products, (warp - first_multiplying_warp) / 4).run();
    return;
  }
  if (warp >= first_streaming_warp) {
    hopper::grow_registers<stream_registers>();
    Streamer<T, output, plain>(params, maps, shared.stream, shared.patches, warp - first_streaming_warp).run();
    return;
  }
  hopper::shrink_registers<helper_registers>();
  if (warp == 0) {
    Loader<T>(params, shared.products).run();
  } else if (warp == 1) {
    Dispatcher<T>(params, shared.stream).run();
  } else if (warp == 2) {
    if (leads) publish(params, shared.products, shared.stream);
  }
#endif
}

}  // namespace fastconv::algos::winograd_megakernel
