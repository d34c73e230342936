// The work of each kind of task on the CPU, in FP32 arithmetic.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "algos/winograd_megakernel/cpu/plan.h"
#include "winograd/cpu_tiles.h"

namespace fastconv::algos::winograd_megakernel::cpu {

// One row of M per row of V, 16 filters: M[row][lane] = sum over c of V[row][c] * U[c][lane].
template <int rows>
FASTCONV_HOST_DEVICE void multiply_rows(const float* v,  // [rows][depth], rows `v_stride` apart
                                        std::int64_t v_stride, const float* u, std::int64_t depth,  // [depth][16]
                                        float* products, std::int64_t stride) {  // [rows][16], rows `stride` apart
  using Lanes = float __attribute__((vector_size(filter_lanes * sizeof(float))));
  constexpr std::int64_t run = 64;  // sums of sums round less than one long chain
  Lanes total[rows] = {};
  for (std::int64_t first = 0; first < depth; first += run) {
    Lanes sum[rows] = {};
    for (std::int64_t c = first; c < std::min(first + run, depth); ++c) {
      Lanes filters;
      std::memcpy(&filters, u + c * filter_lanes, sizeof filters);
#pragma GCC unroll 8
      for (int i = 0; i < rows; ++i) sum[i] += v[i * v_stride + c] * filters;
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i) total[i] += sum[i];
  }
#pragma GCC unroll 8
  for (int i = 0; i < rows; ++i) std::memcpy(products + i * stride, &total[i], sizeof total[i]);
}

FASTCONV_CPU_CLONES inline void multiply(const float* v, std::int64_t v_stride, std::int64_t rows,  // [rows][depth]
                                         const float* u, std::int64_t depth,                        // [depth][16]
                                         float* products, std::int64_t stride) {                    // [rows][16]
  std::int64_t row = 0;
  for (; row + 8 <= rows; row += 8) {
    multiply_rows<8>(v + row * v_stride, v_stride, u, depth, products + row * stride, stride);
  }
  for (; row + 2 <= rows; row += 2) {
    multiply_rows<2>(v + row * v_stride, v_stride, u, depth, products + row * stride, stride);
  }
  if (row < rows) multiply_rows<1>(v + row * v_stride, v_stride, u, depth, products + row * stride, stride);
}

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
      for (std::int64_t k = extent.first_channel; k < last_filter; k += filter_lanes) {
        multiply(v(group) + f * tiles * c_pad_, c_pad_, tiles, u_ + (f * k_pad_ + k) * c_pad_, c_pad_,
                 products(group) + f * tiles * k_pad_ + k, k_pad_);
      }
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
