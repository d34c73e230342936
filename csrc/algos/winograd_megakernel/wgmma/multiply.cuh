// The multiplying side of a block: one thread loads, two warpgroups multiply, one thread raises the counters.
//
// Split operands: the scheme of winograd_staged/gemm, with stages of half the size and one set of sums, which leaves
// shared memory and registers to the streaming warps. While one warpgroup joins its sums to its totals, the other one's
// products run. Halves: the sums of all chunks stay where they are, and change their scale where a chunk has another.
#pragma once

#include "algos/winograd_megakernel/shared/values.cuh"
#include "algos/winograd_megakernel/wgmma/load.cuh"
#include "device/power_of_two.h"

namespace fastconv::algos::winograd_megakernel::wgmma {

// All threads of a warpgroup, 0 or 1: rows [64 warpgroup, 64 warpgroup + 64) of each task.
template <typename T>
class Multiplier {
 public:
  __device__ __forceinline__ Multiplier(const Params<T>& params, ProductStorage<T>& shared, int warpgroup)
      : params_(params), shared_(shared), ring_(params.ring), warpgroup_(warpgroup) {}

  __device__ __forceinline__ void run() {
    if constexpr (is_split<T>) zero_totals();
    unsigned task = 0;
#pragma unroll 1
    for (;; ++task) {
      Stage first = next_stage(0);
      const ProductTask& product = shared_.tasks[task % product_task_slots];
      if (product.rows == 0) {
        break;
      }
      if constexpr (is_split<T>) {
        exponents_ = product.exponents + lane_row() * params_.chunks;
        sum_chunks(first);
      } else {
        if (shared_.common[task % product_task_slots]) {
          sum_in_place(first, product);
        } else {
          sum_and_scale(first, product);
        }
      }
      finish(product, task);
    }
    hand_over(task, -1);
  }

 private:
  // A stage that is there: its slot, and the low words of its operands' descriptors.
  struct Stage {
    int slot;
    std::uint32_t v, u;
  };

  // ---- Split operands: a chunk's sums start from zero and join the totals.

  __device__ __forceinline__ void sum_chunks(Stage first) {
#pragma unroll 1
    for (int chunk = 0; chunk < params_.chunks; ++chunk) {
      issue<true>(first);
      const Stage second = next_stage(2 * chunk + 1);
      issue<false>(second);
      if (chunk == 0) find_least();
      const float factors[2] = {factor(chunk, 0), factor(chunk, 1)};
      const int first_slot = first.slot;
      if (chunk + 1 < params_.chunks) first = next_stage(2 * chunk + 2);  // so that little is left to do in between
      hopper::wait_for_products<1>();
      release(first_slot);
      hopper::wait_for_products<0>();
      release(second.slot);
      hopper::fence_operand(sums_);
#pragma unroll
      for (int i = 0; i < 64; ++i) totals_[i] = fmaf(sums_[i], factors[i / 2 % 2], totals_[i]);
    }
  }
  // ----

  // The warp's first row: lane l has its rows l / 4 and 8 further (hopper/ptx/wgmma.cuh).
  __device__ __forceinline__ int warp_row() const {
    return warpgroup_ * 64 + static_cast<int>(thread<T>()) % 128 / 32 * 16;
  }
  __device__ __forceinline__ int lane_row() const { return warp_row() + static_cast<int>(thread<T>()) % 32 / 4; }

  // The sums of a chunk are brought to the scale of the tile's largest one before they are added up: exact, and neither
  // too large nor, relative to the result, too small for FP32. Four lanes share a row.
  __device__ __forceinline__ void find_least() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int least = 127;
#pragma unroll
      for (int j = 0; j < kept_exponents; ++j) {
        const int chunk = 4 * j + static_cast<int>(threadIdx.x) % 4;
        kept_[j][i] = chunk < params_.chunks ? exponent(chunk, i) : 127;
      }
#pragma unroll
      for (int j = 0; j < kept_exponents; ++j) least = min(least, kept_[j][i]);
#pragma unroll 1
      for (int chunk = 4 * kept_exponents + threadIdx.x % 4; chunk < params_.chunks; chunk += 4) {
        least = min(least, exponent(chunk, i));
      }
      least = min(least, __shfl_xor_sync(0xffffffffu, least, 1));
      min_exponent_[i] = min(least, __shfl_xor_sync(0xffffffffu, least, 2));
    }
  }
  __device__ __forceinline__ float factor(int chunk, int i) const {
    int of_chunk;
    if (chunk < 4 * kept_exponents) {
      static_assert(kept_exponents == 2);
      of_chunk = __shfl_sync(0xffffffffu, chunk < 4 ? kept_[0][i] : kept_[1][i], chunk % 4, 4);
    } else {
      of_chunk = exponent(chunk, i);
    }
    return power_of_two(max(-126, min_exponent_[i] - of_chunk));
  }
  // Past the first cache: written by other multiprocessors of this very kernel.
  __device__ __forceinline__ int exponent(int chunk, int i) const {
    return __ldcg(exponents_ + i * 8 * params_.chunks + chunk);
  }

  // ---- Halves: one set of sums for all chunks, which at last get M's scale.

  // All chunks have the common scale. The exponents, which M's scale asks for, are on their way meanwhile.
  __device__ __forceinline__ void sum_in_place(Stage stage, const ProductTask& product) {
    issue<true>(stage);
    int early[2][2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) early[j][i] = load_early(product, static_cast<int>(thread<T>()) % 4 + 4 * j, i);
    }
#pragma unroll 1
    for (int chunk = 1; chunk < params_.chunks; ++chunk) {
      const Stage next = next_stage(chunk);
      issue<false>(next);
      hopper::wait_for_products<1>();
      release(stage.slot);
      stage = next;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) min_exponent_[i] = min(early[0][i], early[1][i]);
    find_least(product, 8);
    const int scale[2] = {common_exponent, common_exponent};
    complete(stage, scale);
  }
  // The sums change their scale before a chunk with another one joins them.
  __device__ __forceinline__ void sum_and_scale(Stage stage, const ProductTask& product) {
    issue<true>(stage);
    min_exponent_[0] = min_exponent_[1] = zero_exponent;
    find_least(product, 0);
    int scale[2] = {scale_of(product, 0, 0), scale_of(product, 0, 1)};
#pragma unroll 1
    for (int chunk = 1; chunk < params_.chunks; ++chunk) {
      const Stage next = next_stage(chunk);
      hopper::wait_for_products<0>();
      release(stage.slot);
      float factors[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int own = scale_of(product, chunk, i);
        factors[i] = power_of_two(max(-126, own - scale[i]));
        scale[i] = own;
      }
      multiply_sums(factors);
      issue<false>(next);
      stage = next;
    }
    complete(stage, scale);
  }
  __device__ __forceinline__ void complete(const Stage& stage, const int (&scale)[2]) {
    const int shift = product_shift(params_.chunks);
    const float factors[2] = {power_of_two(max(-126, min_exponent_[0] - scale[0] - shift)),
                              power_of_two(max(-126, min_exponent_[1] - scale[1] - shift))};
    hopper::wait_for_products<0>();
    release(stage.slot);
    multiply_sums(factors);
  }
  __device__ __forceinline__ void multiply_sums(const float (&factors)[2]) {
    hopper::fence_operand(sums_);
#pragma unroll
    for (int i = 0; i < 64; ++i) sums_[i] *= factors[i / 2 % 2];
  }
  // The least exponent of each of the lane's rows, of which the lane already knows that of its chunks below `first`.
  __device__ __forceinline__ void find_least(const ProductTask& product, int first) {
#pragma unroll 1
    for (int chunk = first + threadIdx.x % 4; chunk < params_.chunks; chunk += 4) {
#pragma unroll
      for (int i = 0; i < 2; ++i) min_exponent_[i] = min(min_exponent_[i], exponent(product, chunk, i));
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      min_exponent_[i] = min(min_exponent_[i], __shfl_xor_sync(0xffffffffu, min_exponent_[i], 1));
      min_exponent_[i] = min(min_exponent_[i], __shfl_xor_sync(0xffffffffu, min_exponent_[i], 2));
    }
  }
  // That of the row's sums when a chunk joins them: the chunk's, but not so far above the least one that the sums could
  // exceed FP32's range. (What is that much smaller does not count, whatever its scale.)
  __device__ __forceinline__ int scale_of(const ProductTask& product, int chunk, int i) const {
    return min(v_exponent(exponent(product, chunk, i)), v_exponent(min_exponent_[i]) + 72);
  }
  // Of the row 8 i further; read anew each time, since registers are scarce.
  __device__ __forceinline__ int exponent(const ProductTask& product, int chunk, int i) const {
    const int row = lane_row() + 8 * i;
    return row < product.rows ? __ldcg(product.exponents + row * params_.chunks + chunk) : zero_exponent;
  }
  // The same, begun here and nowhere else; of rows that do not exist anything.
  __device__ __forceinline__ int load_early(const ProductTask& product, int chunk, int i) const {
    int value;
    asm volatile("{\n.reg .pred p;\nsetp.lt.s32 p, %2, %3;\nmov.s32 %0, %4;\n@p ld.global.cg.s32 %0, [%1];\n}"
                 : "=r"(value)
                 : "l"(product.exponents + (lane_row() + 8 * i) * params_.chunks + chunk), "r"(chunk),
                   "r"(params_.chunks), "n"(zero_exponent)
                 : "memory");
    return value;
  }

  __device__ __forceinline__ Stage next_stage(int index) {
    wait_in_place<role_multiply>(shared_.full[position_.slot], position_.parity, params_.report);
    const int slot = position_.slot;
    const std::uint32_t buffers = shared_address(shared_.buffers);
    position_.advance(ring_.slots);
    const auto low = [](std::uint32_t address) {
      return static_cast<std::uint32_t>(hopper::matrix_descriptor<128>(address));
    };
    return {slot, low(buffers + ring_.v_buffer(slot) * operand_bytes + warpgroup_ * (operand_bytes / 2)),
            low(buffers + ring_.u_buffer(slot, index) * operand_bytes)};
  }
  __device__ __forceinline__ void release(int slot) {
    __syncwarp();
    hopper::arrive_for_warp(shared_.free[slot]);
  }

  // The products of a stage; of split operands lo hi and hi lo first, the small ones (docs/concepts/numerics.md).
  template <bool begins>
  __device__ __forceinline__ void issue(const Stage& stage) {
    constexpr int hi = 64;  // bytes, in a row
    // Addresses have 14 bits there, and steps within a row do not carry.
    const auto descriptor = [](std::uint32_t low, int bytes) {
      constexpr std::uint64_t high = (std::uint64_t{1} << 62) | (std::uint64_t{64} << 32);
      return high | (low + static_cast<std::uint32_t>(bytes / 16));
    };
    const auto multiply = [&](auto accumulate, int v_bytes, int u_bytes) {
      hopper::multiply_shared<half_t, accumulate()>(sums_, descriptor(stage.v, v_bytes), descriptor(stage.u, u_bytes));
    };
    constexpr std::true_type add{};
    constexpr std::bool_constant<!begins> first{};
    hopper::fence_products();
    if constexpr (is_split<T>) {
      multiply(first, 0, hi), multiply(add, 32, hi + 32);
      multiply(add, hi, 0), multiply(add, hi + 32, 32);
      multiply(add, hi, hi), multiply(add, hi + 32, hi + 32);
    } else {
      multiply(first, 0, 0), multiply(add, 32, 32), multiply(add, 64, 64), multiply(add, 96, 96);
    }
    hopper::commit_products();
  }

  __device__ __forceinline__ void zero_totals() {
#pragma unroll
    for (int i = 0; i < 64; ++i) totals_[i] = 0.0f;
  }
  __device__ __forceinline__ void finish(const ProductTask& product, unsigned task) {
    delay_randomly(params_.delay);
    write(product);
    if constexpr (is_split<T>) zero_totals();
    hand_over(task, product.number);
  }

  // Predicated, not branched around; and the compiler may not see that this is global memory.
  static __device__ __forceinline__ void store_if(int width, int column, void* target, float a, float b, float c,
                                                  float d) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.gt.s32 p, %1, %2;\n@p st.global.v4.f32 [%0], {%3, %4, %5, %6};\n}" ::"l"(target),
        "r"(width), "r"(column), "f"(a), "f"(b), "f"(c), "f"(d)
        : "memory");
  }
  static __device__ __forceinline__ void store_if(int width, int column, void* target, half2 a, half2 b, half2 c,
                                                  half2 d) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.gt.s32 p, %1, %2;\n@p st.global.v4.b32 [%0], {%3, %4, %5, %6};\n}" ::"l"(target),
        "r"(width), "r"(column), "r"(to_bits(a)), "r"(to_bits(b)), "r"(to_bits(c)), "r"(to_bits(d))
        : "memory");
  }
  // In the order of the registers: rows would be pieces of 32 bytes.
  __device__ __forceinline__ void write(const ProductTask& product) {
    constexpr int filters = form<T>.segment_filters;
    const int lane = thread<T>() % 32, row = warp_row();
    auto* target = static_cast<Product<T>*>(product.m) + segment_at<T>(row, 0) * segment_values + lane * (filters / 4);
    asm volatile("" : "+l"(target));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int width = row + 8 * h < product.rows ? product.columns : 0;
#pragma unroll
      for (int j = 0; j < tile_n / filters; ++j) {
        Product<T>* const place = target + segment_at<T>(8 * h, filters * j) * segment_values;
        if constexpr (is_split<T>) {
          const float* t = totals_ + 8 * j + 2 * h;
          store_if(width, filters * j, place, t[0], t[1], t[4], t[5]);
        } else {
          const float* t = sums_ + 16 * j + 2 * h;
          const auto pair = [t](int i) { return __floats2half2_rn(t[i], t[i + 1]); };
          store_if(width, filters * j, place, pair(0), pair(4), pair(8), pair(12));
        }
      }
    }
  }

  __device__ __forceinline__ void hand_over(unsigned task, int number) {
    constexpr unsigned slots = ProductStorage<T>::signal_slots;
    const unsigned slot = task % slots;
    wait_in_place<role_multiply>(shared_.taken[slot], task / slots & 1 ^ 1, params_.report);
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      if (warpgroup_ == 0 && threadIdx.x % 128 == 0) shared_.number[slot] = number;
      hopper::arrive(shared_.stored[slot]);
    }
  }

  const Params<T>& params_;
  ProductStorage<T>& shared_;
  const ProductRing ring_;
  const int warpgroup_;
  hopper::RingPosition position_;           // of the stage to be multiplied next
  const int* exponents_;                    // of the task under way, at the lane's first row
  static constexpr int kept_exponents = 2;  // of a lane: chunk 4j + lane % 4
  int min_exponent_[2], kept_[kept_exponents][2];
  float totals_[is_split<T> ? 64 : 1], sums_[64];
};

}  // namespace fastconv::algos::winograd_megakernel::wgmma
