// Tiles and memory layout of the implicit GEMM, shared by the planner and the kernels.
//
//   D[pixel][filter] = sum over j of A[pixel][j] * B[filter][j],   j = (r, s, c), c fastest, in steps of 32
//
// of each group, with the C/G channels and K/G filters of that. Packed weight on CUDA: B as
// [group][step][plane][K/G][32] halves (planes hi and lo in split mode, else one; zeros behind the last j), then [K]
// int32 exponents of the filters' scales. On the CPU: [R * S * C/G][K] float32.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/device_info.h"
#include "core/integers.h"
#include "core/problem.h"

namespace fastconv::algos::implicit_gemm {

constexpr int pixel_tile = 128;  // output pixels of a block
constexpr int depth_tile = 32;   // reduction of a step: 64 bytes a row, two m16n8k16 instructions
constexpr int threads = 128;     // 4 warps, each with 32 pixels and all filters of the block
constexpr int blocks_per_processor = 2;
constexpr int ungrouped_filter_tile = 64;    // so wide a tile leaves no register for the group
constexpr std::int64_t most_groups = 65535;  // a dimension of the grid

// What the tensor cores multiply.
enum class Mode : std::uint8_t {
  split,   // float32 as pairs of float16, three products (class fp32; the portable kernel: tf32 too)
  single,  // float32 rounded to float16, one product (class tf32)
  fp16,
  bf16,
};

inline const char* describe(Mode mode) {
  switch (mode) {
    case Mode::split: return "3 x float16";
    case Mode::single: return "1 x float16";
    case Mode::fp16: return "float16";
    case Mode::bf16: return "bfloat16";
  }
  return "?";
}

struct Config {
  Mode mode;
  int planes, products;
  int filter_tile;  // filters of a block
  std::int64_t reduction, steps;
  std::int64_t pixels, pixel_tiles, filter_tiles;  // filter_tiles: of a group

  std::size_t weight_bytes(std::int64_t k) const {
    return align_bytes(static_cast<std::size_t>(steps * planes * k) * depth_tile * 2);
  }
};

inline Mode select_mode(AccuracyClass accuracy) {
  switch (accuracy) {
    case AccuracyClass::fp16: return Mode::fp16;
    case AccuracyClass::bf16: return Mode::bf16;
    default: return Mode::split;
  }
}

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

inline Config make_config(const ConvProblem& problem) {
  Config config{};
  config.mode = select_mode(problem.accuracy);
  config.planes = config.mode == Mode::split ? 2 : 1;
  config.products = config.mode == Mode::split ? 3 : 1;
  config.filter_tile = select_filter_tile(config.mode, problem.k_per_group(), problem.groups);
  config.reduction = problem.r * problem.s * problem.c_per_group();
  config.steps = ceil_div(config.reduction, depth_tile);
  config.pixels = problem.n * problem.p() * problem.q();
  config.pixel_tiles = ceil_div(config.pixels, pixel_tile);
  config.filter_tiles = ceil_div(problem.k_per_group(), config.filter_tile);
  return config;
}

// Whether the kernel loads 16 bytes of channels at a time: from NHWC, so NCHW input is turned into the workspace first.
// With any other C it reads element by element, in either layout.
inline bool loads_vectors(const ConvProblem& problem) {
  return problem.c_per_group() % static_cast<std::int64_t>(16 / size_of(problem.dtype)) == 0;
}
inline std::size_t transposed_input_bytes(const ConvProblem& problem) {
  if (problem.layout == Layout::nhwc || !loads_vectors(problem)) return 0;
  return align_bytes(static_cast<std::size_t>(problem.n * problem.c * problem.h * problem.w) * size_of(problem.dtype));
}

}  // namespace fastconv::algos::implicit_gemm
