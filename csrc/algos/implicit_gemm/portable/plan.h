// Tiles and memory layout of the portable kernel, shared by its planning and its launch.
//
// Packed weight: B as [group][step][limb][K/G][32] halves (limbs hi and lo in split mode, else one; zeros behind the
// last j), then [K] int32 exponents of the filters' scales.
#pragma once

#include <cstddef>
#include <cstdint>

#include "algos/implicit_gemm/plan.h"

namespace fastconv::algos::implicit_gemm::portable {

constexpr int pixel_tile = 128;  // output pixels of a block
constexpr int depth_tile = 32;   // reduction of a step: 64 bytes a row, two m16n8k16 instructions
constexpr int threads = 128;     // 4 warps, each with 32 pixels and all filters of the block
constexpr int blocks_per_processor = 2;
constexpr int ungrouped_filter_tile = 64;  // so wide a tile leaves no register for the group

// What depends on the weight and the class alone (the rule of packed_weight()).
struct Weights {
  Mode mode;
  int limbs, products;
  std::int64_t reduction, steps;

  std::size_t weight_bytes(std::int64_t k) const {
    return align_bytes(static_cast<std::size_t>(steps * limbs * k) * depth_tile * 2);
  }
  std::size_t packed_bytes(std::int64_t k) const {
    return weight_bytes(k) + align_bytes(static_cast<std::size_t>(k) * sizeof(std::int32_t));
  }
};

inline Weights make_weights(const ConvProblem& problem) {
  const Mode mode = select_mode(problem.accuracy);
  const std::int64_t reduction = problem.r * problem.s * problem.c_per_group();
  return {mode, mode == Mode::split ? 2 : 1, mode == Mode::split ? 3 : 1, reduction, ceil_div(reduction, depth_tile)};
}

struct Plan : Weights {
  bool loads_vectors;                              // 16 bytes of channels at a time
  bool stores_quads;                               // y and residual can be accessed by four elements
  int filter_tile;                                 // filters of a block
  std::int64_t pixels, pixel_tiles, filter_tiles;  // filter_tiles: of a group
};

// Of k filters, those of a block. Its time is that of its filters, and of the pixels' loading and splitting: worth
// about 24 filters.
inline int select_filter_tile(Mode mode, std::int64_t k, std::int64_t groups) {
  if (mode != Mode::split) return k <= 32 || groups > 1 ? 32 : 64;
  int best = 48;
  std::int64_t least = INT64_MAX;
  for (int tile : {ungrouped_filter_tile, 48, 32, 16}) {
    if (tile == ungrouped_filter_tile && groups > 1) continue;
    const std::int64_t cost = ceil_div(k, tile) * (tile + 24);
    if (cost < least) least = cost, best = tile;
  }
  return best;
}

inline Plan make_plan(const ConvProblem& problem) {
  Plan plan{};
  static_cast<Weights&>(plan) = make_weights(problem);
  plan.filter_tile = select_filter_tile(plan.mode, problem.k_per_group(), problem.groups);
  plan.pixels = problem.n * problem.p() * problem.q();
  plan.pixel_tiles = ceil_div(plan.pixels, pixel_tile);
  plan.filter_tiles = ceil_div(problem.k_per_group(), plan.filter_tile);
  plan.loads_vectors = loads_vectors(problem);
  plan.stores_quads = (problem.layout == Layout::nchw ? problem.p() * problem.q() : problem.k_per_group()) % 4 == 0;
  return plan;
}

}  // namespace fastconv::algos::implicit_gemm::portable
