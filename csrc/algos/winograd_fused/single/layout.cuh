// The kernel of the one-product classes: parameters, a block's shared memory, its barriers, its work.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "algos/winograd_fused/shared/layout.cuh"

namespace fastconv::algos::winograd_fused::single {

// What setmaxnreg shares out: with 8 registers less for products of 104 or 112 positions, ptxas 13.0 serialises them.
constexpr int consumer_registers(Shape shape) { return shape == narrow ? 232 : shape == small ? 200 : 224; }
constexpr int producer_registers(Shape shape) { return shape == narrow ? 40 : shape == small ? 104 : 56; }
constexpr bool shares_registers(Shape shape) {
  return consumer_threads * consumer_registers(shape) + producer_threads * producer_registers(shape) <=
         launch_registers * block_threads;
}
static_assert(shares_registers(wide) && shares_registers(narrow) && shares_registers(small) &&
              shares_registers(packed_columns));

constexpr int group_points = points / consumer_groups;
// A filter row further is a row of positions further, wherever a row ends: a constant in wgmma's descriptor, since its
// core matrices lie one behind the other.
constexpr int position_groups(Shape shape) { return shape.products() / 8; }
constexpr int last_position(Shape shape) {  // that is read
  return shape.products() + (taps - 1) * shape.row_positions();
}
// The row of a position.
template <Shape shape>
__device__ __forceinline__ int row_of(int position) {
  if constexpr (shape.row_positions() == 7) {
    static_assert(shape.row_positions() != 7 || shape.products() <= 104);
    return position * 147 >> 10;  // position / 7
  } else {
    return static_cast<int>(static_cast<unsigned>(position) / shape.row_positions());
  }
}
// Parts of a work tile that have a scale each: images, or what lies in two blocks of rows.
constexpr int segments(Shape shape) { return shape.packs_columns ? 2 : shape.images; }
// A thread's sums, of two positions side by side always the same, are of the same part, or not.
constexpr int sums_segments(Shape shape) { return shape.packs_columns ? 2 : 1; }

constexpr int raw_column_bytes = 64;

// Where the input of a work tile is looked at for its scale: in a tile of packed columns at two rows and two columns,
// else in every second row (of `small` in each) at four columns.
__host__ __device__ constexpr int sampled_column(Shape shape, int i) {
  if (shape.packs_columns) return i % 2 * 2;
  return shape.images > 1 ? shape.tiles / 2 + i * shape.tiles : i == 0 ? 0 : 9 * i - 7;
}
__host__ __device__ constexpr int sampled_row(Shape shape, int i, int p) {  // p: rows of y
  if (shape.packs_columns) return i < 2 ? 0 : p > shape.rows ? shape.rows : 2;
  return i * (shape.input_rows() / 8);
}
// Some of it is inside the input wherever there is an output: else a part at an edge would be taken for zeros, and
// repeated (docs/log/154-ragged-maps.md).
constexpr bool samples_inputs(Shape shape, bool along_w) {
  const int step = !along_w ? shape.rows : shape.packs_columns ? tile_outputs : shape.width();
  const int count = shape.packs_columns || along_w ? 4 : 8;
  for (int pad = 0; pad < taps; ++pad) {
    for (int size = 2; size < 64; ++size) {
      const int outputs = size + 2 * pad - (taps - 1);
      for (int first = 0; first < outputs; first += step) {
        bool inside = false;
        for (int i = 0; i < count; ++i) {
          const int at = first - pad + (along_w ? sampled_column(shape, i) : sampled_row(shape, i, outputs));
          inside |= at >= 0 && at < size;
        }
        if (!inside) return false;
      }
    }
  }
  return true;
}
static_assert(samples_inputs(wide, true) && samples_inputs(wide, false));
static_assert(samples_inputs(packed_columns, true) && samples_inputs(packed_columns, false));

// What the producers' threads go along: the tiles of an image in a row, or half of the tiles of packed columns.
constexpr int strips(Shape shape) { return shape.packs_columns ? 2 : shape.images; }
constexpr int strip_tiles(Shape shape) { return shape.row_positions() / strips(shape); }

// Raw input of a work tile of packed columns, a stage: what the tiles of one part read, [row][column][64 bytes], then
// those of the other. Pitch as below.
__host__ __device__ constexpr int segment_columns(int tiles) { return tiles * tile_outputs + 3; }
__host__ __device__ constexpr int segment_row_bytes(int tiles) { return segment_columns(tiles) * raw_column_bytes; }
__host__ __device__ constexpr int segment_copied_bytes(int tiles) {
  return packed_columns.input_rows() * segment_row_bytes(tiles);
}
// A copy's target is a multiple of 128.
__host__ __device__ constexpr int segment_bytes(int tiles) { return segment_copied_bytes(tiles) + 64; }
static_assert(segment_row_bytes(1) % 128 == 64 && segment_bytes(1) % 128 == 0 && segment_bytes(2) % 128 == 0);

// What differs between input types: a stage's columns are 64 bytes in shared memory, 16 channels of float32 or 32 of
// half types.
template <typename T, Shape shape>
struct Stage {
  static constexpr int channels = 64 / sizeof(T), steps = channels / winograd_fused::channels;
  // V, a stage: [f][step][channel half] limbs of one position after the other, 8 channels (16 bytes) each. The pitches
  // are such that the producers' stores, of 4 rows or images by all channels, meet every bank equally often. Rows 7
  // positions apart: limbs an odd multiple of 64 bytes, steps 32 more. Rows of 8 positions are all alike; two strips
  // are 64 bytes apart: 16 and 32 bytes more than a multiple of 128; four are 32 bytes apart: 16 and 64.
  static constexpr int plane_bytes = strips(shape) == 1 ? 1984 : last_position(shape) * 16 + 16;
  static constexpr int step_bytes = 2 * plane_bytes + (strips(shape) == 2 ? 0 : (steps - 1) * 32);
  static constexpr int point_bytes = steps * step_bytes;
  static constexpr int v_stage_bytes = points * point_bytes;
  // Two of raw input where three would leave too little L1 cache, which U needs on its way.
  static constexpr int raw_stages = steps == 1 && (shape == wide || shape == small) ? 3 : 2, v_stages = 2;
  static_assert(plane_bytes % 128 == (strips(shape) == 1 ? 64 : 16) && plane_bytes / 16 >= last_position(shape));

  // Raw input, a stage: [image][row][column][64 bytes]. The row's pitch is an odd multiple of 64 bytes: neighbouring
  // rows (of four images: neighbouring images) by 64 bytes are read without a bank conflict.
  static constexpr int raw_row_bytes = shape.raw_columns() * raw_column_bytes;
  static constexpr int raw_image_bytes = shape.input_rows() * raw_row_bytes;
  static constexpr int raw_stage_bytes =
      shape.packs_columns ? segment_bytes(1) + segment_bytes(7) : shape.images * raw_image_bytes;
  static_assert(raw_row_bytes % 128 == 64 &&
                (shape.packs_columns || raw_image_bytes % 128 == (shape.images == 4 ? 64 : 0)));
  static_assert(raw_stage_bytes % 128 == 0);
};

// Whether a thread's sums j of 8 positions are of a position. Those behind the last row are sums of whatever shared
// memory held.
template <Shape shape>
__device__ __forceinline__ bool is_position(int j, int lane) {
  constexpr int rest = shape.positions() % 8;
  static_assert(rest == 0 || rest == 2);
  return rest == 0 || j < position_groups(shape) - 1 || lane % 4 == 0;
}

// Sums of 16 positions and all points on their way from wgmma's registers to the threads that finish them:
// [f][position][64 filters], padded by 16 bytes so that neither side meets a bank conflict.
constexpr int exchanged_groups = 2, exchange_pitch = filter_tile + 4;
constexpr int exchanged_positions = 8 * exchanged_groups;
using Exchange = float[points][8 * exchanged_groups][exchange_pitch];

// Outputs on their way to NHWC by tensor copies, lines of 128 bytes in the swizzle of that width: [column of the
// tiles][position] of 64 filters of half types; of float32, half of the columns at a time, [warpgroup][half of the
// filters][position]. Before that, in the same place, what the warpgroups give each other (single/pairs.cuh).
constexpr int line_bytes = 128;
constexpr int column_bytes(Shape shape) { return shape.products() * line_bytes; }
template <typename T>
constexpr bool has_lines = filter_tile * sizeof(T) == line_bytes;

// A thread's sums are of two filters (pack.cuh): rows of a fragment that are 8 apart.
template <typename T>
constexpr int filter_step = has_lines<T> ? 8 : 1;
// The filter of row `row` of the 64.
template <typename T>
__device__ __forceinline__ int filter_of_row(int row) {
  return has_lines<T> ? row : row / 16 * 16 + row % 8 * 2 + row / 8 % 2;
}

// Where the thread that issues tensor copies is. In shared memory: registers are short.
template <bool packs_columns>
struct LoaderStateOf {
  unsigned ordinal;  // of the work tile
  int w, h, n;       // where its input starts; n < 0: there is no work tile
  int stage;
  hopper::RingPosition raw;
};
template <>
struct LoaderStateOf<true> {
  unsigned ordinal;
  int w, h, n;  // of the tiles that are not in the left segment
  int stage;
  hopper::RingPosition raw;
  int left_tiles, left_h, left_n;
};
template <Shape shape>
using LoaderState = LoaderStateOf<shape.packs_columns>;

// What undoes the scales of a work tile, by filter. Two factors where the exponents exceed what one float can hold.
struct alignas(16) FilterEnds {
  float scale[filter_tile], second_scale[filter_tile], bias[filter_tile];
  int two_factors[filter_tile / 32];
};

template <typename T, Shape shape>
struct Shared {
  static constexpr int work_tile_slots = Stage<T, shape>::v_stages + 1;  // the producers are never further ahead

  alignas(128) unsigned char raw[Stage<T, shape>::raw_stages][Stage<T, shape>::raw_stage_bytes];
  alignas(128) unsigned char v[Stage<T, shape>::v_stages][Stage<T, shape>::v_stage_bytes];
  alignas(8) hopper::Barrier raw_full[Stage<T, shape>::raw_stages], raw_empty[Stage<T, shape>::raw_stages];
  hopper::Barrier v_full[Stage<T, shape>::v_stages], v_empty[Stage<T, shape>::v_stages], pass_done;
  FilterEnds ends[2];  // of the work tile that ends, and the next one
  LoaderState<shape> loader;
  WorkTile work_tiles[work_tile_slots];
  int exponents[work_tile_slots][segments(shape)];  // of their segments' scales
  unsigned largest[segments(shape)];                // bits of the largest |x| of a work tile that is repeated
  unsigned overflow_flags[max_work_tiles / 32];     // work tiles whose scale did not fit
  union {
    alignas(1024) Exchange exchange;
    alignas(1024) unsigned char lines[has_lines<T> ? tile_outputs : 1][column_bytes(shape)];
    unsigned char half_lines[consumer_groups][2][column_bytes(shape)];
    float4 given[consumer_groups][position_groups(shape)][128];
  };
  unsigned char beyond[shape.packs_columns ? packed_columns.tiles * line_bytes
                                           : 16];  // what a copy of lines may cut off (copy_lines)
  static constexpr int bytes_for_exchange() { return offsetof(Shared, exchange) + sizeof(Exchange); }
};
static_assert(sizeof(Shared<half_t, wide>) <= 227 * 1024 && sizeof(Shared<half_t, narrow>) <= 227 * 1024 &&
              sizeof(Shared<half_t, packed_columns>) <= 227 * 1024);
static_assert(sizeof(Shared<float, wide>) <= 195 * 1024 && sizeof(Shared<float, narrow>) <= 195 * 1024 &&
              sizeof(Shared<float, packed_columns>) <= 195 * 1024 &&
              Shared<half_t, wide>::bytes_for_exchange() <= 195 * 1024);  // the rest is L1 cache

// y for the copies, a tensor for each column of the tiles: [P, N, tiles with that column, K], in the order of
// positions. Of a work tile of packed columns' left segment: so many tiles. And the residual, if there is one,
// [N, P, Q, K], for prefetches of residual_rows.
template <int count>
struct LineMaps {
  CUtensorMap column[count][tile_outputs], residual;
};
constexpr int residual_rows = 7;
constexpr int line_maps(Shape shape) { return shape.packs_columns ? shape.tiles : 1; }

// x for the copies: of a work tile of packed columns, by the number of a part's tiles less 1.
template <int count>
struct InputMaps {
  CUtensorMap map[count];
};
constexpr int input_maps(Shape shape) { return shape.packs_columns ? shape.tiles : 1; }

template <typename T>
using Params = ParamsOf<T>;

template <Shape shape, typename T>
__device__ __forceinline__ WorkTile find_work_tile(const Params<T>& params, unsigned number) {
  if constexpr (shape.packs_columns) {
    WorkTile work_tile;
    work_tile.filter_block = static_cast<int>(params.by_filters.divmod(number));
    number *= shape.tiles;
    work_tile.q0 = static_cast<int>(params.by_columns.divmod(number)) * tile_outputs;
    work_tile.p0 = static_cast<int>(params.by_rows.divmod(number)) * shape.rows;
    work_tile.n = static_cast<int>(number);
    return work_tile;
  } else {
    WorkTile work_tile = winograd_fused::find_work_tile<shape.rows, shape.width()>(params, number);
    work_tile.n *= shape.images;
    return work_tile;
  }
}

// Of a work tile of packed columns: how many of its tiles lie in the next block of rows, at the left edge. Their
// positions come first, so that the other tiles end at the right edge and in the last positions (copy_lines).
template <typename T>
__device__ __forceinline__ int left_tiles(const Params<T>& params, const WorkTile& work_tile) {
  return max(0, work_tile.q0 / tile_outputs + packed_columns.tiles - static_cast<int>(params.by_columns.divisor()));
}
template <typename T>
__device__ __forceinline__ WorkTile left_segment(const Params<T>& params, const WorkTile& work_tile) {
  const bool below = work_tile.p0 + packed_columns.rows < params.p;
  return {below ? work_tile.n : work_tile.n + 1, below ? work_tile.p0 + packed_columns.rows : 0, 0,
          work_tile.filter_block};
}

__device__ __forceinline__ __half2 as_half2(unsigned bits) { return *reinterpret_cast<const __half2*>(&bits); }
__device__ __forceinline__ unsigned as_bits(__half2 value) { return *reinterpret_cast<const unsigned*>(&value); }
template <typename T>
__device__ __forceinline__ float2 as_floats(unsigned bits) {
  if constexpr (std::is_same_v<T, half_t>) {
    return __half22float2(as_half2(bits));
  } else {
    return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000));
  }
}

}  // namespace fastconv::algos::winograd_fused::single
