#include <algorithm>
#include <cmath>
#include <string>

#include "algos/fused_unroll/plan.h"
#include "core/algorithm.h"
#include "core/cost.h"
#include "core/fitted.h"
#include "core/roundoffs.h"

namespace fastconv::algos::fused_unroll {
namespace {

namespace own = fitted::fused_unroll;

constexpr double blocks_per_processor = 2.0;

Support supports(const ConvProblem& problem, const DeviceInfo&) {
  if (!has_kernel_size(problem.r, problem.s)) {
    return Support::no("kernel", "kernel is ", problem.r, "x", problem.s,
                       "; fused_unroll has square ones of 1, 2, 3, 4, 5 and 7");
  }
  const std::int64_t height = problem.h + 2 * problem.pad_h, width = problem.w + 2 * problem.pad_w;
  if (problem.x_pitch() * problem.h * problem.w >= sample_limit || height >= sample_limit || width >= sample_limit) {
    return Support::no("size",
                       "one sample has 2^30 elements, or padded rows or columns, or more; fused_unroll uses "
                       "32-bit indices inside a sample");
  }
  return Support::yes();
}

ConvPlan plan(const ConvProblem& problem, const DeviceInfo& device) {
  const TileShape tile = tile_shape(problem.k_per_group());
  const TileGrid grid = tile_grid(problem, tile);
  ConvPlan plan;
  plan.kernel_plan = keep_plan(tile);
  plan.config = text_of("tile ", tile.k, "x", tile.pixels, ", ", chunk_channels(static_cast<int>(problem.r)),
                        " channels x ", problem.r, "x", problem.s, " taps");

  const double terms = static_cast<double>(problem.c_per_group() * problem.r * problem.s);
  const double bytes_us = memory_us(problem.compulsory_bytes(), 1.0, device);
  if (device.type == DeviceType::cpu) {
    const double blocks = in_whole_waves(static_cast<double>(grid.count()), device.processors);
    const double flops = 2.0 * tile.k * tile.pixels * terms * blocks;
    plan.cost_us = 8.0 + std::max(fp32_us(flops, own::product.of(device), device), bytes_us);
    return plan;
  }
  // A wave of blocks takes as long as each of them needs to find its pixels, walk its reduction and store, whether a
  // multiprocessor has one or two of them: a tile is loaded before it is multiplied. With one tap there are fewer
  // products for each element loaded.
  const double waves = std::ceil(static_cast<double>(grid.count()) / (blocks_per_processor * device.processors));
  const bool single_tap = problem.r * problem.s == 1;
  const double term = single_tap ? own::term_1x1 : tile.k == narrow_tile.k ? own::term_narrow : own::term;
  const double walk_us = clocks_us((own::tile + term * terms) * waves, device);
  // Halves are converted one by one on the way, which counts where a tile is of few products.
  const bool converts = single_tap && problem.dtype != DType::f32 && problem.c_per_group() <= 16;
  plan.cost_us = 8.0 + (converts ? own::conversions : 1.0) * std::max(walk_us, bytes_us);
  return plan;
}

double roundoffs(const ConvProblem& problem, const DeviceInfo&) {
  return blocked_sum(reduction_length(problem), 300.0);
}

}  // namespace

extern const Algorithm algorithm;
const Algorithm algorithm{
    .name = "fused_unroll",
    .family = "gemm",
    .summary = "unroll inside the GEMM tile, kernel size a template constant",
    .source = 5,
    .roundoffs = roundoffs,
    .supports = supports,
    .plan = plan,
    .abilities = {.ranges = true},
};

}  // namespace fastconv::algos::fused_unroll
