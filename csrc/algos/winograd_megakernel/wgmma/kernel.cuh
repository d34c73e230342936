// The kernel: one persistent block per multiprocessor, whose warps have roles.
//
//   warp 0          loads the operands of the products
//   warp 1          hands out transforms
//   warp 2          one thread raises the counters of what is finished
//   warp 3          finds the tasks of the products
//   warps 4 to 11   two warpgroups that multiply: 128 tiles x 128 filters of one point at a time
//   others          transform inputs and outputs, a tile and 64 channels or 64 values of M each
//
// So the transforms, which wait for memory, run beside the products, which keep the tensor cores busy.
#pragma once

#include "algos/winograd_megakernel/wgmma/signal.cuh"

namespace fastconv::algos::winograd_megakernel::wgmma {

constexpr int first_multiplying_warp = 4, first_streaming_warp = first_multiplying_warp + multiplying_warps;
template <typename T>
constexpr int threads = 32 * (first_streaming_warp + streaming_warps<T>);
// A thread starts with all registers' equal share; some of those who load go to the others. No call may stand anywhere
// in this kernel: with one, even on a rare path, ptxas 13.0 finds no registers for the products (C7600).
template <typename T>
constexpr int multiply_registers = is_split<T> ? 152 : 96;
template <typename T>
constexpr int helper_registers = is_split<T> ? 64 : 48;
template <typename T>
constexpr int stream_registers = is_split<T> ? 144 : 120;
template <typename T>
constexpr bool registers_suffice =
    multiplying_warps * multiply_registers<T> + first_multiplying_warp * helper_registers<T> +
        streaming_warps<T> * stream_registers<T> <=
    65536 / threads<T> / 8 * 8 * (threads<T> / 32);
static_assert(registers_suffice<float> && registers_suffice<half_t>);

template <typename T>
struct Shared {
  ProductStorage<T> products;
  Patches<T> patches;
  StreamControl<T> stream;
};
template <typename T>
constexpr int shared_bytes = sizeof(Shared<T>) + 1024;  // room to align
static_assert(shared_bytes<float> <= 227 * 1024 && shared_bytes<half_t> <= 227 * 1024);

template <typename T, StoreMode output, bool plain>
__global__ void __launch_bounds__(threads<T>, 1)
    convolve(const __grid_constant__ Params<T> params, const __grid_constant__ StreamMaps maps) {
#if defined(FASTCONV_HAS_WGMMA)
  extern __shared__ unsigned char dynamic[];
  Shared<T>& shared = *reinterpret_cast<Shared<T>*>(dynamic + (-shared_address(dynamic) & 1023));
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  const bool elected = threadIdx.x % 32 == 0;
  if (threadIdx.x == 0) {
    shared.products.init();
    shared.stream.init(params.work_tiles());
    hopper::barrier_init_fence();
  }
  __syncthreads();
  if (warp >= first_multiplying_warp && warp < first_streaming_warp) {
    hopper::setmaxnreg_inc<multiply_registers<T>>();
    Multiplier<T>(params, shared.products, (warp - first_multiplying_warp) / 4).run();
    return;
  }
  if (warp >= first_streaming_warp) {
    hopper::setmaxnreg_inc<stream_registers<T>>();
    TransformWorker<T, output, plain>(params, maps, shared.stream, shared.patches, warp - first_streaming_warp).run();
    return;
  }
  hopper::setmaxnreg_dec<helper_registers<T>>();
  if (warp == 0) {
    if (elected) Loader<T>(params, shared.products).run();
  } else if (warp == 1) {
    if (elected) TransformTaskFetcher<T>(params, shared.stream).run();
  } else if (warp == 2) {
    if (elected) signal(params, shared.products, shared.stream);
  } else {
    GemmTaskFetcher<T>(params, shared.products).run();
  }
#endif
}

}  // namespace fastconv::algos::winograd_megakernel::wgmma
