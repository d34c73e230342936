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

__device__ __forceinline__ unsigned fresh_thread() {
  unsigned thread;
  asm volatile("mov.u32 %0, %tid.x;" : "=r"(thread));
  return thread;
}
// What a thread multiplies: quads of tiles `quad` and quad + 4 of the 8 of its warp, quads of filters `column` and
// column + 8. Lanes l and l ^ 1 read the same filters, l and l ^ 2 the same tiles: then a load of 16 bytes takes two
// passes through the banks instead of four.
struct Place {
  unsigned team, warp, quad, column;

  __device__ __forceinline__ explicit Place(unsigned thread)
      : team(thread / team_threads),
        warp(thread / 32 % team_warps),
        quad((thread & 1) | (thread >> 3 & 2)),
        column(thread >> 1 & 7) {}
  __device__ __forceinline__ unsigned octet() const { return warp * 4 + quad / 2; }
  __device__ __forceinline__ unsigned exchanged() const { return quad / 2; }
};

// A warp has 32 tiles x 64 filters.
__device__ __forceinline__ void multiply(const Params& params, Shared* all, unsigned at, RingPosition& ring) {
  constexpr int unroll = FFMA_UNROLL;
  float sum[8][8] = {};
  float v[2][8], u[2][8];
  std::uint32_t row_v[2], row_u;  // row_v: for even and odd places
  // Everything is computed anew for each stage from the thread's number, which the compiler cannot keep: registers.
  const auto begin_stage = [&] {
    const Place place(fresh_thread());
    Shared& shared = all[place.team];
    const Shared::Stage& stage = shared.stages[ring.slot];
    row_v[0] = shared_address(&stage.v[place.octet()][0][place.quad % 2 * 4]) + place.exchanged() * 32;
    row_v[1] = row_v[0] - place.exchanged() * 64;
    row_u = shared_address(&stage.u[0][place.column * 4]);
    wait<role_multiply>(shared.full[ring.slot], ring.parity, params.report);
  };
  const auto load = [&](int channel) {
    const std::uint32_t from_v = row_v[channel % 2] + channel * 32, from_u = row_u + channel * (block_filters * 4);
    load_shared(u[channel % 2], from_u);
    load_shared(u[channel % 2] + 4, from_u + 128);
    load_shared(v[channel % 2], from_v);
    load_shared(v[channel % 2] + 4, from_v + 2 * stage_channels * 32);
  };
  // A multiprocessor reads two operands of an FFMA from its registers, one of each bank (odd and even numbers), and
  // takes the third from the instruction before. Up and down the columns one operand is always that one; and as U's
  // filters lie in memory with neighbours exchanged, the register of a filter and those of its sums differ in parity.
  const auto multiply_add = [&](int channel) {
#pragma unroll
    for (int n = 0; n < 64; ++n) {
      const int i = n / 8, j = i % 2 ? n % 8 : 7 - n % 8;
      sum[i][j] = fmaf(v[channel % 2][i], u[channel % 2][j ^ 1], sum[i][j]);
    }
  };
  begin_stage();
  load(0);
#pragma unroll 1
  for (int stage = params.stages; stage > 0; --stage) {
#pragma unroll 1
    for (int part = unroll; part < stage_channels; part += unroll) {
#pragma unroll
      for (int channel = 0; channel < unroll; ++channel) {
        load(channel + 1);
        multiply_add(channel);
      }
      row_v[0] += unroll * 32, row_v[1] += unroll * 32, row_u += unroll * block_filters * 4;
    }
#pragma unroll
    for (int channel = 0; channel < unroll - 1; ++channel) {
      load(channel + 1);
      multiply_add(channel);
    }
    // The last channel is in registers: the slot can be filled again.
#ifdef FENCE_WAR
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
    __syncwarp();
    if (const unsigned thread = fresh_thread(); thread % 32 == 0) arrive(all[thread / team_threads].empty[ring.slot]);
    ring.advance();
    if (stage > 1) {
      begin_stage();
      load(0);
    }
    static_assert(unroll % 2 == 0);
    multiply_add(unroll - 1);
  }
  const Place place(fresh_thread());
  const Item& item = all[place.team].items[at];
  float* m =
      params.products + item.place * params.m_place() +
      (std::int64_t{item.channel / block_filters * 36 + item.count} * unit_tiles + place.warp * 32 + place.quad * 4) *
          block_filters +
      place.column * 4;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float* const target = m + (i / 4 * 16 + i % 4) * block_filters;
#pragma unroll
    for (int j = 0; j < 8; j += 4) {
      *reinterpret_cast<float4*>(target + j * 8) = make_float4(sum[i][j], sum[i][j + 1], sum[i][j + 2], sum[i][j + 3]);
    }
  }
}

}  // namespace fastconv::algos::winograd_megakernel::ffma
