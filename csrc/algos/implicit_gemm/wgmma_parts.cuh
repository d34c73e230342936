// The parts of a tile's reduction, one for each block of a cluster, added through shared memory: each block leaves its
// sums there, and finishes some of the pixels for all. Always in the same order.
#pragma once

#include "algos/implicit_gemm/wgmma_output.cuh"
#include "device/cluster.cuh"

namespace fastconv::algos::implicit_gemm::wgmma {

// The last unit of a block's work, so the rings are free: [pixel][filter], where the pad keeps two pixels' 16 bytes in
// different banks.
template <typename S>
__device__ __forceinline__ void add_in_cluster(const Params<typename S::T>& params, const Work& work,
                                               const FilterData<S>& filters, const Shared<S>& shared,
                                               const float (&sums)[S::row_blocks][S::sums],
                                               const int (&exponents)[2 * S::row_blocks], const WaitSite& site) {
  using T = typename S::T;
  constexpr int chunk = chunk_of<T>, pitch = S::filter_tile + 4, vectors = S::filter_tile / chunk;
  constexpr int threads = 128 * multiply_warpgroups;
  const std::uint32_t ready = shared_address(&shared.control->parts_ready);
  const std::uint32_t done = shared_address(&shared.control->parts_done);
  const int parts = params.splits, thread = static_cast<int>(threadIdx.x);
  const auto address_of = [&](int pixel, int filter) { return shared.input + (pixel * pitch + filter) * 4; };

  synchronise_multipliers();  // both warpgroups have read the rings
#pragma unroll
  for (int i = 0; i < 2 * S::row_blocks; ++i) {
    const std::uint32_t target = address_of(pixel_of_lane<S>(i), thread % 4 * chunk);
    const float factor = S::scaled ? power_of_two(-exponents[i]) : 1.0f;
    const auto bits = [&](float value) { return __float_as_uint(S::scaled ? value * factor : value); };
#pragma unroll
    for (int filter = 0; filter < S::filter_tile; filter += 4 * chunk) {
#pragma unroll
      for (int e = 0; e < chunk; e += 4) {
        const int at = (filter / 8 + e / 2) * 4 + i % 2 * 2;
        const float* of_row = sums[i / 2];
        store_shared(target + (filter + e) * 4,
                     {bits(of_row[at]), bits(of_row[at + 1]), bits(of_row[at + 4]), bits(of_row[at + 5])});
      }
    }
  }
  synchronise_multipliers();
  if (thread < parts) hopper::arrive_in_block(ready, thread);
  hopper::wait_for_cluster(ready, 0, site);

  const int share = (S::pixel_tile + parts - 1) / parts, first = work.split * share;
  const int last = min(first + share, S::pixel_tile), first_k = work.filter_tile * S::filter_tile;
  if (params.vectors) {
#pragma unroll 1
    for (int i = thread; i < (last - first) * vectors; i += threads) {
      const int pixel = first + i / vectors, filter = i % vectors * chunk;
      std::int64_t index[1] = {output_index(params, work, pixel)};
      index[0] = index[0] >= 0 && first_k + filter < params.k ? index[0] + first_k + filter : -1;
      float value[1][chunk] = {}, bias[1][chunk];
#pragma unroll 4
      for (int part = 0; part < parts; ++part) {
        const std::uint32_t source = hopper::address_in_block(address_of(pixel, filter), part);
#pragma unroll
        for (int e = 0; e < chunk; e += 4) {
          const float4 quad = hopper::load_from_block(source + e * 4);
          value[0][e] += quad.x, value[0][e + 1] += quad.y, value[0][e + 2] += quad.z, value[0][e + 3] += quad.w;
        }
      }
#pragma unroll
      for (int e = 0; e < chunk; ++e) {
        bias[0][e] = to_float(filters.bias[filter + e]);
        if constexpr (S::scaled) value[0][e] *= power_of_two(-filters.exponent[filter + e]);
      }
      store_vectors(params, 0, index, value, bias);
    }
  } else {
#pragma unroll 1
    for (int i = thread; i < (last - first) * S::filter_tile; i += threads) {
      const int pixel = first + (params.along_filters ? i / S::filter_tile : i % (last - first));
      const int filter = params.along_filters ? i % S::filter_tile : i / (last - first);
      std::int64_t index = output_index(params, work, pixel);
      if (index < 0 || first_k + filter >= params.k) continue;
      index += (first_k + filter) * params.y_filter;
      float sum = 0.0f;
#pragma unroll 1
      for (int part = 0; part < parts; ++part) {
        float one;
        asm volatile("ld.shared::cluster.f32 %0, [%1];"
                     : "=f"(one)
                     : "r"(hopper::address_in_block(address_of(pixel, filter), part))
                     : "memory");
        sum += one;
      }
      if constexpr (S::scaled) sum *= power_of_two(-filters.exponent[filter]);
      params.y[index] = params.epilogue.finish(sum + to_float(filters.bias[filter]), index);
    }
  }
  synchronise_multipliers();
  if (thread < parts) hopper::arrive_in_block(done, thread);
  hopper::wait_for_cluster(done, 0, site);  // others have read this block's shared memory, which may now go
}

}  // namespace fastconv::algos::implicit_gemm::wgmma
