// The end of a work tile in NHWC (single/pairs.cuh), and y by tensor copies of whole lines, 128 bytes of filters, which
// overlap the next work tile.
#pragma once

#include "algos/winograd_fused/single/epilogue.cuh"

namespace fastconv::algos::winograd_fused::single {

// Two outputs of neighbouring positions.
template <typename T>
__device__ __forceinline__ std::uint32_t pack_half2(float low, float high) {
  if constexpr (std::is_same_v<T, half_t>) {
    const __half2 two = __floats2half2_rn(low, high);
    return *reinterpret_cast<const std::uint32_t*>(&two);
  } else {
    const __nv_bfloat162 two = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const std::uint32_t*>(&two);
  }
}
// max(a, b), NaN kept.
template <typename T>
__device__ __forceinline__ std::uint32_t max_half2(std::uint32_t a, std::uint32_t b) {
  if constexpr (std::is_same_v<T, half_t>) {
    asm("max.NaN.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  } else {
    asm("max.NaN.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  }
  return a;
}
// sum + 0 a: NaN if a is not finite.
template <typename T>
__device__ __forceinline__ std::uint32_t add_unless_finite(std::uint32_t sum, std::uint32_t a) {
  if constexpr (std::is_same_v<T, half_t>) {
    asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(a), "r"(0));
  } else {
    asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(a), "r"(0));
  }
  return sum;
}

// Starts the copy of lines of one column of the tiles. Two warps of a warpgroup have one to start each. Both parts of a
// work tile of packed columns are copied with all positions from theirs on: what is not theirs lies beyond the right
// edge, which for the left segment is that of a narrower tensor. (A copy may not start left of the edge.)
template <Shape shape, typename T>
__device__ __forceinline__ void copy_lines(const Params<T>& params, const LineMaps<line_maps(shape)>& maps,
                                           const WorkTile& work_tile, int column, int filter,
                                           const unsigned char* lines) {
  if (column < params.q) {
    const auto store = [&](const CUtensorMap& map, const WorkTile& segment, int first) {
      hopper::tma_store(map, segment.filter_block * filter_tile + filter, segment.q0 / tile_outputs, segment.n,
                        segment.p0, shared_address(lines) + first * line_bytes);
    };
    if constexpr (shape.packs_columns) {
      const int left = left_tiles(params, work_tile);
      store(maps.column[0][column], work_tile, left);
      if (left > 0) store(maps.column[left][column], left_segment(params, work_tile), 0);
    } else {
      store(maps.column[0][column], work_tile, 0);
    }
  }
  hopper::commit_stores();
}
__device__ __forceinline__ bool copies(int warp, int lane) { return warp < 2 && lane == 0; }

// Half types, no activation, ReLU or a leaky one. Calls between(j) among the 8 positions j. Outputs beyond float16 look
// like sums that are not finite: their work tile is repeated without need.
template <End end, typename T, Shape shape, typename Between>
__device__ __forceinline__ float finish_plain_fp16(const Params<T>& params, const Fragment<T, shape>& mine,
                                                   Sums<shape>& sum, const Between& between) {
  constexpr int groups = position_groups(shape);
  constexpr std::uint32_t minus_infinity = std::is_same_v<T, half_t> ? 0xfc00fc00 : 0xff80ff80;
  const std::uint32_t least = params.epilogue.activate.clamps ? 0 : minus_infinity;
  const float slope = params.epilogue.activate.negative_slope;
  const auto load = [&](int j) { hopper::load_shared(&sum[1][4 * j], mine.received + j * group_bytes<T>); };
  std::uint32_t bad = 0;
  constexpr int ahead = 3;
#pragma unroll
  for (int j = 0; j < ahead; ++j) load(j);
#pragma unroll
  for (int j = 0; j < groups; ++j) {
    if (j + ahead < groups) load(j + ahead);
    between(j);
    float value[2][4];  // [column][2 * filter + position]
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float own = sum[0][4 * j + i], other = sum[1][4 * j + i];
      const float scale = mine.filters.scale[mine.filters.index(i)], bias = mine.filters.bias[i / 2];
      value[0][i] = fmaf(mine.pairs.first(own, other, sum[2][4 * j + i]), scale, bias);
      value[1][i] = fmaf(mine.pairs.second(own, other), scale, bias);
      if constexpr (end == End::leaky) {
#pragma unroll
        for (int which = 0; which < 2; ++which)
          value[which][i] = max_keeping_nan(value[which][i], value[which][i] * slope);
      }
    }
    std::uint32_t packed[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) packed[i] = pack_half2<T>(value[i / 2][i % 2 * 2], value[i / 2][i % 2 * 2 + 1]);
    if (is_position<shape>(j, mine.lane)) bad = add_unless_finite<T>(bad, packed[0]);
#pragma unroll
    for (int i = 0; i < 4 && end == End::plain; ++i) packed[i] = max_half2<T>(packed[i], least);
    hopper::store_transposed(mine.received + j * group_bytes<T>, packed);
  }
  return bad == 0 ? 0.0f : NAN;
}

// Half types, any epilogue.
template <typename T, Shape shape, typename Between>
__device__ __forceinline__ float finish_any_fp16(const Params<T>& params, const Fragment<T, shape>& mine,
                                                 Sums<shape>& sum, const Between& between) {
  constexpr int groups = position_groups(shape);
#pragma unroll
  for (int j = 0; j < groups; ++j) hopper::load_shared(&sum[1][4 * j], mine.received + j * group_bytes<T>);
  const float bad = transform_in_place(mine, sum, [&](int j) {
    if (j == 3 && params.epilogue.residual != nullptr) start_residual(params, mine);  // the first registers are free
  });
  params.epilogue.in_order([&] { add_residual(mine, sum); },
                           [&] {
                             activate_all(params.epilogue.activate, [&](const auto& function) {
#pragma unroll
                               for (int which = 0; which < 2; ++which) {
                                 for_outputs<shape>(sum[which], [&](float& v, int) { v = function(v); });
                               }
                             });
                           });
#pragma unroll
  for (int j = 0; j < groups; ++j) between(j);
#pragma unroll
  for (int j = 0; j < groups; ++j) {
    std::uint32_t packed[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* two = &sum[i / 2][4 * j + i % 2 * 2];
      packed[i] = pack_half2<T>(two[0], two[1]);
    }
    hopper::store_transposed(mine.received + j * group_bytes<T>, packed);
  }
  return bad;
}

// float32: one column after the other, since shared memory holds half of the outputs.
template <typename T, Shape shape>
struct HalfLines {
  const Params<T>& params;
  const LineMaps<line_maps(shape)>& maps;
  Shared<T, shape>& shared;
  const Fragment<T, shape>& mine;
  // Filters 2 (lane / 4) and the next of the warp's 16, of the positions 2 (lane % 4) and the next.
  std::uint32_t place[2];

  __device__ __forceinline__ HalfLines(const Params<T>& params, const LineMaps<line_maps(shape)>& maps,
                                       Shared<T, shape>& shared, const Fragment<T, shape>& mine)
      : params(params), maps(maps), shared(shared), mine(mine) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int position = mine.lane % 4 * 2 + i;
      place[i] = first() + position * line_bytes + ((mine.warp % 2 * 4 + mine.lane / 8) ^ position) * 16 +
                 mine.lane / 4 % 2 * 8;
    }
  }
  __device__ __forceinline__ std::uint32_t first() const {
    return shared_address(shared.half_lines[mine.group][mine.warp / 2]);
  }
  // A column's residual, to where its outputs will lie: the same warp's.
  __device__ __forceinline__ void start_residual(int which) const {
    single::start_residual(params, mine, first(), which);
  }
  __device__ __forceinline__ void add_residual(float (&values)[shape.products() / 2]) const {
    wait_for_copies<0>();
    __syncwarp();
#pragma unroll
    for (int j = 0; j < position_groups(shape); ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float2 two;
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                     : "=f"(two.x), "=f"(two.y)
                     : "r"(place[i] + j * 8 * line_bytes)
                     : "memory");
        values[4 * j + i] += two.x, values[4 * j + 2 + i] += two.y;
      }
    }
  }
  __device__ __forceinline__ void store(int j, int i, float first, float second) const {
    hopper::store_shared(place[i] + j * 8 * line_bytes, first, second);
  }
  // Of the column before.
  __device__ __forceinline__ void wait() const {
    if (copies(mine.warp, mine.lane)) hopper::wait_for_reading<0>();
    hopper::synchronise(group_barrier + mine.group, 128);
  }
  __device__ __forceinline__ void copy(int which) const {
    hopper::fence_copies();
    hopper::synchronise(group_barrier + mine.group, 128);
    if (copies(mine.warp, mine.lane)) {
      copy_lines<shape>(params, maps, mine.work_tile, own_column(mine.group, which), mine.warp * filter_tile / 2,
                        shared.half_lines[mine.group][mine.warp]);
    }
  }
};

// No activation, ReLU or a leaky one.
template <End end, typename T, Shape shape, typename Between>
__device__ __forceinline__ float finish_plain_floats(const Params<T>& params, const LineMaps<line_maps(shape)>& maps,
                                                     Shared<T, shape>& shared, const Fragment<T, shape>& mine,
                                                     Sums<shape>& sum, const Between& between) {
  constexpr int groups = position_groups(shape);
  constexpr bool late = sums_segments(shape) > 1;  // more scales: registers for U are free once sum[2] is done with
  const float least = params.epilogue.activate.clamps ? 0.0f : -INFINITY;
  const float slope = params.epilogue.activate.negative_slope;
  const auto finish = [&](float value, int i) {
    value = fmaf(value, mine.filters.scale[mine.filters.index(i)], mine.filters.bias[i / 2]);
    return max_keeping_nan(value, end == End::leaky ? value * slope : least);
  };
#pragma unroll
  for (int j = 0; j < groups; ++j) {
    hopper::load_shared(&sum[1][4 * j], mine.received + j * group_bytes<T>);
    if (!late) between(j);
  }
  hopper::synchronise(group_barrier + mine.group, 128);  // all of it has been received
  const HalfLines<T, shape> lines(params, maps, shared, mine);
  float bad = 0.0f;
#pragma unroll
  for (int j = 0; j < groups; ++j) {
    float value[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) value[i] = mine.pairs.first(sum[0][4 * j + i], sum[1][4 * j + i], sum[2][4 * j + i]);
    if (is_position<shape>(j, mine.lane)) bad = fmaf(value[1], 0.0f, fmaf(value[0], 0.0f, bad));
#pragma unroll
    for (int i = 0; i < 2; ++i) lines.store(j, i, finish(value[i], i), finish(value[2 + i], 2 + i));
  }
  lines.copy(0);
#pragma unroll
  for (int j = 0; j < groups; ++j) {
    if (late) between(j);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& value = sum[1][4 * j + i];
      value = finish(mine.pairs.second(sum[0][4 * j + i], value), i);
    }
  }
  lines.wait();
#pragma unroll
  for (int j = 0; j < groups; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) lines.store(j, i, sum[1][4 * j + i], sum[1][4 * j + 2 + i]);
  }
  lines.copy(1);
  return bad;
}

// Any epilogue. The residual of the first column comes while the sums become outputs, that of the second one once the
// first is stored.
template <typename T, Shape shape, typename Between>
__device__ __forceinline__ float finish_any_floats(const Params<T>& params, const LineMaps<line_maps(shape)>& maps,
                                                   Shared<T, shape>& shared, const Fragment<T, shape>& mine,
                                                   Sums<shape>& sum, const Between& between) {
  constexpr int groups = position_groups(shape);
#pragma unroll
  for (int j = 0; j < groups; ++j) hopper::load_shared(&sum[1][4 * j], mine.received + j * group_bytes<T>);
  hopper::synchronise(group_barrier + mine.group, 128);  // all of it has been received
  const HalfLines<T, shape> lines(params, maps, shared, mine);
  const bool adds = params.epilogue.residual != nullptr;
  if (adds) lines.start_residual(0);
  const float bad = transform_in_place(mine, sum, [](int) {});
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    auto& values = sum[which];
    if (which == 1) {
      lines.wait();
      if (adds) lines.start_residual(1);
    }
    params.epilogue.in_order([&] { lines.add_residual(values); },
                             [&] {
                               activate_all(params.epilogue.activate, [&](const auto& function) {
                                 for_outputs<shape>(values, [&](float& v, int) { v = function(v); });
                               });
                             });
#pragma unroll
    for (int j = 0; j < groups; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) lines.store(j, i, values[4 * j + i], values[4 * j + 2 + i]);
      if (which == 0) between(j);
    }
    lines.copy(which);
  }
  return bad;
}

// Returns NaN if a sum is not finite. prepare_next: once sum[2] may be waited for; load_next(j), j a group of
// positions: into registers of the next work tile. slot: of the work tile and its exponents.
template <End end, typename T, Shape shape, typename Prepare, typename Load>
__device__ __forceinline__ float finish_lines(const Params<T>& params, const LineMaps<line_maps(shape)>& maps,
                                              Shared<T, shape>& shared, Sums<shape>& sum, int slot,
                                              const WorkTile& work_tile, SumExponents<shape>& exponents, int group,
                                              const Prepare& prepare_next, const Load& load_next) {
  constexpr bool any = end == End::any;
  const int thread = threadIdx.x % 128, lane = thread % 32, warp = __shfl_sync(~0u, thread / 32, 0);
  const PairSums pairs(group);
  if (copies(warp, lane)) hopper::wait_for_reading<0>();  // by the copies of the work tile before
  synchronise<consumer_barrier, consumer_threads>();
  give<T, shape>(sum, pairs.sign, received_at(shared, 1 - group, warp, lane));
  const FilterTerms terms(params, work_tile.filter_block * filter_tile + filter_of_row<T>(warp * 16 + lane / 4));
  prepare_next();
  hopper::synchronise(pair_barrier + warp, 64);
  if constexpr (shape.packs_columns)
    find_exponents<T, shape>(params, work_tile, shared.exponents[slot], lane, exponents);
  const Fragment<T, shape> mine{pairs, FilterScales<shape>(terms, exponents), work_tile, group, warp,
                                lane,  received_at(shared, group, warp, lane)};
  float bad;
  // Any other end applies it to the outputs, where it costs no registers (transform_in_place).
  if (!any && __builtin_expect(mine.filters.two_factors, 0)) apply_second_scale(mine, sum);
  if constexpr (has_lines<T>) {
    if constexpr (!any) {
      bad = finish_plain_fp16<end>(params, mine, sum, load_next);
    } else {
      bad = finish_any_fp16(params, mine, sum, load_next);
    }
    hopper::fence_copies();
    hopper::synchronise(group_barrier + group, 128);
    if (copies(warp, lane)) {
      const int column = own_column(group, warp);
      copy_lines<shape>(params, maps, work_tile, column, 0, shared.lines[column]);
    }
  } else {
    if constexpr (!any) {
      bad = finish_plain_floats<end>(params, maps, shared, mine, sum, load_next);
    } else {
      bad = finish_any_floats(params, maps, shared, mine, sum, load_next);
    }
  }
  return bad;
}

}  // namespace fastconv::algos::winograd_fused::single
