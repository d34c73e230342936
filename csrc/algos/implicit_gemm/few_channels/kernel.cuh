// A block keeps its filters in shared memory and walks over tiles of outputs; while it multiplies one, the input patch
// of the next is on its way.
#pragma once

#include "algos/implicit_gemm/few_channels/load.cuh"
#include "algos/implicit_gemm/few_channels/output.cuh"

namespace fastconv::algos::implicit_gemm::few_channels {

// Which of the lane's outputs need a repetition, a bit each.
template <typename S>
__device__ __forceinline__ unsigned outputs_off(const __half2 (&largest)[quad], const Converted& converted) {
  if (converted.special) return 0xfu;
  unsigned off = 0;
  if constexpr (S::scaled) {
#pragma unroll
    for (int pixel = 0; pixel < quad; pixel += 2) {  // two in a register
      const __half2 &a = largest[pixel], &b = largest[pixel + 1];
      __half2 high = __hmax2(__lows2half2(a, b), __highs2half2(a, b));
      high = __hmax2(high, __shfl_xor_sync(0xffffffffu, high, 1));
      high = __hmax2(high, __shfl_xor_sync(0xffffffffu, high, 2));
      const float of[2] = {__low2float(high), __high2float(high)};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        off |= static_cast<unsigned>(of[i] < min_high<S> && (of[i] > 0.0f || converted.tiny)) << (pixel + i);
      }
    }
  }
  return off;
}

template <typename S>
__global__ void __launch_bounds__(max_warps * 32, S::blocks_per_processor)
    convolve(const __grid_constant__ Params<typename S::T> params) {
  extern __shared__ __align__(128) unsigned char memory[];
  const Plan& plan = params.plan;
  auto* taps = reinterpret_cast<Tap*>(memory + plan.taps_offset);
  auto* bias = reinterpret_cast<float*>(memory + plan.bias_offset);
  auto* exponents = reinterpret_cast<int*>(memory + plan.exponents_offset);
  auto* ranges = reinterpret_cast<uint2*>(memory + plan.ranges_offset);
  unsigned char* patch = memory + plan.patch_offset;
  const unsigned char* raw = memory + plan.raw_offset;

  const auto end = static_cast<std::uint32_t>(plan.tiles);
  const int first_filter = static_cast<int>(blockIdx.y) * S::filter_tile;
  std::uint32_t tile = blockIdx.x;

  fetch(params, Origin(tile, params, params.plan), shared_address(raw));
  const unsigned char* weight = params.weight + static_cast<std::int64_t>(blockIdx.y) * plan.taps_offset;
  for (int offset = threadIdx.x * 16; offset < plan.taps_offset; offset += blockDim.x * 16) {
    copy_async(shared_address(memory + offset), weight + offset, true);
  }
  commit_copies();
  list_taps(params, plan.steps, taps);
  bool wide = false;  // the filters' exponents: two of those do not make one of a float
  for (int filter = threadIdx.x; filter < S::filter_tile; filter += blockDim.x) {
    const int k = first_filter + filter;
    bias[filter] = k < params.k ? params.epilogue.bias_of(k) : 0.0f;
    if constexpr (S::scaled) {
      exponents[filter] = params.exponents[k];
      wide |= abs(exponents[filter]) > 63;
    }
  }
  if (threadIdx.x < max_warps) ranges[threadIdx.x] = {0, nothing};
  if constexpr (S::scaled) {
    wide = __syncthreads_or(wide);
    if (threadIdx.x == 0) ranges[max_warps].x = static_cast<std::uint32_t>(wide);
  }

  for (; tile < end; tile += gridDim.x) {
    wait_for_copies<0>();
    __syncthreads();  // the patch is here, and all are done with the one before
    convert<S>(params, Origin(tile, params, params.plan), raw, patch, ranges);
    if (tile + gridDim.x < end) {
      fetch(params, Origin(tile + gridDim.x, params, params.plan), shared_address(raw));
      commit_copies();
    }

    Sums<S> total = {};
    __half2 largest[quad] = {};
    {
      const Place place(plan.tile_q, thread_index());
      const unsigned char* window = patch + place.p * params.stride_h * plan.row_bytes + place.q * params.pixel_bytes;
      multiply<S>(window, plan.patch_limb_bytes, params.pixel_bytes, taps, memory, plan.steps, total, largest);
    }
    asm volatile("" : "+r"(tile) : : "memory");  // what follows is found out here: registers are few above
    const Origin at(tile, params, params.plan);
    const Converted converted = converted_from<typename S::T>(ranges);
    const Place place(plan.tile_q, thread_index());
    const int p = at.p + place.p, q = at.q + place.q;
    const std::int64_t first = at.n * params.image_out + (p * params.out_p + q * params.out_q) +
                               static_cast<std::int64_t>(first_filter) * params.out_k;
    const Extent extent{p < params.p ? min(params.q - q, quad) : 0, params.k - first_filter};
    finish<S>(params, extent, first, bias, exponents, converted.exponent,
              ranges[max_warps].x != 0 || abs(converted.exponent) > 63, total);

    const unsigned off = outputs_off<S>(largest, converted);
    if (__any_sync(0xffffffffu, off != 0)) {
      repeat_outputs<S>(params, at, off, extent.columns, first_filter, memory, exponents);
    }
  }
}

}  // namespace fastconv::algos::implicit_gemm::few_channels
