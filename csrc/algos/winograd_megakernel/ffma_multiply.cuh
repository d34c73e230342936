// GEMM: M = V U^T of one frequency, 128 tiles x 128 filters, by FFMA.
#pragma once

#include "algos/winograd_megakernel/ffma_params.cuh"

namespace fastconv::algos::winograd_megakernel::ffma {

// Where the working warps are in the ring of stages.
struct RingPosition {
  int slot = 0;
  unsigned parity = 0;

  __device__ __forceinline__ void advance() {
    if (++slot == slots) slot = 0, parity ^= 1;
  }
};

__device__ __forceinline__ void load_shared(float* target, std::uint32_t source) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(target[0]), "=f"(target[1]), "=f"(target[2]), "=f"(target[3])
               : "r"(source));
}

// A warp has 32 tiles x 64 filters, a lane 4 + 4 tiles, 16 apart, x 4 + 4 filters, 32 apart. Lanes l and l ^ 1 read the
// same filters, l and l ^ 2 the same tiles: then a load of 16 bytes takes two passes through the banks instead of four.
template <int unroll>
__device__ __forceinline__ void multiply(const Params& params, Shared& shared, const Item& item, RingPosition& ring) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#ifdef FFMA_MAP
  const int tile = warp % 4 * 32 + (lane >> 3) * 4;
  const int filter = warp / 4 * 64 + (lane & 7) * 4;
#else
  const int tile = warp % 4 * 32 + ((lane & 1) | (lane >> 4) << 1) * 4;
  const int filter = warp / 4 * 64 + (lane >> 1 & 7) * 4;
#endif
  constexpr std::uint32_t operand_bytes = stage_floats * 4, slot_bytes = 2 * operand_bytes;
  const std::uint32_t base = shared_address(shared.stages), full = shared_address(shared.full);
  // Of V; filters lie `difference` behind.
  const std::uint32_t first = base + tile * 4;
  const std::uint32_t difference = operand_bytes + (filter - tile) * 4;

  float sum[8][8] = {};
  float v[2][8], u[2][8];
  const auto load = [&](int buffer, std::uint32_t row) {
    load_shared(v[buffer], row);
    load_shared(v[buffer] + 4, row + 64);
    load_shared(u[buffer], row + difference);
    load_shared(u[buffer] + 4, row + difference + 128);
  };
  const auto multiply_add = [&](int buffer) {
#pragma unroll
    for (int n = 0; n < 64; ++n) {
#if ORDER == 0
      const int i = n / 8, j = n % 8;
#elif ORDER == 1
      const int i = n / 8, j = i % 2 ? 7 - n % 8 : n % 8;
#elif ORDER == 2
      const int j = n / 8, i = n % 8;
#elif ORDER == 3
      const int j = n / 8, i = j % 2 ? 7 - n % 8 : n % 8;
#elif ORDER == 4  // 2x2 cells
      const int c = n / 4, ci = c / 4, cj = ci % 2 ? 3 - c % 4 : c % 4, e = n % 4;
      const int i = ci * 2 + (e >> 1), j = cj * 2 + ((e ^ e >> 1) & 1);
#elif ORDER == 5  // 4 x 2: columns of pairs, snake
      const int c = n / 16, r = n % 16, i0 = c * 2, j = c % 2 ? 7 - r / 2 : r / 2, i = i0 + ((r + r / 2) % 2);
#endif
      sum[i][j] = fmaf(v[buffer][i], u[buffer][j], sum[i][j]);
    }
  };
  wait<role_multiply>(full + ring.slot * 8, ring.parity, params.report);
  std::uint32_t row = first + ring.slot * slot_bytes;
  load(0, row);
#pragma unroll 1
  for (int stage = params.stages; stage > 0; --stage) {
#pragma unroll 1
    for (int part = unroll; part < stage_channels; part += unroll) {
#pragma unroll
      for (int channel = 0; channel < unroll; ++channel) {
        load((channel + 1) % 2, row + (channel + 1) * 512);
        multiply_add(channel % 2);
      }
      row += unroll * 512;
    }
#pragma unroll
    for (int channel = 0; channel < unroll - 1; ++channel) {
      load((channel + 1) % 2, row + (channel + 1) * 512);
      multiply_add(channel % 2);
    }
    // The last channel is in registers: the slot can be filled again.
    __syncwarp();
    if (lane == 0) arrive(shared.empty[ring.slot]);
    ring.advance();
    row = first + ring.slot * slot_bytes;
    if (stage > 1) wait<role_multiply>(full + ring.slot * 8, ring.parity, params.report);
    static_assert(unroll % 2 == 0);
    load(0, row);  // after the last stage: of no use
    multiply_add(1);
  }
  float* m = params.products + item.place * params.m_place() +
             (std::int64_t{item.channel / unit_filters * 36 + item.count} * unit_tiles + tile) * unit_filters + filter;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float* const target = m + (i / 4 * 16 + i % 4) * unit_filters;
    *reinterpret_cast<float4*>(target) = make_float4(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
    *reinterpret_cast<float4*>(target + 32) = make_float4(sum[i][4], sum[i][5], sum[i][6], sum[i][7]);
  }
}

}  // namespace fastconv::algos::winograd_megakernel::ffma
