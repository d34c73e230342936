// The products' roles (winograd/products.cuh) as the megakernel uses them.
#pragma once

#include "algos/winograd_megakernel/multiply.cuh"

namespace fastconv::algos::winograd_megakernel {

template <typename T>
struct TensorProducts {
  // One set of sums, to leave registers to the streaming warps; a task's output never waits for a later task's input.
  using Shape = products::Shape<winograd::Mode::split, 1, false, true, 3, kernel_winograd_megakernel>;
  using Storage = products::Storage<Shape, ProductTask>;

  static __device__ __forceinline__ void init(Storage& storage) { storage.initialise(); }
  // One thread.
  static __device__ __forceinline__ void load(Storage& storage, const Params<T>& params) {
    products::load_products<Shape>(storage, params.chunks, ProductSource<T>(params), params.report);
  }
  // A warpgroup.
  static __device__ __forceinline__ void multiply(Storage& storage, const Params<T>& params, int warpgroup,
                                                  ProductSink<T>& sink) {
    products::multiply_products<Shape, 8>(storage, params.chunks, warpgroup, sink, params.report);
  }
};

}  // namespace fastconv::algos::winograd_megakernel
