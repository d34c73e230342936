// One block: p x q outputs for a few filters, summed over chunks of channels that are staged in shared memory.
#pragma once

#include "algos/direct_tiled/plan.h"
#include "device/epilogue.h"
#include "device/indexing.h"

namespace fastconv::algos::direct_tiled {

// index / divisor for indices into shared memory: at most 2^16 and divisor at most 2^16, so that the rounding of the
// reciprocal (error below divisor / 2^32) never reaches the next integer.
struct SmallDivider {
  unsigned divisor = 1;
  std::uint64_t reciprocal = std::uint64_t{1} << 32;

  SmallDivider() = default;
  explicit SmallDivider(int value)
      : divisor(static_cast<unsigned>(value)), reciprocal(((std::uint64_t{1} << 32) + divisor - 1) / divisor) {}

  __device__ int divide(int index, int& remainder) const {
    const auto quotient = static_cast<int>(static_cast<unsigned>(index) * reciprocal >> 32);
    remainder = index - quotient * static_cast<int>(divisor);
    return quotient;
  }
};

template <typename T>
struct Params {
  const T* x;       // [N, C, H, W]
  const T* weight;  // [K, C/G, R, S]
  T* y;             // [N, K, P, Q]
  Strides4 in, out;
  Epilogue<T> epilogue;
  Config config;
  SmallDivider by_plane, by_patch_w, by_slots, by_channels;  // patch_h * patch_w; ...; group_tile * channels; channels
  std::int64_t h, w, p, q, groups, c_per_group, k_per_group, pad_h, pad_w;
  int r, s, stride_h, stride_w, dilation_h, dilation_w;
  bool nhwc;
};

// What a block computes: outputs from (n, p0, q0), filters from k0 of each of the groups from g0.
struct Position {
  std::int64_t n, g0, k0, p0, q0;

  // Filters run fastest: blocks in flight together read the same patch.
  template <typename T>
  __device__ Position(std::int64_t block, const Params<T>& params, const Tile& tile) {
    const Config& config = params.config;
    k0 = block % config.k_tiles * config.k_tile, block /= config.k_tiles;
    q0 = block % config.q_tiles * tile.q, block /= config.q_tiles;
    p0 = block % config.p_tiles * tile.p, block /= config.p_tiles;
    g0 = block % config.group_tiles * config.group_tile, n = block / config.group_tiles;
  }
};

// Where the threads along the filters stand: `k_thread` of the tile serves filters first .. first + k_per_thread of
// its group (counted in the group's k_tile).
struct FilterSlot {
  int group, first;
  bool used;

  __device__ FilterSlot(int k_thread, const Config& config, int k_per_thread)
      : group(k_thread / config.threads_per_group),
        first(k_thread % config.threads_per_group * k_per_thread),
        used(group < config.group_tile) {
    if (!used) group = 0;  // computes in vain, from memory that is there
  }
};

// patch: [group_tile, channels, patch_h, patch_w], a channel every `plane` floats; padding becomes zeros.
// Consecutive threads read consecutive elements: along W (NCHW) or along C (NHWC).
template <typename T>
__device__ void load_patch(const Params<T>& params, const Position& at, std::int64_t c0, float* patch) {
  const Config& config = params.config;
  const int area = config.patch_h * config.patch_w, slots = config.group_tile * config.channels;
  const std::int64_t h0 = at.p0 * params.stride_h - params.pad_h, w0 = at.q0 * params.stride_w - params.pad_w;
  for (int index = threadIdx.x; index < slots * area; index += threads) {
    int slot, pixel, channel, column;
    if (params.nhwc) {
      pixel = params.by_slots.divide(index, slot);
    } else {
      slot = params.by_plane.divide(index, pixel);
    }
    const int group = params.by_channels.divide(slot, channel);
    const int row = params.by_patch_w.divide(pixel, column);
    const std::int64_t g = at.g0 + group, c = c0 + channel, h = h0 + row, w = w0 + column;
    const bool inside = g < params.groups && c < params.c_per_group && h >= 0 && h < params.h && w >= 0 && w < params.w;
    patch[slot * config.plane + pixel] =
        inside ? to_float(params.x[params.in(at.n, g * params.c_per_group + c, h, w)]) : 0.0f;
  }
}

// filters: [channels * R * S, filter_pitch]. A warp reads one filter's chunk, which is contiguous, and transposes it.
template <typename T, int tile_index>
__device__ void load_filters(const Params<T>& params, const Position& at, std::int64_t c0, int taps, float* filters) {
  constexpr Tile tile = tiles[tile_index];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int filter = warp; filter < tile.filters(); filter += threads / 32) {
    const FilterSlot slot(filter / tile.k_per_thread, params.config, tile.k_per_thread);
    const std::int64_t g = at.g0 + slot.group, k = at.k0 + slot.first + filter % tile.k_per_thread;
    const bool inside = slot.used && g < params.groups && k < params.k_per_group;
    const std::int64_t offset = ((g * params.k_per_group + k) * params.c_per_group + c0) * params.r * params.s;
    for (int t = lane; t < taps; t += 32) {
      filters[t * tile.filter_pitch() + filter] = inside ? to_float(params.weight[offset + t]) : 0.0f;
    }
  }
}

// The filters of one thread at one tap; `source` is 16-byte aligned if there is more than one.
template <int count>
__device__ __forceinline__ void load_row(const float* source, float (&row)[count]) {
  if constexpr (count % 4 == 0) {
#pragma unroll
    for (int j = 0; j < count; j += 4) {
      const float4 four = *reinterpret_cast<const float4*>(source + j);
      row[j] = four.x, row[j + 1] = four.y, row[j + 2] = four.z, row[j + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int j = 0; j < count; ++j) row[j] = source[j];
  }
}

// patch: the first channel of the thread's group; filters: the thread's first; corner: of each output in the patch
template <typename T, int tile_index, int pixels, int count>
__device__ __forceinline__ void multiply_add(const Params<T>& params, int channels, const float* patch,
                                             const float* filters, const int (&corner)[pixels],
                                             float (&sum)[pixels][count]) {
  constexpr Tile tile = tiles[tile_index];
  for (int c = 0; c < channels; ++c, patch += params.config.plane) {
    for (int r = 0; r < params.r; ++r) {
      const float* row = patch + r * params.dilation_h * params.config.patch_w;
      for (int s = 0; s < params.s; ++s, row += params.dilation_w, filters += tile.filter_pitch()) {
        float weight[count];
        load_row(filters, weight);
#pragma unroll
        for (int i = 0; i < pixels; ++i) {
          const float value = row[corner[i]];
#pragma unroll
          for (int j = 0; j < count; ++j) sum[i][j] += value * weight[j];
        }
      }
    }
  }
}

template <typename T, int tile_index>
__global__ void __launch_bounds__(threads, 2) convolve(const __grid_constant__ Params<T> params) {
  constexpr Tile tile = tiles[tile_index];
  constexpr int pixels = tile.pixels_per_thread(), count = tile.k_per_thread;
  extern __shared__ float4 shared[];
  const Config& config = params.config;
  float* filters = reinterpret_cast<float*>(shared);
  float* patch = filters + config.channels * params.r * params.s * tile.filter_pitch();

  // Consecutive threads take consecutive outputs in memory: along Q (NCHW) or along K (NHWC).
  const int k_thread = params.nhwc ? threadIdx.x % tile.k_threads : threadIdx.x / tile.pixel_threads();
  const int pixel_thread = params.nhwc ? threadIdx.x / tile.k_threads : threadIdx.x % tile.pixel_threads();
  const FilterSlot slot(k_thread, config, tile.k_per_thread);
  int corner[pixels];
#pragma unroll
  for (int i = 0; i < pixels; ++i) {
    const int pixel = pixel_thread + i * tile.pixel_threads();
    corner[i] = pixel / tile.q * params.stride_h * config.patch_w + pixel % tile.q * params.stride_w;
  }

  for (std::int64_t block = blockIdx.x; block < config.blocks; block += gridDim.x) {
    const Position at(block, params, tile);
    float total[pixels][count] = {};
    for (std::int64_t c0 = 0; c0 < params.c_per_group; c0 += config.channels) {
      const std::int64_t left = params.c_per_group - c0;
      const int channels = left < config.channels ? static_cast<int>(left) : config.channels;
      load_patch(params, at, c0, patch);
      load_filters<T, tile_index>(params, at, c0, channels * params.r * params.s, filters);
      __syncthreads();
      float sum[pixels][count] = {};  // of the chunk: sums of sums round less than one long chain
      multiply_add<T, tile_index>(params, channels, patch + slot.group * config.channels * config.plane,
                                  filters + k_thread * count, corner, sum);
#pragma unroll
      for (int i = 0; i < pixels; ++i) {
#pragma unroll
        for (int j = 0; j < count; ++j) total[i][j] += sum[i][j];
      }
      __syncthreads();
    }
    const std::int64_t g = at.g0 + slot.group;
    if (!slot.used || g >= params.groups) continue;  // no barrier before the next block's first
#pragma unroll
    for (int i = 0; i < pixels; ++i) {
      const int pixel = pixel_thread + i * tile.pixel_threads();
      const std::int64_t p = at.p0 + pixel / tile.q, q = at.q0 + pixel % tile.q;
      if (p >= params.p || q >= params.q) continue;
#pragma unroll
      for (int j = 0; j < count; ++j) {
        const std::int64_t k = at.k0 + slot.first + j;
        if (k >= params.k_per_group) break;
        const std::int64_t index = params.out(at.n, g * params.k_per_group + k, p, q);
        params.y[index] = params.epilogue(total[i][j], index, g * params.k_per_group + k);
      }
    }
  }
}

}  // namespace fastconv::algos::direct_tiled
