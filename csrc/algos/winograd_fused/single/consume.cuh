// The consumers' way through the items.
#pragma once

#include "algos/winograd_fused/single/lines.cuh"
#include "algos/winograd_fused/single/output.cuh"

namespace fastconv::algos::winograd_fused::single {

// One pass over the items.
template <typename T, Shape shape, StoreMode output>
__device__ __forceinline__ void consume(const Params<T>& params, const LineMaps<line_maps(shape)>& lines,
                                        Shared<T, shape>& shared, bool repeated, ConsumerState& state) {
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  const int first_filter = first_filter_of_warp();
  constexpr bool spare = output != StoreMode::elements && shape != narrow;  // registers to ask for absent filters
  WorkTileScheduler<Params<T>> walk{params, repeated ? shared.repeat : nullptr};
  const auto filters = [&]() -> Source {
    unsigned number = walk.number();
    const std::int64_t block = params.by_filters.divmod(number);
    return {params.u + block * params.stages * (Stage<T, shape>::steps * u_step) + group * group_points * u_point +
                threadIdx.x % 128,
            spare && static_cast<int>(block) * filter_tile + first_filter >= params.k ? 0 : params.stages};
  };
  if (output == StoreMode::filters && repeated) hopper::wait_for_writing<0>();  // of what is written again
  if (!walk.next()) return;
  constexpr int pieces = u_depth(shape) * taps;
  Filters u[u_depth(shape)];
  Source source = filters();
  const auto load_piece = [&](int i) {
    if (i < group_points * taps * Stage<T, shape>::steps || params.stages > 1) {
      load_filter(u[i / taps], piece_of(source.first, i), i % taps);
    }
  };
#pragma unroll
  for (int i = 0; i < pieces; ++i) load_piece(i);
#pragma unroll 1
  for (bool more = true; more;) {
    Sums<shape> sum;
    accumulate(params, shared, sum, u, source, group, state);
    const int slot = static_cast<int>(state.item % Shared<T, shape>::item_slots);
    const Item item = shared.items[slot];
    SumExponents<shape> exponents;
    if constexpr (!shape.listed) {  // else where they are needed: registers
      find_exponents<T, shape>(params, item, shared.exponents[slot], static_cast<int>(threadIdx.x) % 32, exponents);
    }
    const unsigned ordinal = walk.ordinal;
    const auto next = [&] {
      more = walk.next();
      source = more ? filters() : Source{params.u + threadIdx.x % 128, params.stages};  // any, if there is no next item
    };
    float bad;
    if constexpr (output == StoreMode::filters) {
      bad = finish_lines(
          params, lines, shared, sum, slot, item, exponents, group,
          [&] {
            finish_products(shared, sum, state);
            next();
          },
          [&](int j) {
#pragma unroll
            for (int i = j; i < pieces; i += position_groups(shape)) load_piece(i);
          });
    } else {
      finish_products(shared, sum, state);
      FilterEnds& ends = shared.ends[state.item & 1];
      prepare_ends(params, ends, item, exponents[0]);
      const Finisher<T> mine(params, item, output == StoreMode::elements && params.y_channel == 1);
      next();
      bad = finish_item<T, output>(params, shared, sum, ends, mine, group, u, source.first);
    }
    if (!repeated && bad != 0.0f) atomicOr(&shared.repeat[ordinal / 32], 1u << ordinal % 32);
    ++state.item;
  }
}

}  // namespace fastconv::algos::winograd_fused::single
