// The multiplying warpgroups.
#pragma once

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

// A warpgroup works on a step at a time; the tensor cores pass from one warpgroup to the other while its sums join the
// totals and the next operand is loaded. The loops are short on purpose: with that of the splitting warpgroup they must
// fit the instruction cache of a quarter of the multiprocessor.
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

  __device__ __forceinline__ void synchronise() const {
    asm volatile("bar.sync 1, %0;" ::"n"(128 * multiply_warpgroups) : "memory");
  }

  // One unit of work. exact: with the scales that measure() has left. Else returns whether a scale does not fit one of
  // the lane's pixels.
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
      multiply_exact(total);
      if constexpr (!S::raw) release_stage();
    } else {
      if constexpr (S::split) {
        multiply_promoted(total);
      } else {
        multiply_chained(total);
      }
      leave();
      if constexpr (S::scaled) {
#pragma unroll
        for (int i = 0; i < rows; ++i) {
          const float high = largest_[i] * power_of_two(exponents_[i]);
          off |= largest_[i] > 0.0f && !(high >= least_high && high < most_high);
        }
      }
    }
    wait_for_copies<0>();
    asm volatile("" : "+r"(index));  // so that it is decoded again, and does not occupy registers until now
    const Work output(params_, index);
    store_tile<S>(params_, output, filters, shared_.output[threadIdx.x / 32], total, exponents_);
    return off;
  }

  // Passes over the work's input and filters, while the pixels are measured.
  __device__ __forceinline__ void measure(const Work& work) {
    begin(work);
#pragma unroll 1
    for (; steps_left_ > 0; --steps_left_) {
      await_stage();
      if constexpr (S::raw) input_.measure_raw(stage(), largest_);
      next_tap();
      await_filters();
      ++filters_.count;
      release_filters(1);
    }
    leave();
#pragma unroll
    for (int i = 0; i < rows; ++i) {
      exponents_[i] = largest_[i] > 0.0f ? scale_exponent(largest_[i], exact_target) : exact_target;
    }
  }

 private:
  static constexpr int rows = Input<S>::rows;

  using Total = float[S::row_blocks][S::sums];
  using Operands = Operand<S>[S::row_blocks];

  // Each step starts from zero, and its sums join the totals, rounded: nothing is chained that could be truncated.
  __device__ __forceinline__ void multiply_promoted(Total& total) {
    Operands operands;
    Total sums;
    load(operands);
#pragma unroll 1
    while (true) {
      await_filters();
      issue(operands, sums);
      const bool more = --steps_left_ > 0;
      [[maybe_unused]] Operands next;
      if constexpr (S::loads_ahead) {
        if (more) load(next);
      }
      hopper::wait_for_products<0>();
      keep(operands);
      release_filters(1);
      if constexpr (!S::loads_ahead) {
        if (more) load(operands);
      }
      add(sums, total);
      if (!more) break;
      if constexpr (S::loads_ahead) copy(next, operands);
    }
  }

  // Each step's products go on where those of the step before have ended, and the tensor cores need not wait.
  __device__ __forceinline__ void multiply_chained(Total& total) {
    Operands operands[2];
    load(operands[0]);
    await_filters();
    bool first = true;
    const auto step = [&](Operands& now, Operands& next) {
      issue(now, total);
      const bool more = --steps_left_ > 0;
      hopper::wait_for_products<1>();  // the step before is complete
      keep(next);
      if (!first) release_filters(2);
      first = false;
      if (more) {
        load(next);
        await_filters();
      }
      return more;
    };
#pragma unroll 1
    while (step(operands[0], operands[1]) && step(operands[1], operands[0])) {
    }
    hopper::wait_for_products<0>();
#pragma unroll
    for (int m = 0; m < S::row_blocks; ++m) hopper::pin(total[m]);
    release_filters(1);
  }

  // With the scales that measure() has left. Rare, so nothing overlaps.
  __device__ __forceinline__ void multiply_exact(Total& total) {
#pragma unroll 1
    for (; steps_left_ > 0; --steps_left_) {
      await_stage();
      await_filters();
      Operands operands;
#pragma unroll
      for (int m = 0; m < S::row_blocks; ++m) input_.load_exact(stage(), shift_, m, exponents_, operands[m]);
      if constexpr (S::split) {
        Total sums;
        issue(operands, sums);
        hopper::wait_for_products<0>();
        add(sums, total);
      } else {
        issue(operands, total);
        hopper::wait_for_products<0>();
      }
      release_filters(1);
      next_tap();
    }
  }

  // The operands of the step to come.
  __device__ __forceinline__ void load(Operands& operands) {
    await_stage();
#pragma unroll
    for (int m = 0; m < S::row_blocks; ++m) {
      if constexpr (S::raw) {
        input_.load_raw(stage(), m, scale_, largest_, operands[m]);
      } else {
        input_.load(stage(), shift_, m, operands[m]);
      }
    }
    next_tap();
  }
  // Products read registers after they are issued, which the compiler does not know: until here these must not change.
  static __device__ __forceinline__ void keep(Operands& operands) {
#pragma unroll
    for (int m = 0; m < S::row_blocks; ++m) {
#pragma unroll
      for (int i = 0; i < S::depth; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          asm volatile("" : "+r"(operands[m].high[i][j]));
          if constexpr (S::split) asm volatile("" : "+r"(operands[m].low[i][j]));
        }
      }
    }
  }
  static __device__ __forceinline__ void copy(const Operands& from, Operands& to) {
#pragma unroll
    for (int m = 0; m < S::row_blocks; ++m) {
#pragma unroll
      for (int i = 0; i < S::depth; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          to[m].high[i][j] = from[m].high[i][j];
          if constexpr (S::split) to[m].low[i][j] = from[m].low[i][j];
        }
      }
    }
  }

  __device__ __forceinline__ void issue(const Operands& operands, Total& sums) {
    const std::uint64_t filters =
        hopper::matrix_descriptor<S::row_bytes>(shared_.filters + filters_.slot() * S::filter_bytes);
    hopper::fence_products();
#pragma unroll
    for (int m = 0; m < S::row_blocks; ++m) multiply_step<S>(sums[m], operands[m], filters);
    hopper::commit_products();
    ++filters_.count;
  }

  static __device__ __forceinline__ void add(Total& sums, Total& total) {
#pragma unroll
    for (int m = 0; m < S::row_blocks; ++m) {
      hopper::pin(sums[m]);
#pragma unroll
      for (int i = 0; i < S::sums; ++i) total[m][i] += sums[m][i];
    }
  }

  // ---- The rings

  __device__ __forceinline__ std::uint32_t stage() const { return shared_.input + slot_.slot * params_.stage_bytes; }

  __device__ __forceinline__ void begin(const Work& work) {
    steps_left_ = (work.last_stage - work.first_stage) * (S::raw ? 1 : params_.stage_taps);
    stages_left_ = work.last_stage - work.first_stage;
    tap_ = 0, column_ = 0, shift_ = 0;
    if constexpr (S::raw) {
#pragma unroll
      for (int i = 0; i < rows; ++i) scale_[i] = 0.0f, largest_[i] = 0.0f;
    }
  }

  // Waits for the stage of the step to come, if that is its first.
  __device__ __forceinline__ void await_stage() {
    if (!S::raw && tap_ > 0) return;
    std::uint64_t* barriers = S::transforms ? control_.input_ready : control_.input_full;
    hopper::wait(shared_address(&barriers[slot_.slot]), slot_.parity, site_);
  }

  // The step's input is in registers: on to the next tap, and past the end of a stage, which is given back; but where
  // the stage knows the largest values, the last one only by leave().
  __device__ __forceinline__ void next_tap() {
    if constexpr (S::raw) {
      release_stage();
    } else if (++tap_ == params_.stage_taps) {
      tap_ = 0, column_ = 0, shift_ = 0;
      if (--stages_left_ > 0) release_stage();
    } else if (++column_ == params_.s) {
      column_ = 0;
      shift_ += params_.dilation_h * params_.box_w - (params_.s - 1) * params_.dilation_w;
    } else {
      shift_ += params_.dilation_w;
    }
  }
  // After the last step: what the work's pixels had for their scales, and how large they were.
  __device__ __forceinline__ void leave() {
    if constexpr (S::raw) {
#pragma unroll
      for (int i = 0; i < rows; ++i) {
        largest_[i] = Input<S>::of_pixel(largest_[i]);
        exponents_[i] = scale_[i] == 0.0f ? 0 : static_cast<int>(__float_as_uint(scale_[i]) >> 23) - 127;
      }
      return;
    }
    if constexpr (S::transforms) {
      input_.find_largest(params_, shared_.largest + slot_.slot * (params_.stage_bytes / input_row_bytes), largest_);
#pragma unroll
      for (int i = 0; i < rows; ++i) exponents_[i] = control_.exponent[slot_.slot];
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
  int tap_ = 0, column_ = 0, shift_ = 0, stages_left_ = 0, steps_left_ = 0;
  // Of the last work's pixels. raw: the largest of the lane's values, until leave(); the scale, 0 where none is known.
  float largest_[rows] = {}, scale_[rows] = {};
  int exponents_[rows] = {};
};

}  // namespace fastconv::algos::implicit_gemm::wgmma
