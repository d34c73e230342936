// The single-tile kernel in class fp32: three products of halves with weights that are packed so. Each step's sums
// start from zero, small products first, and join FP32 totals (docs/concepts/numerics.md).
//
//   whole windows   a stage is split where it lies, by the warps that multiply it: 32 hi and 32 lo halves of a pixel.
//                   One scale for the tile, from the first of its stages that is not zero
//   single taps     a warp splits its pixels on their way into registers. One scale for each pixel, from its first
//                   values that are not zero. Also for tiles whose windows do not all fit one scale
//
// What comes later can only be larger; where a pixel's scale does not fit, the block does all its steps once more, with
// exact ones.
#pragma once

#include "algos/implicit_gemm/persistent/operand.cuh"
#include "algos/implicit_gemm/single_tile/plan.h"
#include "algos/implicit_gemm/single_tile/tile.cuh"

namespace fastconv::algos::implicit_gemm::single_tile {

// All multiplying warps have done their steps for the pass-th time; returns whether the block does them again.
__device__ __forceinline__ bool retries(const Control& control, int pass, WaitReport* report) {
  hopper::wait(shared_address(&control.passed), pass & 1, WaitSite{report, kernel_implicit_gemm, role_multiply});
  int result;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(result) : "r"(shared_address(&control.retry_pass)) : "memory");
  return result > pass;
}
// The same for the warps themselves. off: a scale of the lane does not fit.
__device__ __forceinline__ bool must_retry(Control& control, bool off, int pass, WaitReport* report) {
  off = __any_sync(0xffffffffu, off);
  if (threadIdx.x % 32 == 0) {
    if (off)
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared_address(&control.retry_pass)), "r"(pass + 1) : "memory");
    hopper::arrive(shared_address(&control.passed));
  }
  return retries(control, pass, report);
}

struct Rings {
  int slot = 0, filter_slot = 0;
  unsigned parity = 0, filter_parity = 0;
};

// What a lane has of a step's A: 32 bytes of two pixels.
struct Raw {
  uint4 piece[2][2];

  __device__ __forceinline__ void load(std::uint32_t first, std::uint32_t second) {
    const auto swizzled = [](std::uint32_t row) { return row + ((threadIdx.x % 4 * 2 ^ (row >> 7 & 7)) << 4); };
    first = swizzled(first), second = swizzled(second);
    piece[0][0] = persistent::load_shared(first), piece[0][1] = persistent::load_shared(first ^ 16);
    piece[1][0] = persistent::load_shared(second), piece[1][1] = persistent::load_shared(second ^ 16);
  }
};

// Four lanes share a pixel.
__device__ __forceinline__ float of_pixel(float largest) {
  largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
  return fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
}

// Undoes the scales: of the lane's two pixels, of the filters.
template <typename S>
__device__ __forceinline__ void unscale(const Control& control, int first_pixel, int second_pixel,
                                        float (&totals)[S::sums]) {
  const int lane = threadIdx.x % 32, of_pixels[2] = {first_pixel, second_pixel};
  // One factor holds the scales of a pixel and a filter if both are moderate: all but always.
  constexpr int moderate = 64;
  int most = max(abs(first_pixel), abs(second_pixel));
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

// ---- Whole windows

// All multiplying threads: of stage `stage`, in place, as split_piece() has it. 0: no scale is known yet.
template <typename S>
__device__ __forceinline__ void split_stage(const Params<typename S::T>& params, Control& control, std::uint32_t stage,
                                            bool first, float& scale) {
  constexpr int barrier = 2, threads = 32 * S::multiplying, step = threads / 4;
  const int thread = threadIdx.x, t = thread % 4, pixels = params.box_bytes / row_bytes;
  const auto address = [&](int pixel) {
    const std::uint32_t row = stage + pixel * row_bytes;
    return row + ((2 * t ^ (row >> 7 & 7)) << 4);
  };
  if (scale == 0.0f) {
    float largest = 0.0f;
#pragma unroll 1
    for (int pixel = thread / 4; pixel < pixels; pixel += step) {
      const std::uint32_t at = address(pixel);
      largest = persistent::larger(persistent::larger(largest, persistent::load_shared(at)),
                                   persistent::load_shared(at ^ 16));
    }
    const unsigned most = __reduce_max_sync(0xffffffffu, __float_as_uint(largest));
    if (thread % 32 == 0) control.largest_of_warp[thread / 32] = __uint_as_float(most);
    hopper::synchronise(barrier, threads);
#pragma unroll
    for (int i = 0; i < S::multiplying; ++i) largest = fmaxf(largest, control.largest_of_warp[i]);
    hopper::synchronise(barrier, threads);  // they have been read
    if (largest > 0.0f) scale = power_of_two(scale_exponent(largest, persistent::guessed_target));
  }
#pragma unroll 1
  for (int pixel = thread / 4; pixel < pixels; pixel += step) {
    const std::uint32_t at = address(pixel), word = (at & ~0x7fu) + 4 * t, row = at >> 7 & 7;
    const uint4 raw[2] = {persistent::load_shared(at), persistent::load_shared(at ^ 16)};
    float largest = persistent::larger(persistent::larger(0.0f, raw[0]), raw[1]);
    const unsigned lanes = __activemask();  // whole pixels
    __syncwarp(lanes);                      // a pixel has been read before it is written
    largest = fmaxf(largest, __shfl_xor_sync(lanes, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(lanes, largest, 2));
    if (t == 0) control.largest[pixel] = first ? largest : fmaxf(largest, control.largest[pixel]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 limbs = persistent::split_piece(raw[i], scale);
      const std::uint32_t words[4] = {limbs.x, limbs.y, limbs.z, limbs.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {  // hi01, hi23, lo01, lo23
        const unsigned piece = j / 2 * 4 + 2 * i + j % 2;
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(word + ((piece ^ row) << 4)), "r"(words[j]) : "memory");
      }
    }
  }
  hopper::fence_copies();  // products read through the same path
  hopper::synchronise(barrier, threads);
}

// The sums, scales undone, of a warpgroup over its steps of this block; false: one scale does not fit all windows.
// start: of the tile's first pixel in the stage.
template <typename S>
__device__ __forceinline__ bool multiply_windows(const Params<typename S::T>& params, Control& control,
                                                 std::uint32_t input, std::uint32_t filters, int start, int first_step,
                                                 int steps, Rings& rings, float (&totals)[S::sums]) {
#pragma unroll
  for (int i = 0; i < S::sums; ++i) totals[i] = 0.0f;
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0), lane = threadIdx.x % 32;
  const int group = warp / 4, warpgroup_splits = params.warpgroup_splits, turn = turn_of(params, group);
  const bool elected = lane == 0;
  constexpr std::uint64_t swizzled = std::uint64_t{1} << 62 | std::uint64_t{1} << 16;
  const std::uint64_t a_high = swizzled | static_cast<std::uint64_t>(params.group_stride) << 32;
  constexpr std::uint64_t b_high = swizzled | std::uint64_t{64} << 32;
  const int first_row = start + (group - turn) * params.second_pixels;
  const std::uint32_t inputs_full = shared_address(control.input.full),
                      filters_full = shared_address(control.filters.full);
  const int first_tap = first_step - static_cast<int>(params.by_stage_taps.quotient(first_step)) * params.stage_taps;
  int until_mine = turn, tap = first_tap;
  unsigned r = tap;
  int s = static_cast<int>(params.by_s.divmod(r));
  int offset = static_cast<int>(r) * params.row_step + s * params.column_step;
  float scale = 0.0f;
  bool first = true;
  float sums[2][S::sums];  // of a step, and of the one before
  std::uint32_t free_filters[2];
#pragma unroll 1
  while (steps > 0) {
    const std::uint32_t stage = input + rings.slot * params.stage_bytes;
    wait<role_multiply>(inputs_full + 8 * rings.slot, rings.parity, params.report);
    split_stage<S>(params, control, stage, first, scale);
    first = false;
    const std::uint32_t a_stage = (stage >> 4) + first_row * 8;
    int left = min(steps, params.stage_taps - tap);  // of this stage
    steps -= left;
    const auto advance = [&] {
      --until_mine, --left;
      if (++rings.filter_slot == params.filter_slots) rings.filter_slot = 0, rings.filter_parity ^= 1;
      offset += params.column_step;
      if (++s == params.s) s = 0, offset += params.row_step - params.s * params.column_step;
    };
    const auto is_left = [&] {  // a step of this warpgroup
      if (until_mine > 0 && left > 0) advance();
      return left > 0;
    };
    const auto issue = [&](int i) {
      const std::uint32_t barrier = filters_full + 8 * rings.filter_slot;
      wait<role_multiply>(barrier, rings.filter_parity, params.report);
      free_filters[i] = barrier + sizeof(control.filters.full);
      const std::uint32_t a = a_stage + offset, b = (filters + rings.filter_slot * S::filter_bytes) >> 4;
      hopper::fence_products();
      hopper::multiply_shared<half_t, false>(sums[i], a_high | (a + 4), b_high | b);  // lo hi
      hopper::multiply_shared<half_t, true>(sums[i], a_high | (a + 6), b_high | (b + 2));
      hopper::multiply_shared<half_t, true>(sums[i], a_high | a, b_high | (b + 4));  // hi lo
      hopper::multiply_shared<half_t, true>(sums[i], a_high | (a + 2), b_high | (b + 6));
      hopper::multiply_shared<half_t, true>(sums[i], a_high | a, b_high | b);  // hi hi
      hopper::multiply_shared<half_t, true>(sums[i], a_high | (a + 2), b_high | (b + 2));
      hopper::commit_products();
      until_mine = warpgroup_splits;
      advance();
    };
    const auto add = [&](int i) {
      hopper::fence_operand(sums[i]);
      if (elected) hopper::arrive(free_filters[i]);
#pragma unroll
      for (int j = 0; j < S::sums; ++j) totals[j] += sums[i][j];
    };
    if (is_left()) {
      issue(0);
#pragma unroll 1
      while (true) {
        if (!is_left()) {
          hopper::wait_for_products<0>();
          add(0);
          break;
        }
        issue(1);
        hopper::wait_for_products<1>();
        add(0);
        if (!is_left()) {
          hopper::wait_for_products<0>();
          add(1);
          break;
        }
        issue(0);
        hopper::wait_for_products<1>();
        add(1);
      }
    }
    tap = 0, s = 0, offset = 0;
    if (elected) hopper::arrive(inputs_full + sizeof(control.input.full) + 8 * rings.slot);
    if (++rings.slot == params.input_slots) rings.slot = 0, rings.parity ^= 1;
  }
  // The largest |x| of the windows of the lane's two pixels.
  float largest[2] = {};
  const int second = params.group_stride / 8, row = first_row + warp % 4 * 2 * second + lane / 4,
            pixels = params.box_bytes / row_bytes;
#pragma unroll 1
  for (int i = lane % 4; i < params.stage_taps; i += 4) {
    unsigned of_r = i;
    const int of_s = static_cast<int>(params.by_s.divmod(of_r));
    const int at = row + (static_cast<int>(of_r) * params.row_step + of_s * params.column_step) / 8;
    // Surplus pixels may have windows beyond the stage.
    if (at < pixels) largest[0] = fmaxf(largest[0], control.largest[at]);
    if (at + second < pixels) largest[1] = fmaxf(largest[1], control.largest[at + second]);
  }
  bool off = false;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float most = of_pixel(largest[i]), high = most * scale;
    off |= most > 0.0f && !(high >= persistent::min_high && high < persistent::max_high);
  }
  if (must_retry(control, off, 0, params.report)) [[unlikely]]
    return false;
  const int exponent = scale == 0.0f ? 0 : static_cast<int>(__float_as_uint(scale) >> 23) - 127;
  unscale<S>(control, exponent, exponent, totals);
  return true;
}

// ---- Single taps

// The same, of any stages. pass: how often the steps have been done before.
template <typename S>
__device__ __forceinline__ void multiply_pixels(const Params<typename S::T>& params, Control& control,
                                                std::uint32_t input, std::uint32_t filters, int start, int first_step,
                                                const int steps, int pass, Rings& rings, float (&totals)[S::sums]) {
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0), lane = threadIdx.x % 32;
  const int group = warp / 4, warpgroup_splits = params.warpgroup_splits, turn = turn_of(params, group);
  const std::uint32_t second = params.group_stride * 16;  // from the lane's first pixel to its second
  const std::uint32_t row =
      (start + (group - turn) * params.second_pixels + lane / 4) * row_bytes + warp % 4 * 2 * second;
  const std::uint32_t inputs_full = shared_address(control.input.full),
                      filters_full = shared_address(control.filters.full);
  constexpr std::uint64_t b_high = std::uint64_t{1} << 62 | std::uint64_t{64} << 32 | std::uint64_t{1} << 16;
  float scale[2] = {}, largest[2] = {};
  bool exact = false;
#pragma unroll 1
  while (true) {
#pragma unroll
    for (int i = 0; i < S::sums; ++i) totals[i] = 0.0f;
    int tap = first_step - static_cast<int>(params.by_stage_taps.quotient(first_step)) * params.stage_taps;
    unsigned r = tap;
    int s = static_cast<int>(params.by_s.divmod(r));
    int offset = static_cast<int>(r) * params.row_step + s * params.column_step;
    int left = steps, until_mine = turn;
    bool fresh = true;
    // On to the next step; the stage before it is given back after its last one.
    const auto advance = [&](bool mine) {
      --until_mine, --left;
      if (++rings.filter_slot == params.filter_slots) rings.filter_slot = 0, rings.filter_parity ^= 1;
      offset += params.column_step;
      if (++s == params.s) s = 0, offset += params.row_step - params.s * params.column_step;
      if (++tap == params.stage_taps) {
        tap = 0, s = 0, offset = 0, fresh = true;
        if (mine || params.stage_taps > 1) {
          __syncwarp();
          if (lane == 0) hopper::arrive(inputs_full + sizeof(control.input.full) + 8 * rings.slot);
        }
        if (++rings.slot == params.input_slots) rings.slot = 0, rings.parity ^= 1;
      }
    };
    Raw raw;
    const auto load = [&] {
      if (fresh) wait<role_multiply>(inputs_full + 8 * rings.slot, rings.parity, params.report);
      fresh = false;
      const std::uint32_t at = input + rings.slot * params.stage_bytes + offset * 16 + row;
      raw.load(at, at + second);
    };
    const auto skip = [&] {
#pragma unroll 1
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
        here[i] = persistent::larger(persistent::larger(0.0f, raw.piece[i][0]), raw.piece[i][1]);
        largest[i] = fmaxf(largest[i], here[i]);
      }
      if (__any_sync(0xffffffffu, scale[0] == 0.0f || scale[1] == 0.0f)) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float most = of_pixel(here[i]);
          if (scale[i] == 0.0f && most > 0.0f) {
            scale[i] = power_of_two(scale_exponent(most, persistent::pixel_guess_target));
          }
        }
      }
      std::uint32_t high[2][4], low[2][4];  // of a product: row l/4, row l/4 + 8, then both at k + 8
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const uint4 limbs = persistent::split_piece(raw.piece[i][j], scale[i]);
          high[j][i] = limbs.x, high[j][2 + i] = limbs.y, low[j][i] = limbs.z, low[j][2 + i] = limbs.w;
        }
      }
      const std::uint32_t filters_barrier = filters_full + 8 * rings.filter_slot;
      wait<role_multiply>(filters_barrier, rings.filter_parity, params.report);
      const std::uint32_t b = (filters + rings.filter_slot * S::filter_bytes) >> 4;
      float sums[S::sums];
      hopper::fence_products();
      hopper::multiply<half_t, false>(sums, low[0], b_high | b);
      hopper::multiply<half_t, true>(sums, low[1], b_high | (b + 2));
      hopper::multiply<half_t, true>(sums, high[0], b_high | (b + 4));
      hopper::multiply<half_t, true>(sums, high[1], b_high | (b + 6));
      hopper::multiply<half_t, true>(sums, high[0], b_high | b);
      hopper::multiply<half_t, true>(sums, high[1], b_high | (b + 2));
      hopper::commit_products();
      until_mine = warpgroup_splits;
      advance(true);
      skip();
      if (S::ahead && left > 0) load();
      hopper::wait_for_products<0>();
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) asm volatile("" ::"r"(high[j][i]), "r"(low[j][i]));  // read until here
      }
      hopper::fence_operand(sums);
      if (lane == 0) hopper::arrive(filters_barrier + sizeof(control.filters.full));
#pragma unroll
      for (int i = 0; i < S::sums; ++i) totals[i] += sums[i];
    }
    if (tap > 0) {  // the split ends within a stage
      __syncwarp();
      if (lane == 0) hopper::arrive(inputs_full + sizeof(control.input.full) + 8 * rings.slot);
      if (++rings.slot == params.input_slots) rings.slot = 0, rings.parity ^= 1;
    }
    if (exact) break;
    bool off = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      largest[i] = of_pixel(largest[i]);
      const float high = largest[i] * scale[i];
      off |= largest[i] > 0.0f && !(high >= persistent::min_high && high < persistent::max_high);
    }
    if (!must_retry(control, off, pass, params.report)) [[likely]]
      break;
    exact = true;
#pragma unroll
    for (int i = 0; i < 2; ++i) scale[i] = power_of_two(scale_exponent(largest[i], persistent::exact_target));
  }
  int exponents[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    exponents[i] = scale[i] == 0.0f ? 0 : static_cast<int>(__float_as_uint(scale[i]) >> 23) - 127;
  }
  unscale<S>(control, exponents[0], exponents[1], totals);
}

template <typename S>
__device__ __forceinline__ void multiply_split(const Params<typename S::T>& params, Control& control,
                                               std::uint32_t input, std::uint32_t filters, int start, int first_step,
                                               int steps, float (&totals)[S::sums]) {
  Rings rings;
  const bool windows = params.stage_taps > 1;
  if (windows && multiply_windows<S>(params, control, input, filters, start, first_step, steps, rings, totals)) return;
  multiply_pixels<S>(params, control, input, filters, start, first_step, steps, windows ? 1 : 0, rings, totals);
}
// How often the loading warps do their work, at most.
template <typename T>
__device__ __forceinline__ int max_passes(const Params<T>& params) {
  return params.stage_taps > 1 ? 3 : 2;
}

}  // namespace fastconv::algos::implicit_gemm::single_tile
