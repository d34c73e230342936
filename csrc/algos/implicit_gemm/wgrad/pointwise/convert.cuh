// Chunks of float32 into operands of products, in shared memory: [limb][64 channels][pixel][64 halves], each row of
// 128 bytes swizzled as wgmma and tensor copies do it.
#pragma once

#include <cstdint>

#include "algos/implicit_gemm/wgrad/pointwise/tile.cuh"
#include "device/power_of_two.h"

namespace fastconv::algos::implicit_gemm::wgrad::pointwise {

__device__ __forceinline__ std::uint32_t half_bits(__half2 value) {
  return *reinterpret_cast<const std::uint32_t*>(&value);
}
__device__ __forceinline__ void store_shared(std::uint32_t target, const std::uint32_t (&words)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(target), "r"(words[0]), "r"(words[1]), "r"(words[2]),
               "r"(words[3])
               : "memory");
}

// A lane's part: one pixel of the chunk, 8 channels of every other box. Eight lanes have 8 pixels and the same
// channels, so that neither loads nor stores of 16 bytes meet in a bank.
struct ConvertLane {
  int pixel;
  std::uint32_t source, target;  // of its bytes in box 0 or 1, in the 64 channels of both

  __device__ __forceinline__ ConvertLane() {
    const int warp = static_cast<int>(threadIdx.x) / 32 % convert_warps, lane = static_cast<int>(threadIdx.x) % 32;
    const int piece = lane / 8, parity = warp / 4;  // of its boxes
    pixel = warp % 4 * 8 + lane % 8;
    source = parity * box_bytes + pixel * row_bytes + hopper::swizzle_128(pixel, 2 * piece) * 16;
    target = pixel * row_bytes + hopper::swizzle_128(pixel, 4 * parity + piece) * 16;
  }
};

// The largest values of the image that a lane's pixel belongs to, as far as its chunks have shown them.
struct ImageMaxima {
  int image = -1;
  float of_rows = 0.0f, of_columns = 0.0f;

  // Goes on to another image (of each lane). Lanes that leave the same one speak with one voice.
  __device__ __forceinline__ void enter(int next, ImageScale* rows, ImageScale* columns) {
    const bool leaves = next != image;
    unsigned left = __ballot_sync(0xffffffffu, leaves && image >= 0);
    while (left != 0) {
      const int leader = __ffs(static_cast<int>(left)) - 1;
      const int of = __shfl_sync(0xffffffffu, image, leader);
      const bool mine = leaves && image == of;
      const int a = __reduce_max_sync(0xffffffffu, mine ? __float_as_int(of_rows) : 0);
      const int b = __reduce_max_sync(0xffffffffu, mine ? __float_as_int(of_columns) : 0);
      if (static_cast<int>(threadIdx.x) % 32 == leader) {
        if (rows != nullptr && a > 0) atomicMax(&rows[of].largest, a);
        if (columns != nullptr && b > 0) atomicMax(&columns[of].largest, b);
      }
      left &= ~__ballot_sync(0xffffffffu, mine);
    }
    if (leaves) image = next, of_rows = of_columns = 0.0f;
  }
};

// A lane's values of one operand of a chunk.
template <typename S, int boxes>
__device__ __forceinline__ void convert_operand(std::uint32_t source, std::uint32_t target, float factor,
                                                float& largest) {
  constexpr int batch = boxes >= 4 ? 2 : 1;  // boxes at a time, of which a lane takes every other one
  float values[batch * 8];
#pragma unroll
  for (int first = 0; first < boxes / 2; first += batch) {
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      const std::uint32_t at = source + 2 * (first + i) * box_bytes;
      hopper::load_shared(&values[i * 8], at);
      hopper::load_shared(&values[i * 8 + 4], at ^ 16);
    }
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      std::uint32_t high[4], low[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float a = values[i * 8 + 2 * j] * factor, b = values[i * 8 + 2 * j + 1] * factor;
        const __half2 hi = __floats2half2_rn(a, b);
        high[j] = half_bits(hi);
        if constexpr (S::tile.limbs == 2) {
          low[j] = half_bits(__floats2half2_rn(a - __low2float(hi), b - __high2float(hi)));
        }
      }
      const std::uint32_t to = target + (first + i) * box_bytes;
      store_shared(to, high);
      if constexpr (S::tile.limbs == 2) store_shared(to + S::tile.limb_bytes(), low);
    }
    float most[2] = {0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < batch * 8; ++j) most[j % 2] = fmaxf(most[j % 2], fabsf(values[j]));
    most[0] = fmaxf(most[0], most[1]);
    if (most[0] == INFINITY) {
      most[0] = 0.0f;
#pragma unroll
      for (int j = 0; j < batch * 8; ++j) most[0] = larger_finite(most[0], values[j]);
    }
    largest = fmaxf(largest, most[0]);
  }
}

template <typename S>
__device__ __forceinline__ void convert(const Params& params, const Memory<S>& memory, const WorkTile<S>& work_tile) {
  const ConvertLane lane;
  // The blocks of one row of tiles see all columns, those of one column all rows.
  ImageScale* rows = params.retry || work_tile.column0 != 0 ? nullptr : params.scales_of_rows();
  ImageScale* columns = params.retry || work_tile.row0 != 0 ? nullptr : params.scales_of_columns();
  ImageMaxima maxima;
  hopper::RingPosition staged, operand;
#pragma unroll 1
  for (int chunk = work_tile.first_chunk; chunk < work_tile.last_chunk; ++chunk) {
    hopper::wait_in_place<kernel_implicit_gemm, role_transform>(memory.control.staged.full[staged.slot], staged.parity,
                                                                params.report);
    const ChunkScales& scales = memory.control.scales[staged.slot];
    const float of_rows = scales.of_rows[lane.pixel], of_columns = scales.of_columns[lane.pixel];
    if (const int image = scales.image[lane.pixel]; __any_sync(0xffffffffu, image != maxima.image)) {
      maxima.enter(image, rows, columns);
    }
    hopper::wait_in_place<kernel_implicit_gemm, role_transform>(memory.control.operands.free[operand.slot],
                                                                operand.parity ^ 1, params.report);
    if (threadIdx.x % convert_threads == 0) memory.control.sums[operand.slot] = scales.sum;
    const std::uint32_t source = memory.staged + staged.slot * S::tile.staged_bytes() + lane.source;
    const std::uint32_t target = memory.operands + operand.slot * S::tile.operand_bytes() + lane.target;
    convert_operand<S, S::row_boxes>(source, target, of_rows, maxima.of_rows);
    convert_operand<S, S::column_boxes>(source + S::row_boxes * box_bytes, target + S::row_boxes / 2 * box_bytes,
                                        of_columns, maxima.of_columns);
    hopper::fence_copies();  // products read what was stored as copies do
    __syncwarp();
    hopper::arrive_for_warp(memory.control.staged.free[staged.slot]);
    hopper::arrive_for_warp(memory.control.operands.full[operand.slot]);
    staged.advance(S::tile.staged_slots());
    operand.advance(S::tile.operand_slots());
  }
  maxima.enter(-1, rows, columns);
}

}  // namespace fastconv::algos::implicit_gemm::wgrad::pointwise
