// The multiplying side of a block: where the products' roles (winograd/products.cuh) get their tasks from, and what
// becomes of finished ones.
#pragma once

#include "algos/winograd/products.cuh"
#include "algos/winograd_megakernel/params.cuh"

namespace fastconv::algos::winograd_megakernel {

namespace products = winograd::products;

struct ProductTask {
  const char* v;         // [chunks][lo, hi][128 tiles][64]
  const char* u;         // [chunks][lo, hi][128 filters][64]
  const int* exponents;  // [128][chunks]
  float* m;              // [128][k_pad], at the first filter
  int rows, columns;     // that exist; columns a multiple of 8
  int number;            // of the GEMM task
};

// GEMM tasks in the order of the map. Used by the one thread that loads.
template <typename T>
class ProductSource {
 public:
  __device__ __forceinline__ explicit ProductSource(const Params<T>& params)
      : params_(params), ticket_(atomicAdd(params.tickets, 1)) {}

  // The next task, once all that it reads has been written and all that it overwrites has been read.
  __device__ __forceinline__ bool next(ProductTask& product) {
    const TaskMap& map = params_.map;
    const int number = ticket_;
    if (number >= map.gemms()) return false;
    ticket_ = atomicAdd(params_.tickets, 1);  // nobody needs it before the next call
    const Task task = map.gemm_task(number);
    const Extent extent = map.extent(task);
    const int frequency = extent.first_frequency, filter = extent.first_channel;
    const std::int64_t operand_bytes = static_cast<std::int64_t>(params_.chunks) * chunk_bytes;
    product.v = params_.v + task.group % map.v_groups * params_.v_place_bytes() + frequency * operand_bytes;
    product.u = params_.u + (frequency * params_.filter_blocks + filter / unit_filters) * operand_bytes;
    product.exponents = params_.tile_exponents + static_cast<std::int64_t>(task.group) * unit_tiles * params_.chunks;
    product.m = params_.products + task.group % map.m_groups * params_.m_place() +
                static_cast<std::int64_t>(frequency) * unit_tiles * params_.k_pad + filter;
    product.rows = extent.tiles;
    product.columns = min(unit_filters, params_.k_pad - filter);
    product.number = number;
    wait_for(params_, TaskKind::input, task.group, map.inputs_of(task.group)).template wait<role_load>(params_.report);
    const int before = task.group - map.m_groups;  // had the place in M
    wait_for(params_, TaskKind::output, before, map.outputs_of(before)).template wait<role_load>(params_.report);
    fence_global_copies();
    if (params_.trace != nullptr) {
      params_.trace[number] = {global_time(), 0, static_cast<int>(task.kind), task.group, task.index, processor()};
    }
    return true;
  }

  __device__ __forceinline__ void load(const ProductTask& product, int chunk, const products::Stage& stage) const {
    static_assert(products::stage_bytes == 2 * chunk_bytes);
    const std::int64_t offset = static_cast<std::int64_t>(chunk) * chunk_bytes;
    hopper::copy_bulk(stage.v, product.v + offset, chunk_bytes, stage.full);
    hopper::copy_bulk(stage.u, product.u + offset, chunk_bytes, stage.full);
  }

 private:
  const Params<T>& params_;
  int ticket_;
};

// Raising a counter takes as long as the stores before it. A warp of its own waits for that, so that the multiplying
// warps go on: they hand it the numbers of tasks whose results they have stored.
struct PublishControl {
  static constexpr int slots = 2;
  std::uint64_t stored[slots], taken[slots];
  int number[slots];  // of the GEMM task; -1: there are no more

  __device__ __forceinline__ void init(int warps) {
    for (int i = 0; i < slots; ++i) {
      hopper::barrier_init(shared_address(&stored[i]), warps);
      hopper::barrier_init(shared_address(&taken[i]), 1);
    }
  }
};

// Used by the multiplying warps, each with an object of its own.
template <typename T>
class ProductSink {
 public:
  __device__ __forceinline__ ProductSink(const Params<T>& params, PublishControl& control)
      : params_(params), control_(control) {}

  // The sums of a chunk are brought to the scale of the tile's largest one before they are added up: exact, and neither
  // too large nor, relative to the result, too small for FP32.
  __device__ __forceinline__ void begin(const ProductTask& product, int warpgroup) {
    exponents_ = product.exponents + products::lane_row(warpgroup) * params_.chunks;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      least_[i] = 127;
#pragma unroll 1
      for (int chunk = 0; chunk < params_.chunks; ++chunk) least_[i] = min(least_[i], exponent(chunk, i));
    }
  }
  __device__ __forceinline__ float factor(int chunk, int i) const {
    return power_of_two(max(-126, least_[i] - exponent(chunk, i)));
  }
  // By all lanes.
  __device__ __forceinline__ void write(const ProductTask& product, int warpgroup, const float (&totals)[64]) {
    delay_randomly(params_.delay);
    products::write_rows(totals, warpgroup, product.m, params_.k_pad, product.rows, product.columns);
    hand_over(product.number, warpgroup);
  }
  __device__ __forceinline__ void finish(int warpgroup) { hand_over(-1, warpgroup); }

 private:
  // Past the first cache: written by other multiprocessors of this very kernel.
  __device__ __forceinline__ int exponent(int chunk, int i) const {
    return __ldcg(exponents_ + i * 8 * params_.chunks + chunk);
  }
  __device__ __forceinline__ void hand_over(int number, int warpgroup) {
    const int slot = slot_.slot;
    wait_in_place<role_multiply>(control_.taken[slot], slot_.parity ^ 1, params_.report);
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      if (warpgroup == 0 && threadIdx.x % 128 == 0) control_.number[slot] = number;
      hopper::arrive(shared_address(&control_.stored[slot]));
    }
    slot_.advance(PublishControl::slots);
  }

  const Params<T>& params_;
  PublishControl& control_;
  hopper::RingPosition slot_;
  const int* exponents_;  // of the task under way, at the lane's first row
  int least_[2];
};

// The publishing warp; one lane.
template <typename T>
__device__ __forceinline__ void publish(const Params<T>& params, PublishControl& control) {
  hopper::RingPosition slot;
#pragma unroll 1
  while (true) {
    wait_in_place<role_publish>(control.stored[slot.slot], slot.parity, params.report);
    const int number = control.number[slot.slot];
    if (number < 0) break;
    delay_randomly(params.delay);
    raise(params.counters + TaskMap::counter_of(TaskKind::gemm, params.map.gemm_task(number).group));
    if (params.trace != nullptr) params.trace[number].end = global_time();
    hopper::arrive(shared_address(&control.taken[slot.slot]));
    slot.advance(PublishControl::slots);
  }
}

}  // namespace fastconv::algos::winograd_megakernel
