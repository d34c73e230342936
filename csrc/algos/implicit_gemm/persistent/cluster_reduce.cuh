// Adds the splits of a tile's reduction, one per block of a cluster, through shared memory: each block stores its sums
// there and finishes some of the pixels for all blocks. Always in the same order.
#pragma once

#include "algos/implicit_gemm/persistent/output.cuh"
#include "hopper/ptx/cluster.cuh"

namespace fastconv::algos::implicit_gemm::persistent {

// The last work tile of a block, so the rings are free: they hold [pixel][filter], where the pad keeps 16 bytes of
// two pixels in different banks; then (float32) the exponent of each pixel's scale.
template <typename S>
class ClusterReduce {
 public:
  using T = typename S::T;

  __device__ __forceinline__ ClusterReduce(const Params<T>& params, const Shared<S>& shared, const WaitSite& site)
      : params_(params), shared_(shared), site_(site) {}

  __device__ __forceinline__ void add(const WorkTile& work_tile, const FilterData<S>& filters,
                                      const float (&sums)[S::row_blocks][S::sums],
                                      const int (&exponents)[2 * S::row_blocks]) {
    Control& control = *shared_.control;
    const std::uint32_t ready = shared_address(&control.partials_ready), done = shared_address(&control.partials_read);
    const int split_k = params_.split_k, thread = static_cast<int>(threadIdx.x);
    synchronise_multipliers();  // both warpgroups have read the rings
    leave(sums, exponents);
    synchronise_multipliers();
    hopper::wait_for_cluster_arrival();  // the others' barriers are there
    if (thread < split_k) hopper::arrive_in_block(ready, thread);
    hopper::wait_for_cluster(ready, 0, site_);
    const int pixels = (S::pixel_tile + split_k - 1) / split_k, first = work_tile.split * pixels;
    const int last = min(first + pixels, S::pixel_tile);
    if (params_.vectors) {
      finish_vectors(work_tile, filters, first, last);
    } else {
      finish_single(work_tile, filters, first, last);
    }
    synchronise_multipliers();
    if (thread < split_k) hopper::arrive_in_block(done, thread);
    hopper::wait_for_cluster(done, 0, site_);  // others have read this block's shared memory, which may now go
  }

 private:
  static constexpr int vec = vec_of<T>, pitch = S::filter_tile + 4;
  static constexpr int threads = 128 * multiply_warpgroups;

  __device__ __forceinline__ std::uint32_t address_of(int pixel, int filter) const {
    return shared_.input + (pixel * pitch + filter) * 4;
  }
  __device__ __forceinline__ std::uint32_t exponent_of(int pixel) const {
    return shared_.input + (S::pixel_tile * pitch + pixel) * 4;
  }

  __device__ __forceinline__ void leave(const float (&sums)[S::row_blocks][S::sums],
                                        const int (&exponents)[2 * S::row_blocks]) {
    const int lane = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
    for (int i = 0; i < 2 * S::row_blocks; ++i) {
      const unsigned pixel = pixel_of_lane<S>(i);
      const std::uint32_t target = address_of(pixel, lane * vec);
      const float* of_row = sums[i / 2];
#pragma unroll
      for (int filter = 0; filter < S::filter_tile; filter += 4 * vec) {
#pragma unroll
        for (int e = 0; e < vec; e += 4) {
          const int at = (filter / 8 + e / 2) * 4 + i % 2 * 2;
          store_shared(target + (filter + e) * 4, {__float_as_uint(of_row[at]), __float_as_uint(of_row[at + 1]),
                                                   __float_as_uint(of_row[at + 4]), __float_as_uint(of_row[at + 5])});
        }
      }
      if constexpr (S::scaled) {
        if (lane == 0) asm volatile("st.shared.u32 [%0], %1;" ::"r"(exponent_of(pixel)), "r"(exponents[i]) : "memory");
      }
    }
  }

  // Four filters of a few pixels at a time: reading another block's memory takes long, and wants neighbours.
  __device__ __forceinline__ void finish_vectors(const WorkTile& work_tile, const FilterData<S>& filters, int first,
                                                 int last) {
    constexpr int size = 4, vectors = S::filter_tile / size, rows = threads / vectors,
                  batch = S::row_blocks == 2 ? 2 : 4;
    const int thread = static_cast<int>(threadIdx.x), filter = thread % vectors * size;
    const int k = work_tile.filter_tile * S::filter_tile + filter;
    if (thread >= rows * vectors) return;
#pragma unroll 1
    for (int at = first + thread / vectors; at < last; at += batch * rows) {
      float value[batch][size] = {}, bias[batch][size];
      std::int64_t index[batch];
#pragma unroll 1
      for (int split = 0; split < params_.split_k; ++split) {
        const std::uint32_t source = hopper::address_in_block(address_of(at, filter), split);
        float4 quad[batch];
        int exponent[batch] = {};
#pragma unroll
        for (int i = 0; i < batch; ++i) {
          if (at + i * rows < last) {
            quad[i] = hopper::load_from_block(source + i * rows * pitch * 4);
            if constexpr (S::scaled) {
              exponent[i] = static_cast<int>(hopper::load_word_from_block(exponent_of(at + i * rows), split));
            }
          }
        }
#pragma unroll
        for (int i = 0; i < batch; ++i) {
          const float of_split[size] = {quad[i].x, quad[i].y, quad[i].z, quad[i].w};
#pragma unroll
          for (int e = 0; e < size; ++e) {
            float one = of_split[e];
            if constexpr (S::scaled) one = Unscale(exponent[i], filters.exponent[filter + e])(one);
            value[i][e] += one;
          }
        }
      }
#pragma unroll
      for (int i = 0; i < batch; ++i) {
        const int pixel = at + i * rows;
        index[i] = pixel < last ? output_index(params_, work_tile, pixel) : -1;
        index[i] = index[i] >= 0 && k < params_.k ? index[i] + k : -1;
#pragma unroll
        for (int e = 0; e < size; ++e) bias[i][e] = to_float(filters.bias[filter + e]);
      }
      store_vectors<S>(params_, 0, index, value, bias);
    }
  }

  // In any order of y.
  __device__ __forceinline__ void finish_single(const WorkTile& work_tile, const FilterData<S>& filters, int first,
                                                int last) {
    const int first_k = work_tile.filter_tile * S::filter_tile;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < (last - first) * S::filter_tile; i += threads) {
      const int pixel = first + (params_.along_filters ? i / S::filter_tile : i % (last - first));
      const int filter = params_.along_filters ? i % S::filter_tile : i / (last - first);
      std::int64_t index = output_index(params_, work_tile, pixel);
      if (index < 0 || first_k + filter >= params_.k) continue;
      index += (first_k + filter) * params_.y_filter;
      float sum = 0.0f;
#pragma unroll 1
      for (int split = 0; split < params_.split_k; ++split) {
        const float one = __uint_as_float(hopper::load_word_from_block(address_of(pixel, filter), split));
        if constexpr (S::scaled) {
          const int exponent = static_cast<int>(hopper::load_word_from_block(exponent_of(pixel), split));
          sum += Unscale(exponent, filters.exponent[filter])(one);
        } else {
          sum += one;
        }
      }
      params_.y[index] = finish_one<S>(params_.epilogue, sum + to_float(filters.bias[filter]), index);
    }
  }

  const Params<T>& params_;
  const Shared<S>& shared_;
  WaitSite site_;
};

}  // namespace fastconv::algos::implicit_gemm::persistent
