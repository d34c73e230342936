// The producers of the one-product classes: raw input by tensor copies (or by element), V = B^T d along W in FP16.
#pragma once

#include "algos/winograd_fused/shared/elements.cuh"
#include "algos/winograd_fused/single/prefetch.cuh"
#include "winograd/matrices.h"

namespace fastconv::algos::winograd_fused::single {

// A scale for a work tile. The guess brings the largest of a sample to [2^6, 2^7): the rest may be 2^6 times as large,
// and what is 2^20 times smaller is still a normal float16. Input is left as it is if the sample allows that.
constexpr int guessed_target = 6, exact_target = 12, unknown_exponent = 126;
constexpr float min_unscaled = 0x1p-6f, max_unscaled = 0x1p10f;
static_assert(winograd::Transform<4>::input_gain * (2 << exact_target) < 65504.0f);

template <typename T, Shape shape>
struct ProducerState {
  unsigned stage = 0;              // all of them so far; says where V is in its two slots
  hopper::RingPosition three_raw;  // where raw input is, if it has more than two
  int work_tile_slot = 0;

  static_assert(Stage<T, shape>::v_stages == 2);
  __device__ __forceinline__ int v_slot() const { return stage & 1; }
  __device__ __forceinline__ unsigned v_parity() const { return stage >> 1 & 1; }
  __device__ __forceinline__ int raw_slot() const {
    return Stage<T, shape>::raw_stages == 2 ? v_slot() : three_raw.slot;
  }
  __device__ __forceinline__ unsigned raw_parity() const {
    return Stage<T, shape>::raw_stages == 2 ? v_parity() : three_raw.parity;
  }
  __device__ __forceinline__ void advance() {
    ++stage;
    if constexpr (Stage<T, shape>::raw_stages != 2) three_raw.advance(Stage<T, shape>::raw_stages);
  }
};

// Where a work tile's input starts.
template <Shape shape, typename T>
__device__ __forceinline__ void locate_work_tile(const Params<T>& params, LoaderState<shape>& state, unsigned number) {
  const WorkTile work_tile = find_work_tile<shape>(params, number);
  state.w = work_tile.q0 - params.pad_w, state.h = work_tile.p0 - params.pad_h, state.n = work_tile.n;
  if constexpr (shape.packs_columns) {
    const WorkTile left = left_segment(params, work_tile);
    state.left_tiles = left_tiles(params, work_tile), state.left_h = left.p0 - params.pad_h, state.left_n = left.n;
  }
}

// Advances to the next work tile, if any. Only here: elsewhere its cost would delay the first warp at every stage.
template <Shape shape, typename T>
__device__ __forceinline__ void load_next_work_tile(const Params<T>& params, LoaderState<shape>& state,
                                                    const unsigned* overflow_flags) {
  WorkTileScheduler<Params<T>> scheduler{params, overflow_flags, state.ordinal};
  state.n = -1, state.stage = 0;
  if (!scheduler.next()) return;
  state.ordinal = scheduler.ordinal;
  locate_work_tile<shape>(params, state, scheduler.number());
}

// Starts a tensor copy of a stage of a work tile.
template <typename T, Shape shape>
__device__ __forceinline__ void start_copy(const Params<T>& params, const CUtensorMap (&maps)[input_maps(shape)],
                                           Shared<T, shape>& shared, LoaderState<shape>& state) {
  const std::uint32_t full = shared_address(&shared.raw_full[state.raw.slot]);
  const std::uint32_t target = shared_address(shared.raw[state.raw.slot]);
  const int channel = state.stage * Stage<T, shape>::channels;
  if constexpr (shape.packs_columns) {
    const int left = state.left_tiles, others = shape.tiles - left;
    hopper::arrive_expecting(full, segment_copied_bytes(others) + (left > 0 ? segment_copied_bytes(left) : 0));
    hopper::tma_load(target + segment_bytes(left), maps[others - 1], channel, state.w, state.h, state.n, full);
    if (left > 0) {
      hopper::tma_load(target, maps[left - 1], channel, -params.pad_w, state.left_h, state.left_n, full);
    }
  } else {
    hopper::arrive_expecting(full, Stage<T, shape>::raw_stage_bytes);
    hopper::tma_load(target, maps[0], channel, state.w, state.h, state.n, full);
  }
  state.raw.advance(Stage<T, shape>::raw_stages);
  ++state.stage;
}

// The next tensor copy, ahead of the stage that is transformed. One thread.
template <typename T, Shape shape>
__device__ __forceinline__ void issue_copy(const Params<T>& params, const CUtensorMap (&maps)[input_maps(shape)],
                                           Shared<T, shape>& shared, const unsigned* overflow_flags) {
  LoaderState<shape> state = shared.loader;
  if (state.n < 0) return;
  wait<role_load>(shared_address(&shared.raw_empty[state.raw.slot]), state.raw.parity ^ 1, params.report);
  start_copy(params, maps, shared, state);
  if (state.stage == params.stages) load_next_work_tile<shape>(params, state, overflow_flags);
  shared.loader = state;
}

// The first tensor copy of a launch, by one thread: with as few instructions as it takes, since those come from afar,
// too. The thread initialises the barriers of raw input.
template <typename T, Shape shape, bool use_tma>
__device__ __forceinline__ void start_loading(const Params<T>& params, const CUtensorMap (&maps)[input_maps(shape)],
                                              Shared<T, shape>& shared) {
  if constexpr (use_tma) {
    hopper::prefetch_map(maps[input_maps(shape) - 1]);
    for (int i = 0; i < Stage<T, shape>::raw_stages; ++i) {
      hopper::barrier_init(shared.raw_full[i], 1);
      hopper::barrier_init(shared.raw_empty[i], producer_warps);
    }
    hopper::barrier_init_fence();
    LoaderState<shape> state{};
    locate_work_tile<shape>(params, state, params.first_work_tile + blockIdx.x);
    start_copy(params, maps, shared, state);
    shared.loader = state;
  }
}

// Bits of the largest absolute value of 16 bytes, as float32. NaN counts as very large.
template <typename T>
__device__ __forceinline__ unsigned largest_bits(const uint4& d) {
  if constexpr (std::is_same_v<T, float>) {
    constexpr unsigned mask = 0x7fffffff;
    return max(max(d.x & mask, d.y & mask), max(d.z & mask, d.w & mask));
  } else {
    constexpr unsigned mask = 0x7fff7fff;
    const unsigned two = __vmaxu2(__vmaxu2(d.x & mask, d.y & mask), __vmaxu2(d.z & mask, d.w & mask));
    const auto one = static_cast<unsigned short>(max(two & 0xffff, two >> 16));
    return __float_as_uint(to_float(*reinterpret_cast<const T*>(&one)));
  }
}

// The exponents of a thread's scales: of its image, or of both parts of packed columns.
template <Shape shape>
struct Exponents {
  int of[sums_segments(shape)] = {};

  __device__ __forceinline__ bool none() const {
    bool result = of[0] == 0;
    if constexpr (shape.packs_columns) result = result && of[1] == 0;
    return shape.images == 1 ? result : __all_sync(~0u, result);
  }
};

// The scale's exponent by the bits of the largest of a sample.
__device__ __forceinline__ int guess_exponent(unsigned largest) {
  const float value = __uint_as_float(largest);
  if (value >= min_unscaled && value < max_unscaled) return 0;
  // Nothing but zeros seen: a scale at which anything else overflows, and is noticed.
  return value == 0.0f ? unknown_exponent : scale_exponent(value, guessed_target);
}

// From a sample of the first stage: of each image of a work tile 128 times 16 bytes; of a work tile of packed columns
// 16 times of each tile. All warps find the same. left: tiles of the left segment.
template <typename T, Shape shape>
__device__ __forceinline__ Exponents<shape> guess_exponents(const Params<T>& params, const unsigned char* raw, int lane,
                                                            int image, int left) {
  using Stage = single::Stage<T, shape>;
  if constexpr (shape.packs_columns) {
    // Two tiles at a time, 4 places of each.
    static_assert(shape.tiles == 8);
    constexpr int tile_bytes = tile_outputs * raw_column_bytes;
    launder(lane);
    const int place = lane / 4 % 4, row = sampled_row(shape, place, params.p), first = lane / 16;
    raw += lane % 4 * 16 + sampled_column(shape, place) * raw_column_bytes;
    const unsigned char* other =
        raw + segment_bytes(left) + row * segment_row_bytes(shape.tiles - left) - left * tile_bytes;
    raw += row * segment_row_bytes(left);
    unsigned largest[2] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int tile = 2 * i + first;
      const unsigned char* column = (tile < left ? raw : other) + tile * tile_bytes;
      const unsigned bits = largest_bits<T>(*reinterpret_cast<const uint4*>(column));
      largest[0] = max(largest[0], tile < left ? bits : 0);
      largest[1] = max(largest[1], tile < left ? 0 : bits);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) largest[i] = __reduce_max_sync(~0u, largest[i]);
    return {{left > 0 ? guess_exponent(largest[0]) : 0, guess_exponent(largest[1])}};
  }
  raw += sampled_row(shape, lane >> 2, 0) * Stage::raw_row_bytes + (lane & 3) * 16;
  unsigned found = 0;
#pragma unroll
  for (int i = 0; i < shape.images; ++i) {
    unsigned largest = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const auto& piece = *reinterpret_cast<const uint4*>(raw + i * Stage::raw_image_bytes +
                                                          sampled_column(shape, j) * raw_column_bytes);
      largest = max(largest, largest_bits<T>(piece));
    }
    largest = __reduce_max_sync(~0u, largest);
    if (i == image) found = largest;
  }
  return {guess_exponent(found)};
}

// From the whole input of a work tile, infinities and NaN left out.
template <typename T, Shape shape>
__device__ __forceinline__ Exponents<shape> find_exact_exponents(const Params<T>& params, Shared<T, shape>& shared,
                                                                 const WorkTile& work_tile, int thread, int my_image) {
  if (thread < segments(shape)) shared.largest[thread] = 0;
  synchronise<producer_barrier, producer_threads>();
#pragma unroll 1
  for (int i = 0; i < segments(shape) && (shape.packs_columns || work_tile.n + i < params.n); ++i) {
    WorkTile segment = work_tile;
    int columns = shape.width() + 2;
    if constexpr (shape.packs_columns) {
      const int left = left_tiles(params, work_tile);
      if (i == 0) segment = left_segment(params, work_tile);
      columns = (i == 0 ? left : shape.tiles - left) * tile_outputs + 2;
      if (columns == 2 || segment.n >= params.n) continue;
    } else {
      segment.n += i;
    }
    const T* image = params.x + segment.n * params.x_image;
    unsigned largest = 0;
#pragma unroll 1
    for (int pixel = thread / 32; pixel < shape.input_rows() * columns; pixel += producer_warps) {
      const int h = segment.p0 - params.pad_h + pixel / columns;
      const int w = segment.q0 - params.pad_w + pixel % columns;
      if (static_cast<unsigned>(h) >= static_cast<unsigned>(params.h) ||
          static_cast<unsigned>(w) >= static_cast<unsigned>(params.w)) {
        continue;
      }
      for (int c = thread % 32; c < params.c; c += 32) {
        const unsigned bits =
            __float_as_uint(to_float(image[h * params.x_row + w * params.x_column + c * params.x_channel])) &
            0x7fffffff;
        largest = max(largest, bits < 0x7f800000 ? bits : 0);
      }
    }
    atomicMax(&shared.largest[i], largest);
  }
  synchronise<producer_barrier, producer_threads>();
  Exponents<shape> result;
#pragma unroll
  for (int i = 0; i < sums_segments(shape); ++i) {
    const float value = __uint_as_float(shared.largest[shape.packs_columns ? i : my_image]);
    result.of[i] = value > 0.0f ? scale_exponent(value, exact_target) : 0;
  }
  synchronise<producer_barrier, producer_threads>();
  return result;
}

// B^T d of two channels in FP16 arithmetic: two roundings of V more, of its segments (docs/concepts/numerics.md).
__device__ __forceinline__ void transform_fp16(const __half2 (&d)[points], __half2 (&v)[points]) {
  using Transform = winograd::Transform<4>;
  const auto constant = [](float value) { return __float2half2_rn(value); };
  const __half2 even_a = __hfma2(d[2], constant(-2.0f), d[4]), odd_a = __hfma2(d[1], constant(-2.0f), d[3]);
  const __half2 even_b = __hfma2(d[2], constant(-0.5f), d[4]), odd_b = __hfma2(d[1], constant(-0.5f), d[3]);
  v[0] = __hfma2(d[2], constant(-2.5f), __hadd2(d[0], d[4]));
  v[1] = __hfma2(odd_a, constant(Transform::a), even_a);
  v[2] = __hfma2(odd_a, constant(-Transform::a), even_a);
  v[3] = __hfma2(odd_b, constant(Transform::b), even_b);
  v[4] = __hfma2(odd_b, constant(-Transform::b), even_b);
  v[5] = __hfma2(d[3], constant(-2.5f), __hadd2(d[1], d[5]));
}

// Halves of 8 bytes of raw input. scaled: multiply by scale.
template <typename T, bool scaled, int words>
__device__ __forceinline__ void convert(const uint2& bits, float scale, __half2 (&packed)[words]) {
  static_assert(4 * words == 16 / sizeof(T));
  if constexpr (std::is_same_v<T, half_t> && !scaled) {
    packed[0] = as_half2(bits.x), packed[1] = as_half2(bits.y);
  } else {
    const auto round = [&](float2 two) {
      if constexpr (scaled) two.x *= scale, two.y *= scale;
      return __floats2half2_rn(two.x, two.y);
    };
    if constexpr (std::is_same_v<T, float>) {
      packed[0] = round(make_float2(__uint_as_float(bits.x), __uint_as_float(bits.y)));
    } else {
      packed[0] = round(as_floats<T>(bits.x)), packed[1] = round(as_floats<T>(bits.y));
    }
  }
}

// A thread's strips of the raw input: 64 bytes of channels by 8 threads, so a warp has 4 strips at a time. Of two in a
// row, two rows; of four, one: so that neither reading raw input nor storing V has a bank conflict.
template <Shape shape>
__device__ __forceinline__ int strip_of_lane(int lane) {
  return lane / 8 % strips(shape);
}
template <Shape shape>
__device__ __forceinline__ int first_row(int warp, int lane) {
  return strips(shape) == 1   ? warp * 4 + lane / 8
         : strips(shape) == 2 ? warp * 4 + (lane / 16 ^ lane / 8 % 2)
                              : (warp + 1) % producer_warps;  // a row more for the last warp, not for the first
}

// Tiles of a strip in straight-line code: as many as cost no spills. few_registers: in kernels that need them
// elsewhere.
template <typename T>
constexpr int unrolled_tiles(Shape shape, bool few_registers, bool scaled) {
  if (shape == narrow && std::is_same_v<T, bfloat16_t>) return 1;
  if (strips(shape) > 1) return strip_tiles(shape);
  return few_registers || scaled ? 1 : strip_tiles(shape);
}

// Along so many tiles of a strip: each column is read once, 8 bytes a thread.
template <typename T, Shape shape, int tiles, bool scaled, int unrolled>
__device__ __forceinline__ void transform_strip(const unsigned char* raw, unsigned char* v, float scale) {
  constexpr int words = Stage<T, shape>::steps;  // of two halves
  const auto load = [&](int column) { return *reinterpret_cast<const uint2*>(raw + column * raw_column_bytes); };
  constexpr int kept = points - tile_outputs;  // columns that neighbouring tiles share
  __half2 d[points][words];
  uint2 next[tile_outputs];
#pragma unroll
  for (int j = 0; j < kept; ++j) convert<T, scaled>(load(j), scale, d[j]);
#pragma unroll
  for (int j = 0; j < tile_outputs; ++j) next[j] = load(kept + j);
#pragma unroll unrolled
  for (int tile = 0; tile < tiles; ++tile) {
    // Where a column is missing it is zero. Asked here: behind its load, everything would wait for that.
    if (shape.raw_columns() < shape.width() + 2 && tile + 1 == tiles) next[tile_outputs - 1] = make_uint2(0, 0);
#pragma unroll
    for (int j = 0; j < tile_outputs; ++j) convert<T, scaled>(next[j], scale, d[kept + j]);
    raw += tile_outputs * raw_column_bytes;
    if (tile + 1 < tiles) {
#pragma unroll
      for (int j = 0; j < tile_outputs; ++j) next[j] = load(kept + j);
    }
    __half2 out[words][points];
#pragma unroll
    for (int i = 0; i < words; ++i) {
      __half2 in[points];
#pragma unroll
      for (int j = 0; j < points; ++j) in[j] = d[j][i];
      transform_fp16(in, out[i]);
    }
#pragma unroll
    for (int f = 0; f < points; ++f) {
      unsigned char* target = v + point_order(f) * Stage<T, shape>::point_bytes;
      if constexpr (words == 1) {
        *reinterpret_cast<unsigned*>(target) = as_bits(out[0][f]);
      } else {
        *reinterpret_cast<uint2*>(target) = make_uint2(as_bits(out[0][f]), as_bits(out[1][f]));
      }
    }
    v += 16;
#pragma unroll
    for (int j = 0; j < kept; ++j) {
#pragma unroll
      for (int i = 0; i < words; ++i) d[j][i] = d[tile_outputs + j][i];
    }
  }
}

// A warp's part of a stage. tiles: of a work tile of packed columns' left segment.
template <typename T, Shape shape, bool scaled, bool few_registers>
__device__ __forceinline__ void transform_stage(const unsigned char* raw, unsigned char* v, int warp, int lane,
                                                const Exponents<shape>& exponents, int tiles) {
  using Stage = single::Stage<T, shape>;
  constexpr int unrolled = unrolled_tiles<T>(shape, few_registers, scaled);
  if constexpr (shape.packs_columns)
    launder(tiles), launder(lane), launder(warp);  // what follows from them shall not be kept
  static_assert(strips(shape) == 4 || (4 * producer_warps - shape.input_rows()) / 2 == 0);
  const int chunk = lane % 8, row = first_row<shape>(warp, lane), strip = strip_of_lane<shape>(lane);
  raw += chunk * 8;
  if constexpr (!shape.packs_columns) raw += strip * Stage::raw_image_bytes + row * Stage::raw_row_bytes;
  v += (row * shape.row_positions() + strip * strip_tiles(shape)) * 16;
  if constexpr (Stage::steps == 1) {
    v += chunk / 4 * Stage::plane_bytes + chunk % 4 * 4;
  } else {
    v += chunk / 4 * Stage::step_bytes + chunk / 2 % 2 * Stage::plane_bytes + chunk % 2 * 8;
  }
  constexpr int step = strips(shape) == 2 ? 2 : producer_warps;  // to the thread's next row
  constexpr int v_step = step * shape.row_positions() * 16;
  if constexpr (shape.packs_columns) {
    constexpr int tile_bytes = tile_outputs * raw_column_bytes;
    const int first = strip * strip_tiles(shape), turn = tiles % strip_tiles(shape);
    const int row_bytes = segment_row_bytes(tiles), other_row_bytes = segment_row_bytes(shape.tiles - tiles);
    const unsigned char* other = raw + segment_bytes(tiles) + row * other_row_bytes;
    raw += row * row_bytes + first * tile_bytes;
    int step_bytes = step * row_bytes, other_step_bytes = step * other_row_bytes;
    const bool all_of_other = first >= tiles, none_of_other = first + strip_tiles(shape) <= tiles;
    if (all_of_other) raw = other + (first - tiles) * tile_bytes, step_bytes = other_step_bytes;
    if (all_of_other || none_of_other) other = raw + turn * tile_bytes, other_step_bytes = step_bytes;
    const auto for_rows = [&](const auto& transform) {
      int left = row + step < shape.input_rows() ? 2 : 1;
#pragma unroll 1
      do {
        transform();
        raw += step_bytes, other += other_step_bytes, v += v_step;
      } while (--left > 0);
    };
    if constexpr (scaled) {  // rare: tile by tile
      const float scale = power_of_two(all_of_other ? exponents.of[1] : exponents.of[0]);
      const float other_scale = power_of_two(none_of_other ? exponents.of[0] : exponents.of[1]);
      for_rows([&] {
#pragma unroll 1
        for (int i = 0; i < strip_tiles(shape); ++i) {
          const bool wrapped = i >= turn;
          transform_strip<T, shape, 1, scaled, 1>(wrapped ? other + (i - turn) * tile_bytes : raw + i * tile_bytes,
                                                  v + i * 16, wrapped ? other_scale : scale);
        }
      });
    } else {
      const auto transform = [&]<int turn>() {
        for_rows([&] {
          if constexpr (turn > 0) transform_strip<T, shape, turn, scaled, unrolled>(raw, v, 1.0f);
          transform_strip<T, shape, strip_tiles(shape) - turn, scaled, unrolled>(other, v + turn * 16, 1.0f);
        });
      };
      static_assert(strip_tiles(shape) == 4);
      switch (turn) {  // straight-line code for each
        case 0: return transform.template operator()<0>();
        case 1: return transform.template operator()<1>();
        case 2: return transform.template operator()<2>();
        case 3: return transform.template operator()<3>();
      }
    }
  } else {
    const float scale = scaled ? power_of_two(exponents.of[0]) : 1.0f;
    const auto transform = [&] { transform_strip<T, shape, strip_tiles(shape), scaled, unrolled>(raw, v, scale); };
    if constexpr (shape.images == 1) return transform();
    int left = shape.images == 2 ? 2 : (shape.input_rows() - 1 - row) / step + 1;
#pragma unroll 1
    do {
      transform();
      raw += step * Stage::raw_row_bytes, v += v_step;
    } while (--left > 0);
  }
}

// One pass over the work tiles. use_tma: x is loaded by tensor copies.
template <typename T, Shape shape, bool use_tma, bool few_registers>
__device__ __forceinline__ void produce(const Params<T>& params, const CUtensorMap (&maps)[input_maps(shape)],
                                        const CUtensorMap* residual, Shared<T, shape>& shared, bool retry,
                                        ProducerState<T, shape>& state) {
  const int thread = static_cast<int>(threadIdx.x) - consumer_threads, warp = thread / 32, lane = thread % 32;
  const int image = shape.packs_columns ? 0 : strip_of_lane<shape>(lane);
  // One thread of each image, of the last warp: the first has the copies to issue.
  const bool tells = shape.images == 1 ? thread == producer_threads - 32
                                       : thread >= producer_threads - 32 && lane % 8 == 0 && lane / 8 < shape.images;
  const unsigned* overflow_flags = retry ? shared.overflow_flags : nullptr;
  if (use_tma && thread == 0) {
    if (retry || params.stages == 1) {
      LoaderState<shape> state = shared.loader;
      if (retry) state.ordinal = ~0u;
      load_next_work_tile<shape>(params, state, overflow_flags);
      shared.loader = state;
    }
    for (int i = retry ? 0 : 1; i < Stage<T, shape>::raw_stages - 1; ++i)
      issue_copy(params, maps, shared, overflow_flags);
  }
  WorkTileScheduler<Params<T>> scheduler{params, overflow_flags};
  while (scheduler.next()) {
    Exponents<shape> exponents;
    if (retry) {
      exponents =
          find_exact_exponents(params, shared, find_work_tile<shape>(params, scheduler.number()), thread, image);
    }
    int left = 0;
    if constexpr (shape.packs_columns) left = left_tiles(params, find_work_tile<shape>(params, scheduler.number()));
#pragma unroll 1
    for (int stage = 0; stage < params.stages; ++stage) {
      unsigned char* raw = shared.raw[state.raw_slot()];
      if constexpr (use_tma) {
        if (thread == 0) issue_copy(params, maps, shared, overflow_flags);
        __syncwarp();
        wait<role_transform>(shared_address(&shared.raw_full[state.raw_slot()]), state.raw_parity(), params.report);
      } else {
        load_elements<shape.input_rows(), shape.raw_columns(), Stage<T, shape>::channels>(
            params, raw, find_work_tile<shape>(params, scheduler.number()), stage * Stage<T, shape>::channels, thread);
        synchronise<producer_barrier, producer_threads>();
      }
      if (stage == 0 && !retry) {
        exponents = guess_exponents<T, shape>(params, raw, lane, image, left);
        if constexpr (shape.packs_columns) {  // what lies behind the last image is zero
          if (left_segment(params, find_work_tile<shape>(params, scheduler.number())).n >= params.n)
            exponents.of[0] = 0;
        }
      }
      wait<role_transform>(shared_address(&shared.v_empty[state.v_slot()]), state.v_parity() ^ 1, params.report);
      if (stage == 0 && tells) {
        if (image == 0) shared.work_tiles[state.work_tile_slot] = find_work_tile<shape>(params, scheduler.number());
#pragma unroll
        for (int i = 0; i < sums_segments(shape); ++i)
          shared.exponents[state.work_tile_slot][image + i] = exponents.of[i];
      }
      unsigned char* v = shared.v[state.v_slot()];
      if (!retry && exponents.none()) {
        transform_stage<T, shape, false, few_registers>(raw, v, warp, lane, exponents, left);
      } else {
        transform_stage<T, shape, true, few_registers>(raw, v, warp, lane, exponents, left);
      }
      hopper::fence_copies();  // of V before the products that read it
      __syncwarp();
      if (lane == 0) {
        hopper::arrive(shared.v_full[state.v_slot()]);
        if (use_tma) hopper::arrive(shared.raw_empty[state.raw_slot()]);
      }
      state.advance();
    }
    if (tells && image == 0) prefetch_residual<shape>(params, residual, shared.work_tiles[state.work_tile_slot]);
    state.work_tile_slot = (state.work_tile_slot + 1) % Shared<T, shape>::work_tile_slots;
  }
}

}  // namespace fastconv::algos::winograd_fused::single
