// The Hopper kernel: its parameters, its shared memory, and where the pixels of a tile are.
#pragma once

#include <cuda.h>

#include "algos/implicit_gemm/persistent/plan.h"
#include "core/fast_divide.h"
#include "device/epilogue.h"
#include "device/mma.cuh"
#include "device/numeric.h"
#include "device/shuffled_places.h"
#include "hopper/pipeline.cuh"
#include "hopper/ptx/mbarrier.cuh"
#include "hopper/ptx/tma.cuh"
#include "hopper/ptx/warp.cuh"
#include "hopper/ptx/wgmma.cuh"

namespace fastconv::algos::implicit_gemm::persistent {

template <typename T>
struct Params {
  const unsigned char* weight;  // packed (plan.h)
  const int* exponents;         // [filter tile][filter_tile], or null
  const int* image_exponents;   // converted: [N], of the scales of x
  const int* condition;         // [condition_count] or null: nothing is done unless one is not 0
  int condition_count, images;
  T* y;            // [N, K, P, Q] by the strides below
  float* partial;  // [split_k] tensors like y, if partial sums go there; else null: the blocks of a cluster add them
  Epilogue<T> epilogue;
  WaitReport* report;
  std::int64_t y_image, y_row, y_pixel, y_filter, y_numel;
  ShuffledPlaces shuffled;
  int n, p, q, k;  // a matrix product: 1, 1, N H W
  int tile_n, tile_p, tile_q;
  int box_h, box_w;
  int input_slots, stage_bytes, box_bytes;
  int stages, stage_taps, taps, split_k, stages_per_split;
  std::int64_t packed_tile_bytes;
  int packed_bytes, n_splits;  // of a channel block and tap of a packed filter tile; blocks that share such a tile
  bool flat;                   // Plan::flat
  bool in_a_row;               // flat, or a matrix product: all pixels of y are one row
  int rows, halo_rows;         // flat: of an image of y; of input beyond those of y
  int row_bytes;               // flat: of a row of a stage
  FastDivide by_row, by_rows;
  FastDivide by_k;
  int s, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
  bool along_filters;   // of y: NHWC, else NCHW
  bool vectors;         // NHWC: 16 bytes of filters of y and of the residual are one aligned access
  bool quads;           // NCHW: four neighbouring pixels are
  bool stores_by_tma;   // y is written by copies, not by the warps
  int residual_stages;  // those that bring the residual of a tile, or 0: its first or its last (residual_first)
  int staging_bytes;
  bool flat_nchw;  // a matrix product into NCHW: pixels are numbered through all images
  FastDivide by_image;
  unsigned work_tiles, whole;  // all; those that are whole tiles, before the splits of tiles
  FastDivide by_split_k, by_n_splits, by_filter_tiles, by_tiles_q, by_tiles_p, by_tiles_n, by_tile_q, by_tile_p,
      by_taps, by_s;
  // An affine input: [C], and the range of its activation.
  const float *scale, *shift;
  float floor, cap;
  int c;
};

enum class IssueGroups { row_blocks, n_halves, steps };

// A kernel instantiation. gated: its ends are the activations that are is_gated(), and there is no residual.
template <typename T_, Mode mode_, int filter_tile_, int row_blocks_, Source source_, bool gated_ = false>
struct Shape {
  using T = T_;
  using Half = std::conditional_t<std::is_same_v<T, bfloat16_t>, bfloat16_t, half_t>;
  static constexpr Mode mode = mode_;
  static constexpr bool split = mode == Mode::split;  // two limbs, three products, totals
  static constexpr bool scaled = std::is_same_v<T, float>;
  static constexpr bool affine = source_ == Source::affine, gated = gated_;
  static constexpr bool raw = source_ == Source::raw || (affine && scaled), transforms = source_ == Source::transformed;
  static constexpr bool one_tap = raw || affine;  // a stage is one, and a tile not flat
  static constexpr bool converted = source_ == Source::converted, reads_fp16 = converted || !scaled;
  static constexpr bool retries = scaled && !converted;                 // tiles whose scale does not fit
  static constexpr bool conditional = retries && mode == Mode::single;  // it may be a fallback (Plan::fallback)
  static_assert((affine || scaled == (source_ != Source::fp16)) && (!converted || mode == Mode::single));
  static constexpr int filter_tile = filter_tile_, row_blocks = row_blocks_;
  static constexpr int pixel_tile = 64 * multiply_warpgroups * row_blocks;
  static constexpr int row_bytes = mode == Mode::single ? 64 : 128;
  static constexpr bool paired = mode == Mode::single;  // packed as pairs of channel blocks; converted: one step
  static constexpr int limb_bytes = filter_tile * row_bytes;
  static constexpr int filter_bytes = limb_bytes * (converted ? 2 : 1);
  static constexpr int step_channels = input_row_bytes / (reads_fp16 ? 2 : 4);
  static constexpr int channels_bytes = affine ? step_channels * 8 : 0;  // scales and shifts of a stage
  static constexpr int sums = filter_tile / 2;                           // registers of a thread for 64 pixels
  // Products of 16 along a step's channels.
  static constexpr int depth = reads_fp16 ? 4 : 2;
  static constexpr int slots = filter_slots(filter_bytes, raw);
  // Whether copies can bring sums to y (Plan::stores_by_tma).
  static constexpr bool stores_by_tma =
      !transforms && filter_tile * sizeof(T) % box_bytes == 0 && pixel_tile * filter_tile * sizeof(T) <= max_staging;

  // How the work of a warpgroup is cut into the groups that alternate on the tensor cores (Multiplier).
  static constexpr IssueGroups issue_groups = row_blocks == 2              ? IssueGroups::row_blocks
                                              : split && filter_tile >= 96 ? IssueGroups::n_halves
                                                                           : IssueGroups::steps;
  static constexpr int groups_per_step = issue_groups == IssueGroups::steps ? 1 : 2;
  static constexpr int group_sums = issue_groups == IssueGroups::n_halves ? sums / 2 : sums;

  // Warpgroups: the multiplying ones, the splitting one, the loading one; and the registers that a thread of each asks
  // for: 65536 in all, or what the block starts with, 168 a thread.
  static constexpr int warpgroups = multiply_warpgroups + (transforms ? 2 : 1), threads = 128 * warpgroups;
  static constexpr int multiply_registers = transforms ? 216 : 232, transform_registers = 40;
  static constexpr int load_registers = 40;
  static_assert(multiply_warpgroups * multiply_registers + (transforms ? transform_registers : 0) + load_registers <=
                65536 / threads / 8 * 8 * warpgroups);  // more, and setmaxnreg waits forever
};

// Filters of a box of y; a stage of the residual is one.
template <typename T>
constexpr int box_filters = box_bytes / static_cast<int>(sizeof(T));
// Sums of half types start with the residual, and the epilogue knows nothing of it. Those of float32 have scales that
// are not known then: class fp32 adds it at the end, box by box, TF32 where they lie (finish_in_place).
template <typename T>
constexpr bool residual_first = !std::is_same_v<T, float>;

// Of y, 16 bytes: the filters that a lane stores at once. wgmma gives lane l columns 2t and 2t + 1 (t = l % 4) of each
// 8; the order of columns is free, so that we let them mean neighbours. This is the column of filter `filter` of a
// tile.
template <typename T>
constexpr int vec_of = 16 / sizeof(T);
template <typename T>
constexpr __host__ __device__ int column_of(int filter) {
  constexpr int vec = vec_of<T>, group = 4 * vec;
  const int within = filter % group;
  return filter / group * group + within % vec / 2 * 8 + within / vec * 2 + within % 2;
}

// The pixel of the tile that is the lane's row i: wgmma's rows 16w + l/4 and 8 behind it, of each 64.
template <typename S>
__device__ __forceinline__ unsigned pixel_of_lane(int i) {
  return threadIdx.x / 128 * 64 * S::row_blocks + i / 2 * 64 + threadIdx.x % 128 / 32 * 16 + i % 2 * 8 +
         threadIdx.x % 32 / 4;
}

// In a box, what a lane stores at once of its row `row` (pixel_of_lane) and the filters from `column` of the tile.
template <typename S>
__device__ __forceinline__ std::uint32_t place_in_box(std::uint32_t box, int lane, int column, int row) {
  using T = typename S::T;
  const int piece = column % box_filters<T> / vec_of<T> + lane % 4;
  return box + pixel_of_lane<S>(row) * box_bytes + hopper::swizzle_128(lane / 4, piece) * 16;
}

constexpr int max_flags = 8192;  // tiles that a block has overflow flags for, before it must retry

// A warp's part of shared memory, through which 16 pixels and some filters pass on their way from fragments to rows of
// y.
struct OutputStage {
  static constexpr int rows = 16, pitch = 40;  // the pad spreads the fragments of four rows over all banks
  float values[rows][pitch];
  std::int64_t index[rows];  // in y, of the pixel's filter 0; -1: there is no such pixel
  int exponent[rows];        // of the pixel's scale
};

struct Control {
  // Of the rings: an input slot is loaded (full), split (ready; float32 only), read (free).
  hopper::Barrier input_full[max_input_slots], input_ready[max_input_slots], input_free[max_input_slots];
  hopper::Barrier filters_full[max_filter_slots], filters_free[max_filter_slots];
  hopper::Barrier flags_written, flags_read;
  hopper::Barrier partials_ready, partials_read;  // of a cluster: sums are in shared memory; have been read
  int exponent[max_input_slots];                  // of the scale of the slot's tile
  float largest[4];                               // of the transforming warps
  unsigned work_tiles;                            // Params::work, or 0 if its condition is not met
  unsigned pad[3];
  unsigned overflow_flags[max_flags / 32];
};

// What a warp's epilogue needs of a tile's filters; it comes during the products, without registers.
template <typename S>
struct FilterData {
  using T = typename S::T;
  alignas(16) int exponent[S::filter_tile];  // of their scales; or, after make_factors(), float bits
  alignas(16) T bias[S::filter_tile + 2];    // zeros if there is none

  __device__ __forceinline__ void fetch(const Params<T>& params, int filter_tile) {
    const int lane = threadIdx.x % 32, first = filter_tile * S::filter_tile;
    __syncwarp();  // the tile before has been read
    if constexpr (S::scaled) {
      for (int k = lane; k < S::filter_tile; k += 32) {
        copy_async<4>(shared_address(exponent + k), params.exponents + first + k, 4);
      }
    }
    if (params.epilogue.bias != nullptr) {
      constexpr int count = 4 / sizeof(T);
      for (int k = lane * count; k < S::filter_tile; k += 32 * count) {
        const int bytes = max(0, min(count, params.k - first - k)) * static_cast<int>(sizeof(T));
        copy_async<4>(shared_address(bias + k), params.epilogue.bias + (bytes > 0 ? first + k : 0), bytes);
      }
    } else {
      for (int k = lane; k < S::filter_tile; k += 32) {
        const bool exists = params.epilogue.bias != nullptr && first + k < params.k;
        bias[k] = exists ? params.epilogue.bias[first + k] : from_float<T>(0.0f);
      }
    }
    commit_copies();
  }
};

// Dynamic shared memory, from a multiple of 1024: input slots, filter slots, staging of the output, the largest values
// of the input slots' pixels (with a splitting warpgroup) or their channels' scales and shifts (of an affine input),
// control, filter data.
template <typename S>
struct Shared {
  std::uint32_t input, filters;
  float* largest;          // [input slot][stage_bytes / 128]
  std::uint32_t channels;  // [input slots + 1][channels_bytes]: affine.cuh
  std::uint32_t staging;   // boxes of y on their way: [box][pixel][128 bytes], swizzled
  Control* control;

  OutputStage* output;         // [warp], where the staging is
  FilterData<S>* filter_data;  // [warp]

  __device__ __forceinline__ Shared(unsigned char* memory, const Params<typename S::T>& params) {
    unsigned char* base = memory + (-shared_address(memory) & 1023);
    const int inputs = params.input_slots * params.stage_bytes;
    input = shared_address(base);
    filters = input + inputs;
    unsigned char* rest = base + inputs + S::slots * S::filter_bytes;
    staging = shared_address(rest);
    output = reinterpret_cast<OutputStage*>(rest);
    rest += params.staging_bytes;
    largest = reinterpret_cast<float*>(rest);
    channels = shared_address(rest);
    control =
        reinterpret_cast<Control*>(rest + (S::transforms ? inputs / 32 : (params.input_slots + 1) * S::channels_bytes));
    filter_data = reinterpret_cast<FilterData<S>*>(control + 1);
    static_assert(1024 + sizeof(Control) + 4 * multiply_warpgroups * sizeof(FilterData<S>) <= shared_overhead);
    static_assert(4 * multiply_warpgroups * sizeof(OutputStage) <= min_staging);
  }
};
static_assert(sizeof(Control) % 16 == 0);

// One tile of the output, or one split of its reduction: whole tiles come first, and splits of one tile side by side.
struct WorkTile {
  int filter_tile, n, p, q;  // first image, row and column of the tile
  int split, first_stage, last_stage, residual_stages;

  template <typename T>
  __device__ __forceinline__ WorkTile(const Params<T>& params, unsigned index) {
    const bool is_split = index >= params.whole;
    split = 0;
    if (is_split) {
      index -= params.whole;
      split = static_cast<int>(params.by_split_k.divmod(index));
      index += params.whole;
    }
    filter_tile = static_cast<int>(params.by_filter_tiles.divmod(index));  // neighbours share the input in the L2 cache
    q = static_cast<int>(params.by_tiles_q.divmod(index)) * params.tile_q;
    p = static_cast<int>(params.by_tiles_p.divmod(index)) * params.tile_p;
    n = static_cast<int>(params.by_tiles_n.divmod(index)) * params.tile_n;
    first_stage = split * params.stages_per_split;
    last_stage = is_split ? min(first_stage + params.stages_per_split, params.stages) : params.stages;
    residual_stages = (residual_first<T> ? split == 0 : !is_split) ? params.residual_stages : 0;
  }
};

}  // namespace fastconv::algos::implicit_gemm::persistent
