// The multiplying warpgroups.
#pragma once

#include <utility>

#include "algos/implicit_gemm/persistent/cluster_reduce.cuh"
#include "algos/implicit_gemm/persistent/operand.cuh"

namespace fastconv::algos::implicit_gemm::persistent {

// Products [first, last) of a group: 64 pixels and some filters of a step; issued, not finished. In split mode the sums
// start from zero, and the small products come first, while truncation of the accumulator costs nothing
// (docs/concepts/numerics.md).
template <typename S, int first, int last, int count>
__device__ __forceinline__ void multiply(float (&sums)[count], const Operand<S>& operand, std::uint64_t filters) {
  using Half = typename S::Half;
  constexpr int to_low = 64;  // bytes from hi to lo
#pragma unroll
  for (int i = first; i < last; ++i) {
    const int kind = S::split ? i / S::depth : 2, at = i % S::depth;  // lo hi, hi lo, hi hi
    const int of_product = S::converted ? 32 * (at % 2) + S::limb_bytes * (at / 2) : 32 * at;
    const std::uint32_t offset = (of_product + (kind == 1 ? to_low : 0)) / 16;
    // Within 32 bits, which cannot overflow: fewer instructions.
    const std::uint64_t descriptor = (filters & 0xffffffff00000000) | (static_cast<std::uint32_t>(filters) + offset);
    if (S::split && i == 0) {
      hopper::multiply<Half, false>(sums, operand.low[at], descriptor);
    } else if (kind == 0) {
      hopper::multiply<Half, true>(sums, operand.low[at], descriptor);
    } else {
      hopper::multiply<Half, true>(sums, operand.high[at], descriptor);
    }
  }
}

// A warpgroup's work on a tile is cut into groups that alternate on the tensor cores. Issuing products blocks the warp
// until they begin. So a group is issued in two parts; between them, while the first part runs, the previous group's
// sums are added to the totals and the next operand is loaded. The loop is short on purpose: together with the
// splitting warpgroup's it must fit in the instruction cache of a quarter of the multiprocessor.
//   row_blocks  a step's two blocks of 64 pixels
//   n_halves    a step's filters, two halves
//   steps       steps
template <typename S>
class Multiplier {
 public:
  using T = typename S::T;

  __device__ __forceinline__ Multiplier(const Params<T>& params, const CUtensorMap& output_map, const Shared<S>& shared)
      : params_(params),
        output_map_(output_map),
        shared_(shared),
        control_(*shared.control),
        site_{params.report, kernel_implicit_gemm, role_multiply},
        input_(params),
        cluster_reduce_(params, shared, site_) {}

  // One work tile. exact: with the scales that measure() has left. Else returns whether a scale does not fit one of
  // the lane's pixels.
  __device__ __forceinline__ bool run(unsigned index, bool exact) {
    Total total;
#pragma unroll
    for (int m = 0; m < S::row_blocks; ++m) {
#pragma unroll
      for (int i = 0; i < S::sums; ++i) total[m][i] = 0.0f;
    }
    const WorkTile work_tile(params_, index);
    begin(work_tile);
    if (S::reads_fp16 && !S::one_tap && params_.flat) input_.place_flat(params_, work_tile);
    if constexpr (S::converted) find_exponents(work_tile);
    FilterData<S>& filters = shared_.filter_data[threadIdx.x / 32];
    filters.fetch(params_, work_tile.filter_tile);
    if constexpr (residual_first<T> && !S::gated) {
      if (work_tile.residual_stages > 0) start_with_residual(total);
    }
    bool off = false;
    if (S::retries && exact) {
      multiply_exact(total);
      if constexpr (!S::raw) release_stage();
    } else {
      if constexpr (S::split) {
        multiply_promoted(total);
      } else {
        multiply_chained(total);
      }
      leave();
      if constexpr (S::retries) {
#pragma unroll
        for (int i = 0; i < rows; ++i) {
          const float high = largest_[i] * power_of_two(exponents_[i]);
          off |= largest_[i] > 0.0f && !(high >= min_high && high < max_high);
        }
      }
    }
    wait_for_copies<0>();
    unsigned misfit = off;
    // So that the index is decoded again, and does not occupy registers until now; and no predicate is spilled.
    asm volatile("" : "+r"(index), "+r"(misfit));
    const WorkTile output(params_, index);
    if constexpr (S::reads_fp16) {
      if (index >= params_.whole && params_.partial == nullptr) [[unlikely]] {
        cluster_reduce_.add(output, filters, total, exponents_);
        return false;
      }
    }
    int residual_stages = has_residual_finish<S> ? output.residual_stages : 0;
    // Of the next filters: what use() does with their stage, if it comes.
    const auto with_residual = [&](const auto& use, bool comes = true) {
      if (comes) hopper::wait(shared_address(&control_.input_full[slot_.slot]), slot_.parity, site_);
      use(stage());
      if (!comes) return;
      release_stage();
      if constexpr (has_residual_finish<S>) --residual_stages;
    };
    store_tile<S>(params_, output_map_, output, filters, shared_, total, exponents_, S::transforms && !exact,
                  with_residual);
    while (residual_stages > 0) with_residual([](std::uint32_t) {});  // they were not wanted
    return misfit != 0;
  }

  // Passes over the work tile's input and filters, while the pixels are measured.
  __device__ __forceinline__ void measure(const WorkTile& work_tile) {
    begin(work_tile);
#pragma unroll 1
    for (; steps_left_ > 0; --steps_left_) {
      await_stage();
      if constexpr (S::raw) input_.measure_raw(stage(), channels(), largest_);
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
  static constexpr int operands = 2;
  static constexpr int period =
      S::issue_groups == IssueGroups::n_halves ? 4 : 2;  // the code repeats after so many groups
  static constexpr int products = S::depth * (S::split ? 3 : 1), head = products / 2;  // of a group; of its first part

  using Total = float[S::row_blocks][S::sums];
  using Sums = float[S::split ? 2 : 1][S::group_sums];

  // From the stages that come before those of the input (residual_first).
  __device__ __forceinline__ void start_with_residual(Total& total) {
    constexpr int vec = vec_of<T>, per_word = 4 / sizeof(T);
    int lane = static_cast<int>(threadIdx.x) % 32;
    asm volatile("" : "+r"(lane));  // so that no address is kept in registers for the next tile
#pragma unroll
    for (int filter = 0; filter < S::filter_tile; filter += box_filters<T>) {
      hopper::wait(shared_address(&control_.input_full[slot_.slot]), slot_.parity, site_);
#pragma unroll
      for (int column = filter; column < min(filter + box_filters<T>, S::filter_tile); column += 4 * vec) {
#pragma unroll
        for (int row = 0; row < rows; ++row) {
          const uint4 values = load_shared(place_in_box<S>(stage(), lane, column, row));
          const std::uint32_t words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
          for (int e = 0; e < vec; ++e) {
            total[row / 2][(column / 8 + e / 2) * 4 + row % 2 * 2 + e % 2] =
                to_float(reinterpret_cast<const T*>(&words[e / per_word])[e % per_word]);
          }
        }
      }
      release_stage();
    }
  }

  __device__ __forceinline__ void multiply_promoted(Total& total) {
    Operand<S> operand[operands];
    Sums sums;
    groups_left_ = steps_left_ * S::groups_per_step;
    const bool odd = groups_left_ % 2 == 1;
    load<0>(operand[0]);
    await_filters();
    multiply_periods(operand, sums, total, std::make_integer_sequence<int, period>{});
    hopper::wait_for_products<0>();
    if (odd) {
      add<0>(sums, total);
    } else {
      add<1>(sums, total);
    }
    release_filters(1);
  }
  template <int... u>
  __device__ __forceinline__ void multiply_periods(Operand<S> (&operand)[operands], Sums& sums, Total& total,
                                                   std::integer_sequence<int, u...>) {
    bool first = true;
#pragma unroll 1
    while ((group<u>(first, operand, sums, total) && ...)) {
    }
  }

  // One product (no promotion, no splitting of groups): each step's products go on where those of the step before have
  // ended, and the tensor cores need not wait.
  __device__ __forceinline__ void multiply_chained(Total& total) {
    Operand<S> operand[operands][S::row_blocks];
    load_step(operand[0]);
    await_filters();
    bool first = true;
    const auto step = [&](Operand<S>(&now)[S::row_blocks], Operand<S>(&next)[S::row_blocks]) {
      const std::uint64_t filters = filters_of(0);
      hopper::fence_products();
#pragma unroll
      for (int m = 0; m < S::row_blocks; ++m) persistent::multiply<S, 0, products>(total[m], now[m], filters);
      hopper::commit_products();
      ++filters_.count;
      const bool more = --steps_left_ > 0;
      hopper::wait_for_products<1>();  // the step before is complete
#pragma unroll
      for (int m = 0; m < S::row_blocks; ++m) keep(next[m]);
      if (!first) release_filters(2);
      first = false;
      if (more) {
        load_step(next);
        await_filters();
      }
      return more;
    };
#pragma unroll 1
    while (step(operand[0], operand[1]) && step(operand[1], operand[0])) {
    }
    hopper::wait_for_products<0>();
#pragma unroll
    for (int m = 0; m < S::row_blocks; ++m) hopper::fence_operand(total[m]);
    release_filters(1);
  }
  __device__ __forceinline__ void load_step(Operand<S> (&operand)[S::row_blocks]) {
    await_stage();
#pragma unroll
    for (int m = 0; m < S::row_blocks; ++m) {
      if constexpr (S::raw) {
        input_.load_raw(stage(), channels(), m, scale_, largest_, operand[m]);
      } else {
        input_.load(stage(), shift_, m, operand[m]);
      }
    }
    const StageChannels channels = this->channels();
    next_tap();
    if constexpr (S::affine && !S::raw) Input<S>::norm(channels, operand);
  }

  // With the scales that measure() has left. Rare, so nothing overlaps.
  __device__ __forceinline__ void multiply_exact(Total& total) {
#pragma unroll 1
    for (; steps_left_ > 0; --steps_left_) {
      await_stage();
      await_filters();
      Operand<S> operand;
      Sums sums;
      input_.load_exact(stage(), channels(), shift_, 0, exponents_, operand);
      multiply_exact_group<0>(operand, sums, total);
      if constexpr (S::groups_per_step == 2) {
        if (S::issue_groups == IssueGroups::row_blocks)
          input_.load_exact(stage(), channels(), shift_, S::row_blocks - 1, exponents_, operand);
        multiply_exact_group<1>(operand, sums, total);
      }
      ++filters_.count;
      release_filters(1);
      next_tap();
    }
#pragma unroll
    for (int m = 0; m < S::row_blocks; ++m) hopper::fence_operand(total[m]);
  }
  template <int u>
  __device__ __forceinline__ void multiply_exact_group(Operand<S>& operand, Sums& sums, Total& total) {
    issue<u, 0, products>(operand, filters_of(u), sums, total);
    hopper::wait_for_products<0>();
    keep(operand);
    add<u>(sums, total);
  }

  // Of group `group` modulo `period`.
  static constexpr int row_block(int group) { return S::issue_groups == IssueGroups::row_blocks ? group % 2 : 0; }
  static constexpr int first_sum(int group) {
    return S::issue_groups == IssueGroups::n_halves ? group % 2 * S::group_sums : 0;
  }
  static constexpr int operand_of(int group) {
    return S::issue_groups == IssueGroups::n_halves ? group / 2 % 2 : group % 2;
  }
  static constexpr bool begins_step(int group) { return S::groups_per_step == 1 || group % 2 == 0; }
  static constexpr bool ends_step(int group) { return S::groups_per_step == 1 || group % 2 == 1; }
  // Whether its operand is not that of the group before.
  static constexpr bool begins_operand(int group) {
    return S::issue_groups == IssueGroups::row_blocks || begins_step(group);
  }

  // Issues a group, and does what can be done beside it. Returns whether there are more.
  template <int u>
  __device__ __forceinline__ bool group(bool& first, Operand<S> (&operand)[operands], Sums& sums, Total& total) {
    constexpr int next = (u + 1) % period, before = (u + period - 1) % period;
    const std::uint64_t filters = filters_of(u);
    issue<u, 0, head>(operand[operand_of(u)], filters, sums, total);
    const bool more = --groups_left_ > 0;
    hopper::wait_for_products<1>();  // the group before is complete
    keep(operand[operand_of(before)]);
    if (u > 0 || !first) {
      if constexpr (begins_step(u)) release_filters(1);  // those of its step
      add<before>(sums, total);
    }
    if (u == 0) first = false;
    if constexpr (begins_operand(next)) {
      if (more) load<next>(operand[operand_of(next)]);
    }
    issue<u, head, products>(operand[operand_of(u)], filters, sums, total);
    if constexpr (ends_step(u)) {
      ++filters_.count;
      if (more) await_filters();
    }
    return more;
  }

  template <int u>
  __device__ __forceinline__ void load(Operand<S>& operand) {
    if (begins_step(u)) await_stage();
    if constexpr (S::raw) {
      input_.load_raw(stage(), channels(), row_block(u), scale_, largest_, operand);
    } else {
      input_.load(stage(), shift_, row_block(u), operand);
    }
    if (S::issue_groups != IssueGroups::row_blocks || ends_step(u)) next_tap();
  }

  __device__ __forceinline__ std::uint64_t filters_of(int group) const {
    const int half = S::issue_groups == IssueGroups::n_halves ? group % 2 * S::filter_bytes / 2 : 0;
    return hopper::matrix_descriptor<S::row_bytes>(shared_.filters + filters_.slot() * S::filter_bytes + half);
  }
  template <int u, int first, int last>
  __device__ __forceinline__ void issue(const Operand<S>& operand, std::uint64_t filters, Sums& sums, Total& total) {
    hopper::fence_products();
    if constexpr (S::split) {
      persistent::multiply<S, first, last>(sums[u % 2], operand, filters);
    } else {
      persistent::multiply<S, first, last>(total[row_block(u)], operand, filters);
    }
    hopper::commit_products();
  }
  // Products read their operand after they are issued, which the compiler does not know: it must not change until here.
  static __device__ __forceinline__ void keep(Operand<S>& operand) {
#pragma unroll
    for (int i = 0; i < S::depth; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        asm volatile("" : "+r"(operand.high[i][j]));
        if constexpr (S::split) asm volatile("" : "+r"(operand.low[i][j]));
      }
    }
  }

  // The group's products are there. Its sums join the totals, rounded.
  template <int u>
  __device__ __forceinline__ void add(Sums& sums, Total& total) {
    if constexpr (S::split) {
      hopper::fence_operand(sums[u % 2]);
#pragma unroll
      for (int i = 0; i < S::group_sums; ++i) total[row_block(u)][first_sum(u) + i] += sums[u % 2][i];
    }
  }

  // Of the images of the lane's pixels.
  __device__ __forceinline__ void find_exponents(const WorkTile& work_tile) {
#pragma unroll
    for (int i = 0; i < rows; ++i) {
      unsigned pixel = pixel_of_lane<S>(i), image;
      if (params_.in_a_row) {
        image = params_.by_image.quotient(work_tile.q + pixel);
      } else {
        params_.by_tile_q.divmod(pixel);
        image = work_tile.n + params_.by_tile_p.quotient(pixel);
      }
      exponents_[i] = params_.image_exponents[min(static_cast<int>(image), params_.images - 1)];
    }
  }

  // ---- The rings

  __device__ __forceinline__ std::uint32_t stage() const { return shared_.input + slot_.slot * params_.stage_bytes; }

  __device__ __forceinline__ StageChannels channels() const {
    return {shared_.channels + place_.slot * S::channels_bytes, params_.floor, params_.cap};
  }

  __device__ __forceinline__ void begin(const WorkTile& work_tile) {
    steps_left_ = (work_tile.last_stage - work_tile.first_stage) * (S::one_tap ? 1 : params_.stage_taps);
    stages_left_ = work_tile.last_stage - work_tile.first_stage;
    tap_ = 0, column_ = 0, shift_ = 0;
    if constexpr (S::raw) {
#pragma unroll
      for (int i = 0; i < rows; ++i) scale_[i] = 0.0f, largest_[i] = 0.0f;
    }
  }

  // Waits for the stage of the step to come, if that is its first.
  __device__ __forceinline__ void await_stage() {
    if (!S::one_tap && tap_ > 0) return;
    hopper::Barrier* barriers = S::transforms ? control_.input_ready : control_.input_full;
    hopper::wait(shared_address(&barriers[slot_.slot]), slot_.parity, site_);
  }

  // The step's input is in registers: on to the next tap, and past the end of a stage, which is given back; but where
  // the stage knows the largest values, the last one only by leave().
  __device__ __forceinline__ void next_tap() {
    if constexpr (S::one_tap) {
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
  // After the last step: what the work tile's pixels had for their scales, and how large they were.
  __device__ __forceinline__ void leave() {
    if constexpr (S::raw) {
#pragma unroll
      for (int i = 0; i < rows; ++i) {
        largest_[i] = Input<S>::of_pixel(largest_[i]);
        exponents_[i] = scale_[i] == 0.0f ? 0 : static_cast<int>(__float_as_uint(scale_[i]) >> 23) - 127;
      }
    }
    if constexpr (S::one_tap) return;
    if constexpr (S::transforms) {
      input_.find_largest(params_, shared_.largest + slot_.slot * (params_.stage_bytes / input_row_bytes), largest_);
#pragma unroll
      for (int i = 0; i < rows; ++i) exponents_[i] = control_.exponent[slot_.slot];
    }
    release_stage();
  }
  // The stage was read by ordinary loads, which may still be under way, and is overwritten by a copy: an arrival alone
  // does not wait for them (docs/log/42-megakernel-ieee.md, "Failure found: a ring of stages").
  __device__ __forceinline__ void release_stage() {
    hopper::fence_copies();
    __syncwarp();
    hopper::arrive_for_warp(control_.input_free[slot_.slot]);
    slot_.advance(params_.input_slots);
    if constexpr (S::affine) place_.advance(params_.input_slots + 1);
  }

  __device__ __forceinline__ void await_filters() {
    hopper::wait(shared_address(&control_.filters_full[filters_.slot()]), filters_.parity(), site_);
  }
  __device__ __forceinline__ void release_filters(unsigned back) {
    __syncwarp();
    hopper::arrive_for_warp(control_.filters_free[filters_.slot(back)]);
  }

  const Params<T>& params_;
  const CUtensorMap& output_map_;
  const Shared<S>& shared_;
  Control& control_;
  WaitSite site_;
  Input<S> input_;
  ClusterReduce<S> cluster_reduce_;
  hopper::RingPosition slot_, place_;  // of input; of an affine input's channels
  hopper::RingCounter<S::slots> filters_;
  int tap_ = 0, column_ = 0, shift_ = 0, stages_left_ = 0, steps_left_ = 0, groups_left_ = 0;
  // Of the last work's pixels. raw: the largest of the lane's values, until leave(); the scale, 0 where none is known.
  float largest_[rows] = {}, scale_[rows] = {};
  int exponents_[rows] = {};
};

}  // namespace fastconv::algos::implicit_gemm::persistent
