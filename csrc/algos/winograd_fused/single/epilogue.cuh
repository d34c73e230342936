// Any epilogue on the outputs of a work tile in NHWC, all of which are in the registers of the sums: straight-line code
// for each of its steps, so that branches and the residual's latency are paid once per work tile.
#pragma once

#include "algos/winograd_fused/single/activation.cuh"
#include "algos/winograd_fused/single/pairs.cuh"

namespace fastconv::algos::winograd_fused::single {

// visit(output, its number) for a column of the tiles.
template <Shape shape, typename Visitor>
__device__ __forceinline__ void for_outputs(float (&values)[shape.products() / 2], const Visitor& visit) {
#pragma unroll
  for (int i = 0; i < shape.products() / 2; ++i) visit(values[i], i);
}

// Writes the outputs of column own_column(which) to sum[which]; sum[1] holds what was received, sum[2] is free
// afterwards. Calls between(j) when the registers of the 8 positions j are free. Returns NaN if a sum is not finite. A
// V that is not finite spoils every filter, so checking half of them suffices.
template <typename T, Shape shape, typename Between>
__device__ __forceinline__ float transform_in_place(const Fragment<T, shape>& mine, Sums<shape>& sum,
                                                    const Between& between) {
  const FilterScales<shape>& filters = mine.filters;
  float bad = 0.0f;
#pragma unroll
  for (int j = 0; j < position_groups(shape); ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float &own = sum[0][4 * j + i], &other = sum[1][4 * j + i];
      const float first = mine.pairs.first(own, other, sum[2][4 * j + i]);
      other = mine.pairs.second(own, other);
      own = first;
    }
    if (is_position<shape>(j, mine.lane)) bad = fmaf(sum[0][4 * j + 1], 0.0f, fmaf(sum[0][4 * j], 0.0f, bad));
    between(j);
  }
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    if (__builtin_expect(filters.two_factors, 0)) {
      for_outputs<shape>(sum[which], [&](float& v, int i) { v *= filters.second_scale[filters.index(i % 4)]; });
    }
    for_outputs<shape>(sum[which], [&](float& v, int i) {
      v = fmaf(v, filters.scale[filters.index(i % 4)], filters.bias[i % 4 / 2]);
    });
  }
  return bad;
}

// The residual at the positions 8 j + `place` of a work tile, a column of their tiles and a filter.
template <typename T, Shape shape>
struct ResidualPlace {
  const T* first;   // at the first row, and the first tile or the place's
  int rows, tiles;  // that exist, of the work tile
  int row_step, tile_step, place;

  __device__ __forceinline__ ResidualPlace(const Params<T>& params, WorkTile work_tile, int place, int column, int k)
      : row_step(static_cast<int>(params.y_row)),
        tile_step(static_cast<int>(params.y_column) * tile_outputs),
        place(place) {
    int tile = 0, image = 0;
    if constexpr (shape.row_positions() == 8) {
      image = place / shape.tiles, tile = place % shape.tiles;
    } else {
      static_assert(shape.images == 1);
    }
    if constexpr (shape.packs_columns) {
      const int left = left_tiles(params, work_tile);
      if (tile < left) {
        work_tile = left_segment(params, work_tile);
      } else {
        work_tile.q0 -= left * tile_outputs;
      }
    }
    const int n = work_tile.n + image, q = work_tile.q0 + tile * tile_outputs + column;
    first = params.epilogue.residual + (n * params.y_image + work_tile.p0 * params.y_row + q * params.y_column + k);
    rows = n < params.n && k < params.k && q < params.q ? min(shape.rows, params.p - work_tile.p0) : 0;
    tiles = (params.q - q + tile_outputs - 1) / tile_outputs;
    asm volatile("" : "+l"(first));  // an address, to which 32 bits are added, and not the sum of an index
  }

  // Where it is, and whether it is anywhere. Within a work tile 32 bits suffice (supports()).
  __device__ __forceinline__ const T* find(int j, bool& exists) const {
    if constexpr (shape.row_positions() == 8) {
      exists = j < rows;
      return first + j * row_step;
    } else {
      const int number = 8 * j + place, row = row_of<shape>(number), tile = number - row * shape.row_positions();
      exists = row < rows && tile < tiles;
      return first + (row * row_step + tile * tile_step);
    }
  }
};

// ---- Half types: to where the outputs will lie, by asynchronous copies, 8 filters each; from there transposed.

template <typename T, Shape shape>
__device__ __forceinline__ void start_residual(const Params<T>& params, const Fragment<T, shape>& mine) {
  const unsigned lane = reload_lane();
  const ResidualPlace<T, shape> place(params, mine.work_tile, lane % 8, own_column(mine.group, lane / 16),
                                      mine.first_filter() + lane / 8 % 2 * 8);
#pragma unroll
  for (int j = 0; j < position_groups(shape); ++j) {
    bool exists;
    const T* source = place.find(j, exists);
    copy_async(mine.received + j * group_bytes<T>, source, exists);  // nothing is read where there is nothing
  }
  commit_copies();
}

// Where store_transposed() has stored, or would.
__device__ __forceinline__ void load_transposed(std::uint32_t (&matrix)[4], std::uint32_t source) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrix[0]), "=r"(matrix[1]), "=r"(matrix[2]), "=r"(matrix[3])
               : "r"(source)
               : "memory");
}

template <typename T, Shape shape>
__device__ __forceinline__ void add_residual(const Fragment<T, shape>& mine, Sums<shape>& sum) {
  wait_for_copies<0>();
  __syncwarp();
#pragma unroll
  for (int j = 0; j < position_groups(shape); ++j) {
    std::uint32_t packed[4];
    load_transposed(packed, mine.received + j * group_bytes<T>);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 two = as_floats<T>(packed[i]);
      sum[i / 2][4 * j + i % 2 * 2] += two.x, sum[i / 2][4 * j + i % 2 * 2 + 1] += two.y;
    }
  }
}

// ---- float32: a column at a time, in the same way, 4 filters each. Not into registers: the lines of what is on its
// way would have to fit in the L1 cache, which shared memory has left little of.

template <typename T, Shape shape>
__device__ __forceinline__ void start_residual(const Params<T>& params, const Fragment<T, shape>& mine,
                                               std::uint32_t lines, int which) {
  const unsigned lane = reload_lane();
  const ResidualPlace<T, shape> place(params, mine.work_tile, lane % 8, own_column(mine.group, which),
                                      mine.first_filter() + lane / 8 * 4);
  const std::uint32_t target = lines + lane % 8 * line_bytes + ((mine.warp % 2 * 4 + lane / 8) ^ lane % 8) * 16;
#pragma unroll
  for (int j = 0; j < position_groups(shape); ++j) {
    bool exists;
    const T* source = place.find(j, exists);
    copy_async(target + j * 8 * line_bytes, source, exists);
  }
  commit_copies();
}

}  // namespace fastconv::algos::winograd_fused::single
