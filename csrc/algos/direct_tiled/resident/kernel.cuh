// A block keeps its filters in shared memory and walks over tiles of outputs; while it computes one, the input patch of
// the next is on its way.
#pragma once

#include "algos/direct_tiled/resident/plan.h"
#include "core/fast_divide.h"
#include "device/epilogue.h"
#include "device/indexing.h"
#include "device/origin.cuh"

namespace fastconv::algos::direct_tiled::resident {

// The elements of a patch in the order of memory: fastest index 0, then 1, then 2, which are column, row, channel or
// channel, column, row. `in` and `staged`: elements and floats from one to the next; that of index 0 in memory is 1.
struct PatchOrder {
  int count;
  FastDivide by_0, by_1;
  int in_1, in_2, staged_0, staged_1, staged_2;
};

template <typename T>
struct Params {
  const T* x;                       // [N, C, H, W]
  const T* weight;                  // [K, C, R, S]
  T* y;                             // [N, K, P, Q]
  std::int64_t image_out;           // elements of y from one image to the next
  std::uint32_t image_in;           // of x
  int in_row, out_k, out_p, out_q;  // elements from one input row, output channel, row, column to the next
  Epilogue<T> epilogue;
  Config config;
  Tile tile;
  PatchOrder patch;
  FastDivide by_p_tiles, by_q_tiles, by_stride_w, by_s, by_terms;  // ...; C * R * S
  Chunk chunks[max_chunks];
  int k, p, q, c, r, s, h, w, pad_h, pad_w, stride_h, stride_w, dilation_h, dilation_w, chunk_count;
  bool nhwc, has_activation;
  bool vector;  // four neighbours of y (and residual) lie in one aligned vector, and either all or none are inside
};

// Where a thread's outputs lie in the tile.
struct Lane {
  int k, p, q;  // its first filter in each half of k_tile; its first row; its first column

  __device__ explicit Lane(const Tile& tile) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, pixel = lane / tile.k_lanes;
    const int k_warps = tile.k_threads / tile.k_lanes;
    k = (warp % k_warps * tile.k_lanes + lane % tile.k_lanes) * quad;
    q = pixel % tile.q_lanes * quad;
    p = (warp / k_warps * (32 / (tile.k_lanes * tile.q_lanes)) + pixel / tile.q_lanes) * rows;
  }
};

// Copies asynchronously where no conversion is needed.
__device__ __forceinline__ void stage(float* to, const float* from, bool inside) {
  const auto address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address), "l"(from), "r"(inside ? 4 : 0)
               : "memory");
}
template <typename T>
__device__ __forceinline__ void stage(float* to, const T* from, bool inside) {
  *to = inside ? to_float(*from) : 0.0f;
}
__device__ __forceinline__ void wait_for_staged() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// patch: [C, patch_h, pitch], padding as zeros. Consecutive threads read consecutive elements.
template <typename T, int stride>
__device__ __forceinline__ void load_patch(const Params<T>& params, const Origin& at, float* patch) {
  const PatchOrder& order = params.patch;
  const int h0 = at.p * params.stride_h - params.pad_h, w0 = at.q * params.stride_w - params.pad_w;
  // Modulo 2^32, like the sums below: elements that exist have smaller numbers.
  const std::uint32_t first =
      static_cast<std::uint32_t>(at.n) * params.image_in + h0 * params.in_row + w0 * (params.nhwc ? order.in_1 : 1);
#pragma unroll 1
  for (int index = threadIdx.x; index < order.count; index += blockDim.x) {
    std::uint32_t index_2 = index;
    const std::uint32_t index_0 = order.by_0.divmod(index_2), index_1 = order.by_1.divmod(index_2);
    const std::uint32_t row = params.nhwc ? index_2 : index_1, column = params.nhwc ? index_1 : index_0;
    const bool inside = h0 + row < static_cast<unsigned>(params.h) && w0 + column < static_cast<unsigned>(params.w);
    const std::uint32_t from = first + index_0 + index_1 * order.in_1 + index_2 * order.in_2;
    std::uint32_t to = index_0 * order.staged_0 + index_1 * order.staged_1 + index_2 * order.staged_2;
    if constexpr (stride != 1) {
      std::uint32_t place = column;  // in its phase
      const std::uint32_t phase = stride == 2 ? place % 2 : params.by_stride_w.divmod(place);
      if constexpr (stride == 2) place /= 2;
      to += phase * params.config.phase_pitch + place - column;
    }
    stage(patch + to, params.x + (inside ? from : 0), inside);
  }
}

// filters: [C, R, S, filter_pitch] and one more row, the bias; half i of a row holds the filters from i * half_filters.
// The taps of a row are in the order of the phases.
template <typename T>
__device__ void load_filters(const Params<T>& params, int k0, float* filters) {
  const int terms = params.c * params.r * params.s, half = params.config.half_filters;
  const bool windows = params.dilation_w == 1;
  const int per_phase = windows ? params.s / params.stride_w : 0, longer = windows ? params.s % params.stride_w : 0;
  const T* weight = params.weight + static_cast<std::int64_t>(k0) * terms;
  for (int index = threadIdx.x; index < params.config.k_tile * terms; index += blockDim.x) {
    std::uint32_t rest = index;
    std::uint32_t line = params.by_terms.divmod(rest);
    std::uint32_t tap = params.by_s.divmod(line);
    const int filter = static_cast<int>(rest);
    if (windows) {
      const std::uint32_t phase = params.by_stride_w.divmod(tap);
      tap += phase * per_phase + min(phase, longer);
    }
    const int column = filter < half ? filter : filter - half + filter_half;
    const bool exists = k0 + filter < params.k;
    stage(filters + (line * params.s + tap) * filter_pitch + column, weight + (exists ? index : 0), exists);
  }
  for (int filter = threadIdx.x; filter < params.config.k_tile; filter += blockDim.x) {
    const int column = filter < half ? filter : filter - half + filter_half;
    filters[terms * filter_pitch + column] = k0 + filter < params.k ? params.epilogue.bias_of(k0 + filter) : 0.0f;
  }
}

using Sums = float[rows][quad][filter_quads][quad];  // output row, output column, half of the filters, filter

__device__ __forceinline__ void load_quad(const float* from, float* to) {
  const float4 four = *reinterpret_cast<const float4*>(from);
  to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
}

// `taps` neighbouring taps. x: the first one's input for the thread's first output, 16-byte aligned or not; filters:
// its filters.
template <int taps, bool aligned>
__device__ __forceinline__ void multiply_add_window(const float* x, int next_row, const float* filters, Sums& sum) {
  constexpr int width = quad - 1 + taps;
  float window[rows][width];
#pragma unroll
  for (int row = 0; row < rows; ++row, x += next_row) {
    if constexpr (aligned) {
      load_quad(x, window[row]);
      if constexpr (width == 5) window[row][4] = x[4];
      if constexpr (width == 6 || width == 7) {
        const float2 two = *reinterpret_cast<const float2*>(x + 4);
        window[row][4] = two.x, window[row][5] = two.y;
      }
      if constexpr (width == 7) window[row][6] = x[6];
    } else {
#pragma unroll
      for (int i = 0; i < width; ++i) window[row][i] = x[i];
    }
  }
#pragma unroll
  for (int tap = 0; tap < taps; ++tap, filters += filter_pitch) {
    float weight[filter_quads][quad];
#pragma unroll
    for (int half = 0; half < filter_quads; ++half) load_quad(filters + half * filter_half, weight[half]);
#pragma unroll
    for (int row = 0; row < rows; ++row) {
#pragma unroll
      for (int j = 0; j < quad; ++j) {
#pragma unroll
        for (int half = 0; half < filter_quads; ++half) {
#pragma unroll
          for (int i = 0; i < quad; ++i) sum[row][j][half][i] += window[row][tap + j] * weight[half][i];
        }
      }
    }
  }
}

template <int taps>
__device__ __forceinline__ void multiply_add_chunk(const float* x, int next_row, const float*& filters, Sums& sum) {
  multiply_add_window<taps, true>(x, next_row, filters, sum);
  filters += taps * filter_pitch;
}

// One row of taps. line: the row of the patch at the thread's first column.
template <typename T, int s, int stride>
__device__ __forceinline__ void multiply_add_line(const Params<T>& params, const float* line, int next_row,
                                                  const float*& filters, Sums& sum) {
  if constexpr (s != 0) {
#pragma unroll
    for (int phase = 0; phase < stride; ++phase, line += params.config.phase_pitch) {
      constexpr int longest = (s + stride - 1) / stride;
      static_assert(longest <= window_taps && longest >= 2);
      if (phase <= (s - 1) % stride) {
        multiply_add_chunk<longest>(line, next_row, filters, sum);
      } else {
        multiply_add_chunk<longest - 1>(line, next_row, filters, sum);
      }
    }
  } else {
#pragma unroll 1
    for (int i = 0; i < params.chunk_count; ++i) {
      const float* x = line + params.chunks[i].offset;
      switch (params.chunks[i].taps) {
        case 4: multiply_add_chunk<4>(x, next_row, filters, sum); break;
        case 3: multiply_add_chunk<3>(x, next_row, filters, sum); break;
        case 2: multiply_add_chunk<2>(x, next_row, filters, sum); break;
        case 1: multiply_add_chunk<1>(x, next_row, filters, sum); break;
        default: multiply_add_window<1, false>(x, next_row, filters, sum); filters += filter_pitch;
      }
    }
  }
}

// patch: at the thread's first output; filters: at the thread's first filter. fixed_r, s and stride (along W) are the
// problem's, or 0 in the kernel for all the others.
template <typename T, int fixed_r, int s, int stride>
__device__ __forceinline__ void multiply_add(const Params<T>& params, const float* patch, const float* filters,
                                             Sums& sum) {
  const int next_row = params.stride_h * params.config.pitch, next_tap = params.dilation_h * params.config.pitch;
#pragma unroll 1
  for (int c = 0; c < params.c; ++c, patch += params.config.plane) {
    const float* line = patch;
#pragma unroll(fixed_r == 3 ? 3 : 1)
    for (int r = 0; r < (fixed_r == 0 ? params.r : fixed_r); ++r, line += next_tap) {
      multiply_add_line<T, s, stride>(params, line, next_row, filters, sum);
    }
  }
}

// Calls visit(offset, count, four sums by reference) for every four outputs that are neighbours in memory: `offset` of
// the first from the thread's first output, `count` of those that exist.
template <typename T, typename Visit>
__device__ __forceinline__ void for_each_quad(const Params<T>& params, int rows_left, int columns_left,
                                              int filters_left, Sums& sum, const Visit& visit) {
  const int half_filters = params.config.half_filters;
#pragma unroll
  for (int row = 0; row < rows; ++row) {
    if (row >= rows_left) break;
    if (params.nhwc) {
#pragma unroll
      for (int j = 0; j < quad; ++j) {
        if (j >= columns_left) break;
#pragma unroll
        for (int half = 0; half < filter_quads; ++half) {
          float (&four)[quad] = sum[row][j][half];
          visit(row * params.out_p + j * params.out_q + half * half_filters, filters_left - half * half_filters,
                four[0], four[1], four[2], four[3]);
        }
      }
    } else {
#pragma unroll
      for (int half = 0; half < filter_quads; ++half) {
#pragma unroll
        for (int i = 0; i < quad; ++i) {
          const int filter = half * half_filters + i;
          if (filter >= filters_left) break;
          float (&four)[quad][filter_quads][quad] = sum[row];
          visit(row * params.out_p + filter * params.out_k, columns_left, four[0][half][i], four[1][half][i],
                four[2][half][i], four[3][half][i]);
        }
      }
    }
  }
}

template <typename T>
struct alignas(quad * sizeof(T)) Vector {
  T of[quad];
};

template <typename T>
__device__ __forceinline__ void finish(const Params<T>& params, const Origin& at, int k, const Lane& lane,
                                       const float* bias, Sums& sum) {
  if (params.epilogue.bias != nullptr) {
    float weight[filter_quads][quad];
#pragma unroll
    for (int half = 0; half < filter_quads; ++half) {
      load_quad(bias + half * filter_half, weight[half]);
#pragma unroll
      for (int i = 0; i < quad; ++i) {
#pragma unroll
        for (int pixel = 0; pixel < rows * quad; ++pixel) sum[pixel / quad][pixel % quad][half][i] += weight[half][i];
      }
    }
  }
  const int rows_left = params.p - at.p - lane.p, columns_left = params.q - at.q - lane.q;
  const int filters_left = params.k - k;
  if (rows_left <= 0 || columns_left <= 0 || filters_left <= 0) return;
  const std::int64_t first = at.n * params.image_out +
                             ((at.p + lane.p) * params.out_p + (at.q + lane.q) * params.out_q) +
                             static_cast<std::int64_t>(k) * params.out_k;
  const auto add_residual = [&] {
    const T* residual = params.epilogue.residual + first;
    for_each_quad(params, rows_left, columns_left, filters_left, sum,
                  [&](int offset, int count, float& a, float& b, float& c, float& d) {
                    const T* from = residual + offset;
                    if (params.vector) {
                      if (count <= 0) return;
                      const Vector<T> four = *reinterpret_cast<const Vector<T>*>(from);
                      a += to_float(four.of[0]), b += to_float(four.of[1]);
                      c += to_float(four.of[2]), d += to_float(four.of[3]);
                    } else {
                      if (count > 0) a += to_float(from[0]);
                      if (count > 1) b += to_float(from[1]);
                      if (count > 2) c += to_float(from[2]);
                      if (count > 3) d += to_float(from[3]);
                    }
                  });
  };
  params.epilogue.in_order(add_residual, [&] {
    if (!params.has_activation) return;
#pragma unroll
    for (int pixel = 0; pixel < rows * quad; ++pixel) {
#pragma unroll
      for (int filter = 0; filter < filter_quads * quad; ++filter) {
        float& value = sum[pixel / quad][pixel % quad][filter / quad][filter % quad];
        value = params.epilogue.activate(value);
      }
    }
  });
  T* y = params.y + first;
  asm volatile("" : "+l"(y));  // or the compiler would rather add `first` to each of the offsets
  __builtin_assume(__isGlobal(y));
  if (params.vector) {
    for_each_quad(params, rows_left, columns_left, filters_left, sum,
                  [&](int offset, int count, float a, float b, float c, float d) {
                    if (count <= 0) return;
                    *reinterpret_cast<Vector<T>*>(y + offset) = {from_float<T>(a), from_float<T>(b), from_float<T>(c),
                                                                 from_float<T>(d)};
                  });
  } else {
    for_each_quad(params, rows_left, columns_left, filters_left, sum,
                  [&](int offset, int count, float a, float b, float c, float d) {
                    if (count > 0) y[offset] = from_float<T>(a);
                    if (count > 1) y[offset + 1] = from_float<T>(b);
                    if (count > 2) y[offset + 2] = from_float<T>(c);
                    if (count > 3) y[offset + 3] = from_float<T>(d);
                  });
  }
}

template <typename T, int r, int s, int stride>
__global__ void __launch_bounds__(256, 2) convolve(const __grid_constant__ Params<T> params) {
  extern __shared__ float4 shared[];
  const Config& config = params.config;
  const int terms = params.c * params.r * params.s;
  float* filters = reinterpret_cast<float*>(shared);
  float* patches = filters + (terms + 1) * filter_pitch;
  const int patch_floats = params.c * config.plane;

  const Lane lane(params.tile);
  const float* lane_filters = filters + lane.k;
  const int corner = lane.p * params.stride_h * config.pitch + lane.q;
  const auto k_tiles = static_cast<std::uint32_t>(config.k_tiles), end = static_cast<std::uint32_t>(config.tiles);
  const std::uint32_t step = gridDim.x / k_tiles;
  std::uint32_t tile = blockIdx.x / k_tiles;
  const int k0 = static_cast<int>(blockIdx.x % k_tiles) * config.k_tile;

  Origin next(tile, params, params.config);
  load_patch<T, stride>(params, next, patches);
  load_filters(params, k0, filters);
  for (int current = 0; tile < end; tile += step, current ^= 1) {
    wait_for_staged();
    __syncthreads();  // the patch is here, and all are done with the one before
    const Origin at = next;
    if (tile + step < end) {
      next = Origin(tile + step, params, params.config);
      load_patch<T, stride>(params, next, patches + (current ^ 1) * patch_floats);
    }
    Sums sum = {};
    multiply_add<T, r, s, stride>(params, patches + current * patch_floats + corner, lane_filters, sum);
    finish(params, at, k0 + lane.k, lane, lane_filters + terms * filter_pitch, sum);
  }
}

}  // namespace fastconv::algos::direct_tiled::resident
