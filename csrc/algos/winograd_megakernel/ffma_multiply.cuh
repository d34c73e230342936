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

// `filters` is 128 or 64. A warp has 32 tiles x half the filters, a lane 4 + 4 tiles, 16 apart, and 4 + 4 filters, 32
// apart, or 4. Lanes l and l ^ 1 read the same filters, l and l ^ 2 the same tiles: then a load of 16 bytes takes two
// passes through the banks instead of four.
template <int filters>
__device__ __forceinline__ void multiply(const Params& params, Shared& shared, const Item& item, RingPosition& ring) {
  constexpr int columns = filters / 16, unroll = FFMA_UNROLL;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#ifdef FFMA_MAP
  const int tile = warp % 4 * 32 + (lane >> 3) * 4;
  const int filter = (lane & 7) * 4;
#else
  const int tile = warp % 4 * 32 + ((lane & 1) | (lane >> 4) << 1) * 4;
  const int filter = (lane >> 1 & 7) * 4;
#endif
  constexpr std::uint32_t slot_bytes = sizeof(shared.stages[0]);
  const std::uint32_t full = shared_address(shared.full);
  // Of slot 0.
  const std::uint32_t first_v = shared_address(&shared.stages[0].v[0][tile]);
  const std::uint32_t first_u = shared_address(columns == 8 ? &shared.stages[0].u[warp / 4][0][filter]
                                                            : &shared.stages[0].u[0][0][warp / 4 * 32 + filter]);

  float sum[8][columns] = {};
  float v[2][8], u[columns];
  std::uint32_t row_v, row_u;
  const auto begin_stage = [&] {
    row_v = first_v + ring.slot * slot_bytes, row_u = first_u + ring.slot * slot_bytes;
    wait<role_multiply>(full + ring.slot * 8, ring.parity, params.report);
  };
  const auto load_v = [&](int channel) {
    load_shared(v[channel % 2], row_v + channel * (unit_tiles * 4));
    load_shared(v[channel % 2] + 4, row_v + channel * (unit_tiles * 4) + 64);
  };
  const auto load_u = [&](int channel, int first) {
    load_shared(u + first, row_u + channel * (block_filters * 4) + first * 32);
  };
  // Up and down, so that of the registers that an instruction reads the one before has read one already: it comes from
  // the cache of operands, and three from one bank are rare. (4 % of the instructions; row by row 9 %.)
  const auto multiply_add = [&](int channel, int first) {
#pragma unroll
    for (int n = 0; n < 32; ++n) {
      const int j = first + n / 8, i = j % 2 ? 7 - n % 8 : n % 8;
      sum[i][j] = fmaf(v[channel % 2][i], u[j], sum[i][j]);
    }
  };
  begin_stage();
  load_v(0), load_u(0, 0);
#pragma unroll 1
  for (int stage = params.stages; stage > 0; --stage) {
#pragma unroll 1
    for (int part = unroll; part < stage_channels; part += unroll) {
#pragma unroll
      for (int channel = 0; channel < unroll; ++channel) {
        if constexpr (columns == 8) load_u(channel, 4);
        load_v(channel + 1);
        multiply_add(channel, 0);
        load_u(channel + 1, 0);
        if constexpr (columns == 8) multiply_add(channel, 4);
      }
      row_v += unroll * unit_tiles * 4, row_u += unroll * block_filters * 4;
    }
#pragma unroll
    for (int channel = 0; channel < unroll - 1; ++channel) {
      if constexpr (columns == 8) load_u(channel, 4);
      load_v(channel + 1);
      multiply_add(channel, 0);
      load_u(channel + 1, 0);
      if constexpr (columns == 8) multiply_add(channel, 4);
    }
    if constexpr (columns == 8) load_u(unroll - 1, 4);
    // The last channel is in registers: the slot can be filled again.
    __syncwarp();
    if (lane == 0) arrive(shared.empty[ring.slot]);
    ring.advance();
    multiply_add(unroll - 1, 0);
    if (stage > 1) {
      begin_stage();
      load_v(0), load_u(0, 0);
    }
    static_assert(unroll % 2 == 0);
    if constexpr (columns == 8) multiply_add(unroll - 1, 4);
  }
  const int block = item.channel / block_filters + (columns == 8 ? warp / 4 : 0);
  float* m = params.products + item.place * params.m_place() +
             (std::int64_t{block * 36 + item.count} * unit_tiles + tile) * block_filters + filter +
             (columns == 8 ? 0 : warp / 4 * 32);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float* const target = m + (i / 4 * 16 + i % 4) * block_filters;
#pragma unroll
    for (int j = 0; j < columns; j += 4) {
      *reinterpret_cast<float4*>(target + j * 8) = make_float4(sum[i][j], sum[i][j + 1], sum[i][j + 2], sum[i][j + 3]);
    }
  }
}

}  // namespace fastconv::algos::winograd_megakernel::ffma
