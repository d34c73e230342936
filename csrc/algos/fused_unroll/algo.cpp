#include <algorithm>
#include <string>

#include "algos/fused_unroll/plan.h"
#include "core/algorithm.h"
#include "core/cost.h"
#include "core/fitted.h"
#include "core/roundoffs.h"

namespace fastconv::algos::fused_unroll {
namespace {

Support supports(const ConvProblem& problem, const DeviceInfo&) {
  if (!has_kernel_size(problem.r, problem.s)) {
    return Support::no("kernel", "kernel is " + std::to_string(problem.r) + "x" + std::to_string(problem.s) +
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
  plan.config = "tile " + std::to_string(tile.k) + "x" + std::to_string(tile.pixels) + ", " +
                std::to_string(chunk_channels(static_cast<int>(problem.r))) + " channels x " +
                std::to_string(problem.r) + "x" + std::to_string(problem.s) + " taps";

  // Whole tiles in whole waves of blocks; no more than this share of the FFMA rate, because the shared memory's
  // bandwidth bounds 4x4 outputs per thread, and a tile is loaded before it is multiplied.
  const double share = device.type == DeviceType::cuda ? 0.16 : fitted::fused_unroll::product.of(device);
  const double depth = static_cast<double>(problem.c_per_group() * problem.r * problem.s);
  const double tile_flops = 2.0 * tile.k * tile.pixels * depth;
  const double blocks = in_whole_waves(static_cast<double>(grid.count()), device.processors);
  // Halves are converted one by one on the way, which counts where a tile is of few products.
  const bool cuda = device.type == DeviceType::cuda, half = problem.dtype != DType::f32;
  const double conversions = cuda && half && problem.c_per_group() <= 16 ? fitted::fused_unroll::conversions : 1.0;
  plan.cost_us = 8.0 + conversions * std::max(fp32_us(blocks * tile_flops, share, device),
                                              memory_us(problem.compulsory_bytes(), 1.0, device));
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
    .on_cpu = true,
    .on_cuda = true,
    .roundoffs = roundoffs,
    .supports = supports,
    .plan = plan,
    .packed_weight = plain_weight,
    .abilities = {.ranges = true},
};

}  // namespace fastconv::algos::fused_unroll
