// The products' roles (winograd/products.cuh) as the megakernel uses them.
#pragma once

#include "algos/winograd_megakernel/multiply.cuh"

namespace fastconv::algos::winograd_megakernel {

template <typename T>
struct TensorProducts {
  using Shape = winograd::products::Shape<winograd::Mode::split, true, false, true>;
  using Storage = winograd::products::Storage<Shape>;
  static constexpr int barrier = 4;  // two named barriers for each multiplying warpgroup

  static __device__ __forceinline__ void init(Storage& storage) { storage.initialise(); }
  static __device__ __forceinline__ winograd::products::Params product_params(const Params<T>& params) {
    return {params.k_pad, params.unscale_pitch(), params.chunks(), params.report, kernel_winograd_megakernel};
  }
  // One thread.
  static __device__ __forceinline__ void load(Storage& storage, const Params<T>& params, const CUtensorMap& v,
                                              const CUtensorMap& u) {
    winograd::products::load_products<Shape>(storage, product_params(params), v, u, ProductSource<T>(params));
  }
  // A warpgroup.
  static __device__ __forceinline__ void multiply(Storage& storage, const Params<T>& params, int warpgroup,
                                                  ProductSink<T>& sink) {
    winograd::products::multiply_products<Shape>(storage, product_params(params), warpgroup, barrier + 2 * warpgroup,
                                                 sink);
  }
};

}  // namespace fastconv::algos::winograd_megakernel
