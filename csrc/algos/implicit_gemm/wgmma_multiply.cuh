// The multiplying warpgroups.
#pragma once

#include <utility>

#include "algos/implicit_gemm/wgmma_operand.cuh"
#include "algos/implicit_gemm/wgmma_output.cuh"

namespace fastconv::algos::implicit_gemm::wgmma {

// The products of a step for 64 pixels, issued, not finished. In split mode the sums start from zero, and the small
// products come first, while truncation of the accumulator costs nothing (docs/numerics.md).
template <typename S, int count>
__device__ __forceinline__ void multiply_step(float (&sums)[count], const Operand<S>& operand, std::uint64_t filters) {
  using Half = typename S::Half;
  using hopper::advance_descriptor;
  constexpr int plane = 64;  // bytes from hi to lo
  if constexpr (S::split) {
    hopper::multiply<Half, false>(sums, operand.low[0], filters);
#pragma unroll
    for (int i = 1; i < S::depth; ++i) {
      hopper::multiply<Half, true>(sums, operand.low[i], advance_descriptor(filters, 32 * i));
    }
#pragma unroll
    for (int i = 0; i < S::depth; ++i) {
      hopper::multiply<Half, true>(sums, operand.high[i], advance_descriptor(filters, plane + 32 * i));
    }
  }
#pragma unroll
  for (int i = 0; i < S::depth; ++i) {
    hopper::multiply<Half, true>(sums, operand.high[i], advance_descriptor(filters, 32 * i));
  }
}

// The work of a warpgroup on a tile is cut into units that alternate on the tensor cores: while they work on one, the
// sums of the one before join the totals, and the operand of the next is loaded. The loop is short on purpose: with
// that of the splitting warpgroup it must fit the instruction cache of a quarter of the multiprocessor.
//   row_blocks     a step's two blocks of 64 pixels
//   filter_halves  a step's filters, two halves
//   steps          steps
template <typename S>
class Multiplier {
 public:
  using T = typename S::T;

  __device__ __forceinline__ Multiplier(const Params<T>& params, const Shared<S>& shared)
      : params_(params),
        shared_(shared),
        control_(*shared.control),
        site_{params.report, kernel_implicit_gemm, role_multiply},
        input_(params) {}

  // Lets the first warpgroup go ahead, so that one's epilogue falls into the other's products: the second one waits
  // here for the first, who opens in run().
  __device__ __forceinline__ void stagger() {
    if (threadIdx.x / 128 == 0) {
      others_wait_ = true;
    } else {
      asm volatile("bar.sync 3, %0;" ::"n"(128 * multiply_warpgroups) : "memory");
    }
  }
  __device__ __forceinline__ void synchronise() const {
    asm volatile("bar.sync 1, %0;" ::"n"(128 * multiply_warpgroups) : "memory");
  }

  // One unit of work. exact: with the scales that measure() has left. Else returns whether the tile's scale does not
  // fit one of the lane's pixels.
  __device__ __forceinline__ bool run(unsigned index, bool exact) {
    Total total;
#pragma unroll
    for (int m = 0; m < S::row_blocks; ++m) {
#pragma unroll
      for (int i = 0; i < S::sums; ++i) total[m][i] = 0.0f;
    }
    const Work work(params_, index);
    begin(work);
    FilterData<S>& filters = shared_.filter_data[threadIdx.x / 32];
    filters.fetch(params_, work.filter_tile);
    bool off = false;
    if (S::scaled && exact) {
      multiply_exact(work, total);
      release_stage();
    } else {
      multiply(work, total);
      leave();
      if constexpr (S::scaled) {
#pragma unroll
        for (int i = 0; i < Input<S>::rows; ++i) {
          exponents_[i] = exponent_;
          const float high = largest_[i] * power_of_two(exponent_);
          off |= largest_[i] > 0.0f && !(high >= least_high && high < most_high);
        }
      }
    }
    wait_for_copies<0>();
    __syncwarp();
    asm volatile("" : "+r"(index));  // so that it is decoded again, and does not occupy registers until now
    const Work output(params_, index);
    store_tile<S>(params_, output, filters, shared_.output[threadIdx.x / 32], total, exponents_);
    return off;
  }

  // Passes over the work's input and filters, while the splitting warpgroup measures the pixels.
  __device__ __forceinline__ void measure(const Work& work) {
    begin(work);
    const int steps = steps_of(work);
    for (int step = 0; step < steps; ++step) {
      await_stage();
      next_tap();
      await_filters();
      ++filters_.count;
      release_filters(1);
    }
    leave();
#pragma unroll
    for (int i = 0; i < Input<S>::rows; ++i) {
      exponents_[i] = largest_[i] > 0.0f ? scale_exponent(largest_[i], exact_target) : exact_target;
    }
  }

 private:
  static constexpr int operands = 2;
  static constexpr int period = S::units == Units::filter_halves ? 4 : 2;  // the code repeats after so many units

  using Total = float[S::row_blocks][S::sums];
  using Sums = float[S::split ? 2 : 1][S::unit_sums];

  __device__ __forceinline__ int steps_of(const Work& work) const {
    return (work.last_stage - work.first_stage) * params_.stage_taps;
  }

  __device__ __forceinline__ void multiply(const Work& work, Total& total) {
    const int units = steps_of(work) * S::units_per_step;
    Operand<S> operand[operands];
    Sums sums;
    prepare<0>(operand[0]);
    await_filters();
    multiply_periods(units, operand, sums, total, std::make_integer_sequence<int, period>{});
    hopper::wait_for_products<0>();
    if (units % 2 == 1) {
      add<0>(sums, total);
    } else {
      add<1>(sums, total);
    }
    release_filters(1);
    open();
  }
  template <int... u>
  __device__ __forceinline__ void multiply_periods(int units, Operand<S> (&operand)[operands], Sums& sums, Total& total,
                                                   std::integer_sequence<int, u...>) {
    for (int first = 0; (step<u>(first, units, operand, sums, total) && ...); first += period) {
    }
  }

  // With the scales that measure() has left. Rare, so nothing overlaps.
  __device__ __forceinline__ void multiply_exact(const Work& work, Total& total) {
    const int steps = steps_of(work);
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      await_stage();
      await_filters();
      Operand<S> operand;
      Sums sums;
      input_.load_exact(stage(), shift_, 0, exponents_, operand);
      issue<0>(operand, sums, total);
      hopper::wait_for_products<0>();
      add<0>(sums, total);
      if constexpr (S::units_per_step == 2) {
        if (S::units == Units::row_blocks) input_.load_exact(stage(), shift_, S::row_blocks - 1, exponents_, operand);
        issue<1>(operand, sums, total);
        hopper::wait_for_products<0>();
        add<1>(sums, total);
      }
      release_filters(1);
      next_tap();
    }
  }

  // Of unit `unit` modulo `period`.
  static constexpr int row_block(int unit) { return S::units == Units::row_blocks ? unit % 2 : 0; }
  static constexpr int first_sum(int unit) { return S::units == Units::filter_halves ? unit % 2 * S::unit_sums : 0; }
  static constexpr int operand_of(int unit) { return S::units == Units::filter_halves ? unit / 2 % 2 : unit % 2; }
  static constexpr bool begins_step(int unit) { return S::units_per_step == 1 || unit % 2 == 0; }
  static constexpr bool ends_step(int unit) { return S::units_per_step == 1 || unit % 2 == 1; }
  // Whether its operand is not that of the unit before.
  static constexpr bool begins_operand(int unit) { return S::units == Units::row_blocks || begins_step(unit); }

  // Issues unit first + u, and does what can be done beside it. Returns whether there are more units.
  template <int u>
  __device__ __forceinline__ bool step(int first, int units, Operand<S> (&operand)[operands], Sums& sums,
                                       Total& total) {
    constexpr int next = (u + 1) % period;
    issue<u>(operand[operand_of(u)], sums, total);
    if constexpr (u == 1) open();
    hopper::wait_for_products<1>();  // the unit before is complete
    const bool more = first + u + 1 < units;
    if (u > 0 || first > 0) {
      if constexpr (begins_step(u)) release_filters(S::units_per_step == 2 ? 1 : 2);  // those of its step
      add<(u + 1) % 2>(sums, total);
    }
    if (more) {
      if constexpr (begins_operand(next)) prepare<next>(operand[operand_of(next)]);
      if constexpr (begins_step(next)) await_filters();
    }
    return more;
  }

  template <int u>
  __device__ __forceinline__ void prepare(Operand<S>& operand) {
    if (begins_step(u)) await_stage();
    input_.load(stage(), shift_, row_block(u), operand);
    if (S::units != Units::row_blocks || ends_step(u)) next_tap();
  }

  template <int u>
  __device__ __forceinline__ void issue(const Operand<S>& operand, Sums& sums, Total& total) {
    constexpr int half = S::units == Units::filter_halves ? u % 2 * S::filter_bytes / 2 : 0;
    const std::uint64_t filters =
        hopper::matrix_descriptor<S::row_bytes>(shared_.filters + filters_.slot() * S::filter_bytes + half);
    hopper::fence_products();
    if constexpr (S::split) {
      multiply_step<S>(sums[u % 2], operand, filters);
    } else {
      multiply_step<S>(total[row_block(u)], operand, filters);
    }
    hopper::commit_products();
    if (ends_step(u)) ++filters_.count;
  }

  // The unit's products are there. Its sums join the totals, rounded.
  template <int u>
  __device__ __forceinline__ void add(Sums& sums, Total& total) {
    if constexpr (S::split) {
      hopper::pin(sums[u % 2]);
#pragma unroll
      for (int i = 0; i < S::unit_sums; ++i) total[row_block(u)][first_sum(u) + i] += sums[u % 2][i];
    }
  }

  __device__ __forceinline__ void open() {
    if (!others_wait_) return;
    asm volatile("bar.arrive 3, %0;" ::"n"(128 * multiply_warpgroups) : "memory");
    others_wait_ = false;
  }

  // ---- The rings

  __device__ __forceinline__ std::uint32_t stage() const { return shared_.input + slot_.slot * params_.stage_bytes; }

  __device__ __forceinline__ void begin(const Work& work) {
    stages_left_ = work.last_stage - work.first_stage;
    tap_ = 0, column_ = 0, shift_ = 0;
  }

  // Waits for the stage of the step to come, if that is its first.
  __device__ __forceinline__ void await_stage() {
    if (tap_ > 0) return;
    std::uint64_t* barriers = S::scaled ? control_.input_ready : control_.input_full;
    hopper::wait(shared_address(&barriers[slot_.slot]), slot_.parity, site_);
  }

  // The step's input is in registers: on to the next tap, and past the end of a stage, which is given back; the last
  // one only by leave(), since it knows the largest values.
  __device__ __forceinline__ void next_tap() {
    if (++tap_ == params_.stage_taps) {
      tap_ = 0, column_ = 0, shift_ = 0;
      if (--stages_left_ > 0) release_stage();
    } else if (++column_ == params_.s) {
      column_ = 0;
      shift_ += params_.dilation_h * params_.box_w - (params_.s - 1) * params_.dilation_w;
    } else {
      shift_ += params_.dilation_w;
    }
  }
  __device__ __forceinline__ void leave() {
    if constexpr (S::scaled) {
      input_.find_largest(params_, shared_.largest + slot_.slot * (params_.stage_bytes / input_row_bytes), largest_);
      exponent_ = control_.exponent[slot_.slot];
    }
    release_stage();
  }
  __device__ __forceinline__ void release_stage() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) hopper::arrive(shared_address(&control_.input_free[slot_.slot]));
    slot_.advance(params_.input_slots);
  }

  __device__ __forceinline__ void await_filters() {
    hopper::wait(shared_address(&control_.filters_full[filters_.slot()]), filters_.parity(), site_);
  }
  __device__ __forceinline__ void release_filters(unsigned back) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) hopper::arrive(shared_address(&control_.filters_free[filters_.slot(back)]));
  }

  const Params<T>& params_;
  const Shared<S>& shared_;
  Control& control_;
  WaitSite site_;
  Input<S> input_;
  hopper::RingPosition slot_;  // of input
  hopper::RingCounter<S::slots> filters_;
  int tap_ = 0, column_ = 0, shift_ = 0, stages_left_ = 0;
  float largest_[Input<S>::rows] = {};                 // of the last work's pixels
  int exponent_ = 0, exponents_[Input<S>::rows] = {};  // of the scales: the last work's, and its pixels'
  bool others_wait_ = false;
};

}  // namespace fastconv::algos::implicit_gemm::wgmma
