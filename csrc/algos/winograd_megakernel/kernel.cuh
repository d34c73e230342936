// The kernel: one persistent block per multiprocessor, whose warps have roles.
//
//   warpgroup 0     warp 0 loads operands of the products (one thread), warp 1 hands out transform tasks, warp 2 raises
//                   the counters of finished products
//   warpgroups 1, 2 multiply: 128 tiles x 128 filters of one frequency at a time
//   warpgroup 3     four warps that transform inputs and outputs, a task each
//
// So the transforms, which wait for memory, run beside the products, which keep the tensor cores busy.
#pragma once

#include "algos/winograd_megakernel/multiply.cuh"
#include "algos/winograd_megakernel/stream.cuh"

namespace fastconv::algos::winograd_megakernel {

constexpr int multiplying_warps = 8;
constexpr int threads = 32 * (4 + multiplying_warps + streaming_warps);
// 64 Ki registers: the products' totals and sums are 128 of a thread's; the helpers need few.
constexpr int helper_registers = 40, multiply_registers = 168, stream_registers = 136;
static_assert(128 * (helper_registers + 2 * multiply_registers) + 32 * streaming_warps * stream_registers <= 65536);

struct Control {
  StreamControl stream;
  PublishControl publish;
};

// Products: the roles of the GEMM tasks (products_role.cuh).
template <typename T, bool vectors, typename Products>
__global__ void __launch_bounds__(threads, 1)
    convolve(const __grid_constant__ Params<T> params) {
#if defined(FASTCONV_HAS_WGMMA)
  extern __shared__ unsigned char dynamic[];
  __shared__ Control control;
  auto& storage = *reinterpret_cast<typename Products::Storage*>(dynamic + (1024 - shared_address(dynamic) % 1024) % 1024);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    control.stream.init();
    control.publish.init(multiplying_warps);
    Products::init(storage);
    hopper::barrier_init_fence();
  }
  __syncthreads();
  if (warp < 4) {
    hopper::shrink_registers<helper_registers>();
    if (warp == 0 && lane == 0) {
      Products::load(storage, params);
    } else if (warp == 1) {
      dispatch(params, control.stream);
    } else if (warp == 2 && lane == 0) {
      publish(params, control.publish);
    }
  } else if (warp < 4 + multiplying_warps) {
    hopper::grow_registers<multiply_registers>();
#ifdef DEBUG_WAIT
    if (lane == 0) printf("warp %d grown\n", warp);
#endif
    ProductSink<T> sink(params, control.publish);
    const int warpgroup = __shfl_sync(0xffffffffu, warp / 4 - 1, 0);
    Products::multiply(storage, params, warpgroup, sink);
    sink.finish(warpgroup);
  } else {
    hopper::grow_registers<stream_registers>();
#ifdef DEBUG_WAIT
    if (lane == 0) printf("warp %d grown\n", warp);
#endif
    stream<T, vectors>(params, control.stream);
  }
#endif
}

}  // namespace fastconv::algos::winograd_megakernel
