// The Hopper kernel: persistent blocks whose warpgroups have roles. One thread loads input boxes and filter tiles into
// two rings of shared memory; a warpgroup splits float32 input in place, where more than one tap reads it; two
// warpgroups multiply and write the output.
#pragma once

#include "algos/implicit_gemm/persistent/multiply.cuh"
#include "algos/implicit_gemm/persistent/transform.cuh"
#include "hopper/ptx/cluster.cuh"

namespace fastconv::algos::implicit_gemm::persistent {

template <typename S>
class Loader {
 public:
  using T = typename S::T;

  __device__ __forceinline__ Loader(const Params<T>& params, const CUtensorMap& map, const CUtensorMap& residual_map,
                                    const Shared<S>& shared)
      : params_(params),
        map_(map),
        residual_map_(residual_map),
        shared_(shared),
        site_{params.report, kernel_implicit_gemm, role_load} {}

  // Everything that one work tile reads. stores: it is not only measured.
  __device__ __forceinline__ void run(const WorkTile& work_tile, bool stores) {
    Control& control = *shared_.control;
    if constexpr (residual_first<T> && !S::gated) load_residual(work_tile);
    unsigned packed_tile = work_tile.filter_tile;
    const unsigned half = params_.by_n_splits.divmod(packed_tile);
    const unsigned char* filters = params_.weight + packed_tile * params_.packed_tile_bytes + half * S::limb_bytes;
    const ShuffledPlaces& shuffled = params_.shuffled;
    const int first_row =
        work_tile.p * params_.stride_h - params_.pad_h + shuffled.shifts * shuffled.row(work_tile.filter_tile);
    const int first_column =
        work_tile.q * params_.stride_w - params_.pad_w + shuffled.shifts * shuffled.column(work_tile.filter_tile);
    for (int stage = work_tile.first_stage; stage < work_tile.last_stage; ++stage) {
      unsigned block = stage, tap = 0;  // of channels
      if (params_.stage_taps != params_.taps) tap = params_.by_taps.divmod(block);
      const bool pairs = S::paired && !S::converted;
      const int first_step = static_cast<int>(pairs ? (block & ~1u) * params_.taps + 2 * tap + (block & 1)
                                                    : (block * params_.taps + tap) * (S::converted ? 2 : 1));
      const int s = static_cast<int>(params_.by_s.divmod(tap)), r = static_cast<int>(tap);
      const std::uint32_t full = shared_address(&control.input_full[input_.slot]);
      hopper::wait(shared_address(&control.input_free[input_.slot]), input_.parity ^ 1, site_);
      if constexpr (S::transforms) hopper::fence_copies();  // the splitting warps have written there
      const std::uint32_t target = shared_.input + input_.slot * params_.stage_bytes;
      const int channel = static_cast<int>(block) * S::step_channels;
      if (S::reads_fp16 && !S::one_tap && params_.flat) [[unlikely]] {
        load_rows(work_tile, channel, target, full);
      } else {
        hopper::arrive_expecting(full, params_.box_bytes);
        hopper::tma_load(target, map_, channel, first_column + s * params_.dilation_w,
                         first_row + r * params_.dilation_h, work_tile.n, full);
      }
      input_.advance(params_.input_slots);
      const unsigned char* source = filters + static_cast<std::int64_t>(first_step) * params_.packed_bytes;
      for (int i = 0; i < params_.stage_taps; ++i, source += params_.packed_bytes * (S::paired ? 2 : 1)) {
        load_filters(source);
      }
    }
    if constexpr (has_residual_last<S>) {
      if (stores) load_residual(work_tile);
    }
  }

 private:
  __device__ __forceinline__ void load_residual(const WorkTile& work_tile) {
    Control& control = *shared_.control;
    int filter = work_tile.filter_tile * S::filter_tile;
#pragma unroll 1
    for (int i = 0; i < work_tile.residual_stages; ++i, filter += box_filters<T>) {
      const std::uint32_t full = shared_address(&control.input_full[input_.slot]);
      hopper::wait(shared_address(&control.input_free[input_.slot]), input_.parity ^ 1, site_);
      hopper::arrive_expecting(full, params_.tile_n * params_.tile_p * params_.tile_q * box_bytes);
      hopper::tma_load(shared_.input + input_.slot * params_.stage_bytes, residual_map_, filter, work_tile.q,
                       work_tile.p, work_tile.n, full);
      input_.advance(params_.input_slots);
    }
  }
  // A stage of a flat tile: the rows of input under its pixels, with the halo of each image.
  __device__ __forceinline__ void load_rows(const WorkTile& work_tile, int channel, std::uint32_t target,
                                            std::uint32_t full) {
    unsigned first_n = params_.by_row.quotient(work_tile.q);
    unsigned last_n = params_.by_row.quotient(min(work_tile.q + S::pixel_tile, params_.q) - 1);
    const int rows = static_cast<int>(last_n - first_n) + 1;
    const int first_row = static_cast<int>(params_.by_rows.divmod(first_n));
    const int last_row = static_cast<int>(params_.by_rows.divmod(last_n));
    const int images = static_cast<int>(last_n - first_n) + 1;
    hopper::arrive_expecting(full, (rows + images * params_.halo_rows) * params_.row_bytes);
#pragma unroll 1
    for (unsigned n = first_n; n <= last_n; ++n) {
      const int last = (n == last_n ? last_row : params_.rows - 1) + params_.halo_rows;
#pragma unroll 1
      for (int row = n == first_n ? first_row : 0; row <= last; ++row, target += params_.row_bytes) {
        hopper::tma_load(target, map_, channel, -params_.pad_w, row - params_.pad_h, static_cast<int>(n), full);
      }
    }
  }
  __device__ __forceinline__ void load_filters(const unsigned char* source) {
    Control& control = *shared_.control;
    const std::uint32_t full = shared_address(&control.filters_full[filters_.slot]);
    hopper::wait(shared_address(&control.filters_free[filters_.slot]), filters_.parity ^ 1, site_);
    hopper::arrive_expecting(full, S::filter_bytes);
#pragma unroll
    for (int limb = 0; limb < S::filter_bytes / S::limb_bytes; ++limb) {
      hopper::copy_bulk(shared_.filters + filters_.slot * S::filter_bytes + limb * S::limb_bytes,
                        source + limb * params_.packed_bytes, S::limb_bytes, full);
    }
    filters_.advance(S::slots);
  }

  const Params<T>& params_;
  const CUtensorMap &map_, &residual_map_;
  const Shared<S>& shared_;
  WaitSite site_;
  hopper::RingPosition input_, filters_;
};

// Of an affine input: scales and shifts of each stage's channels (affine.cuh). By a whole warp. They are read behind
// the stage, which is given back before: but a warp that has given back the stage that was in a slot before has done
// with the channels of the one before that, and so the next place in a ring of one more is free.
template <typename S>
class ChannelLoader {
 public:
  using T = typename S::T;

  __device__ __forceinline__ ChannelLoader(const Params<T>& params, const Shared<S>& shared)
      : params_(params), shared_(shared), site_{params.report, kernel_implicit_gemm, role_load} {}

  __device__ __forceinline__ void run(const WorkTile& work_tile) {
    Control& control = *shared_.control;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    constexpr int pairs = S::step_channels / 2;
    for (int stage = work_tile.first_stage; stage < work_tile.last_stage; ++stage) {
      const int channel = stage * S::step_channels + 2 * lane;  // C is even, taps are one
      uint4 pair{};
      if (lane < pairs && channel < params_.c) {
        const auto bits = [](const float* at) { return __float_as_uint(__ldg(at)); };
        pair = {bits(params_.scale + channel), bits(params_.scale + channel + 1), bits(params_.shift + channel),
                bits(params_.shift + channel + 1)};
      }
      hopper::wait(shared_address(&control.input_free[slot_.slot]), slot_.parity ^ 1, site_);
      if (lane < pairs) store_shared(shared_.channels + place_.slot * S::channels_bytes + lane * 16, pair);
      __syncwarp();
      if (lane == 0) hopper::arrive(control.input_full[slot_.slot]);
      slot_.advance(params_.input_slots);
      place_.advance(params_.input_slots + 1);
    }
  }

 private:
  const Params<T>& params_;
  const Shared<S>& shared_;
  WaitSite site_;
  hopper::RingPosition slot_, place_;  // of input; of channels
};

// A block's work, in rounds of as many work tiles as it has flags for. visit(index, flag, retry): first all work tiles
// of the round; then (float32) those whose overflow flag is set again. before_flags() and after_flags() enclose the
// reading of flags.
template <typename S, typename Visit, typename Before, typename After>
__device__ __forceinline__ void for_each_work_tile(const Params<typename S::T>& params, const Shared<S>& shared,
                                                   Visit&& visit, Before&& before_flags, After&& after_flags) {
  const unsigned round = gridDim.x * max_flags,
                 work_tiles = S::conditional ? shared.control->work_tiles : params.work_tiles;
  unsigned parity = 0;
  for (unsigned first = blockIdx.x; first < work_tiles; first += round, parity ^= 1) {
    const unsigned size = min(work_tiles - first, round);
#pragma unroll 1
    for (int pass = 0; pass < (S::retries ? 2 : 1); ++pass) {
      if (pass == 1) before_flags(parity);
      unsigned flag = 0;
#pragma unroll 1
      for (unsigned at = 0; at < size; at += gridDim.x, ++flag) {
        if (pass == 0 || (shared.control->overflow_flags[flag / 32] >> flag % 32 & 1) != 0) {
          visit(first + at, flag, pass == 1);
        }
      }
    }
    if (work_tiles - first <= round) break;  // first + round may exceed 32 bits
    if constexpr (S::retries) after_flags(parity);
  }
}

template <typename S>
__device__ __forceinline__ void initialise(const Params<typename S::T>& params, const Shared<S>& shared) {
  constexpr int multiplying = 4 * multiply_warpgroups, splitting = S::transforms ? 4 : 0;  // warps
  constexpr int loading = S::affine ? 2 : 1;
  Control& control = *shared.control;
  if (threadIdx.x == 0) {
    for (int i = 0; i < params.input_slots; ++i) {
      hopper::barrier_init(control.input_full[i], loading);
      hopper::barrier_init(control.input_ready[i], 4);
      hopper::barrier_init(control.input_free[i], multiplying);
    }
    for (int i = 0; i < S::slots; ++i) {
      hopper::barrier_init(control.filters_full[i], 1);
      hopper::barrier_init(control.filters_free[i], multiplying);
    }
    hopper::barrier_init(control.flags_written, multiplying);
    hopper::barrier_init(control.flags_read, splitting + loading);
    if constexpr (S::reads_fp16) {
      hopper::barrier_init(control.partials_ready, params.split_k);
      hopper::barrier_init(control.partials_read, params.split_k);
    }
    hopper::barrier_init_fence();
  }
  for (int i = threadIdx.x; i < max_flags / 32; i += S::threads) control.overflow_flags[i] = 0;
  unsigned thread = threadIdx.x;
  asm volatile("" : "+r"(thread));  // so that no predicate is spilled
  if (S::conditional && thread < 32) {
    bool is_met = params.condition == nullptr;
    for (int i = thread; i < params.condition_count; i += 32) is_met |= params.condition[i] != 0;
    is_met = __any_sync(0xffffffffu, is_met);
    if (thread == 0) control.work_tiles = is_met ? params.work_tiles : 0;
  }
  __syncthreads();
  if (S::reads_fp16 && params.split_k > 1 && params.partial == nullptr)
    hopper::arrive_in_cluster();  // its barriers are there
}

template <typename S>
__global__ void __launch_bounds__(S::threads, 1)
    convolve(const __grid_constant__ CUtensorMap map, const __grid_constant__ CUtensorMap output_map,
             const __grid_constant__ CUtensorMap residual_map, const __grid_constant__ Params<typename S::T> params) {
#if defined(FASTCONV_HAS_WGMMA)
  extern __shared__ unsigned char memory[];
  const Shared<S> shared(memory, params);
  Control& control = *shared.control;
  initialise<S>(params, shared);
  const int warpgroup = static_cast<int>(threadIdx.x) / 128;
  const auto wait_for_flags = [&](unsigned parity, int role) {
    hopper::wait(shared_address(&control.flags_written), parity, WaitSite{params.report, kernel_implicit_gemm, role});
  };

  // A work tile whose flag is set, because one scale did not fit all of its pixels, is loaded twice more: to measure
  // each pixel, and to multiply with a scale for each pixel.
  if (warpgroup < multiply_warpgroups) {
    hopper::setmaxnreg_inc<S::multiply_registers>();
    Multiplier<S> multiplier(params, output_map, shared);
    for_each_work_tile<S>(
        params, shared,
        [&](unsigned index, unsigned flag, bool retry) {
          if (retry) multiplier.measure(WorkTile(params, index));
          if (multiplier.run(index, retry)) atomicOr(&control.overflow_flags[flag / 32], 1u << flag % 32);
        },
        [&](unsigned parity) {
          __syncwarp();
          hopper::arrive_for_warp(control.flags_written);
          wait_for_flags(parity, role_multiply);
        },
        [&](unsigned parity) {
          hopper::wait(shared_address(&control.flags_read), parity,
                       WaitSite{params.report, kernel_implicit_gemm, role_multiply});
          synchronise_multipliers();  // the other multiplying warps read the flags, too
          for (int i = threadIdx.x; i < max_flags / 32; i += 128 * multiply_warpgroups) control.overflow_flags[i] = 0;
          synchronise_multipliers();
        });
    hopper::wait_for_writing<0>();
  } else if (S::transforms && warpgroup == multiply_warpgroups) {
    hopper::setmaxnreg_dec<S::transform_registers>();
    if constexpr (S::transforms) {
      Transformer<S> transformer(params, shared);
      for_each_work_tile<S>(
          params, shared,
          [&](unsigned index, unsigned, bool retry) {
            const WorkTile work_tile(params, index);
            transformer.run(work_tile, retry ? Transform::measure : Transform::split);
            if (retry) transformer.run(work_tile, Transform::nothing);
          },
          [&](unsigned parity) { wait_for_flags(parity, role_transform); },
          [&](unsigned) {
            __syncwarp();
            hopper::arrive_for_warp(control.flags_read);
          });
    }
  } else {
    hopper::setmaxnreg_dec<S::load_registers>();
    if (threadIdx.x % 128 == 0) {
      hopper::prefetch_map(map);
      Loader<S> loader(params, map, residual_map, shared);
      for_each_work_tile<S>(
          params, shared,
          [&](unsigned index, unsigned, bool retry) {
            const WorkTile work_tile(params, index);
            if (retry) loader.run(work_tile, false);
            loader.run(work_tile, true);
          },
          [&](unsigned parity) { wait_for_flags(parity, role_load); },
          [&](unsigned) { hopper::arrive(control.flags_read); });
    }
    if constexpr (S::affine) {
      if (threadIdx.x % 128 / 32 == 1) {
        ChannelLoader<S> loader(params, shared);
        for_each_work_tile<S>(
            params, shared,
            [&](unsigned index, unsigned, bool retry) {
              const WorkTile work_tile(params, index);
              for (int i = 0; i < (retry ? 2 : 1); ++i) loader.run(work_tile);
            },
            [&](unsigned parity) { wait_for_flags(parity, role_load); },
            [&](unsigned) {
              __syncwarp();
              hopper::arrive_for_warp(control.flags_read);
            });
      }
    }
  }
#endif
}

}  // namespace fastconv::algos::implicit_gemm::persistent
