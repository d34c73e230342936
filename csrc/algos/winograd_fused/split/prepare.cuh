// Work ahead of the transform, by a separate warpgroup: one warp loads raw input by tensor copies, two find a work
// tile's scales and where its outputs go.
#pragma once

#include "algos/winograd_fused/shared/layout.cuh"
#include "hopper/ptx/cluster.cuh"
#include "winograd/matrices.h"

namespace fastconv::algos::winograd_fused::split {

// |V| of a tile column must reach 2 somewhere (else lo would lose bits to float16's subnormals) and stay finite. The
// guess brings the largest of a sample to [2^3, 2^4): the rest may be 2^9 times as large. The correction is exact.
constexpr int guessed_target = 3, exact_target = 12, unknown_exponent = 126;
constexpr float min_high = 2.0f;
static_assert(winograd::Transform<4>::input_gain * (2 << exact_target) < 65504.0f);
// So a column whose own sample is not zero need not be watched: |d| <= 3.13 max|V|.
static_assert((1 << guessed_target) / 3.13f > min_high);

template <int strips>
constexpr int row_pairs = strip_input_rows(strips) / 2;

// The loader's lanes have a copy of a raw stage each: a segment, or, of a work tile of one strip, two rows of it.
template <int strips>
constexpr int segment_copies = strips == 1 ? strip_input_rows(strips) / raw_copied_rows : 1;
struct Copy {
  int w, h, n;
  int target;  // in a raw stage
  const CUtensorMap* box;
  bool exists;
};

template <int strips>
__device__ __forceinline__ Copy find_copy(const Params& params, const Maps& maps, unsigned work_tile, int lane) {
  const int strip = strips == 1 ? 0 : lane / 2 % strips;
  const Place place = find_place<strips>(params, work_tile, strip);
  const bool second = (lane & 1) != 0;
  const auto segment = find_row_segment<strips>(params, place, second);
  const int tiles = second ? tile_columns - place.tiles : place.tiles, r = strips == 1 ? lane / 2 * raw_copied_rows : 0;
  const bool whole = segment.boundary >= segment.input_rows;
  Copy copy;
  copy.w = segment.q0 - params.pad_w, copy.h = segment.row_of(r) - params.pad_h, copy.n = segment.image_of(r);
  copy.target = strip * raw_strip_bytes<strips> + (second ? raw_segment_bytes<strips>(place.tiles) : 0) +
                r * raw_row_bytes(tiles);
  copy.box = (whole ? maps.whole : maps.pair) + max(tiles - 1, 0);
  copy.exists = lane < 2 * strips * segment_copies<strips> && tiles > 0 && (!whole || r == 0);
  return copy;
}

// What the copies of a stage bring.
template <int strips>
__device__ __forceinline__ unsigned copied_bytes(const Params& params, unsigned work_tile) {
  unsigned bytes = 0;
#pragma unroll
  for (int strip = 0; strip < strips; ++strip) {
    const bool one_segment = find_place<strips>(params, work_tile, strip).tiles == tile_columns;
    bytes += one_segment ? raw_segment_bytes<strips>(tile_columns) : raw_strip_bytes<strips>;
  }
  return bytes;
}

// One pass over the work tiles by the loader of block `rank` of a cluster, as far ahead as there are slots. A cluster's
// blocks take turns: what one brings, both get. raw: of the ring.
template <bool retry, Variant variant>
__device__ __forceinline__ void load_work_tiles(const Params& params, const Maps& maps, Shared<variant>& shared,
                                                int rank, typename Shared<variant>::RawRing& raw) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  WorkTileScheduler<Params, variant.blocks> scheduler{params, retry ? shared.overflow_flags : nullptr};
#pragma unroll 1
  while (scheduler.next()) {
    const Copy copy = find_copy<variant.strips>(params, maps, scheduler.number(), lane);
    const unsigned bytes = copied_bytes<variant.strips>(params, scheduler.number());
#pragma unroll 1
    for (int stage = 0; stage < params.stages; ++stage, ++raw.count) {
      const int slot = raw.slot();
      const std::uint32_t full = shared_address(&shared.raw_full[slot]);
      const bool mine = variant.blocks == 1 || slot_owner(slot) == rank;
      // Until the slot may be filled again; or, where the other block fills it, until its last phase is over, which
      // this block's arrival would disturb.
      wait<role_load>(mine ? shared_address(&shared.raw_empty[slot]) : full, raw.parity() ^ 1, params.report);
      if (lane == 0) hopper::arrive_expecting(full, bytes);
      __syncwarp();
      if (mine && copy.exists) {
        const std::uint32_t target = shared_address(shared.raw[slot]) + copy.target;
        if constexpr (variant.blocks == 1) {
          hopper::tma_load(target, *copy.box, stage * channels, copy.w, copy.h, copy.n, full);
        } else {
          hopper::tma_load_multicast(target, *copy.box, stage * channels, copy.w, copy.h, copy.n, full, 3);
        }
      }
      __syncwarp();
    }
  }
}

// A lane's part of what a warp has at a time, 16 channels of 2 rows x 4 tiles, or of a row x 8 tiles: a tile by four
// channels.
template <int warp_columns = tile_columns / 2>
struct Lane {
  static constexpr unsigned column_lanes = 32 / warp_columns, rows = column_lanes / 4;
  int row, column, quad;  // of the pair; of the strip's eight; of the channels

  __device__ __forceinline__ Lane(unsigned warp, unsigned lane)
      : row(lane / 4 % rows),
        column(warp % (tile_columns / warp_columns) * warp_columns + lane / column_lanes),
        quad(lane % 4) {}
  __device__ __forceinline__ int raw(int row_bytes) const { return row * row_bytes + quad * 16; }
  __device__ __forceinline__ int v() const {
    return row * v_row_bytes + (quad >> 1) * core_bytes + column * 16 + (quad & 1) * 8;
  }
};

__device__ __forceinline__ float largest_of(float4 a) {
  return fmaxf(fmaxf(fabsf(a.x), fabsf(a.y)), fmaxf(fabsf(a.z), fabsf(a.w)));
}

// The largest of a sample of a lane's column: of `pairs` pairs of rows.
template <typename Sampler>
__device__ __forceinline__ float sample_column(const unsigned char* raw, int raw_pair, int pairs) {
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < 3; ++i) {
#pragma unroll
    for (int row = 0; row < 2; row += Sampler::rows) {
      largest = fmaxf(largest,
                      largest_of(*reinterpret_cast<const float4*>(raw + pairs * (2 * i + 1) / 6 * raw_pair +
                                                                  row * (raw_pair / 2) + (1 + i) * raw_column_bytes)));
    }
  }
#pragma unroll
  for (unsigned lanes = 1; lanes < Sampler::column_lanes; lanes *= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lanes));
  }
  return largest;
}

// The exponent for a column by its sample's largest; by that of its neighbours in the same block where it is zero.
template <typename Sampler>
__device__ __forceinline__ int guess_exponent(float largest, bool second) {
#pragma unroll
  for (unsigned lanes = Sampler::column_lanes; lanes < 32; lanes *= 2) {
    const float other = __shfl_xor_sync(~0u, largest, lanes);
    const bool same = (__shfl_xor_sync(~0u, second ? 1 : 0, lanes) != 0) == second;
    if (largest == 0.0f && same) largest = other;
  }
  // Nothing but zeros seen: a scale at which anything else overflows, and is noticed.
  return largest == 0.0f ? unknown_exponent : scale_exponent(largest, guessed_target);
}

// The largest finite |x| of all columns from the whole input of a work tile.
template <Variant variant>
__device__ __forceinline__ void find_exact_largest(const Params& params, Shared<variant>& shared, unsigned work_tile,
                                                   int warp, int lane) {
  constexpr int strips = variant.strips;
#pragma unroll 1
  for (int i = warp; i < scales; i += preparing_warps) {
    const int column = i % tile_columns;
    const Place place = find_place<strips>(params, work_tile, strips == 1 ? 0 : i / tile_columns);
    const bool second = column >= place.tiles;
    const auto segment = find_row_segment<strips>(params, place, second);
    const int w0 = segment.q0 + (column - (second ? place.tiles : 0)) * tile_outputs - params.pad_w;
    float largest = 0.0f;
#pragma unroll 1
    for (int pixel = 0; pixel < segment.input_rows * points; ++pixel) {
      const int r = pixel / points, n = segment.image_of(r), h = segment.row_of(r) - params.pad_h;
      const int w = w0 + pixel % points;
      if ((strips == 1 && segment.crosses(r) != (i >= tile_columns)) || n >= params.n ||
          static_cast<unsigned>(h) >= static_cast<unsigned>(params.h) ||
          static_cast<unsigned>(w) >= static_cast<unsigned>(params.w)) {
        continue;
      }
      const float* x = params.x + n * params.x_image + h * params.x_row + w * params.x_column;
#pragma unroll 1
      for (int c = lane; c < params.c; c += 32) {
        largest = larger_finite(largest, __ldg(x + c * params.x_channel));
      }
    }
    const unsigned bits = __reduce_max_sync(~0u, __float_as_uint(largest));
    if (lane == 0) shared.exact_largest[i] = __uint_as_float(bits);
  }
  synchronise<preparing_barrier, preparing_warps * 32>();
}

// One pass over the work tiles by the two warps that prepare them: scales, from a sample of the first stage or exact
// ones, and where the outputs go. A work tile ahead of the transform: beside its last stage, which all its warps say
// they have begun. Then none of them waits for the work tile before any more, and the slot of the first stage is in its
// phase. A warp has half of the columns, or a strip of two.
template <bool retry, Variant variant>
__device__ __forceinline__ void prepare_work_tiles(const Params& params, Shared<variant>& shared, int warp,
                                                   PrepareState<variant>& state) {
  constexpr int strips = variant.strips;
  constexpr int images = strips == 1 ? 2 : 1;  // that a strip may meet
  using Sampler = Lane<tile_columns * strips / preparing_warps>;
  WorkTileScheduler<Params, variant.blocks> scheduler{params, retry ? shared.overflow_flags : nullptr};
#pragma unroll 1
  while (scheduler.next()) {
    const int strip = strips == 1 ? 0 : warp;
    const unsigned lane = reload_lane();
    const Sampler mine(warp, lane);
    if (retry) find_exact_largest(params, shared, scheduler.number(), warp, lane);
    const Place place = find_place<strips>(params, scheduler.number(), strip);
    const bool second = mine.column >= place.tiles;
    const auto segment = find_row_segment<strips>(params, place, second);
    const int tiles = second ? tile_columns - place.tiles : place.tiles;
    const int in_block = (mine.column - (second ? place.tiles : 0)) * tile_outputs;
    const int start = strip * raw_strip_bytes<strips> + (second ? raw_segment_bytes<strips>(place.tiles) : 0) +
                      in_block * raw_column_bytes;
    const int boundary = segment.boundary_within(), raw_pair = 2 * raw_row_bytes(tiles);
    const bool crosses = images > 1 && __any_sync(~0u, boundary < segment.input_rows);
    wait<role_transform>(shared_address(&shared.last_stage), state.work_tiles.parity() ^ 1, params.report);
    if constexpr (!retry) {
      wait<role_transform>(shared_address(&shared.raw_full[state.raw.slot()]), state.raw.parity(), params.report);
    }
    const unsigned char* raw = shared.raw[state.raw.slot()] + start + mine.raw(raw_pair / 2);
    const int q = segment.q0 + in_block;
    unsigned guesses = 0;
    int exponent[images];
    float scale[2] = {};
#pragma unroll
    for (int i = 0; i < images; ++i) {
      bool guessed = false;
      if (retry) {
        const float largest = shared.exact_largest[(strip + i) * tile_columns + mine.column];
        exponent[i] = largest > 0.0f ? scale_exponent(largest, exact_target) : exact_target;
      } else {
        float largest = 0.0f;
        if (i == 0 || crosses) {  // the same in all lanes
          const int first_pairs = boundary / 2, pairs = i == 0 ? first_pairs : row_pairs<strips> - first_pairs;
          largest = sample_column<Sampler>(raw + (i == 0 ? 0 : first_pairs) * raw_pair, raw_pair, pairs);
          if (pairs == 0) largest = 0.0f;
          exponent[i] = guess_exponent<Sampler>(largest, second);
        } else {
          exponent[i] = 0;
        }
        guessed = largest == 0.0f;
      }
      const bool outputs =
          (i == 0 ? segment.row < params.p : boundary < strip_rows(strips)) && segment.n + i < params.n && q < params.q;
      scale[i] = outputs ? power_of_two(exponent[i]) : 0.0f;
      if (outputs && guessed) guesses |= Column::guessed << i;
    }
    if (__any_sync(~0u, guesses != 0)) guesses |= Column::watched;
    if (lane % Sampler::column_lanes == 0) {
      shared.columns[state.work_tiles.slot][strip * tile_columns + mine.column] = {
          guesses | static_cast<unsigned>(boundary) << Column::boundary_bit | raw_pair, start,
          Column::pack_scales(scale[0], scale[1])};
    }
    // A lane for each position.
    static_assert(Sampler::column_lanes == strip_rows(strips) && preparing_warps * 32 == positions);
    {
      const int r = static_cast<int>(lane % Sampler::column_lanes), p = segment.row_of(r), n = segment.image_of(r);
      const int used = segment.crosses(r) ? exponent[images - 1] : exponent[0], half = used / 2;
      const int count = n < params.n && p < params.p ? max(0, min(params.q - q, tile_outputs)) : 0;
      const std::int64_t index = n * params.y_image + p * params.y_row + q * params.y_column;
      shared.outputs[state.work_tiles.slot][(strip * strip_rows(strips) + r) * tile_columns + mine.column] = {
          power_of_two(-half), power_of_two(half - used), index * 8 + count};
    }
    (&shared.watched[state.work_tiles.slot][0][0])[warp * 32 + lane] = 0;
    static_assert(producer_warps * scales == preparing_warps * 32);
    if (retry) synchronise<preparing_barrier, preparing_warps * 32>();  // exact_largest was read
    __syncwarp();
    if (lane == 0) hopper::arrive(shared.prepared);
    state.raw.count += params.stages;
    state.work_tiles.advance();
  }
}

}  // namespace fastconv::algos::winograd_fused::split
