// What lives where: kernel parameters, a block's shared memory, its barriers, its work.
#pragma once

#include <cstdint>

#include "algos/winograd_fused/config.h"
#include "device/epilogue.h"
#include "device/fast_divide.h"
#include "device/hopper.cuh"
#include "device/power_of_two.h"

namespace fastconv::algos::winograd_fused {

// Two warpgroups multiply (three frequencies each), one transforms the input.
constexpr int consumer_groups = 2, producer_warps = 4;
constexpr int consumer_threads = consumer_groups * 128, producer_threads = producer_warps * 32;
constexpr int block_threads = consumer_threads + producer_threads;
constexpr int consumer_registers = 216, producer_registers = 72;
// What a block starts with, and shares out again: more than that, and setmaxnreg would wait forever.
constexpr int launch_registers = 65536 / block_threads / 8 * 8;
static_assert(consumer_threads * consumer_registers + producer_threads * producer_registers <=
              launch_registers * block_threads);

constexpr int group_frequencies = frequencies / consumer_groups;
// The columns of a product are positions: tile columns fastest, then rows. A filter row further is tile_columns positions
// further, wherever a row ends: a constant in wgmma's descriptor, since its core matrices lie one behind the other. The
// last position of an item is none. An instruction takes half of them.
constexpr int products = 64, positions = tile_rows * tile_columns, half_groups = products / 2 / 8;
constexpr int stored_positions = input_rows * tile_columns;
constexpr int read_positions = products + (taps - 1) * tile_columns;
static_assert(positions < products && stored_positions <= read_positions);

// Raw input, two stages: [row][column][32 channels] float32, rows of 128 bytes in the swizzle of that width, which spreads
// neighbouring tiles over the banks. A row's pitch is a multiple of 1024 bytes, so that a tile's parity says how its
// columns are swizzled.
constexpr int raw_channels = 2 * channels, raw_columns = tile_width + 2, raw_column_bytes = raw_channels * 4;
constexpr int raw_row_bytes = 4096, raw_slots = 2, raw_slot_bytes = input_rows * raw_row_bytes;
constexpr int raw_copied_bytes = input_rows * raw_columns * raw_column_bytes;
static_assert(raw_row_bytes % 1024 == 0 && raw_columns * raw_column_bytes <= raw_row_bytes);

// V, a stage: [f][channel half][hi, lo] planes of one position after the other, 8 channels (16 bytes) each. The halves are
// an odd multiple of 64 bytes apart: the producers' stores of 4 positions x 16 channels then meet every bank once.
constexpr int v_plane_bytes = read_positions * 16, v_half_bytes = 2 * v_plane_bytes;
constexpr int v_frequency_bytes = 2 * v_half_bytes, v_stage_bytes = frequencies * v_frequency_bytes, v_stages = 2;
static_assert(v_half_bytes % 128 == 64 && v_stage_bytes % 128 == 0);

// Items of a block and launch: a bit each says which must be repeated.
constexpr int most_items = 4096;
// Items whose outputs and largest values are remembered: the producers are never further ahead than their stages allow.
constexpr int item_slots = v_stages + 1;

// Tile columns of an item that share a scale: those of its first and of its second strip.
constexpr int scales = 2 * tile_columns;

// Where the outputs of a position go, and what undoes its input's scale: two factors, since 2^126 times a filter's has
// none.
struct alignas(16) Outputs {
  float first, second;
  std::int64_t packed;  // 8 times the element of y of the first output and filter 0, plus the number of outputs

  __device__ __forceinline__ std::int64_t index() const { return packed >> 3; }
  __device__ __forceinline__ int count() const { return static_cast<int>(packed) & 7; }
};

struct Shared {
  alignas(1024) unsigned char raw[raw_slots][raw_slot_bytes];
  alignas(128) unsigned char v[v_stages][v_stage_bytes];
  // At the end of an item each warpgroup gives the other its three sums of half of the outputs, 8 positions at a time.
  // Or (pairs.cuh) one sum in six, 16 positions at a time.
  union {
    alignas(128) float4 exchange[consumer_groups][group_frequencies][128];
    float4 pairs[consumer_groups][2][128];
  };
  Outputs outputs[item_slots][products];
  // Bits of the largest |V|, scaled, of each warp's positions: for scales that are a mere guess, and in the end of all.
  unsigned largest[item_slots][producer_warps][16];
  alignas(8) std::uint64_t raw_full[raw_slots], raw_empty[raw_slots], v_full[v_stages], v_empty[v_stages];
  float exact_largest[scales];  // of |x|, for an item that is repeated
  unsigned repeat[most_items / 32];
};

// What is not shared memory is L1 cache, and U passes through it: with 196 or 228 KB shared, the 60 or 28 KB left for
// loads under way seem to bound the rate of U (docs/performance.md).
constexpr int most_shared_bytes = 163 * 1024;
static_assert(sizeof(Shared) <= most_shared_bytes);

// What both kernels of this folder are told. T: of x and y.
template <typename T>
struct ParamsOf {
  const T* x;            // [N, C, H, W] by the strides below
  const uint4* u;        // config.h
  const int* exponents;  // [K]
  T* y;                  // [N, K, P, Q], NCHW or NHWC
  Epilogue<T> epilogue;
  WaitReport* report;
  std::int64_t x_image, x_row, x_column, x_channel;  // strides of x, in elements
  std::int64_t y_image, y_row, y_column, y_channel;  // of y and residual
  int n, c, h, w, k, p, q, pad_h, pad_w;
  int stages;
  unsigned first_item, end_item;  // of this launch
  FastDivide by_filters, by_columns, by_rows;  // by_rows: class fp32 by the pitch of strips
};
using Params = ParamsOf<float>;

// A piece of the output: 64 filters x `rows` x `width` of an image. Filters run fastest, so that neighbours share their
// input in the L2 cache.
struct alignas(16) Item {
  int n, p0, q0, filter_block;
};

template <int rows, int width, typename T>
__device__ __forceinline__ Item find_item(const ParamsOf<T>& params, unsigned item) {
  Item result;
  result.filter_block = static_cast<int>(params.by_filters.peel(item));
  result.q0 = static_cast<int>(params.by_columns.peel(item)) * width;
  result.p0 = static_cast<int>(params.by_rows.peel(item)) * rows;
  result.n = static_cast<int>(item);
  return result;
}

// An item of class fp32: 9 rows of the canvas, those before `boundary` of one strip, the others from the top of the next.
struct Place {
  int row, boundary;  // of the first row, in its strip; of the item's rows
  int n[2], q0[2];    // of the two strips
};

__device__ __forceinline__ Place find_place(const Params& params, unsigned item) {
  params.by_filters.peel(item);
  unsigned strip = item * tile_rows;
  Place place;
  place.row = static_cast<int>(params.by_rows.peel(strip));
  place.boundary = static_cast<int>(params.by_rows.divisor()) - place.row;
  const int column = static_cast<int>(params.by_columns.peel(strip));
  const bool last = column + 1 == static_cast<int>(params.by_columns.divisor());
  place.n[0] = static_cast<int>(strip), place.q0[0] = column * tile_width;
  place.n[1] = place.n[0] + (last ? 1 : 0), place.q0[1] = last ? 0 : place.q0[0] + tile_width;
  return place;
}

// The items of a block, in two passes: all of them with guessed scales, then those that need exact ones. Every role
// walks the same way.
template <typename Params>
struct Walk {
  const Params& params;
  const unsigned* repeat;  // null: the first pass
  unsigned ordinal = ~0u;

  // Whether there is a next item. Then number() is its number.
  __device__ __forceinline__ bool next() {
#pragma unroll 1
    for (;;) {
      ++ordinal;
      if (number() >= params.end_item) return false;
      if (repeat == nullptr || (repeat[ordinal / 32] >> ordinal % 32 & 1) != 0) return true;
    }
  }
  __device__ __forceinline__ unsigned number() const { return params.first_item + blockIdx.x + ordinal * gridDim.x; }
};

// Until the phase of that parity has ended. Bounded: a wait that expires reports itself (device/wait_report.h) and
// stops the kernel. One asm block: with the loop and the trap in C++, ptxas 13.0 gives the consumers 180 registers
// instead of those of setmaxnreg, and spills.
__device__ __forceinline__ void wait_bounded(std::uint32_t barrier, unsigned parity, WaitReport* report, int role) {
  static_assert(sizeof(WaitReport) == 16);
  asm volatile(
      "{\n.reg .pred p;\n.reg .u32 tries, block;\nmov.u32 tries, 0;\n"
      "again:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra done;\n"
      "add.u32 tries, tries, 1;\nsetp.lt.u32 p, tries, 1048576;\n@p bra again;\n"
      "setp.eq.u64 p, %2, 0;\n@p bra stop;\n"
      "atom.sys.cas.b32 tries, [%2], 0, 1;\nsetp.ne.u32 p, tries, 0;\n@p bra stop;\n"
      "mov.u32 block, %%ctaid.x;\nst.volatile.u32 [%2 + 4], %4;\nst.volatile.u32 [%2 + 8], %3;\n"
      "st.volatile.u32 [%2 + 12], block;\nmembar.sys;\n"
      "stop:\ntrap;\ndone:\n}" ::"r"(barrier),
      "r"(parity), "l"(report), "r"(role), "n"(static_cast<int>(kernel_winograd_fused))
      : "memory");
}

// Barriers of warps: 0 is the whole block's.
constexpr int producer_barrier = 1, consumer_barrier = 2, pass_barrier = 3;
// Of a warp and its like in the other warpgroup; of a warpgroup.
constexpr int pair_barrier = 4, group_barrier = 8;
template <int barrier, int threads>
__device__ __forceinline__ void synchronise() {
  asm volatile("bar.sync %0, %1;" ::"n"(barrier), "n"(threads) : "memory");
}

}  // namespace fastconv::algos::winograd_fused
