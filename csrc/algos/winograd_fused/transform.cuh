// The producers: raw input by tensor copies (or by element), V = B^T d along W, scaled and split into halves.
#pragma once

#include "algos/winograd_fused/layout.cuh"
#include "device/cluster.cuh"
#include "device/winograd_matrices.h"

namespace fastconv::algos::winograd_fused {

// |V| of a tile column must reach 2 somewhere (else lo would lose bits to float16's subnormals) and stay finite. The
// guess brings the largest of a sample to [2^3, 2^4): the rest may be 2^9 times as large. The correction is exact.
constexpr int guessed_target = 3, exact_target = 12, unknown_exponent = 126;
constexpr float least_high = 2.0f;
static_assert(winograd::Transform<4>::input_gain * (2 << exact_target) < 65504.0f);
// So a column whose own sample is not zero need not be watched: |d| <= 3.13 max|V|.
static_assert((1 << guessed_target) / 3.13f > least_high);

constexpr int loader_warp = 0;

constexpr int warp_columns = 2;                                     // a warp's, of the eight
constexpr int sharing = producer_warps * warp_columns / tile_columns;  // warps of the same columns share the pairs of rows
constexpr int row_pairs = input_rows / 2;

struct ProducerState {
  hopper::RingPosition raw;
  hopper::RingPosition v;
  int item_slot = 0;
};

// What the producers need to know of an item is worked out by one warp, ahead, and kept in shared memory.
//   Columns: image, row in it, column of the output; boundary (Part) in the last 4 bits, then the number of tiles in
//   its block less 1, the byte of its first column in a raw stage, which block. Copies of a raw stage, a part each, or
//   two rows of it: w, h, n; the map in the last bits, the target.
constexpr int part_copies = input_rows / raw_copied_rows;
constexpr int copy_pair = 64;  // of two rows
template <int blocks>
__device__ __forceinline__ void note_item(const Params& params, Shared<blocks>& shared, int slot, int lane,
                                          unsigned item) {
  forget(item), forget(lane);
  const Place place = find_place(params, item);
  const int column = lane - 16;
  const bool second = column >= 0 ? column >= place.tiles : (lane & 1) != 0;
  const Part part = find_part(params, place, second);
  const int tiles = second ? tile_columns - place.tiles : place.tiles, start = second ? raw_part_bytes(place.tiles) : 0;
  if (column >= 0 && column < tile_columns) {
    const int in_block = (column - (second ? place.tiles : 0)) * tile_outputs;
    shared.columns[slot][column] = make_int4(
        part.n, part.row, part.q0 + in_block,
        (second ? 1 << 16 : 0) | (start + in_block * raw_column_bytes) | (tiles - 1) << 4 | part.boundary_within());
  } else if (lane < 2 * part_copies) {
    const int r = lane / 2 * raw_copied_rows;
    const bool whole = part.boundary >= input_rows, exists = tiles > 0 && (!whole || r == 0);
    const int target = start + r * raw_row_bytes(tiles);
    shared.copies[slot][lane] = make_int4(part.q0 - params.pad_w, part.row_of(r) - params.pad_h, part.image_of(r),
                                          exists ? target | (whole ? 0 : copy_pair) | (tiles - 1) : -1);
  }
  __syncwarp();
}
// A cluster's blocks take turns: what one brings, both get.
template <int rank, int blocks>
__device__ __forceinline__ void issue_copies(const Params& params, const Maps& maps, Shared<blocks>& shared, int slot,
                                             int lane, int first_channel, const hopper::RingPosition& position) {
  forget(lane);
  const std::uint32_t full = shared_address(&shared.raw_full[position.slot]);
  const bool mine = blocks == 1 || slot_owner(position.slot) == rank;
  if (mine) {
    wait_bounded(shared_address(&shared.raw_empty[position.slot]), position.parity ^ 1, params.report, role_load);
  }
  const int4 copy = shared.copies[slot][min(lane, 2 * part_copies - 1)];
  const int map = copy.w & (copy_pair - 1);
  if (lane == 0) {
    hopper::arrive_expecting(full, map == tile_columns - 1 ? raw_part_bytes(tile_columns) : raw_stage_bytes);
  }
  __syncwarp();
  if (mine && lane < 2 * part_copies && copy.w >= 0) {
    const std::uint32_t target = shared_address(shared.raw[position.slot]) + (copy.w & ~127);
    const CUtensorMap& box = (copy.w & copy_pair) != 0 ? maps.pair[map] : maps.whole[map];
    if constexpr (blocks == 1) {
      hopper::copy_box(target, box, first_channel, copy.x, copy.y, copy.z, full);
    } else {
      hopper::copy_box_to_blocks(target, box, first_channel, copy.x, copy.y, copy.z, full, 3);
    }
  }
  __syncwarp();
}

// A raw stage element by element, from any layout and alignment, by all producers. Zeros outside.
__device__ __forceinline__ void load_elements(const Params& params, unsigned char* raw, unsigned item,
                                              int first_channel, int thread) {
  forget(item);
  const Place place = find_place(params, item);
#pragma unroll 1
  for (int second = 0; second < 2; ++second) {
    const Part part = find_part(params, place, second != 0);
    const int tiles = second != 0 ? tile_columns - place.tiles : place.tiles, columns = raw_columns(tiles);
    if (tiles == 0) break;
#pragma unroll 1
    for (int i = thread; i < input_rows * columns * channels; i += producer_threads) {
      const int c = first_channel + i % channels, pixel = i / channels, r = pixel / columns;
      const int n = part.image_of(r), h = part.row_of(r) - params.pad_h;
      const int w = part.q0 - params.pad_w + pixel - r * columns;
      const bool inside = n < params.n && c < params.c && static_cast<unsigned>(h) < static_cast<unsigned>(params.h) &&
                          static_cast<unsigned>(w) < static_cast<unsigned>(params.w);
      reinterpret_cast<float*>(raw)[i] =
          inside ? params.x[n * params.x_image + h * params.x_row + w * params.x_column + c * params.x_channel] : 0.0f;
    }
    raw += raw_part_bytes(tiles);
  }
}

// A lane's part of a pass: 2 rows x 2 tiles x 16 channels of a warp are one tile by two channels of a lane.
constexpr int column_lanes = 32 / warp_columns;
struct Lane {
  int row, column, two;  // of the pair; of the block's eight; of the channels

  __device__ __forceinline__ Lane(int warp, int lane)
      : row(lane >> 3 & 1), column(warp * warp_columns % tile_columns + lane / column_lanes), two(lane & 7) {}
  __device__ __forceinline__ int v() const {
    return row * v_row_bytes + (two >> 2) * core_bytes + column * 16 + (two & 3) * 4;
  }
};

// What a lane must know of an item: of the column that it transforms, in the first and in the second image.
struct Column {
  int raw, raw_pair;  // offset in a raw stage, and from one pair of rows to the next
  int boundary;       // Part
  float scale[2];     // zero where there are no outputs
  unsigned guessed;   // bits: a scale that no sample supports, so that its largest |V| is watched; bit 2: of any lane
};

__device__ __forceinline__ float largest_of(float2 a) { return fmaxf(fabsf(a.x), fabsf(a.y)); }

// The largest of a sample of a lane's column: of `pairs` pairs of rows.
__device__ __forceinline__ float sample_column(const unsigned char* raw, int raw_pair, int pairs) {
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    largest = fmaxf(largest, largest_of(*reinterpret_cast<const float2*>(raw + pairs * (2 * i + 1) / 6 * raw_pair +
                                                                         (1 + i) * raw_column_bytes)));
  }
#pragma unroll
  for (int lanes = 1; lanes < column_lanes; lanes *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lanes));
  return largest;
}

// The exponent for a column by its sample's largest; by that of its neighbours in the same block where it is zero.
__device__ __forceinline__ int guess_exponent(float largest, bool second) {
#pragma unroll
  for (int lanes = column_lanes; lanes < 32; lanes *= 2) {
    const float other = __shfl_xor_sync(~0u, largest, lanes);
    const bool same = (__shfl_xor_sync(~0u, second ? 1 : 0, lanes) != 0) == second;
    if (largest == 0.0f && same) largest = other;
  }
  // Nothing but zeros seen: a scale at which anything else overflows, and is noticed.
  return largest == 0.0f ? unknown_exponent : scale_exponent(largest, guessed_target);
}

// The largest finite |x| of all columns from the whole input of an item. By all producers.
template <int blocks>
__device__ __forceinline__ void find_exact_largest(const Params& params, Shared<blocks>& shared, unsigned item,
                                                   int warp, int lane) {
  const Place place = find_place(params, item);
#pragma unroll 1
  for (int i = warp; i < scales; i += producer_warps) {
    const int column = i % tile_columns;
    const bool second = column >= place.tiles;
    const Part part = find_part(params, place, second);
    const int w0 = part.q0 + (column - (second ? place.tiles : 0)) * tile_outputs - params.pad_w;
    float largest = 0.0f;
#pragma unroll 1
    for (int pixel = 0; pixel < input_rows * frequencies; ++pixel) {
      const int r = pixel / frequencies, n = part.image_of(r), h = part.row_of(r) - params.pad_h;
      const int w = w0 + pixel % frequencies;
      if (part.crosses(r) != (i >= tile_columns) || n >= params.n ||
          static_cast<unsigned>(h) >= static_cast<unsigned>(params.h) ||
          static_cast<unsigned>(w) >= static_cast<unsigned>(params.w)) {
        continue;
      }
      const float* x = params.x + n * params.x_image + h * params.x_row + w * params.x_column;
#pragma unroll 1
      for (int c = lane; c < params.c; c += 32) {
        const float value = fabsf(__ldg(x + c * params.x_channel));
        largest = fmaxf(largest, isinf(value) ? 0.0f : value);
      }
    }
    const unsigned bits = __reduce_max_sync(~0u, __float_as_uint(largest));
    if (lane == 0) shared.exact_largest[i] = __uint_as_float(bits);
  }
  synchronise<producer_barrier, producer_threads>();
}

// The beginning of an item: scales, from a sample of the first stage or exact ones, and where its outputs go.
template <int blocks>
__device__ __forceinline__ Column begin_item(const Params& params, Shared<blocks>& shared, const unsigned char* raw,
                                             int slot, bool exact, int warp, int lane) {
  const Lane mine(warp, lane);
  const int4 noted = shared.columns[slot][mine.column];
  const Part part{noted.x, noted.y, noted.w & 15, 0};
  const int q = noted.z, tiles = (noted.w >> 4 & 7) + 1;
  const bool second = noted.w >> 16 != 0;
  Column result;
  result.raw = (noted.w & 0x7f80) + mine.row * raw_row_bytes(tiles) + mine.two * 8;
  result.raw_pair = 2 * raw_row_bytes(tiles);
  result.boundary = part.boundary;
  result.guessed = 0;
  const bool crosses = __any_sync(~0u, part.boundary < input_rows);
  int exponent[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    bool guessed = false;
    if (exact) {
      const float largest = shared.exact_largest[i * tile_columns + mine.column];
      exponent[i] = largest > 0.0f ? scale_exponent(largest, exact_target) : exact_target;
    } else {
      float largest = 0.0f;
      if (i == 0 || crosses) {  // the same in all lanes
        const int first_pairs = min(part.boundary, input_rows) / 2,
                  pairs = i == 0 ? first_pairs : row_pairs - first_pairs;
        largest =
            sample_column(raw + result.raw + (i == 0 ? 0 : first_pairs) * result.raw_pair, result.raw_pair, pairs);
        if (pairs == 0) largest = 0.0f;
        exponent[i] = guess_exponent(largest, second);
      } else {
        exponent[i] = 0;
      }
      guessed = largest == 0.0f;
    }
    const bool outputs =
        (i == 0 ? part.row < params.p : part.boundary < tile_rows) && part.n + i < params.n && q < params.q;
    result.scale[i] = outputs ? power_of_two(exponent[i]) : 0.0f;
    if (outputs && guessed) result.guessed |= 1u << i;
  }
  if (__any_sync(~0u, result.guessed != 0)) result.guessed |= 4;
  // A lane for each position.
  static_assert(tile_rows == 8 && column_lanes == 2 * tile_rows);
  if (warp >= producer_warps / sharing && (lane & tile_rows) == 0) {  // these warps have fewer rows in the first stage
    const int r = lane & 7, p = part.row_of(r), n = part.image_of(r);
    const int used = part.crosses(r) ? exponent[1] : exponent[0], half = used / 2;
    const int count = n < params.n && p < params.p ? max(0, min(params.q - q, tile_outputs)) : 0;
    const std::int64_t index = n * params.y_image + p * params.y_row + q * params.y_column;
    shared.outputs[slot][r * tile_columns + mine.column] = {power_of_two(-half), power_of_two(half - used),
                                                            index * 8 + count};
  }
  if (lane < scales) shared.watched[slot][warp][lane] = 0;
  __syncwarp();
  return result;
}

// hi and lo of two values; notes the largest |hi|, NaN included.
__device__ __forceinline__ void split(float a, float b, std::uint32_t& high, std::uint32_t& low, __half2& largest) {
  const __half2 hi = __floats2half2_rn(a, b);
  const float2 back = __half22float2(hi);
  const __half2 lo = __floats2half2_rn(a - back.x, b - back.y);
  largest = __hmax2_nan(largest, __habs2(hi));
  high = *reinterpret_cast<const std::uint32_t*>(&hi);
  low = *reinterpret_cast<const std::uint32_t*>(&lo);
}

// Bits of the larger of two halves, neither negative, as float32. NaN is the largest.
__device__ __forceinline__ unsigned largest_bits(__half2 two) {
  return max(__float_as_uint(__low2float(two)), __float_as_uint(__high2float(two)));
}

// winograd::Transform<4>::input of d times a power of two, which joins the constants.
__device__ __forceinline__ void transform_scaled(const float (&d)[frequencies], float scale, float (&v)[frequencies]) {
  using Transform = winograd::Transform<4>;
  const float a = scale * Transform::a, b = scale * Transform::b, last = d[4] * scale;
  const float even_a = fmaf(d[2], scale * -2.0f, last), odd_a = fmaf(d[1], -b, d[3] * a);
  const float even_b = fmaf(d[2], scale * -0.5f, last), odd_b = fmaf(d[1], -a, d[3] * b);
  v[0] = fmaf(d[0], scale, fmaf(d[2], scale * -2.5f, last));
  v[1] = even_a + odd_a;
  v[2] = even_a - odd_a;
  v[3] = even_b + odd_b;
  v[4] = even_b - odd_b;
  v[5] = fmaf(d[1], scale, fmaf(d[3], scale * -2.5f, d[5] * scale));
}

// One tile, two channels: six columns to six frequencies, or to the `count` from `first` on. Returns the largest |hi|.
template <int first, int count>
__device__ __forceinline__ __half2 transform_tile(const unsigned char* raw, unsigned char* v, float scale) {
  __half2 largest = __float2half2_rn(0.0f);
  float values[frequencies][2];
#pragma unroll
  for (int j = 0; j < frequencies; ++j) {
    const float2 d = *reinterpret_cast<const float2*>(raw + j * raw_column_bytes);
    values[j][0] = d.x, values[j][1] = d.y;
  }
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    float d[frequencies], result[frequencies];
#pragma unroll
    for (int j = 0; j < frequencies; ++j) d[j] = values[j][c];
    transform_scaled(d, scale, result);
#pragma unroll
    for (int j = 0; j < frequencies; ++j) values[j][c] = result[j];
  }
#pragma unroll
  for (int f = 0; f < count; ++f) {
    std::uint32_t high, low;
    split(values[first + f][0], values[first + f][1], high, low, largest);
    *reinterpret_cast<std::uint32_t*>(v + (2 * f) * v_plane_bytes) = high;
    *reinterpret_cast<std::uint32_t*>(v + (2 * f + 1) * v_plane_bytes) = low;
  }
  return largest;
}

// One pass over the items, by the block `rank` of a cluster. boxes: x is loaded by tensor copies.
template <bool boxes, int rank, int blocks>
__device__ __forceinline__ void produce(const Params& params, const Maps& maps, Shared<blocks>& shared, bool repeated,
                                        ProducerState& state) {
  using Memory = Shared<blocks>;
  using Items = Walk<Params, blocks>;
  const int thread = static_cast<int>(threadIdx.x) - consumer_threads, warp = thread / 32, lane = thread % 32;
  const int v_offset = Lane(warp, lane).v();
  Items walk{params, repeated ? shared.repeat : nullptr};
  if (!walk.next()) return;
  if (boxes && warp == loader_warp) {
    note_item(params, shared, state.item_slot, lane, walk.number());
    issue_copies<rank>(params, maps, shared, state.item_slot, lane, 0, state.raw);
  }
#pragma unroll 1
  do {
    // What happens once an item happens here: within the loop over stages it would cost registers.
    const auto wait_for_raw = [&](int stage) {
      if constexpr (boxes) {
        // A stage ahead: the slot was last read two stages ago, so no warp waits for the others here. Always by the
        // same warp, which knows what it has noted; the others know of it only when the first copies have come.
        if (warp == loader_warp) {
          hopper::RingPosition next = state.raw;
          next.advance(raw_stages);
          Items ahead = walk;
          const int lane_here = lane;
          forget(ahead.ordinal);
          const bool same = stage + 1 < params.stages, more = same || ahead.next();
          const int slot = same ? state.item_slot : (state.item_slot + 1) % Memory::item_slots;
          if (!same && more) note_item(params, shared, slot, lane_here, ahead.number());
          if (more) issue_copies<rank>(params, maps, shared, slot, lane_here, same ? (stage + 1) * channels : 0, next);
        }
        wait_bounded(shared_address(&shared.raw_full[state.raw.slot]), state.raw.parity, params.report, role_transform);
      } else {
        int thread_here = thread;
        forget(thread_here);
        if (stage == 0 && thread_here < 32) note_item(params, shared, state.item_slot, thread_here, walk.number());
        load_elements(params, shared.raw[state.raw.slot], walk.number(), stage * channels, thread_here);
        synchronise<producer_barrier, producer_threads>();
      }
    };
    const auto wait_for_v = [&] {
      wait_bounded(shared_address(&shared.v_empty[state.v.slot]), state.v.parity ^ 1, params.report, role_transform);
    };
    int lane_here = lane, warp_here = warp;
    forget(lane_here);
    forget(warp_here);
    if (repeated) find_exact_largest(params, shared, walk.number(), warp_here, lane_here);
    wait_for_raw(0);
    wait_for_v();
    const Column column =
        begin_item(params, shared, shared.raw[state.raw.slot], state.item_slot, repeated, warp_here, lane_here);
    if (repeated) synchronise<producer_barrier, producer_threads>();
    __half2 largest = __float2half2_rn(0.0f);
#pragma unroll 1
    for (int stage = 0; stage < params.stages; ++stage) {
      if (stage > 0) {
        wait_for_raw(stage);
        wait_for_v();
      }
      const unsigned char* raw = shared.raw[state.raw.slot] + column.raw;
      unsigned char* v = shared.v[state.v.slot] + v_offset;
#pragma unroll 1
      for (int pair = (warp / (producer_warps / sharing) + (sharing - row_pairs % sharing) * stage) % sharing; pair < row_pairs;
           pair += sharing) {
        const bool crosses = 2 * pair >= column.boundary;
        const __half2 here = transform_tile<rank * Memory::v_frequencies, Memory::v_frequencies>(
            raw + pair * column.raw_pair, v + 2 * pair * v_row_bytes, crosses ? column.scale[1] : column.scale[0]);
        largest = __hmax2_nan(largest, here);
        if (column.guessed != 0) {  // the same in all lanes
          unsigned bits = largest_bits(here);
#pragma unroll
          for (int lanes = 1; lanes < column_lanes; lanes *= 2) bits = max(bits, __shfl_xor_sync(~0u, bits, lanes));
          int lane_here = lane, warp_here = warp;
          forget(lane_here), forget(warp_here);
          const int which = crosses ? 1 : 0;
          if (lane_here % column_lanes == 0 && (column.guessed >> which & 1) != 0) {
            atomicMax(
                &shared.watched[state.item_slot][warp_here][which * tile_columns + Lane(warp_here, lane_here).column],
                bits);
          }
        }
      }
      if (stage == params.stages - 1) {
        const unsigned bits = __reduce_max_sync(~0u, largest_bits(largest));
        if (lane == 0) shared.largest[state.item_slot][warp] = bits;
      }
      hopper::fence_copies();  // of V before the products that read it
      __syncwarp();
      if (lane == 0) {
        hopper::arrive(shared_address(&shared.v_full[state.v.slot]));
        const std::uint32_t read = shared_address(&shared.raw_empty[state.raw.slot]);
        if (boxes && blocks == 1) hopper::arrive(read);
        if (boxes && blocks == 2) hopper::notify_block(read, slot_owner(state.raw.slot));
      }
      state.raw.advance(raw_stages);
      state.v.advance(Memory::v_stages);
    }
    state.item_slot = (state.item_slot + 1) % Memory::item_slots;
  } while (walk.next());
}

}  // namespace fastconv::algos::winograd_fused
