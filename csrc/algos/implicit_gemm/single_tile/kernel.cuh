// The single-tile kernel (plan.h): a warp loads filters, another one input, two warpgroups multiply and store.
// Written for the first microseconds of a cold multiprocessor: instructions come from memory, eight at a time, so the
// way from the first one to the first product is short, and every loop is rolled.
#pragma once

#include <type_traits>

#include "algos/implicit_gemm/persistent/finish.cuh"
#include "algos/implicit_gemm/single_tile/load.cuh"
#include "device/activation.cuh"
#include "device/fast_gates.cuh"
#include "device/fast_silu.cuh"
#include "hopper/ptx/cluster.cuh"

namespace fastconv::algos::implicit_gemm::single_tile {

__device__ __forceinline__ float4 load_sums(std::uint32_t address) {
  float4 value;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

// All threads arrive; what it orders is the initialisation of barriers, which has a fence of its own.
__device__ __forceinline__ void arrive_in_cluster() { asm volatile("barrier.cluster.arrive.relaxed.aligned;"); }

// One lane.
template <typename S>
__device__ __forceinline__ void load_filters(const Params<typename S::T>& params, Control& control,
                                             std::uint32_t target, int first_step, int steps) {
  const unsigned filters = blockIdx.x >> params.split_k_log2, packed = params.by_n_splits.quotient(filters);
  const unsigned char* source = params.weight + packed * params.packed_tile_bytes +
                                (filters - packed * params.by_n_splits.divisor()) * S::filter_bytes +
                                static_cast<std::int64_t>(first_step) * params.packed_bytes;
  const std::uint32_t full = shared_address(control.filters.full);
  if (params.bias != nullptr) {
    const unsigned bytes =
        min(S::filter_tile, params.k - static_cast<int>(filters) * S::filter_tile) * sizeof(typename S::T);
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(full), "r"(bytes) : "memory");
    hopper::copy_bulk(shared_address(control.bias), params.bias + filters * S::filter_tile, bytes, full);
  }
  if constexpr (S::split) {
    constexpr int bytes = S::filter_tile * sizeof(int);
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(full), "r"(bytes) : "memory");
    hopper::copy_bulk(shared_address(control.exponent), params.exponents + filters * S::filter_tile, bytes, full);
  }
  int slot = 0;
  unsigned parity = 1;
  const auto load = [&](int left, const unsigned char* next) {
#pragma unroll 1
    for (; left > 0; --left, next += params.packed_bytes) {
      const std::uint32_t barrier = full + 8 * slot;
      wait<role_load>(barrier + sizeof(control.filters.full), parity, params.report);
      hopper::arrive_expecting(barrier, S::filter_bytes);
      hopper::copy_bulk(target + slot * S::filter_bytes, next, S::filter_bytes, barrier);
      if (++slot == params.filter_slots) slot = 0, parity ^= 1;
    }
  };
  load(steps, source);
  if constexpr (S::split) {
    for (int pass = 1; pass < max_passes(params) && retries(control, pass - 1, params.report); ++pass) {
      load(steps, source);
    }
  }
}

// One lane.
template <typename S>
__device__ __forceinline__ void load_input(const Params<typename S::T>& params, const CUtensorMap& map,
                                           Control& control, std::uint32_t input, int first_step, int steps) {
  const Place place = place_of(params);
  int w = place.q * params.stride_w - params.pad_w, h = place.p * params.stride_h - params.pad_h;
  if (params.shifts != 0) {
    const int filter_tile = static_cast<int>(blockIdx.x >> params.split_k_log2);
    w += params.shuffled.column(filter_tile), h += params.shuffled.row(filter_tile);
  }
  const unsigned stage = params.by_stage_taps.quotient(first_step);
  steps += first_step - static_cast<int>(stage) * params.stage_taps;
  const std::uint32_t full = shared_address(control.input.full);
  int slot = 0;
  unsigned parity = 1;
  const auto load = [&](int left, unsigned stage) {
#pragma unroll 1
    for (; left > 0; left -= params.stage_taps, ++stage) {
      unsigned block = stage, r = 0, s = 0;
      if (params.stage_taps == 1) {
        r = params.by_taps.divmod(block);
        s = params.by_s.divmod(r);
      }
      const std::uint32_t barrier = full + 8 * slot;
      wait<role_load>(barrier + sizeof(control.input.full), parity, params.report);
      hopper::arrive_expecting(barrier, params.box_bytes);
      hopper::tma_load(input + slot * params.stage_bytes, map, static_cast<int>(block) * params.step_channels,
                       w + static_cast<int>(s) * params.dilation_w, h + static_cast<int>(r) * params.dilation_h,
                       place.n, barrier);
      if (++slot == params.input_slots) slot = 0, parity ^= 1;
    }
  };
  load(steps, stage);
  if constexpr (S::split) {
    for (int pass = 1; pass < max_passes(params) && retries(control, pass - 1, params.report); ++pass) {
      load(steps, stage);
    }
  }
}

// The sums of a warpgroup over its steps of this block. start: of the tile's first pixel in the stage.
template <typename S>
__device__ __forceinline__ void multiply_steps(const Params<typename S::T>& params, Control& control,
                                               std::uint32_t input, std::uint32_t filters, int start, int first_step,
                                               int steps, float (&sums)[S::sums]) {
#pragma unroll
  for (int i = 0; i < S::sums; ++i) sums[i] = 0.0f;
  // A shuffle, so that the compiler knows it to be the same for all lanes: uniform registers are what products take.
  const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0),
            warpgroup_splits = params.warpgroup_splits, turn = turn_of(params, group);
  const bool elected = threadIdx.x % 32 == 0;
  int until_mine = turn;  // steps
  // Descriptors: rows of 128 bytes, swizzled by absolute addresses, so that a tile may begin at any pixel of a stage.
  constexpr std::uint64_t swizzled = std::uint64_t{1} << 62 | std::uint64_t{1} << 16;
  const std::uint64_t a_high = swizzled | static_cast<std::uint64_t>(params.group_stride) << 32;
  constexpr std::uint64_t b_high = swizzled | std::uint64_t{64} << 32;
  std::uint32_t a_stage = (input >> 4) + (start + (group - turn) * params.second_pixels) * 8;
  const std::uint32_t inputs_full = shared_address(control.input.full),
                      filters_full = shared_address(control.filters.full);
  int tap = first_step - static_cast<int>(params.by_stage_taps.quotient(first_step)) * params.stage_taps;
  unsigned r = tap;
  int s = static_cast<int>(params.by_s.divmod(r));
  int offset = static_cast<int>(r) * params.row_step + s * params.column_step;
  int slot = 0, filter_slot = 0;
  unsigned parity = 0, filter_parity = 0;
  bool fresh = true;
  std::uint32_t free_filters = 0, free_input = 0;  // what products that are under way have read
  // Without branches: they would not be allowed between products.
  const auto advance = [&](bool mine) {
    --until_mine;
    const bool filters_end = ++filter_slot == params.filter_slots;
    filter_slot = filters_end ? 0 : filter_slot, filter_parity ^= filters_end;
    const bool row_ends = ++s == params.s, stage_ends = ++tap == params.stage_taps;
    offset += params.column_step + (row_ends ? params.row_step - params.s * params.column_step : 0);
    // One tap a stage: those of other warpgroups are not ours to give back.
    const bool gives_back = stage_ends && (mine || params.stage_taps > 1);
    free_input = gives_back ? inputs_full + sizeof(control.input.full) + 8 * slot : free_input;
    s = row_ends || stage_ends ? 0 : s, tap = stage_ends ? 0 : tap, offset = stage_ends ? 0 : offset;
    fresh = fresh || stage_ends;
    slot += stage_ends;
    const bool inputs_end = slot == params.input_slots;
    slot = inputs_end ? 0 : slot, parity ^= inputs_end;
    a_stage +=
        ((stage_ends ? params.stage_bytes : 0) - (inputs_end ? params.input_slots * params.stage_bytes : 0)) >> 4;
  };
#pragma unroll 1
  for (; steps > 0; --steps) {
    if (until_mine > 0) {
      advance(false);
      continue;
    }
    if (fresh) wait<role_multiply>(inputs_full + 8 * slot, parity, params.report);
    wait<role_multiply>(filters_full + 8 * filter_slot, filter_parity, params.report);
    const std::uint32_t a = a_stage + offset, b = (filters + filter_slot * S::filter_bytes) >> 4;
    const std::uint32_t last_filters = free_filters, last_input = free_input;
    hopper::fence_products();
    hopper::multiply_shared<typename S::T, true>(sums, a_high | a, b_high | b);
    hopper::multiply_shared<typename S::T, true>(sums, a_high | (a + 2), b_high | (b + 2));
    // While these are under way: products block the warp that issues them until they begin.
    free_filters = filters_full + sizeof(control.filters.full) + 8 * filter_slot, free_input = 0;
    fresh = false;
    until_mine = warpgroup_splits;
    advance(true);
    hopper::multiply_shared<typename S::T, true>(sums, a_high | (a + 4), b_high | (b + 4));
    hopper::multiply_shared<typename S::T, true>(sums, a_high | (a + 6), b_high | (b + 6));
    hopper::commit_products();
    hopper::wait_for_products<1>();
    if (elected && last_filters != 0) hopper::arrive(last_filters);
    if (elected && last_input != 0) hopper::arrive(last_input);
  }
  hopper::wait_for_products<0>();
  hopper::fence_operand(sums);
}

// The sums of the warp's pixels that other warps and blocks have, to the one that finishes them. Returns whether that
// is this one.
template <typename S>
__device__ __forceinline__ bool join(const Params<typename S::T>& params, Control& control, std::uint32_t buffer,
                                     float (&sums)[S::sums]) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int rank = static_cast<int>(blockIdx.x) & ((1 << params.split_k_log2) - 1);
  const int turn = turn_of(params, warp / 4), pixels = warp - turn * 4;  // of 16
  const int owner = pixels >> params.owned_log2, within = pixels - (owner << params.owned_log2);
  const int contributor = rank * params.warpgroup_splits + turn, of_owner = owner * params.warpgroup_splits;
  constexpr int bytes = 32 * S::sums * 4;
  if (contributor != of_owner) {
    const int place = contributor < of_owner ? contributor : contributor - 1;
    const std::uint32_t target = buffer + ((place << params.owned_log2) + within) * bytes + lane * 16;
    const std::uint32_t barrier = shared_address(&control.sums_full);
    if (params.split_k_log2 > 0) hopper::wait_for_cluster_arrival();  // the other blocks' barriers are there
    if (owner == rank) {
#pragma unroll
      for (int i = 0; i < S::sums; i += 4) {
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(target + i / 4 * 512), "f"(sums[i]),
                     "f"(sums[i + 1]), "f"(sums[i + 2]), "f"(sums[i + 3])
                     : "memory");
      }
      __syncwarp();
      if (lane == 0) hopper::arrive(barrier);
    } else {
      const std::uint32_t there = hopper::address_in_block(target, owner),
                          barrier_there = hopper::address_in_block(barrier, owner);
#pragma unroll
      for (int i = 0; i < S::sums; i += 4) hopper::store_in_block(there + i / 4 * 512, sums + i, barrier_there);
    }
    return false;
  }
  hopper::wait_for_cluster(shared_address(&control.sums_full), 0,
                           WaitSite{params.report, kernel_implicit_gemm, role_multiply});
  std::uint32_t source = buffer + within * bytes + lane * 16;
  const int others = params.warpgroup_splits << params.split_k_log2;
#pragma unroll 1
  for (int i = 1; i < others; ++i, source += bytes << params.owned_log2) {
#pragma unroll
    for (int j = 0; j < S::sums; j += 4) {
      const float4 more = load_sums(source + j / 4 * 512);
      sums[j] += more.x, sums[j + 1] += more.y, sums[j + 2] += more.z, sums[j + 3] += more.w;
    }
  }
  return true;
}

using persistent::Finish;

// A lane has 16 bytes of neighbouring filters of two pixels, from each 4 chunks (column_of in persistent/tile.cuh).
template <typename S, Finish finish>
__device__ __forceinline__ void store(const Params<typename S::T>& params, const Place& place, const Control& control,
                                      const float (&sums)[S::sums]) {
  using T = typename S::T;
  constexpr int chunk = S::chunk;
  using Chunk = persistent::Vector<T, chunk>;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const unsigned pixel = place.start + (warp & (pixel_warps<S>(params) - 1)) * 16 + lane / 4;
  const int of_lane = lane % 4 * chunk, filter_tile = static_cast<int>(blockIdx.x >> params.split_k_log2);
  const int first_k = filter_tile * S::filter_tile, shuffled = params.shuffled.offset(filter_tile);
  const int k = first_k + of_lane;
  int index[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    unsigned n = pixel + 8 * i;
    const int q = place.q + static_cast<int>(params.by_tile_q.divmod(n));
    const int p = place.p + static_cast<int>(params.by_tile_p.divmod(n));
    const int image = place.n + static_cast<int>(n);
    const bool exists = warp < S::multiplying && q < params.q && p < params.p && image < params.n;
    index[i] = exists ? (image * params.p + p) * params.y_row + q * params.y_pitch + k + shuffled : -1;
    if constexpr (finish == Finish::nchw) {
      index[i] = exists ? (image * params.p + p) * params.q + q : -1;
      unsigned within = max(index[i], 0), of = within;
      of = params.by_image.quotient(of);
      index[i] = exists ? static_cast<int>(within + of * (params.k - 1) * params.by_image.divisor()) : -1;
    }
  }
  const Epilogue<T>& epilogue = params.epilogue;
  const ActivationFunction& activate = epilogue.activate;
#pragma unroll
  for (int column = 0; column < S::filter_tile; column += 4 * chunk) {
    const auto of_filters = *reinterpret_cast<const Chunk*>(control.bias + (column + of_lane) * sizeof(T));
    float bias[chunk];
#pragma unroll
    for (int e = 0; e < chunk; ++e) bias[e] = to_float(of_filters.e[e]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float value[chunk];
#pragma unroll
      for (int e = 0; e < chunk; ++e) value[e] = sums[(column / 8 + e / 2) * 4 + i * 2 + e % 2] + bias[e];
      const bool exists = index[i] >= 0 && k + column < params.k;
      if constexpr (finish == Finish::nchw) {
        if (!exists) continue;
        const int image = static_cast<int>(params.by_image.divisor());
        int at = index[i] + (k + column) * image;
#pragma unroll
        for (int e = 0; e < chunk; ++e, at += image) {
          if constexpr (S::gated) {
            params.y[at] = from_float<T>(fast_gated(activate.gated, value[e]));
          } else {
            params.y[at] = epilogue.finish(value[e], at);
          }
        }
        continue;
      }
      const int at = exists ? index[i] + column : 0;
      if constexpr (finish == Finish::clamped) {
#pragma unroll
        for (int e = 0; e < chunk; ++e) value[e] = clamp(value[e], activate.cap);
      }
      if constexpr (S::gated) {
#pragma unroll
        for (int e = 0; e < chunk; ++e) {
          if constexpr (finish == Finish::gelu) value[e] = fast_gelu(value[e]);
          if constexpr (finish == Finish::gelu_tanh) value[e] = fast_gelu_tanh(value[e]);
          if constexpr (finish == Finish::hardswish) value[e] = fast_hardswish(value[e]);
          if constexpr (finish == Finish::sigmoid) value[e] = fast_sigmoid(value[e]);
        }
      }
      if constexpr (finish == Finish::general) {
        const auto add_residual = [&] {
          const auto residual = *reinterpret_cast<const Chunk*>(epilogue.residual + at);
#pragma unroll
          for (int e = 0; e < chunk; ++e) value[e] += to_float(residual.e[e]);
        };
        epilogue.in_order(add_residual, [&] {
          if (activate.is_silu) {
#pragma unroll
            for (int e = 0; e < chunk; ++e) {
              value[e] = S::split ? ActivationFunction::silu(value[e]) : fast_silu(value[e]);
            }
          } else {
#pragma unroll
            for (int e = 0; e < chunk; ++e) value[e] = activate.piecewise(value[e]);
          }
        });
      }
      Chunk result;
#pragma unroll
      for (int e = 0; e < chunk; ++e) result.e[e] = from_float<T>(value[e]);
      if (exists) *reinterpret_cast<Chunk*>(params.y + at) = result;
    }
  }
}

template <typename S>
__global__ void __launch_bounds__(S::threads, S::blocks)
    convolve(const __grid_constant__ CUtensorMap map, const __grid_constant__ Params<typename S::T> params) {
#if defined(FASTCONV_HAS_WGMMA)
  extern __shared__ unsigned char memory[];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  unsigned char* base = memory + (-shared_address(memory) & 1023);
  Control& control = *reinterpret_cast<Control*>(base);
  if (warp < S::multiplying) {  // while they have nothing to do: the constants' lines, all at once
    const int at = min(warp * 64, static_cast<int>(sizeof(params)) - 4);
    control.touched[warp] = *reinterpret_cast<const int*>(reinterpret_cast<const char*>(&params) + at);
  }
  const std::uint32_t input = shared_address(base) + S::control_bytes,
                      filters = input + params.input_slots * params.stage_bytes,
                      sums_buffer = filters + params.filter_slots * S::filter_bytes;
  const int rank = static_cast<int>(blockIdx.x) & ((1 << params.split_k_log2) - 1);
  const int first_step = rank * params.steps_per_split, steps = min(params.steps - first_step, params.steps_per_split);
  constexpr int loading = S::multiplying;  // the two warps that load: input; filters
  constexpr int all = 1;                   // named barrier
  constexpr int at_work = 32 * (S::multiplying + 2);
  if (warp >= loading && warp < loading + 2) {
    if (warp == loading) {
      if (lane == 0) {
        hopper::prefetch_map(map);
        if constexpr (S::split) {
          hopper::barrier_init(shared_address(&control.passed), S::multiplying);
          control.retry_pass = 0;
        }
        hopper::initialise(control.input.full, control.input.free,
                           params.stage_taps == 1 ? pixel_warps<S>(params) : S::multiplying);
        hopper::barrier_init_fence();
      }
    } else {
      if (lane == 0) {
        hopper::initialise(control.filters.full, control.filters.free, pixel_warps<S>(params));
        hopper::barrier_init_fence();
      }
    }
    __syncwarp();
    asm volatile("bar.arrive %0, %1;" ::"n"(all), "n"(at_work) : "memory");
    if (params.split_k_log2 > 0) arrive_in_cluster();
    if (lane > 0) return;
    if (warp > loading) {
      load_filters<S>(params, control, filters, first_step, steps);
    } else {
      load_input<S>(params, map, control, input, first_step, steps);
    }
    if (S::split) return;  // late: they load once more where scales do not fit
  } else if (warp >= loading && params.split_k_log2 > 0) {
    arrive_in_cluster();
  }
  // Warps that load, or do nothing else, go on through the epilogue, which stores nothing for them: its instructions
  // are then there for the others.
  const Place place = place_of(params);
  float sums[S::sums];
  if (warp < loading) {
    if (threadIdx.x == 0) {
      // Arrivals: this one, with what other blocks send, and the other warpgroups' warps.
      hopper::barrier_init(shared_address(&control.sums_full),
                           1 + ((params.warpgroup_splits - 1) << params.owned_log2));
      if (params.joins) hopper::arrive_expecting(shared_address(&control.sums_full), params.sums_bytes);
      hopper::barrier_init_fence();
    }
    __syncwarp();
    if (params.bias == nullptr && threadIdx.x < S::filter_tile) {  // there is none, or it is not aligned
      const int k =
          static_cast<int>(blockIdx.x >> params.split_k_log2) * S::filter_tile + static_cast<int>(threadIdx.x);
      const bool exists = params.epilogue.bias != nullptr && k < params.k;
      reinterpret_cast<typename S::T*>(control.bias)[threadIdx.x] =
          exists ? params.epilogue.bias[k] : from_float<typename S::T>(0.0f);
    }
    asm volatile("bar.sync %0, %1;" ::"n"(all), "n"(at_work) : "memory");
    if (params.split_k_log2 > 0) arrive_in_cluster();
    if constexpr (S::split) {
      multiply_split<S>(params, control, input, filters, place.start, first_step, steps, sums);
    } else {
      multiply_steps<S>(params, control, input, filters, place.start, first_step, steps, sums);
    }
    if (params.joins && !join<S>(params, control, sums_buffer, sums)) return;
  }
  const ActivationFunction& activate = params.epilogue.activate;
  if (params.nchw) {
    store<S, Finish::nchw>(params, place, control, sums);
  } else if constexpr (S::gated) {
    switch (activate.gated) {
      case Activation::gelu: return store<S, Finish::gelu>(params, place, control, sums);
      case Activation::gelu_tanh: return store<S, Finish::gelu_tanh>(params, place, control, sums);
      case Activation::hardswish: return store<S, Finish::hardswish>(params, place, control, sums);
      default: return store<S, Finish::sigmoid>(params, place, control, sums);
    }
  } else if (params.epilogue.residual != nullptr || activate.is_silu || !(activate.clamps || activate.is_linear())) {
    store<S, Finish::general>(params, place, control, sums);
  } else if (activate.clamps) {
    store<S, Finish::clamped>(params, place, control, sums);
  } else {
    store<S, Finish::plain>(params, place, control, sums);
  }
#endif
}

}  // namespace fastconv::algos::implicit_gemm::single_tile
