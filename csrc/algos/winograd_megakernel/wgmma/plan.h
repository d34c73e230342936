// Sizes, task map and workspace of the wgmma kernel, shared by the planner and its launches. Layouts: params.cuh.
//
// Workspace: V | M | exponents of the tiles | tickets and counters | x in NHWC, if it is NCHW
// Packed weight: U | exponents of the filters
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/device_info.h"
#include "core/integers.h"
#include "core/problem.h"
#include "core/store_mode.h"
#include "winograd/instruments.h"
#include "winograd/task_map.h"

namespace fastconv::algos::winograd_megakernel::wgmma {

constexpr int tile_m = 128, tile_n = 128;    // of a GEMM task
constexpr int chunk_channels = 64;           // that share a tile's scale, and of a transform task
constexpr int operand_bytes = tile_m * 128;  // of a stage, what a product loads at once: rows of 64 halves
constexpr int segment_values = 64;           // of M: some tiles x some filters
constexpr int output_filters = 64;           // of a transform task
constexpr int min_work_tiles = 8;            // of a transform task: Form::work tiles, or as many

// How numbers are kept between the stages.
struct Form {
  int limbs;          // halves of a value of V or U: lo and hi, or one. So many stages has a chunk
  int product_bytes;  // of a value of M
  int segment_tiles, segment_filters;
  int work_tiles;  // of a transform task, at most: tiles, or segments of M
  int buffers;     // stages of one operand that shared memory holds

  constexpr int stage_channels() const { return chunk_channels / limbs; }
  constexpr int segments_in_a_row() const { return output_filters / segment_filters; }  // of a transform task
};
constexpr Form split_form{
    .limbs = 2, .product_bytes = 4, .segment_tiles = 4, .segment_filters = 16, .work_tiles = 8, .buffers = 10};
constexpr Form half_form{
    .limbs = 1, .product_bytes = 2, .segment_tiles = 2, .segment_filters = 32, .work_tiles = 16, .buffers = 11};
constexpr Form form_of(DType dtype) { return dtype == DType::f32 ? split_form : half_form; }

// What depends on the weight alone (the rule of packed_weight()).
struct CudaWeights {
  Form form;
  std::int64_t chunks, filter_blocks;

  std::int64_t stages() const { return form.limbs * chunks; }
  std::size_t u_bytes() const { return align_bytes(36 * filter_blocks * stages() * operand_bytes); }
};
inline CudaWeights make_cuda_weights(const ConvProblem& problem) {
  return {form_of(problem.dtype), ceil_div(problem.c, chunk_channels), ceil_div(problem.k, tile_n)};
}

struct CudaPlan {
  TaskMap map;
  CudaWeights weights;
  bool use_tma;  // x is read by tensor copies: from one pixel to the next it is a multiple of 16 bytes
  StoreMode store;
  bool plain;  // the epilogue has no residual and no SiLU
  Instruments instruments = {};

  std::int64_t v_place_bytes() const { return 36 * weights.stages() * operand_bytes; }
  std::int64_t m_place_bytes() const {
    return 36 * weights.filter_blocks * tile_m * tile_n * weights.form.product_bytes;
  }
  std::size_t v_bytes() const { return align_bytes(map.v_groups * v_place_bytes()); }
  std::size_t m_bytes() const { return align_bytes(map.m_groups * m_place_bytes()); }
  std::size_t exponent_bytes() const { return align_bytes(std::int64_t{map.groups} * tile_m * weights.chunks * 4); }
  // Tickets, counters and, of half types, a number for each group (Params::own_scales).
  std::size_t counter_bytes() const {
    return align_bytes((2 * ticket_stride + map.counters() + (weights.form.limbs == 1 ? map.groups : 0)) *
                       std::int64_t{4});
  }
};

// Throws InvalidArgument if the map has too many tasks.
inline CudaPlan make_cuda_plan(const ConvProblem& problem, const DeviceInfo& device,
                               const Instruments& instruments = {}) {
  const std::int64_t tiles = problem.n * ceil_div(problem.p(), 4) * ceil_div(problem.q(), 4);
  const Form form = form_of(problem.dtype);
  // Few work tiles for each streaming warp: small tasks, which spread them better; else large ones, which cost less.
  const std::int64_t all_work_tiles = tiles * (problem.c + problem.k) / chunk_channels;
  const bool small = all_work_tiles < 24 * 8 * static_cast<std::int64_t>(device.processors);
  const std::int32_t work_tiles = small ? min_work_tiles : form.work_tiles;
  const TaskShapes shapes{.group_tiles = tile_m,
                          .filter_filters = 0,  // pack_weight() transforms them
                          .filter_channels = 0,
                          .input_tiles = work_tiles,
                          .input_channels = chunk_channels,
                          .gemm_points = 1,
                          .gemm_filters = tile_n,
                          .output_tiles = work_tiles * segment_values / output_filters,
                          .output_filters = output_filters};
  // All inputs first, up to 1.5 GB of V: beside products they take longer than they save. D_GO: more than what is under
  // way in all blocks. M: U is read once per batch, but a map of two batches overlaps little, and the last batch should
  // not be a small one. (Measured: docs/log/40-megakernel-fp32.md.)
  constexpr std::int64_t max_ahead = 20000;
  const CudaWeights weights = make_cuda_weights(problem);
  const std::int64_t inputs = ceil_div(tiles, work_tiles) * weights.chunks;
  const std::int64_t groups = ceil_div(tiles, tile_m);
  const auto processors = static_cast<std::int32_t>(device.processors);
  const bool fp16 = form.limbs == 1;
  const Mapping mapping{.d_ig = static_cast<std::int32_t>(std::min(inputs, max_ahead)),
                        .d_go = fp16 ? processors * 9 / (groups <= 8 ? 8 : 2) : processors * 9 / 16,
                        .m = groups <= 8                          ? 3
                             : groups <= 64                       ? 5
                             : !fp16 && weights.filter_blocks > 1 ? 3
                                                                  : 8,
                        .bounded = true};
  return {.map = make_task_map(std::max<std::int64_t>(1, tiles), problem.c, problem.k, shapes,
                               instruments.mapping(mapping)),
          .weights = weights,
          .use_tma = problem.x_pitch() * static_cast<std::int64_t>(size_of(problem.dtype)) % 16 == 0,
          .store = select_store_mode(problem, 2),
          .plain = problem.has_plain_epilogue(),
          .instruments = instruments};
}

}  // namespace fastconv::algos::winograd_megakernel::wgmma
