// The work of each kind of task on the CPU, in FP32 arithmetic.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "algos/winograd_megakernel/cpu/plan.h"
#include "winograd/cpu_tiles.h"

namespace fastconv::algos::winograd_megakernel::cpu {

// Registers of one instruction set: vectors of `lanes` floats, a product of `rows` tiles with `blocks` blocks of 16
// filters. AVX-512: 16 sums of 32 registers; AVX2: 12 of 16, in all of which an operand of 16 floats has no register.
template <int lanes>
struct VectorOf;  // a type of its own each: GCC 12 drops a size that depends on a template's parameter
template <>
struct VectorOf<4> {
  typedef float type __attribute__((vector_size(16)));
};
template <>
struct VectorOf<8> {
  typedef float type __attribute__((vector_size(32)));
};
template <>
struct VectorOf<16> {
  typedef float type __attribute__((vector_size(64)));
};

// M[row][block][lane] = sum over c of V[row][c] * U[block][c][lane].
template <int lanes, int rows, int blocks>
FASTCONV_HOST_DEVICE void multiply_rows(const float* v, std::int64_t v_stride,  // [rows][depth], rows `v_stride` apart
                                        const float* u, std::int64_t depth,     // [blocks][depth][16]
                                        float* products,
                                        std::int64_t stride) {  // [rows][blocks * 16], rows `stride` apart
  using Vector = typename VectorOf<lanes>::type;
  constexpr int parts = filter_lanes / lanes, columns = blocks * parts;
  constexpr std::int64_t run = 64;  // sums of sums round less than one long chain
  for (std::int64_t first = 0; first < depth; first += run) {
    Vector sum[rows][columns] = {};
    for (std::int64_t c = first; c < std::min(first + run, depth); ++c) {
      Vector filters[columns];
#pragma GCC unroll 8
      for (int j = 0; j < columns; ++j) {
        const float* from = u + (j / parts * depth + c) * filter_lanes + j % parts * lanes;
        std::memcpy(&filters[j], from, sizeof(Vector));
      }
#pragma GCC unroll 8
      for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 8
        for (int j = 0; j < columns; ++j) sum[i][j] += v[i * v_stride + c] * filters[j];
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 8
      for (int j = 0; j < columns; ++j) {
        float* to = products + i * stride + j * lanes;
        Vector total = {};
        if (first > 0) std::memcpy(&total, to, sizeof total);
        total += sum[i][j];
        std::memcpy(to, &total, sizeof total);
      }
    }
  }
}

// All rows of V with `blocks` blocks of filters: `rows` at a time, and what is left.
template <int lanes, int rows, int blocks>
FASTCONV_HOST_DEVICE void multiply_blocks(const float* v, std::int64_t v_stride, std::int64_t count, const float* u,
                                          std::int64_t depth, float* products, std::int64_t stride) {
  std::int64_t row = 0;
  for (; row + rows <= count; row += rows) {
    multiply_rows<lanes, rows, blocks>(v + row * v_stride, v_stride, u, depth, products + row * stride, stride);
  }
  if constexpr (rows > 1) {
    constexpr int fewer = rows > 4 ? 4 : rows / 2;
    if (row < count) {
      multiply_blocks<lanes, fewer, blocks>(v + row * v_stride, v_stride, count - row, u, depth,
                                            products + row * stride, stride);
    }
  }
}

template <int lanes, int rows, int blocks>
FASTCONV_HOST_DEVICE void multiply_filters(const float* v, std::int64_t v_stride, std::int64_t count, const float* u,
                                           std::int64_t filters, std::int64_t depth, float* products,
                                           std::int64_t stride) {
  std::int64_t k = 0;
  for (; k + blocks * filter_lanes <= filters; k += blocks * filter_lanes) {
    multiply_blocks<lanes, rows, blocks>(v, v_stride, count, u + k * depth, depth, products + k, stride);
  }
  if constexpr (blocks > 1) {
    if (k < filters) {
      multiply_filters<lanes, rows, 1>(v, v_stride, count, u + k * depth, filters - k, depth, products + k, stride);
    }
  }
}

// M[count][filters] of one point, `filters` a multiple of 16: a body for each instruction set, of which the loader
// takes the best that the machine has.
#define FASTCONV_MULTIPLY(TARGET, ...)                                                                        \
  TARGET inline void multiply(const float* v, std::int64_t v_stride, std::int64_t count, /* [count][depth] */ \
                              const float* u, std::int64_t filters,                                           \
                              std::int64_t depth,                     /* [filters / 16][depth][16] */         \
                              float* products, std::int64_t stride) { /* [count][filters] */                  \
    multiply_filters<__VA_ARGS__>(v, v_stride, count, u, filters, depth, products, stride);                   \
  }
#if defined(FASTCONV_CPU_VERSIONS)
FASTCONV_MULTIPLY(__attribute__((target("default"))), 4, 2, 1)
FASTCONV_MULTIPLY(__attribute__((target("arch=x86-64-v3"))), 8, 6, 1)
FASTCONV_MULTIPLY(__attribute__((target("arch=x86-64-v4"))), 16, 8, 2)
#else
FASTCONV_MULTIPLY(, 4, 2, 1)
#endif
#undef FASTCONV_MULTIPLY

// Runs any task of a map; T: element type of the tensors. Holds pointers alone: shared by all threads.
template <typename T>
class Tasks {
 public:
  Tasks(const ConvArgs& args, const TaskMap& map)
      : args_(args),
        map_(map),
        grid_(winograd::tile_grid(tile_outputs, args.problem)),
        c_pad_(padded_channels(args.problem)),
        k_pad_(padded_filters(args.problem)),
        u_(static_cast<const float*>(args.weight)),
        v_(static_cast<float*>(args.workspace)),
        products_(v_ + map.v_groups * v_place(map, c_pad_)) {}

  void operator()(const Task& task) const {
    const Extent extent = map_.extent(task);
    switch (task.kind) {
      case TaskKind::filter: break;  // never: pack_weight() transforms the filters
      case TaskKind::input: {
        const winograd::Runs runs = runs_of(task.group, c_pad_);
        const std::int64_t begin = range_begin(runs, extent);
        winograd::transform_inputs<tile_outputs, T>(args_, runs, begin, begin + extent.tiles, v(task.group));
        break;
      }
      case TaskKind::gemm: gemm(task.group, extent); break;
      case TaskKind::output: {
        const winograd::Runs runs = runs_of(task.group, k_pad_);
        const std::int64_t begin = range_begin(runs, extent);
        winograd::transform_outputs<tile_outputs, T>(args_, runs, begin, begin + extent.tiles, products(task.group));
        break;
      }
    }
  }

  float* v(std::int32_t group) const {  // [36][tiles of the group][C_pad]
    return v_ + group % map_.v_groups * v_place(map_, c_pad_);
  }
  float* products(std::int32_t group) const {  // [36][tiles of the group][K_pad]
    return products_ + group % map_.m_groups * m_place(map_, k_pad_);
  }

 private:
  winograd::Runs runs_of(std::int32_t group, std::int64_t padded) const {
    return {tile_outputs, grid_, std::int64_t{group} * map_.shapes.group_tiles, map_.tiles_of(group), padded};
  }
  // Runs numbers (channel block, tile) pairs, and a task has one channel block.
  static std::int64_t range_begin(const winograd::Runs& runs, const Extent& extent) {
    return extent.first_channel / cpu_channel_block * runs.chunk() + extent.first_tile;
  }

  void gemm(std::int32_t group, const Extent& extent) const {
    const std::int64_t tiles = extent.tiles;
    const std::int64_t last_filter = std::min<std::int64_t>(k_pad_, extent.first_channel + map_.shapes.gemm_filters);
    for (std::int64_t f = extent.first_point; f < extent.first_point + extent.points; ++f) {
      const std::int64_t k = extent.first_channel;
      multiply(v(group) + f * tiles * c_pad_, c_pad_, tiles, u_ + (f * k_pad_ + k) * c_pad_, last_filter - k, c_pad_,
               products(group) + f * tiles * k_pad_ + k, k_pad_);
    }
  }

  const ConvArgs& args_;
  const TaskMap& map_;
  winograd::TileGrid grid_;
  std::int64_t c_pad_, k_pad_;
  const float* u_;   // [36][K_pad / 16][C_pad][16]
  float* v_;         // [v_groups][36][t][C_pad]
  float* products_;  // [m_groups][36][t][K_pad]
};

}  // namespace fastconv::algos::winograd_megakernel::cpu
