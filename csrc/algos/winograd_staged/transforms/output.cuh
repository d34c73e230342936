// Y = A^T M A for a chunk of tiles, the scales undone, then the epilogue.
#pragma once

#include <algorithm>

#include "algos/winograd_staged/transforms/tile_math.cuh"
#include "device/dependent_launch.cuh"
#include "device/epilogue.h"
#include "device/max_pool.h"

namespace fastconv::algos::winograd_staged {

// A^T M A of one tile, columns first: load(point) gives a value of M.
template <int m, typename Value, typename Load>
__device__ __forceinline__ void transform_output_columns(const Load& load, Value (&half)[m][m + 2]) {
  constexpr int alpha = m + 2;
#pragma unroll
  for (int j = 0; j < alpha; ++j) {
    Value column[alpha], result[m];
#pragma unroll
    for (int i = 0; i < alpha; ++i) column[i] = load(i * alpha + j);
    winograd::Transform<m>::output(column, result);
#pragma unroll
    for (int i = 0; i < m; ++i) half[i][j] = result[i];
  }
}
// Then rows: emit(i, row) takes a row of the result.
template <int m, typename Value, typename Emit>
__device__ __forceinline__ void transform_output_rows(const Value (&half)[m][m + 2], const Emit& emit) {
#pragma unroll
  for (int i = 0; i < m; ++i) {
    Value row[m];
    winograd::Transform<m>::output(half[i], row);
    emit(i, row);
  }
}

// Where a thread reads M: the value of a point at first[point * pitch]. read_once: and then the L2 cache need
// not keep it, so that of an M of about its size more is still there when its turn comes. (Of a larger one nothing is,
// and this costs 8 %.)
template <bool read_once = false>
struct ProductReader {
  const float* first;
  std::int64_t pitch;

  template <int vec>
  __device__ __forceinline__ Pack<vec> load(int point) const {
    const float* source = first + point * pitch;
    if constexpr (read_once && vec == 2) {
      const float2 pair = __ldcs(reinterpret_cast<const float2*>(source));
      return {{pair.x, pair.y}};
    } else {
      return load_pack<vec>(source);
    }
  }

  // rows: M [alpha^2][T][k_pad], the library's; else segments (plan.h), our own product's.
  template <bool rows>
  static __device__ __forceinline__ ProductReader make(const Chunk& chunk, const float* products, int tile, int k) {
    if constexpr (rows) {
      return {products + static_cast<std::int64_t>(tile) * chunk.k_pad + k,
              static_cast<std::int64_t>(chunk.tiles) * chunk.k_pad};
    } else {
      const std::int64_t width = static_cast<std::int64_t>(chunk.k_pad) * segment_tiles;
      return {products + tile / segment_tiles * width + k / segment_filters * segment_values +
                  tile % segment_tiles * segment_filters + segment_place(k % segment_filters),
              segment_rows(chunk.tiles) * width};
    }
  }
};

// NHWC. Rows: a row of the block takes a tile, a lane `vec` filters; the grid's second dimension takes further filters,
// so that small maps fill the device. Segments: a block takes two neighbouring segments' values of 4 `vec` tiles, a
// warp those of `vec` tiles; filters turn fastest, so that whole pixels of y are written at about the same time.
// warms_code: a block that begins before the product has ended does everything twice, first with whatever the filters'
// exponents are as values of M, storing nothing: its instructions come from memory meanwhile.
// plain: ConvProblem::has_plain_epilogue(); code for more beside it would come from memory in vain.
// pools: of each 2 x 2 outputs of a tile the largest is written; chunk.p, chunk.q and y are the pool's.
constexpr int segment_threads = 128;
template <typename T, int m, int vec, bool rows, bool plain, bool pools, bool read_once, bool warms_code>
__global__ void __launch_bounds__(segment_threads, pools ? 5 : 4)
    output_transform_nhwc(const Chunk chunk, const float* products,  // M
                          const int* tile_exponents,                 // [T], or null: nothing was scaled
                          const int* __restrict__ filter_exponents,  // [K]
                          T* __restrict__ y,                         // [N, P, Q, K]
                          Epilogue<T> epilogue) {
  constexpr int lanes = segment_filters / vec;  // of a tile of a segment
  constexpr int step = pools ? m / 2 : m;       // elements of y of a tile and dimension
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  unsigned block = blockIdx.x;
  const int k_block = rows ? blockIdx.y : static_cast<int>(chunk.by_filter_blocks.divmod(block));
  const int tile = rows ? blockIdx.x * blockDim.y + threadIdx.y : (block * 4 + warp) * vec + lane / lanes % vec;
  if (tile >= chunk.tiles) return;
  const TilePosition position = tile_position(chunk, tile);
  const int k = rows ? (k_block * blockDim.x + threadIdx.x) * vec
                     : (k_block * 2 + lane / (lanes * vec)) * segment_filters + segment_filter(lane % lanes * vec);
  if (k >= chunk.k) return;
  bool is_warm = false;
#pragma unroll 1
  while (true) {
    const bool real = !warms_code || is_warm;
    if (real) wait_for_predecessor();
    const int tile_exponent = real && tile_exponents != nullptr ? load_written(tile_exponents + tile) : 0;
    float bias[vec], first[vec], second[vec];
#pragma unroll
    for (int e = 0; e < vec; ++e) {
      bias[e] = epilogue.bias_of(k + e);
      const Unscale unscale(tile_exponent, tile_exponents != nullptr ? filter_exponents[k + e] : 0);
      first[e] = unscale.first;
      second[e] = unscale.second;
    }
    const int left_p = real ? chunk.p - position.tp * step : 0, left_q = chunk.q - position.tq * step;
    const std::int64_t corner = chunk.out(position.n, k, position.tp * step, position.tq * step);
    const auto index_of = [&](int i, int j) { return corner + i * chunk.out.h + j * chunk.out.w; };
    // All of it beside M, so that memory's latency is waited for once.
    constexpr bool adds = !plain && !pools;
    Aligned<T, vec> residual[adds ? m : 1][m];
    if (adds && epilogue.residual != nullptr) {
#pragma unroll
      for (int at = 0; at < (adds ? m * m : 0); ++at) {
        const int i = at / m, j = at % m;
        if (i < left_p && j < left_q) {
          residual[i][j] = *reinterpret_cast<const Aligned<T, vec>*>(epilogue.residual + index_of(i, j));
        }
      }
    }
    auto reader = ProductReader<read_once>::template make<rows>(chunk, products, tile, k);
    if (!real) reader = {reinterpret_cast<const float*>(filter_exponents), 0};
    Pack<vec> half[m][m + 2];
    transform_output_columns<m>([&](int point) { return reader.template load<vec>(point); }, half);
    // Asked once for all values: asked for each, most of the code is skipped, and has come from memory in vain.
    const auto write = [&](const auto& finish) {
      transform_output_rows<m>(half, [&](int i, const Pack<vec>(&row)[m]) {
#pragma unroll
        for (int j = 0; j < m; ++j) {
          Aligned<T, vec> result;
#pragma unroll
          for (int e = 0; e < vec; ++e) {
            const float value = row[j].e[e] * first[e] * second[e] + bias[e];
            const bool has_other = adds && epilogue.residual != nullptr;
            result.e[e] = from_float<T>(finish(value, has_other ? to_float(residual[adds ? i : 0][j].e[e]) : -0.0f));
          }
          if (i < left_p && j < left_q) *reinterpret_cast<Aligned<T, vec>*>(y + index_of(i, j)) = result;
        }
      });
    };
    // The same of a pool, whose values stay float: there is no residual.
    const auto write_pooled = [&](const auto& activated) {
      Pack<vec> above[step];
      transform_output_rows<m>(half, [&](int i, const Pack<vec>(&row)[m]) {
#pragma unroll
        for (int j = 0; j < step; ++j) {
          const std::int64_t index = corner + i / 2 * chunk.out.h + j * chunk.out.w;
          Aligned<T, vec> result;
#pragma unroll
          for (int e = 0; e < vec; ++e) {
            const auto value = [&](int column) { return activated(row[column].e[e] * first[e] * second[e] + bias[e]); };
            const float larger = larger_of(value(2 * j), value(2 * j + 1));
            if (i % 2 == 0) {
              above[j].e[e] = larger;
            } else {
              result.e[e] = from_float<T>(larger_of(above[j].e[e], larger));
            }
          }
          if (i % 2 == 1 && i / 2 < left_p && j < left_q) *reinterpret_cast<Aligned<T, vec>*>(y + index) = result;
        }
      });
    };
    const ActivationFunction& activate = epilogue.activate;
    if constexpr (pools && plain) {
      write_pooled([&](float value) { return activate.piecewise(value); });
    } else if constexpr (pools) {
      write_pooled([](float value) { return ActivationFunction::silu(value); });
    } else if constexpr (!plain) {
      write([&](float value, float other) { return epilogue.finish_value(value, other); });
    } else if (activate.is_linear()) {
      write([](float value, float) { return value; });
    } else {
      write([&](float value, float) { return activate.piecewise(value); });
    }
    if (real) return;
    is_warm = true;
  }
}

// NCHW. A block takes 8 tiles, whatever rows they lie in, and 32 filters: M is read along K, the results are turned in
// shared memory and written along Q.
constexpr int output_block_tiles = 8;
constexpr int output_block_filters = 32;
constexpr int output_block_threads = 32 * output_block_tiles;

// The results of a block: [filters][m][tiles] rows of m. A filter has a row more than it needs: no bank conflicts.
template <int m>
struct TransposedTiles {
  static constexpr int rows = m * output_block_tiles;
  Aligned<float, m> row[output_block_filters][rows + 1];

  __device__ __forceinline__ Aligned<float, m>& at(int filter, int i, int tile) {
    return row[filter][i * output_block_tiles + tile];
  }
};

// Writes them, `vec` neighbours of Q by one instruction: Q is a multiple of vec.
template <int vec, typename T, int m>
__device__ __forceinline__ void write_transposed(TransposedTiles<m>& transposed, const Chunk& chunk, int tile0, int k0,
                                                 T* __restrict__ y, const Epilogue<T>& epilogue) {
  constexpr int pieces = m / vec, row_pieces = output_block_tiles * pieces, filter_pieces = m * row_pieces;
  static_assert(output_block_threads % filter_pieces == 0);
  const int i = threadIdx.x / row_pieces % m;
  const int tile = threadIdx.x % row_pieces / pieces, piece = threadIdx.x % pieces;
  if (tile0 + tile >= chunk.tiles) return;
  const TilePosition position = tile_position(chunk, tile0 + tile);
  const int p = position.tp * m + i, q = position.tq * m + piece * vec;
  if (p >= chunk.p || q >= chunk.q) return;
  constexpr int step = output_block_threads / filter_pieces;
  const int first = threadIdx.x / filter_pieces, filters = min(output_block_filters, chunk.k - k0);
  std::int64_t index = chunk.out(position.n, k0 + first, p, q);
  for (int k = first; k < filters; k += step, index += step * chunk.out.c) {
    const auto sums = reinterpret_cast<const Aligned<float, vec>*>(&transposed.at(k, i, tile))[piece];
    Aligned<T, vec> result;
#pragma unroll
    for (int e = 0; e < vec; ++e) result.e[e] = epilogue.finish(sums.e[e], index + e);
    *reinterpret_cast<Aligned<T, vec>*>(y + index) = result;
  }
}

template <typename T, int m, bool rows, bool pools>
__global__ void __launch_bounds__(output_block_threads)
    output_transform_nchw(const Chunk chunk, const float* products,  // M
                          const int* tile_exponents,                 // [T] or null
                          const int* __restrict__ filter_exponents,  // [K]
                          T* __restrict__ y,                         // [N, K, P, Q]
                          Epilogue<T> epilogue) {
  constexpr int step = pools ? m / 2 : m;  // elements of y of a tile and dimension
  __shared__ TransposedTiles<step> transposed;
  const int tile0 = blockIdx.x * output_block_tiles, k0 = blockIdx.y * output_block_filters;
  wait_for_predecessor();
  if (const int slot = threadIdx.x / 32, lane = threadIdx.x % 32; tile0 + slot < chunk.tiles && k0 + lane < chunk.k) {
    const int tile = tile0 + slot, k = k0 + lane;
    const bool scaled = tile_exponents != nullptr;
    const Unscale unscale(scaled ? load_written(tile_exponents + tile) : 0, scaled ? filter_exponents[k] : 0);
    const float bias = epilogue.bias_of(k);
    const auto reader = ProductReader<>::make<rows>(chunk, products, tile, k);
    const auto load = [&](int point) { return reader.template load<1>(point); };
    Pack<1> half[m][m + 2];
    transform_output_columns<m>(load, half);
    Aligned<float, step> above;
    transform_output_rows<m>(half, [&](int i, const Pack<1>(&row)[m]) {
      const auto value = [&](int j) { return unscale(row[j].e[0]) + bias; };
      Aligned<float, step> result;
      if constexpr (pools) {
#pragma unroll
        for (int j = 0; j < step; ++j) {
          result.e[j] = larger_of(epilogue.activate(value(2 * j)), epilogue.activate(value(2 * j + 1)));
          if (i % 2 == 1) result.e[j] = larger_of(above.e[j], result.e[j]);
        }
        if (i % 2 == 1) transposed.at(lane, i / 2, slot) = result;
        above = result;
      } else {
#pragma unroll
        for (int j = 0; j < m; ++j) result.e[j] = value(j);
        transposed.at(lane, i, slot) = result;
      }
    });
  }
  __syncthreads();
  if constexpr (pools) epilogue = {};  // is behind it
  if (chunk.q % step == 0) {
    write_transposed<step>(transposed, chunk, tile0, k0, y, epilogue);
  } else if (chunk.q % 2 == 0) {
    write_transposed<std::min(step, 2)>(transposed, chunk, tile0, k0, y, epilogue);
  } else {
    write_transposed<1>(transposed, chunk, tile0, k0, y, epilogue);
  }
}

}  // namespace fastconv::algos::winograd_staged
