// The consumers' loop over the work tiles.
#pragma once

#include "algos/winograd_fused/single/lines.cuh"
#include "algos/winograd_fused/single/output.cuh"

namespace fastconv::algos::winograd_fused::single {

// One pass over the work tiles.
template <typename T, Shape shape, StoreMode output, End end>
__device__ __forceinline__ void consume(const Params<T>& params, const LineMaps<line_maps(shape)>& lines,
                                        Shared<T, shape>& shared, bool retry, ConsumerState& state) {
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  const int first_filter = first_filter_of_warp();
  constexpr bool spare = output != StoreMode::elements && shape != narrow;  // registers to ask for absent filters
  WorkTileScheduler<Params<T>> scheduler{params, retry ? shared.overflow_flags : nullptr};
  const auto filters = [&]() -> Source {
    unsigned number = scheduler.number();
    const std::int64_t block = params.by_filters.divmod(number);
    return {params.u + block * params.stages * (Stage<T, shape>::steps * u_step) + group * group_points * u_point +
                threadIdx.x % 128,
            spare && static_cast<int>(block) * filter_tile + first_filter >= params.k ? 0 : params.stages};
  };
  if (output == StoreMode::filters && retry) hopper::wait_for_writing<0>();  // of what is written again
  if (!scheduler.next()) return;
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
    const int slot = static_cast<int>(state.work_tile % Shared<T, shape>::work_tile_slots);
    const WorkTile& work_tile = shared.work_tiles[slot];
    SumExponents<shape> exponents;
    if constexpr (!shape.packs_columns) {  // else where they are needed: registers
      find_exponents<T, shape>(params, work_tile, shared.exponents[slot], static_cast<int>(threadIdx.x) % 32,
                               exponents);
    }
    const unsigned ordinal = scheduler.ordinal;
    const auto next = [&] {
      more = scheduler.next();
      source =
          more ? filters() : Source{params.u + threadIdx.x % 128, params.stages};  // any, if there is no next work tile
    };
    float bad;
    if constexpr (output == StoreMode::filters) {
      bad = finish_lines<end>(
          params, lines, shared, sum, slot, work_tile, exponents, group,
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
      FilterEnds& ends = shared.ends[state.work_tile & 1];
      prepare_ends(params, ends, work_tile, exponents[0]);
      const Finisher<T> mine(params, work_tile, output == StoreMode::elements && params.y_channel == 1);
      next();
      bad = finish_work_tile<T, output>(params, shared, sum, ends, mine, group, u, source.first);
    }
    if (!retry && bad != 0.0f) atomicOr(&shared.overflow_flags[ordinal / 32], 1u << ordinal % 32);
    ++state.work_tile;
  }
}

}  // namespace fastconv::algos::winograd_fused::single
