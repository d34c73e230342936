// The lean kernel in class fp32: pixels of A go through registers, where they are split into two halves; three products
// with weights that are packed so; each step's sums start from zero and join FP32 totals (docs/numerics.md).
//
// Scales: one for each pixel, of a warp's own steps, guessed from its first values that are not zero. What follows can
// only be larger; where it does not fit, the block does all its steps once more, with scales that do.
#pragma once

#include "algos/implicit_gemm/lean_config.h"
#include "algos/implicit_gemm/lean_tile.cuh"
#include "algos/implicit_gemm/wgmma_operand.cuh"

namespace fastconv::algos::implicit_gemm::lean {

// All multiplying warps have done their steps; returns whether the block repeats them.
__device__ __forceinline__ bool repeats(const Control& control, WaitReport* report) {
  hopper::wait(shared_address(&control.passed), 0, WaitSite{report, kernel_implicit_gemm, role_multiply});
  int result;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(result) : "r"(shared_address(&control.repeat)) : "memory");
  return result != 0;
}

// What a lane has of a step's A: 32 bytes of two pixels.
struct Raw {
  uint4 piece[2][2];

  __device__ __forceinline__ void load(std::uint32_t first, std::uint32_t second) {
    const auto swizzled = [](std::uint32_t row) { return row + ((threadIdx.x % 4 * 2 ^ (row >> 7 & 7)) << 4); };
    first = swizzled(first), second = swizzled(second);
    piece[0][0] = wgmma::load_shared(first), piece[0][1] = wgmma::load_shared(first ^ 16);
    piece[1][0] = wgmma::load_shared(second), piece[1][1] = wgmma::load_shared(second ^ 16);
  }
};

// Four lanes share a pixel.
__device__ __forceinline__ float of_pixel(float largest) {
  largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
  return fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
}

// The sums, scales undone, of a warpgroup over its steps of this block. start: of the tile's first pixel in the stage.
template <typename S>
__device__ __forceinline__ void multiply_split(const Params<typename S::T>& params, Control& control,
                                               std::uint32_t input, std::uint32_t filters, int start, int first_step,
                                               const int steps, float (&totals)[S::sums]) {
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0), lane = threadIdx.x % 32;
  const int group = warp / 4, shares = params.shares, sets = S::warpgroups / shares;
  const std::uint32_t second = params.group_stride * 16;  // from the lane's first pixel to its second
  const std::uint32_t row =
      (start + group % sets * params.second_pixels + lane / 4) * row_bytes + warp % 4 * 2 * second;
  const std::uint32_t inputs_full = shared_address(control.input_full),
                      filters_full = shared_address(control.filters_full);
  constexpr std::uint64_t b_high = std::uint64_t{1} << 62 | std::uint64_t{64} << 32 | std::uint64_t{1} << 16;
  float scale[2] = {}, largest[2] = {};
  int slot = 0, filter_slot = 0;
  unsigned parity = 0, filter_parity = 0;
  bool exact = false;
#pragma unroll 1
  while (true) {
#pragma unroll
    for (int i = 0; i < S::sums; ++i) totals[i] = 0.0f;
    int tap = first_step - static_cast<int>(params.by_stage_taps.quotient(first_step)) * params.stage_taps;
    unsigned r = tap;
    int s = static_cast<int>(params.by_s.peel(r));
    int offset = static_cast<int>(r) * params.row_step + s * params.column_step;
    int left = steps, until_mine = group / sets;
    bool fresh = true;
    // On to the next step; the stage before it is given back after its last one.
    const auto advance = [&](bool mine) {
      --until_mine, --left;
      if (++filter_slot == params.filter_slots) filter_slot = 0, filter_parity ^= 1;
      offset += params.column_step;
      if (++s == params.s) s = 0, offset += params.row_step - params.s * params.column_step;
      if (++tap == params.stage_taps) {
        tap = 0, s = 0, offset = 0, fresh = true;
        if (mine || params.stage_taps > 1) {
          __syncwarp();
          if (lane == 0) hopper::arrive(inputs_full + sizeof(control.input_full) + 8 * slot);
        }
        if (++slot == params.input_slots) slot = 0, parity ^= 1;
      }
    };
    Raw raw;
    const auto load = [&] {
      if (fresh) wait<role_multiply>(inputs_full + 8 * slot, parity, params.report);
      fresh = false;
      const std::uint32_t at = input + slot * params.stage_bytes + offset * 16 + row;
      raw.load(at, at + second);
    };
    const auto skip = [&] {
      while (until_mine > 0 && left > 0) advance(false);
    };
    skip();
    if (S::ahead && left > 0) load();
#pragma unroll 1
    while (left > 0) {
      if constexpr (!S::ahead) load();
      float here[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        here[i] = wgmma::larger(wgmma::larger(0.0f, raw.piece[i][0]), raw.piece[i][1]);
        largest[i] = fmaxf(largest[i], here[i]);
      }
      if (__any_sync(0xffffffffu, scale[0] == 0.0f || scale[1] == 0.0f)) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float most = of_pixel(here[i]);
          if (scale[i] == 0.0f && most > 0.0f) {
            scale[i] = power_of_two(scale_exponent(most, wgmma::pixel_guess_target));
          }
        }
      }
      std::uint32_t high[2][4], low[2][4];  // of a product: row l/4, row l/4 + 8, then both at k + 8
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const uint4 halves = wgmma::split_piece(raw.piece[i][j], scale[i]);
          high[j][i] = halves.x, high[j][2 + i] = halves.y, low[j][i] = halves.z, low[j][2 + i] = halves.w;
        }
      }
      const std::uint32_t filters_barrier = filters_full + 8 * filter_slot;
      wait<role_multiply>(filters_barrier, filter_parity, params.report);
      const std::uint32_t b = (filters + filter_slot * S::filter_bytes) >> 4;
      float sums[S::sums];
      hopper::fence_products();
      hopper::multiply<half_t, false>(sums, low[0], b_high | b);
      hopper::multiply<half_t, true>(sums, low[1], b_high | (b + 2));
      hopper::multiply<half_t, true>(sums, high[0], b_high | (b + 4));
      hopper::multiply<half_t, true>(sums, high[1], b_high | (b + 6));
      hopper::multiply<half_t, true>(sums, high[0], b_high | b);
      hopper::multiply<half_t, true>(sums, high[1], b_high | (b + 2));
      hopper::commit_products();
      until_mine = shares;
      advance(true);
      skip();
      if (S::ahead && left > 0) load();
      hopper::wait_for_products<0>();
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) asm volatile("" ::"r"(high[j][i]), "r"(low[j][i]));  // read until here
      }
      hopper::pin(sums);
      if (lane == 0) hopper::arrive(filters_barrier + sizeof(control.filters_full));
#pragma unroll
      for (int i = 0; i < S::sums; ++i) totals[i] += sums[i];
    }
    if (tap > 0) {  // the part ends within a stage
      __syncwarp();
      if (lane == 0) hopper::arrive(inputs_full + sizeof(control.input_full) + 8 * slot);
      if (++slot == params.input_slots) slot = 0, parity ^= 1;
    }
    bool off = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      largest[i] = of_pixel(largest[i]);
      const float high = largest[i] * scale[i];
      off |= largest[i] > 0.0f && !(high >= wgmma::least_high && high < wgmma::most_high);
    }
    if (exact) break;
    off = __any_sync(0xffffffffu, off);
    if (lane == 0) {
      if (off) asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared_address(&control.repeat)), "r"(1) : "memory");
      hopper::arrive(shared_address(&control.passed));
    }
    if (!repeats(control, params.report)) [[likely]]
      break;
    exact = true;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      scale[i] = power_of_two(scale_exponent(largest[i], wgmma::exact_target));
    }
  }
  // Scales: one factor holds those of a pixel and a filter if both are moderate: all but always.
  constexpr int moderate = 64;
  int of_pixels[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    of_pixels[i] = scale[i] == 0.0f ? 0 : static_cast<int>(__float_as_uint(scale[i]) >> 23) - 127;
  }
  int most = max(abs(of_pixels[0]), abs(of_pixels[1]));
  for (int i = lane; i < S::filter_tile; i += 32) most = max(most, abs(control.exponent[i]));
  const bool plain = __all_sync(0xffffffffu, most < moderate);
#pragma unroll
  for (int column = 0; column < S::filter_tile; column += 4 * S::chunk) {
    const int4 four = *reinterpret_cast<const int4*>(control.exponent + column + lane % 4 * S::chunk);
    const int of_filters[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& total = totals[(column / 8 + e / 2) * 4 + i * 2 + e % 2];
        if (plain) [[likely]] {
          total *= power_of_two(-of_pixels[i] - of_filters[e]);
        } else {
          total = Unscale(of_pixels[i], of_filters[e])(total);
        }
      }
    }
  }
}

}  // namespace fastconv::algos::implicit_gemm::lean
