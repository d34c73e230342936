// What lives where: kernel parameters, a block's shared memory, its barriers, its work.
#pragma once

#include <cstdint>

#include "algos/winograd_fused/plan.h"
#include "core/fast_divide.h"
#include "device/epilogue.h"
#include "device/mma.cuh"
#include "device/power_of_two.h"
#include "hopper/pipeline.cuh"
#include "hopper/ptx/mbarrier.cuh"
#include "hopper/ptx/tma.cuh"
#include "hopper/ptx/warp.cuh"
#include "hopper/ptx/wgmma.cuh"

namespace fastconv::algos::winograd_fused {

// Two warpgroups multiply (three points each), one transforms the input; of another, one warp loads it, and two
// prepare the next work tile.
constexpr int consumer_groups = 2, producer_warps = 4, preparing_warps = 2, loader_warp = preparing_warps;
constexpr int consumer_threads = consumer_groups * 128, producer_threads = producer_warps * 32;
constexpr int block_threads = consumer_threads + 2 * producer_threads;
constexpr int consumer_registers = 216, producer_registers = 48, preparing_registers = 32;
// Registers that a block starts with, and that setmaxnreg redistributes: asking for more would wait forever.
__host__ __device__ constexpr int launch_registers_of(int threads) { return 65536 / threads / 8 * 8; }
static_assert(consumer_threads * consumer_registers + producer_threads * (producer_registers + preparing_registers) <=
              launch_registers_of(block_threads) * block_threads);
// Of the one-product kernel three warpgroups.
namespace single {
constexpr int block_threads = consumer_threads + producer_threads;
constexpr int launch_registers = launch_registers_of(block_threads);
}  // namespace single

constexpr int group_points = points / consumer_groups;
constexpr int half_groups = tile_rows / 2;  // an instruction's part of the tiles: 4 rows of 8
static_assert(half_groups == strip_rows(max_strips));
constexpr int positions = tile_rows * tile_columns;

// Raw input, a stage: what the tiles of one block of rows read, then those of the next: [row][column][channel] float32.
// A row's pitch is an odd multiple of 64 bytes, so that two rows by 16 channels are read without a bank conflict; hence
// one column more than needed. A segment is one tensor copy, or, where it meets two images, two rows are.
constexpr int raw_column_bytes = channels * 4, raw_copied_rows = 2;
__host__ __device__ constexpr int raw_columns(int tiles) { return tiles * tile_outputs + 3; }
__host__ __device__ constexpr int raw_row_bytes(int tiles) { return raw_columns(tiles) * raw_column_bytes; }
template <int strips>
__host__ __device__ constexpr int raw_segment_bytes(int tiles) {
  return tiles > 0 ? strip_input_rows(strips) * raw_row_bytes(tiles) : 0;
}
template <int strips>
constexpr int raw_strip_bytes = raw_segment_bytes<strips>(1) + raw_segment_bytes<strips>(tile_columns - 1);
__device__ constexpr int slot_owner(int slot) { return slot % 2; }  // the block of a cluster that fills a slot of both
static_assert(raw_row_bytes(1) % 128 == 64 && raw_segment_bytes<1>(1) % 128 == 0 && raw_strip_bytes<1> % 128 == 0);
static_assert(raw_segment_bytes<2>(1) % 128 == 0 && raw_strip_bytes<2> % 128 == 0);

// V, a stage: [f][hi, lo][strip][row][channel half] core matrices of 8 tiles x 8 channels, each padded by 32 bytes: the
// producers' stores of 2 rows x 2 tiles x 16 channels then meet every bank once.
constexpr int core_bytes = 128 + 32, v_row_bytes = 2 * core_bytes;
template <int strips>
constexpr int v_limb_bytes = strips * strip_input_rows(strips) * v_row_bytes;
static_assert(core_bytes % 128 == 32 && v_row_bytes % 128 == 64);

// Read again wherever it is needed: some roles have no register to keep it in.
__device__ __forceinline__ int reload_lane() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// Work tiles of a block and launch: a bit each says which must be repeated.
constexpr int max_work_tiles = 2048;
// Of a work tile: for each of its columns, in the first and in the second image that it meets, or of each strip.
constexpr int scales = 2 * tile_columns;
static_assert(scales == max_strips * tile_columns);

// Keeps the compiler from deriving anything from a value before this point, which it would keep in registers.
template <typename Integer>
__device__ __forceinline__ void launder(Integer& value) {
  asm volatile("" : "+r"(value));
}

// Where the outputs of a position go, and what undoes its input's scale: two factors, since 2^126 times a filter's has
// none.
struct alignas(16) Outputs {
  float first, second;
  std::int64_t packed;  // 8 times the element of y of the first output and filter 0, plus the number of outputs

  __device__ __forceinline__ std::int64_t index() const { return packed >> 3; }
  // In bytes, where it is an even element.
  __device__ __forceinline__ std::int64_t even_bytes() const { return packed >> 1 & ~std::int64_t{7}; }
  __device__ __forceinline__ int count() const { return static_cast<int>(packed) & 7; }
};

// What the points' owners give each other at the end of a work tile.
template <int blocks, int m_halves>
struct Exchange;
// The warpgroups of a block: three sums of half of the outputs, a row at a time, or (pairs.cuh) one sum in six, two
// rows at a time.
template <>
struct Exchange<1, 2> {
  union {
    alignas(128) float4 sums[consumer_groups][group_points][128];
    float4 pairs[consumer_groups][2][128];
  };
};
// A warp and its like in the cluster's other block: one sum in six, all at once. A barrier for each two rows that come,
// and one that says that the other block has read what it was given.
template <int m_halves>
struct Exchange<2, m_halves> {
  static constexpr int slices = m_halves * half_groups / 2;
  alignas(128) float4 pairs[slices][consumer_groups][2][128];
  alignas(8) hopper::Barrier full[consumer_groups][4][slices], read[consumer_groups][4];
};

// What the transform needs to know of a strip's column: in the first and in the second image.
struct alignas(16) Column {
  // Bytes from one pair of rows to the next; then bits: a scale that no sample supports, so that its largest |V| is
  // watched; one of any column of the warp; at the top the boundary (RowSegment), an even number.
  static constexpr unsigned guessed = 1 << 16, watched = 1 << 18, boundary_bit = 28;
  unsigned packed;
  int raw;          // offset in a raw stage
  unsigned scales;  // upper halves of both, which are powers of two, or zero where there are no outputs

  __device__ __forceinline__ int raw_pair() const { return packed & 0xffff; }
  __device__ __forceinline__ static unsigned pack_scales(float first, float second) {
    return __byte_perm(__float_as_uint(first), __float_as_uint(second), 0x7632);
  }
  __device__ __forceinline__ float scale(bool second) const {
    return __uint_as_float(__byte_perm(scales, 0, second ? 0x3244 : 0x1044));
  }
  __device__ __forceinline__ bool crosses(unsigned pair) const { return (2 * pair + 1) << boundary_bit > packed; }
};

// What a kernel is compiled for.
struct Variant {
  int blocks;    // of a cluster, which share the points
  bool use_tma;  // x is loaded by tensor copies, else by element
  StoreMode output;
  int strips = 1;             // of a work tile
  int v_reuse = 1;            // that a work tile's V serves, each with other filters
  int filter_tiles = blocks;  // of a turn of a work tile
  End end = End::any;

  // Of the positions, that a warpgroup has: half of them, if it shares its filters and points with the other.
  constexpr int m_halves() const { return filter_tiles == blocks ? 2 : 1; }
};

template <Variant variant>
struct Shared {
  static constexpr int blocks = variant.blocks, strips = variant.strips, m_halves = variant.m_halves();
  static constexpr int v_points = points / blocks, v_stage_bytes = v_points * 2 * v_limb_bytes<strips>;
  static constexpr int v_stages = variant.v_reuse == 1 ? 3 : kept_stages, raw_stages = 2;
  using RawRing = hopper::RingCounter<raw_stages>;
  // Work tiles whose outputs and largest values are remembered. One is prepared while the last stage of the one before
  // is transformed, which may wait for a slot of V: then the consumers are at the end of a work tile v_stages + 1
  // before that.
  static constexpr int work_tile_slots = 6;
  static_assert(work_tile_slots >= v_stages + 3 ||
                variant.v_reuse > 1);  // whose work tiles have most of the slots: two meet
  // In front of the first work tile the end of one without outputs is warmed up (consume), in the slot before.
  static constexpr bool warms_code = blocks == 1;
  static constexpr int warm_code_slot = work_tile_slots - 1;

  alignas(128) unsigned char raw[raw_stages][strips * raw_strip_bytes<strips>];
  alignas(128) unsigned char v[v_stages][v_stage_bytes];
  Exchange<blocks, m_halves> exchange;
  Outputs outputs[work_tile_slots][positions];
  // Bits of the largest |V|, scaled, of a warp: for scales that are a mere guess, and of all.
  unsigned watched[work_tile_slots][producer_warps][scales], largest[work_tile_slots][producer_warps];
  alignas(8) hopper::Barrier raw_full[raw_stages], raw_empty[raw_stages], v_full[v_stages], v_empty[v_stages];
  hopper::Barrier prepared, last_stage;  // a work tile is prepared; the last stage of a work tile is there
  Column columns[work_tile_slots][strips * tile_columns];
  float exact_largest[scales];  // of |x|, for a work tile that is repeated
  unsigned overflow_flags[max_work_tiles / 32];
};

// A position in a ring of a number of slots, in one register.
template <int slots>
struct Ring {
  int position = 0;  // in two turns

  __device__ __forceinline__ int slot() const { return position < slots ? position : position - slots; }
  __device__ __forceinline__ unsigned parity() const { return position < slots ? 0 : 1; }
  __device__ __forceinline__ void advance() { position = position == 2 * slots - 1 ? 0 : position + 1; }
};
// Work tiles have slots of their own; the barriers of work tiles are one phase each.
template <Variant variant>
struct WorkTileRing {
  static_assert(Shared<variant>::work_tile_slots % 2 == 0);
  int slot = 0;

  __device__ __forceinline__ unsigned parity() const { return slot & 1; }
  __device__ __forceinline__ void advance() { slot = slot == Shared<variant>::work_tile_slots - 1 ? 0 : slot + 1; }
};
template <Variant variant>
struct PrepareState {
  typename Shared<variant>::RawRing raw;
  WorkTileRing<variant> work_tiles;
};
template <Variant variant>
struct TransformState {
  typename Shared<variant>::RawRing raw;
  Ring<Shared<variant>::v_stages> v;
  WorkTileRing<variant> work_tiles;
};

// What is not shared memory is L1 cache, and U passes through it: with 196 or 228 KB shared, the 60 or 28 KB left for
// loads under way seem to bound the rate of U (docs/log/17-fused-fp32-1.md).
constexpr int max_shared_bytes = 195 * 1024;
// Where V is kept for another turn, that is worth more.
constexpr int max_kept_bytes = 227 * 1024;

// What both kernels of this folder are told. T: of x and y.
template <typename T>
struct ParamsOf {
  const T* x;            // [N, C, H, W] by the strides below
  const uint4* u;        // plan.h
  const int* exponents;  // [K]
  T* y;                  // [N, K, P, Q], NCHW or NHWC
  Epilogue<T> epilogue;
  WaitReport* report;
  std::int64_t x_image, x_row, x_column, x_channel;  // strides of x, in elements
  std::int64_t y_image, y_row, y_column, y_channel;  // of y and residual
  int n, c, h, w, k, p, q, pad_h, pad_w;
  int stages;
  unsigned first_work_tile, end_work_tile;     // of this launch
  FastDivide by_filters, by_columns, by_rows;  // by_rows: class fp32 by the pitch of images
};
using Params = ParamsOf<float>;

// x for the tensor copies of class fp32, by the number of tiles less 1: all rows of a strip, or two.
struct Maps {
  CUtensorMap whole[tile_columns], pair[tile_columns];
};

// A piece of the output: 64 filters x `rows` x `width` of an image. Filters run fastest, so that neighbours share their
// input in the L2 cache.
struct alignas(16) WorkTile {
  int n, p0, q0, filter_block;
};

template <int rows, int width, typename T>
__device__ __forceinline__ WorkTile find_work_tile(const ParamsOf<T>& params, unsigned work_tile) {
  WorkTile result;
  result.filter_block = static_cast<int>(params.by_filters.divmod(work_tile));
  result.q0 = static_cast<int>(params.by_columns.divmod(work_tile)) * width;
  result.p0 = static_cast<int>(params.by_rows.divmod(work_tile)) * rows;
  result.n = static_cast<int>(work_tile);
  return result;
}

// The tiles of a strip of class fp32 that lie in one block of rows. Rows of the strip before `boundary` are from `row`
// on of image n, the others from the top of the next image.
template <int strips>
struct RowSegment {
  static constexpr int input_rows = strip_input_rows(strips);
  int n, row, boundary, q0;

  __device__ __forceinline__ int boundary_within() const { return min(boundary, input_rows); }
  __device__ __forceinline__ bool crosses(int r) const { return r >= boundary; }
  __device__ __forceinline__ int image_of(int r) const { return crosses(r) ? n + 1 : n; }
  __device__ __forceinline__ int row_of(int r) const { return crosses(r) ? r - boundary : row + r; }
};
struct Place {
  unsigned block;    // of rows
  int first, tiles;  // column of the first tile; tiles in that block, the others are the first ones of the next
};

// strip: of the work tile.
template <int strips>
__device__ __forceinline__ Place find_place(const Params& params, unsigned work_tile, int strip) {
  params.by_filters.divmod(work_tile);
  unsigned block = (work_tile * strips + strip) * tile_columns;
  const int first = static_cast<int>(params.by_columns.divmod(block));
  return {block, first, min(tile_columns, static_cast<int>(params.by_columns.divisor()) - first)};
}
template <int strips>
__device__ __forceinline__ RowSegment<strips> find_row_segment(const Params& params, const Place& place, bool second) {
  unsigned image = (place.block + (second ? 1 : 0)) * strip_rows(strips);
  const int pitch = static_cast<int>(params.by_rows.divisor()), row = static_cast<int>(params.by_rows.divmod(image));
  const bool crosses = strips == 1 && pitch % tile_rows != 0;  // stacked images
  return {static_cast<int>(image), row, crosses ? pitch - row : strip_input_rows(strips),
          second ? 0 : place.first * tile_outputs};
}

// The work tiles of a block, or of a cluster of `blocks`, in two passes: all of them with guessed scales, then those
// that need exact ones. Every role walks the same way.
template <typename Params, int blocks = 1>
struct WorkTileScheduler {
  const Params& params;
  const unsigned* overflow_flags;  // null: the first pass
  unsigned ordinal = ~0u;

  // Whether there is a next work tile. Then number() is its number.
  __device__ __forceinline__ bool next() {
#pragma unroll 1
    for (;;) {
      ++ordinal;
      if (number() >= params.end_work_tile) return false;
      if (overflow_flags == nullptr || (overflow_flags[ordinal / 32] >> ordinal % 32 & 1) != 0) return true;
    }
  }
  __device__ __forceinline__ unsigned number() const {
    return params.first_work_tile + blockIdx.x / blocks + ordinal * (gridDim.x / blocks);
  }
};

// Whether any work tile is marked, asked by a whole warp.
__device__ __forceinline__ bool any_overflow(const unsigned (&overflow_flags)[max_work_tiles / 32]) {
  static_assert(max_work_tiles == 2 * 32 * 32);
  const int lane = threadIdx.x % 32;
  return __any_sync(~0u, (overflow_flags[lane] | overflow_flags[lane + 32]) != 0);
}

// Of the 64 filters that a warpgroup multiplies by, the first of a warp's 16. The same in all lanes.
__device__ __forceinline__ int first_filter_of_warp() {
  return __shfl_sync(~0u, static_cast<int>(threadIdx.x) % 128 / 32, 0) * 16;
}

// Bounded, like every wait, and in one asm block for the reason given at hopper::wait_in_place().
template <int role>
__device__ __forceinline__ void wait(std::uint32_t barrier, unsigned parity, WaitReport* report) {
  hopper::wait_in_place<kernel_winograd_fused, role>(barrier, parity, report);
}

// Barriers of warps: 0 is the whole block's.
constexpr int producer_barrier = 1, consumer_barrier = 2, pass_barrier = 3;
// Of a warp and its like in the other warpgroup; of a warpgroup.
constexpr int pair_barrier = 4, group_barrier = 8;
constexpr int preparing_barrier = 10;
template <int barrier, int threads>
__device__ __forceinline__ void synchronise() {
  asm volatile("bar.sync %0, %1;" ::"n"(barrier), "n"(threads) : "memory");
}

}  // namespace fastconv::algos::winograd_fused
