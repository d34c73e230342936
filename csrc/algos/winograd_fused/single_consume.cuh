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
  const auto filters = [&] {
    const std::int64_t block =
        find_item<tile_rows, tile_width>(params, walk.number()).filter_block * params.filter_parts + part;
    return params.u + block * params.stages * (Stage<T>::steps * u_step) + group * group_frequencies * u_frequency +
           threadIdx.x % 128;
  };
  if (!walk.next()) return;
  Filters u[group_frequencies];
  const uint4* source = filters();
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
    Item item = find_item<tile_rows, tile_width>(params, walk.number());
    item.filter_block = item.filter_block * params.filter_parts + part;
    const int exponent = shared.exponents[state.item % Shared<T>::item_slots];
    const unsigned ordinal = walk.ordinal;
    if (last_part) {
      more = walk.next(), part = 0;
    } else {
      ++part;
    }
    source = more ? filters() : params.u + threadIdx.x % 128;  // any, if there is no next item
    float bad;
    if constexpr (output == Output::filters) {
      const int row = static_cast<int>(threadIdx.x) % 128 / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4;
      const FilterLoads loads(params, item.filter_block * filter_tile + filter_of_row<T>(row));
#if !defined(EARLY)
      finish_products(shared, sum, !last_part, state);
#endif
      hopper::pin(sum[0]); hopper::pin(sum[1]);
#ifndef LATEU
      load_filters(u[0], source);
      load_filters(u[1], source + u_frequency);
#endif
      bad = finish_fragments(params, lines, shared, sum, item, exponent, group, loads, [&] {
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
