// The consumers' way through the items.
#pragma once

#include "algos/winograd_fused/single_fragments.cuh"
#include "algos/winograd_fused/single_output.cuh"

namespace fastconv::algos::winograd_fused::single {

// One pass over the items.
template <typename T, Output output>
__device__ __forceinline__ void consume(const Params<T>& params, const LineMaps& lines, Shared<T>& shared,
                                        bool repeated, ConsumerState& state) {
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  // Of the walk's item; it is worked out again where it is needed, to keep registers free for the products.
  Walk<Params<T>> walk{params, repeated ? shared.repeat : nullptr};
  int part = 0;  // of the filter tiles that the item's V serves
  const auto filter_block = [&] {
    unsigned number = walk.number();
    return static_cast<int>(params.by_filters.peel(number)) * params.filter_parts + part;
  };
  const auto filters_of = [&](int block) {
    return params.u + static_cast<std::int64_t>(block) * params.stages * (Stage<T>::steps * u_step) +
           group * group_frequencies * u_frequency + threadIdx.x % 128;
  };
  if (!walk.next()) return;
  int block = filter_block();
  Filters u[group_frequencies];
  const uint4* source = filters_of(block);
  load_filters(u[0], source);
  load_filters(u[1], source + u_frequency);
#pragma unroll 1
  for (bool more = true; more;) {
    Sums sum;
    { const int probe_item = state.item; STAMP(7); }
    const hopper::RingPosition first_stage = state.v;
    const bool last_part = part + 1 == params.filter_parts;
    accumulate(params, shared, sum, u, source, group, !last_part, state);
    { const int probe_item = state.item; STAMP(0); }
    const unsigned number = walk.number();
    const int this_block = block;
    const int exponent = shared.exponents[state.item % Shared<T>::item_slots];
    const unsigned ordinal = walk.ordinal;
    if (last_part) {
      more = walk.next(), part = 0;
    } else {
      ++part;
    }
    if (more) block = filter_block();
    source = filters_of(block);  // again, if there is no next item
    float bad;
    if constexpr (output == Output::filters) {
#if !defined(EARLY)
      finish_products(shared, sum, !last_part, state);
#endif
      hopper::pin(sum[0]); hopper::pin(sum[1]);
#ifndef LATEU
      load_filters(u[0], source);
      load_filters(u[1], source + u_frequency);
#endif
      bad = finish_fragments(params, lines, shared, sum, number, this_block, exponent, group, [&] {
#ifdef EARLY
        finish_products(shared, sum, !last_part, state);
#endif
#ifdef LATEU
        load_filters(u[0], source);
        load_filters(u[1], source + u_frequency);
#endif
      }, state.item);
    } else {
      finish_products(shared, sum, !last_part, state);
      hopper::pin(sum[0]); hopper::pin(sum[1]);
      Item item = find_item<tile_rows, tile_width>(params, number);
      item.filter_block = this_block;
      FilterEnds& ends = shared.ends[state.item & 1];
      prepare_ends(params, ends, item, exponent);
      const Finisher<T> mine(params, item, output == Output::elements && params.y_channel == 1);
      bad = finish_item<T, output>(params, shared, sum, ends, mine, group, u, source);
    }
    if (!repeated && bad != 0.0f) atomicOr(&shared.repeat[ordinal / 32], 1u << ordinal % 32);
    if (last_part) {
      ++state.item;
    } else {
      state.v = first_stage;
    }
  }
  if constexpr (output == Output::filters && has_lines<T>) hopper::wait_for_writing<0>();
}

}  // namespace fastconv::algos::winograd_fused::single
