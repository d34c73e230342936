// The producers: raw input by tensor copies (or by element), V = B^T d along W, scaled and split into halves.
#pragma once

#include "algos/winograd_fused/layout.cuh"
#include "device/winograd_matrices.h"

namespace fastconv::algos::winograd_fused {

// |V| of a tile column must reach 2 somewhere (else lo would lose bits to float16's subnormals) and stay finite. The
// guess brings the largest of a sample to [2^3, 2^4): the rest may be 2^9 times as large. The correction is exact.
constexpr int guessed_target = 3, exact_target = 12, unknown_exponent = 126;
constexpr float least_high = 2.0f;
static_assert(winograd::Transform<4>::input_gain * (2 << exact_target) < 65504.0f);
// So a column whose own sample is not zero need not be watched: |d| <= 3.13 max|V|.
static_assert((1 << guessed_target) / 3.13f > least_high);

constexpr int loader_warp = producer_warps - 1;  // has the fewest positions in the stages in which it issues copies

struct ProducerState {
  hopper::RingCounter<raw_slots> raw;
  hopper::RingCounter<v_stages> v;
  int item_slot = 0;
};

// Which strip of a place a row of the item is in, and which row of the input it is.
__device__ __forceinline__ int strip_of(const Place& place, int row) { return row >= place.boundary ? 1 : 0; }
__device__ __forceinline__ int input_row(const Params& params, const Place& place, int row) {
  return (row >= place.boundary ? row - place.boundary : place.row + row) - params.pad_h;
}

// Keeps the compiler from deriving anything from a value before this point, which it would keep in registers.
template <typename Integer>
__device__ __forceinline__ void forget(Integer& value) {
  asm volatile("" : "+r"(value));
}

// Issues the tensor copies of a raw slot, a row a lane.
__device__ __forceinline__ void issue_copies(const Params& params, const CUtensorMap& map, Shared& shared, int lane,
                                             unsigned item, int first_channel,
                                             const hopper::RingCounter<raw_slots>& position) {
  forget(item);
  const Place place = find_place(params, item);
  const std::uint32_t full = shared_address(&shared.raw_full[position.slot()]);
  wait_bounded(shared_address(&shared.raw_empty[position.slot()]), position.parity() ^ 1, params.report, role_load);
  if (lane == 0) hopper::arrive_expecting(full, raw_copied_bytes);
  __syncwarp();
  if (lane < input_rows) {
    const bool second = strip_of(place, lane) != 0;
    hopper::copy_box(shared_address(shared.raw[position.slot()]) + lane * raw_row_bytes, map, first_channel,
                     (second ? place.q0[1] : place.q0[0]) - params.pad_w, input_row(params, place, lane),
                     second ? place.n[1] : place.n[0], full);
  }
  __syncwarp();
}

// The byte of a raw row in which 16 bytes of a column lie.
__device__ __forceinline__ int swizzled(int column, int piece) {
  return column * raw_column_bytes + hopper::swizzle_128(column, piece) * 16;
}

// A raw slot element by element, from any layout and alignment, by all producers. Zeros outside.
__device__ __forceinline__ void load_rows(const Params& params, unsigned char* raw, const Place& place,
                                          int first_channel, int thread) {
#pragma unroll 1
  for (int i = thread; i < input_rows * raw_columns * raw_channels; i += producer_threads) {
    const int channel = i % raw_channels, c = first_channel + channel;
    const int column = i / raw_channels % raw_columns, row = i / (raw_channels * raw_columns);
    const int strip = strip_of(place, row), h = input_row(params, place, row);
    const int w = (strip != 0 ? place.q0[1] : place.q0[0]) - params.pad_w + column;
    const int n = strip != 0 ? place.n[1] : place.n[0];
    const bool inside = n < params.n && c < params.c && static_cast<unsigned>(h) < static_cast<unsigned>(params.h) &&
                        static_cast<unsigned>(w) < static_cast<unsigned>(params.w);
    reinterpret_cast<float*>(raw + row * raw_row_bytes + swizzled(column, channel / 4))[channel % 4] =
        inside
            ? params.x[n * params.x_image + h * params.x_row + w * params.x_column + c * params.x_channel]
            : 0.0f;
  }
}

__device__ __forceinline__ float largest_of(float4 a) {
  return fmaxf(fmaxf(fabsf(a.x), fabsf(a.y)), fmaxf(fabsf(a.z), fabsf(a.w)));
}

// The largest of a sample of each tile column, of `rows` rows of a slot: in lane 4 * column.
__device__ __forceinline__ float sample_columns(const unsigned char* raw, int rows, int lane) {
  const int column = min(lane / 4, tile_columns - 1) * tile_outputs;
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const unsigned char* row = raw + rows * (2 * i + 1) / 6 * raw_row_bytes;
#pragma unroll
    for (int j = 1; j < 3; ++j) {
      largest = fmaxf(largest, largest_of(*reinterpret_cast<const float4*>(row + swizzled(column + j, lane & 3))));
    }
  }
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
  return fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
}

// Lane i has the scale of tile column i of the first strip's rows, or i - 7 of the second's. Every warp finds the same.
struct Scales {
  int exponent;      // of this lane's
  float scale;       // zero where there are no outputs
  unsigned guessed;  // bits: of which nothing is known, so that their largest |V| is watched
};

__device__ __forceinline__ Scales make_scales(const Params& params, const Place& place, int lane, int exponent,
                                              bool guessed) {
  const bool second = lane >= tile_columns;
  const int column = second ? lane - tile_columns : lane;
  const bool rows = second ? place.boundary < tile_rows : place.row < params.p;
  const bool outputs = lane < scales && rows && (second ? place.n[1] : place.n[0]) < params.n &&
                       (second ? place.q0[1] : place.q0[0]) + column * tile_outputs < params.q;
  return {exponent, outputs ? power_of_two(exponent) : 0.0f, __ballot_sync(~0u, outputs && guessed)};
}

// From a sample of the first stage; where that is zero, from the largest of the other columns' samples.
__device__ __forceinline__ Scales guess_scales(const Params& params, const Place& place, const unsigned char* raw,
                                               int lane) {
  const int first_rows = min(place.boundary, input_rows);
  const float first = sample_columns(raw, first_rows, lane);
  float second = 0.0f;
  if (first_rows < input_rows) {
    second = sample_columns(raw + first_rows * raw_row_bytes, input_rows - first_rows, lane);
  }
  const float first_all = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(first)));
  const float second_all = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(second)));
  const bool is_second = lane >= tile_columns;
  const int source = 4 * (is_second ? lane - tile_columns : lane);
  const float own_first = __shfl_sync(~0u, first, source), own_second = __shfl_sync(~0u, second, source);
  const float own = is_second ? own_second : own_first;
  const float largest = own > 0.0f ? own : is_second ? second_all : first_all;
  // Nothing but zeros seen: a scale at which anything else overflows, and is noticed.
  const int exponent = largest == 0.0f ? unknown_exponent : scale_exponent(largest, guessed_target);
  return make_scales(params, place, lane, exponent, own == 0.0f);
}

// From the whole input of an item. By all producers.
__device__ __forceinline__ Scales find_exact_scales(const Params& params, Shared& shared, const Place& place, int warp,
                                                    int lane) {
  for (int i = warp; i < scales; i += producer_warps) {
    const int strip = i / tile_columns, n = strip != 0 ? place.n[1] : place.n[0];
    const int w0 = (strip != 0 ? place.q0[1] : place.q0[0]) + i % tile_columns * tile_outputs - params.pad_w;
    float largest = 0.0f;
    for (int pixel = 0; pixel < input_rows * frequencies; ++pixel) {
      const int row = pixel / frequencies, h = input_row(params, place, row), w = w0 + pixel % frequencies;
      if (strip_of(place, row) != strip || n >= params.n ||
          static_cast<unsigned>(h) >= static_cast<unsigned>(params.h) ||
          static_cast<unsigned>(w) >= static_cast<unsigned>(params.w)) {
        continue;
      }
      const float* x = params.x + n * params.x_image + h * params.x_row + w * params.x_column;
      for (int c = lane; c < params.c; c += 32) {
        const float value = fabsf(__ldg(x + c * params.x_channel));
        largest = fmaxf(largest, isinf(value) ? 0.0f : value);
      }
    }
    const unsigned bits = __reduce_max_sync(~0u, __float_as_uint(largest));
    if (lane == 0) shared.exact_largest[i] = __uint_as_float(bits);
  }
  synchronise<producer_barrier, producer_threads>();
  const float largest = lane < scales ? shared.exact_largest[lane] : 0.0f;
  synchronise<producer_barrier, producer_threads>();
  return make_scales(params, place, lane, largest > 0.0f ? scale_exponent(largest, exact_target) : exact_target, false);
}

// The row of a position; position - 7 * that is its tile.
__device__ __forceinline__ int row_of(int position) {
  static_assert(tile_columns == 7 && stored_positions <= 83);
  return position * 37 >> 8;
}

// Where an item's outputs go: 16 positions of a warp.
__device__ __forceinline__ void note_outputs(const Params& params, Outputs (&outputs)[products], const Place& place,
                                             const Scales& found, int warp, int lane) {
  static_assert(products == 16 * producer_warps);
  const int position = warp * 16 + lane % 16, row = row_of(position), tile = position - row * tile_columns;
  const int strip = strip_of(place, row);
  const int exponent = __shfl_sync(~0u, found.exponent, strip * tile_columns + tile), half = exponent / 2;
  const int n = strip != 0 ? place.n[1] : place.n[0], p = input_row(params, place, row) + params.pad_h;
  const int q = (strip != 0 ? place.q0[1] : place.q0[0]) + tile * tile_outputs;
  const bool inside = position < positions && n < params.n && p < params.p;
  const int count = inside ? max(0, min(params.q - q, tile_outputs)) : 0;
  const std::int64_t index = n * params.y_image + p * params.y_row + q * params.y_column;
  if (lane < 16) outputs[position] = {power_of_two(-half), power_of_two(half - exponent), index * 8 + count};
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

// Six columns to six frequencies. piece: where 16 bytes of the first column lie.
__device__ __forceinline__ __half2 transform_tile(const unsigned char* raw, int piece, unsigned char* v, float scale) {
  __half2 largest = __float2half2_rn(0.0f);
  float values[frequencies][4];
#pragma unroll
  for (int j = 0; j < frequencies; ++j) {
    const float4 d = *reinterpret_cast<const float4*>(raw + j * raw_column_bytes + (piece ^ j * 16));
    values[j][0] = d.x * scale, values[j][1] = d.y * scale, values[j][2] = d.z * scale, values[j][3] = d.w * scale;
  }
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    float d[frequencies], result[frequencies];
#pragma unroll
    for (int j = 0; j < frequencies; ++j) d[j] = values[j][c];
    winograd::Transform<4>::input(d, result);
#pragma unroll
    for (int j = 0; j < frequencies; ++j) values[j][c] = result[j];
  }
#pragma unroll
  for (int f = 0; f < frequencies; ++f) {
    uint2 high, low;
    split(values[f][0], values[f][1], high.x, low.x, largest);
    split(values[f][2], values[f][3], high.y, low.y, largest);
    *reinterpret_cast<uint2*>(v + f * v_frequency_bytes) = high;
    *reinterpret_cast<uint2*>(v + f * v_frequency_bytes + v_plane_bytes) = low;
  }
  return largest;
}

// A warp's part of a stage. half: which 16 of the slot's channels.
__device__ __forceinline__ void transform_stage(const unsigned char* raw, unsigned char* v, int half, int first_pass,
                                                int lane, int boundary, const Scales& found,
                                                unsigned (&watched)[16], __half2& largest) {
  constexpr int passes = (stored_positions + 7) / 8;
  // A lane has one position by four channels.
  v += (lane >> 1 & 1) * v_half_bytes + (lane & 1) * 8;
#pragma unroll 1
  for (int pass = first_pass; pass < passes; pass += producer_warps) {
    const int position = min(8 * pass + lane / 4, stored_positions - 1);  // the last ones do the same
    const int row = row_of(position), tile = position - row * tile_columns;
    const int which = (row >= boundary ? tile_columns : 0) + tile;
    const float scale = __shfl_sync(~0u, found.scale, which);
    const __half2 here =
        transform_tile(raw + row * raw_row_bytes + tile * tile_outputs * raw_column_bytes,
                       (lane & 3) * 16 + ((tile ^ half) & 1) * 64, v + position * 16, scale);
    largest = __hmax2_nan(largest, here);
    if (found.guessed != 0) {
      unsigned bits = largest_bits(here);
      bits = max(bits, __shfl_xor_sync(~0u, bits, 1));
      bits = max(bits, __shfl_xor_sync(~0u, bits, 2));
      if ((lane & 3) == 0 && (found.guessed >> which & 1) != 0) atomicMax(&watched[which], bits);
    }
  }
}

// One pass over the items. boxes: x is loaded by tensor copies.
template <bool boxes>
__device__ __forceinline__ void produce(const Params& params, const CUtensorMap& map, Shared& shared, bool repeated,
                                        ProducerState& state) {
  const int thread = static_cast<int>(threadIdx.x) - consumer_threads, warp = thread / 32, lane = thread % 32;
  Walk<Params> walk{params, repeated ? shared.repeat : nullptr};
  if (!walk.next()) return;
  if (boxes && warp == loader_warp) issue_copies(params, map, shared, lane, walk.number(), 0, state.raw);
#pragma unroll 1
  do {
    unsigned(&watched)[16] = shared.largest[state.item_slot][warp];
    const auto wait_for_raw = [&](int stage) {
      if constexpr (boxes) {
        wait_bounded(shared_address(&shared.raw_full[state.raw.slot()]), state.raw.parity(), params.report,
                     role_transform);
      } else {
        load_rows(params, shared.raw[state.raw.slot()], find_place(params, walk.number()), stage * channels, thread);
        synchronise<producer_barrier, producer_threads>();
      }
    };
    const auto wait_for_v = [&] {
      wait_bounded(shared_address(&shared.v_empty[state.v.slot()]), state.v.parity() ^ 1, params.report,
                   role_transform);
    };
    // What happens once an item happens here: within the loop over stages it would cost registers.
    int boundary, lane_here = lane;
    forget(lane_here);
    Scales found;
    {
      const Place place = find_place(params, walk.number());
      boundary = place.boundary;
      wait_for_raw(0);
      found = repeated ? find_exact_scales(params, shared, place, warp, lane_here)
                       : guess_scales(params, place, shared.raw[state.raw.slot()], lane_here);
      wait_for_v();
      note_outputs(params, shared.outputs[state.item_slot], place, found, warp, lane_here);
      if (lane_here < 16) watched[lane_here] = 0;
      __syncwarp();
    }
    __half2 largest = __float2half2_rn(0.0f);
#pragma unroll 1
    for (int stage = 0; stage < params.stages; ++stage) {
      const int half = stage & 1;
      if (half == 0 && stage > 0) wait_for_raw(stage);
      if (stage > 0) wait_for_v();
      const int raw_slot = state.raw.slot(), v_slot = state.v.slot();
      transform_stage(shared.raw[raw_slot], shared.v[v_slot], half, (warp + 2 * half) % producer_warps, lane, boundary,
                      found, watched, largest);
      const bool last = stage == params.stages - 1;
      if (last) {
        const unsigned bits = __reduce_max_sync(~0u, largest_bits(largest));
        if (lane == 0) watched[15] = bits;
      }
      hopper::fence_copies();  // of V before the products that read it
      __syncwarp();
      const bool read = half == 1 || last;
      if (lane == 0) {
        hopper::arrive(shared_address(&shared.v_full[v_slot]));
        if (boxes && read) hopper::arrive(shared_address(&shared.raw_empty[raw_slot]));
      }
      // The other slot was last read a stage ago or more, so that this warp hardly waits for the others.
      if (boxes && half == 0 && warp == loader_warp) {
        hopper::RingCounter<raw_slots> next = state.raw;
        ++next.count;
        Walk<Params> ahead = walk;
        forget(ahead.ordinal);
        const bool same = stage + raw_channels / channels < params.stages;
        if (same || ahead.next()) {
          issue_copies(params, map, shared, lane, ahead.number(), same ? stage * channels + raw_channels : 0, next);
        }
      }
      if (read) ++state.raw.count;
      ++state.v.count;
    }
    state.item_slot = (state.item_slot + 1) % item_slots;
  } while (walk.next());
}

}  // namespace fastconv::algos::winograd_fused
