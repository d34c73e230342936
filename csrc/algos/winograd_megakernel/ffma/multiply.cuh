// GEMM: M = V U^T of one point, 128 tiles x 128 filters, by FFMA.
#pragma once

#include "algos/winograd_megakernel/ffma/params.cuh"

namespace fastconv::algos::winograd_megakernel::ffma {

__device__ __forceinline__ void load_shared(float* target, std::uint32_t source) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(target[0]), "=f"(target[1]), "=f"(target[2]), "=f"(target[3])
               : "r"(source));
}

// What a thread multiplies: of its warp's 32 tiles the quads `quad` and quad + 4, of the 64 filters the quads `column`
// and column + 8. Lanes l and l ^ 1 read the same filters, l and l ^ 2 the same tiles: then a load of 16 bytes takes
// two passes through the banks instead of four.
struct Place {
  int warp, quad, column;

  __device__ __forceinline__ Place()
      : warp(team_warp()),
        quad(static_cast<int>((threadIdx.x & 1) | (threadIdx.x >> 3 & 2))),
        column(static_cast<int>(threadIdx.x >> 1 & 7)) {}
};

__device__ __forceinline__ void multiply(const Params& params, Shared& shared, const WorkTile& work_tile,
                                         hopper::RingPosition& ring) {
  constexpr int unroll = 8;  // channels of a turn of the inner loop: a stage is one turn and the rest
  static_assert(unroll % 2 == 0 && stage_channels % unroll == 0);
  const Place place;
  const int octet = place.warp * 4 + place.quad / 2, exchanged = octet % 2;
  // In slot 0. Odd places of V lie 32 bytes before where they would be, or behind, in octets that are exchanged.
  const std::uint32_t first_v = shared_address(&shared.stages[0].v[octet][exchanged][place.quad % 2 * 4]);
  const std::uint32_t first_u = shared_address(&shared.stages[0].u[0][place.column * 4]);
  const std::uint32_t full = shared_address(shared.full), empty = shared_address(shared.empty);
  constexpr std::uint32_t slot_bytes = sizeof(Shared::Stage);

  float sum[8][8] = {};
  float v[2][8], u[2][8];
  std::uint32_t row_v[2], row_u;  // row_v: of even and of odd places
  const auto begin_stage = [&] {
    row_v[0] = first_v + ring.slot * slot_bytes, row_v[1] = row_v[0] - exchanged * 64;
    row_u = first_u + ring.slot * slot_bytes;
    wait<role_multiply>(full + ring.slot * 8, ring.parity, params.report);
  };
  const auto load = [&](int channel) {
    const std::uint32_t from_v = row_v[channel % 2] + channel * 32, from_u = row_u + channel * (block_filters * 4);
    load_shared(u[channel % 2], from_u);
    load_shared(u[channel % 2] + 4, from_u + 128);
    load_shared(v[channel % 2], from_v);
    load_shared(v[channel % 2] + 4, from_v + 2 * stage_channels * 32);
  };
  // A quarter of a multiprocessor can start an FFMA every clock if it reads two operands from the registers, one of
  // each bank (odd and even numbers), and the third was read by the instruction before. To and fro along the rows one
  // operand always is; and as U's filters lie in memory with neighbours exchanged, the register of a filter and those
  // of its sums differ in parity.
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
    release_reads();
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(empty + ring.slot * 8);
    ring.advance(slots);
    if (stage > 1) {
      begin_stage();
      load(0);
    }
    multiply_add(unroll - 1);
  }
  float* m = params.products + work_tile.place * params.m_place() +
             (std::int64_t{work_tile.channel / block_filters * 36 + work_tile.count} * tile_m + place.warp * 32 +
              place.quad * 4) *
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
