// The transform: V = B^T d along W, scaled and split into halves.
#pragma once

#include "algos/winograd_fused/split/prepare.cuh"

namespace fastconv::algos::winograd_fused::split {

constexpr int sharing = producer_warps / 2;  // warps of the same columns share the pairs of rows

// A raw stage of one strip element by element, from any layout and alignment, by all producers. Zeros outside.
__device__ __forceinline__ void load_elements(const Params& params, unsigned char* raw, unsigned work_tile,
                                              int first_channel, int thread) {
  launder(work_tile);
  const Place place = find_place<1>(params, work_tile, 0);
#pragma unroll 1
  for (int second = 0; second < 2; ++second) {
    const auto segment = find_row_segment<1>(params, place, second != 0);
    const int tiles = second != 0 ? tile_columns - place.tiles : place.tiles, columns = raw_columns(tiles);
    if (tiles == 0) break;
#pragma unroll 1
    for (int i = thread; i < segment.input_rows * columns * channels; i += producer_threads) {
      const int c = first_channel + i % channels, pixel = i / channels, r = pixel / columns;
      const int n = segment.image_of(r), h = segment.row_of(r) - params.pad_h;
      const int w = segment.q0 - params.pad_w + pixel - r * columns;
      const bool inside = n < params.n && c < params.c && static_cast<unsigned>(h) < static_cast<unsigned>(params.h) &&
                          static_cast<unsigned>(w) < static_cast<unsigned>(params.w);
      reinterpret_cast<float*>(raw)[i] =
          inside ? params.x[n * params.x_image + h * params.x_row + w * params.x_column + c * params.x_channel] : 0.0f;
    }
    raw += raw_segment_bytes<1>(tiles);
  }
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
__device__ __forceinline__ void transform_scaled(const float (&d)[points], float scale, float (&v)[points]) {
  using Transform = winograd::Transform<4>;
  const float a = scale * Transform::a, b = scale * Transform::b, last = d[4] * scale;
  const float even_a = fmaf(d[2], scale * -2.0f, last), odd_a = fmaf(-d[1], b, d[3] * a);
  const float even_b = fmaf(d[2], scale * -0.5f, last), odd_b = fmaf(-d[1], a, d[3] * b);
  v[0] = fmaf(d[0], scale, fmaf(d[2], scale * -2.5f, last));
  v[1] = even_a + odd_a;
  v[2] = even_a - odd_a;
  v[3] = even_b + odd_b;
  v[4] = even_b - odd_b;
  v[5] = fmaf(d[1], scale, fmaf(d[3], scale * -2.5f, d[5] * scale));
}

// One tile, four channels: six columns to six points, or to the `count` from `first` on, each of two limbs of
// `limb_bytes` bytes. Returns the largest |hi|.
template <int first, int count, int limb_bytes>
__device__ __forceinline__ __half2 transform_tile(const unsigned char* raw, unsigned char* v, float scale) {
  __half2 largest = __float2half2_rn(0.0f);
  float values[points][4];
#pragma unroll
  for (int j = 0; j < points; ++j) {
    const float4 d = *reinterpret_cast<const float4*>(raw + j * raw_column_bytes);
    values[j][0] = d.x, values[j][1] = d.y, values[j][2] = d.z, values[j][3] = d.w;
  }
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    float d[points], result[points];
#pragma unroll
    for (int j = 0; j < points; ++j) d[j] = values[j][c];
    transform_scaled(d, scale, result);
#pragma unroll
    for (int j = 0; j < points; ++j) values[j][c] = result[j];
  }
#pragma unroll
  for (int f = 0; f < count; ++f) {
    const float (&value)[4] = values[first + f];
    uint2 high, low;
    split(value[0], value[1], high.x, low.x, largest);
    split(value[2], value[3], high.y, low.y, largest);
    *reinterpret_cast<uint2*>(v + (2 * f) * limb_bytes) = high;
    *reinterpret_cast<uint2*>(v + (2 * f + 1) * limb_bytes) = low;
  }
  return largest;
}

// One pass over the work tiles, by the block `rank` of a cluster. Of one strip the warps of the same columns take the
// pairs of rows in turn; of two each has one.
template <int rank, Variant variant>
__device__ __forceinline__ void transform_work_tiles(const Params& params, Shared<variant>& shared, bool retry,
                                                     int warp, TransformState<variant>& state) {
  using Memory = Shared<variant>;
  constexpr int strips = variant.strips;
  static_assert(strips == 1 || strips == sharing);
  const int strip = strips == 1 ? 0 : warp / 2;
  WorkTileScheduler<Params, variant.blocks> scheduler{params, retry ? shared.overflow_flags : nullptr};
#pragma unroll 1
  while (scheduler.next()) {
    const unsigned first_stage = state.raw.count;  // of the ring: the same in all lanes, and so in no lane's register
    const auto wait_for_raw = [&] {
      const std::uint32_t full = shared_address(&shared.raw_full[state.raw.slot()]);
      if constexpr (variant.use_tma) {
        wait<role_transform>(full, state.raw.parity(), params.report);
      } else {
        load_elements(params, shared.raw[state.raw.slot()], scheduler.number(),
                      static_cast<int>(state.raw.count - first_stage) * channels, warp * 32 + reload_lane());
        synchronise<producer_barrier, producer_threads>();
        if (warp == 0 && reload_lane() == 0) hopper::arrive(full);
      }
    };
    wait_for_raw();
    wait<role_transform>(shared_address(&shared.prepared), state.work_tiles.parity(), params.report);
    const Lane<> mine(warp, reload_lane());
    Column column = shared.columns[state.work_tiles.slot][strip * tile_columns + mine.column];
    unsigned offsets = (strip * strip_input_rows(strips) * v_row_bytes + mine.v()) << 16 |
                       (column.raw + mine.raw(column.raw_pair() / 2));
    __half2 largest = __float2half2_rn(0.0f);
#pragma unroll 1
    for (bool last = false; !last;) {
      if (state.raw.count != first_stage) wait_for_raw();
      last = state.raw.count - first_stage == params.stages - 1u;
      // By every warp: none may still wait for this work tile when the next one is prepared.
      if (last && hopper::elect_one()) hopper::arrive(shared.last_stage);
      wait<role_transform>(shared_address(&shared.v_empty[state.v.slot()]), state.v.parity() ^ 1, params.report);
      const unsigned char* raw = shared.raw[state.raw.slot()];
      unsigned char* v = shared.v[state.v.slot()];
#pragma unroll 1
      for (unsigned pair = strips == 1 ? (warp / 2 + state.raw.count) % sharing : 0; pair < row_pairs<strips>;
           pair += sharing / strips) {
        launder(column.packed), launder(offsets);  // what is in them is not kept apart, for want of registers
        const bool crosses = strips == 1 && column.crosses(pair);
        const __half2 here = transform_tile<rank * Memory::v_points, Memory::v_points, v_limb_bytes<strips>>(
            raw + (offsets & 0xffff) + pair * column.raw_pair(), v + (offsets >> 16) + 2 * pair * v_row_bytes,
            column.scale(crosses));
        largest = __hmax2_nan(largest, here);
        if ((column.packed & Column::watched) != 0) {  // the same in all lanes
          unsigned bits = largest_bits(here);
#pragma unroll
          for (int lanes = 1; lanes < 8; lanes *= 2) bits = max(bits, __shfl_xor_sync(~0u, bits, lanes));
          const int image = crosses ? 1 : 0, lane = reload_lane();
          if (lane % 8 == 0 && (column.packed & Column::guessed << image) != 0) {
            const int scale = (strip + image) * tile_columns + Lane<>(warp, lane).column;
            atomicMax(&shared.watched[state.work_tiles.slot][warp][scale], bits);
          }
        }
      }
      if (last) {
        const unsigned bits = __reduce_max_sync(~0u, largest_bits(largest));
        if (hopper::elect_one()) shared.largest[state.work_tiles.slot][warp] = bits;
      }
      hopper::fence_copies();  // of V before the products that read it
      __syncwarp();
      if (hopper::elect_one()) {
        hopper::arrive(shared.v_full[state.v.slot()]);
        const std::uint32_t read = shared_address(&shared.raw_empty[state.raw.slot()]);
        if (variant.use_tma && variant.blocks == 1) hopper::arrive(read);
        if (variant.use_tma && variant.blocks == 2) hopper::arrive_remote(read, slot_owner(state.raw.slot()));
      }
      ++state.raw.count;
      state.v.advance();
    }
    state.work_tiles.advance();
  }
}

}  // namespace fastconv::algos::winograd_fused::split
