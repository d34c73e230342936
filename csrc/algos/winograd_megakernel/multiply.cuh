// The multiplying side of a block: one thread loads, two warpgroups multiply, one thread raises the counters.
//
// The scheme is that of winograd/products.cuh, with stages of half the size and one set of sums, which leaves shared
// memory and registers to the streaming warps. While one warpgroup joins its sums to its totals, the other one's
// products run.
#pragma once

#include "algos/winograd/products.cuh"
#include "algos/winograd_megakernel/params.cuh"

namespace fastconv::algos::winograd_megakernel {

namespace products = winograd::products;

constexpr int product_slots = 4, product_task_slots = 8, multiplying_warps = 8;
static_assert(product_slots + 1 < product_task_slots);  // tasks that the loading thread can be ahead

struct ProductTask {
  const char* v;         // [2 chunks][128 tiles][lo, hi][32]
  const char* u;         // [2 chunks][128 filters][lo, hi][32]
  const int* exponents;  // [128][chunks]
  float* m;              // [128][k_pad], at the first filter
  int rows, columns;     // that exist, columns a multiple of 8; rows 0: there are no more tasks
  int number;            // of the GEMM task
};

// In shared memory at a multiple of 1024 bytes.
struct alignas(1024) ProductStorage {
  unsigned char v[product_slots][operand_bytes], u[product_slots][operand_bytes];
  ProductTask tasks[product_task_slots];
  std::uint64_t full[product_slots], free[product_slots];
  // Raising a counter takes as long as the stores before it. A thread of its own waits for that; the multiplying warps
  // hand it the numbers of tasks whose results they have stored. -1: there are no more.
  static constexpr int publish_slots = 2;
  std::uint64_t stored[publish_slots], taken[publish_slots];
  int number[publish_slots];

  __device__ __forceinline__ void init() {
    for (int i = 0; i < product_slots; ++i) {
      hopper::barrier_init(shared_address(&full[i]), 1);
      hopper::barrier_init(shared_address(&free[i]), multiplying_warps);
    }
    for (int i = 0; i < publish_slots; ++i) {
      hopper::barrier_init(shared_address(&stored[i]), multiplying_warps);
      hopper::barrier_init(shared_address(&taken[i]), 1);
    }
  }
};

template <typename T>
__device__ __forceinline__ ProductTask describe_product(const Params<T>& params, int number) {
  const TaskMap& map = params.map;
  const Task task = map.gemm_task(number);
  const Extent extent = map.extent(task);
  const int frequency = extent.first_frequency, filter = extent.first_channel;
  const std::int64_t bytes = static_cast<std::int64_t>(2 * params.chunks) * operand_bytes;
  ProductTask product;
  product.v = params.v + task.group % map.v_groups * params.v_place_bytes() + frequency * bytes;
  product.u = params.u + (frequency * params.filter_blocks + filter / unit_filters) * bytes;
  product.exponents = params.tile_exponents + static_cast<std::int64_t>(task.group) * unit_tiles * params.chunks;
  product.m = params.products + task.group % map.m_groups * params.m_place() +
              static_cast<std::int64_t>(frequency) * unit_tiles * params.k_pad + filter;
  product.rows = extent.tiles;
  product.columns = min(unit_filters, params.k_pad - filter);
  product.number = number;
  return product;
}

// One thread: GEMM tasks in the order of the map.
template <typename T>
__device__ __forceinline__ void load_products(const Params<T>& params, ProductStorage& shared) {
  const TaskMap& map = params.map;
  hopper::RingPosition ring;
  unsigned tasks = 0;
  const auto await_slot = [&] { wait_in_place<role_load>(shared.free[ring.slot], ring.parity ^ 1, params.report); };
  int ticket = atomicAdd(params.tickets, 1);
#pragma unroll 1
  while (ticket < map.gemms()) {
    const int number = ticket;
    ticket = atomicAdd(params.tickets, 1);  // nobody needs it before the next turn
    const ProductTask product = describe_product(params, number);
    // All that it reads must have been written, and all that it overwrites been read.
    const int group = map.gemm_task(number).group, before = group - map.m_groups;
    wait_for(params, TaskKind::input, group, map.inputs_of(group)).template wait<role_load>(params.report);
    wait_for(params, TaskKind::output, before, map.outputs_of(before)).template wait<role_load>(params.report);
    fence_global_copies();
    if (params.trace != nullptr) params.trace[number] = {global_time(), 0, 2, group, number, processor()};
#pragma unroll 1
    for (int stage = 0; stage < 2 * params.chunks; ++stage) {
      await_slot();
      if (stage == 0) shared.tasks[tasks++ % product_task_slots] = product;
      const std::uint32_t full = shared_address(&shared.full[ring.slot]);
      const std::int64_t offset = static_cast<std::int64_t>(stage) * operand_bytes;
      hopper::arrive_expecting(full, 2 * operand_bytes);
      hopper::copy_bulk(shared_address(shared.v[ring.slot]), product.v + offset, operand_bytes, full);
      hopper::copy_bulk(shared_address(shared.u[ring.slot]), product.u + offset, operand_bytes, full);
      ring.advance(product_slots);
    }
  }
  await_slot();
  shared.tasks[tasks % product_task_slots].rows = 0;
  hopper::arrive(shared_address(&shared.full[ring.slot]));
}

// All threads of a warpgroup, 0 or 1: rows [64 warpgroup, 64 warpgroup + 64) of each task.
template <typename T>
class Multiplier {
 public:
  __device__ __forceinline__ Multiplier(const Params<T>& params, ProductStorage& shared, int warpgroup)
      : params_(params), shared_(shared), warpgroup_(warpgroup) {}

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (unsigned task = 0;; ++task) {
      await_stage(stage_);
      const ProductTask& product = shared_.tasks[task % product_task_slots];
      if (product.rows == 0) {
        hand_over(task, -1);
        break;
      }
      begin(product);
#pragma unroll
      for (int i = 0; i < 64; ++i) totals_[i] = 0.0f;
#pragma unroll 1
      for (int chunk = 0; chunk < params_.chunks; ++chunk, stage_ += 2) {
        if (chunk > 0) await_stage(stage_);
        issue<true>(stage_);
        await_stage(stage_ + 1);
        issue<false>(stage_ + 1);
        const float factors[2] = {factor(chunk, 0), factor(chunk, 1)};
        hopper::wait_for_products<1>();
        release(stage_);
        hopper::wait_for_products<0>();
        release(stage_ + 1);
        hopper::pin(sums_);
#pragma unroll
        for (int i = 0; i < 64; ++i) totals_[i] = fmaf(sums_[i], factors[i / 2 % 2], totals_[i]);
      }
      delay_randomly(params_.delay);
      products::write_rows(totals_, warpgroup_, product.m, params_.k_pad, product.rows, product.columns);
      hand_over(task, product.number);
    }
  }

 private:
  // The sums of a chunk are brought to the scale of the tile's largest one before they are added up: exact, and neither
  // too large nor, relative to the result, too small for FP32.
  __device__ __forceinline__ void begin(const ProductTask& product) {
    exponents_ = product.exponents + products::lane_row(warpgroup_) * params_.chunks;
    least_[0] = least_[1] = 127;
#pragma unroll 1
    for (int chunk = 0; chunk < params_.chunks; ++chunk) {
      least_[0] = min(least_[0], exponent(chunk, 0));
      least_[1] = min(least_[1], exponent(chunk, 1));
    }
  }
  __device__ __forceinline__ float factor(int chunk, int i) const {
    return power_of_two(max(-126, least_[i] - exponent(chunk, i)));
  }
  // Past the first cache: written by other multiprocessors of this very kernel.
  __device__ __forceinline__ int exponent(int chunk, int i) const {
    return __ldcg(exponents_ + i * 8 * params_.chunks + chunk);
  }

  __device__ __forceinline__ void await_stage(unsigned stage) const {
    wait_in_place<role_multiply>(shared_.full[stage % product_slots], stage / product_slots & 1, params_.report);
  }
  __device__ __forceinline__ void release(unsigned stage) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) hopper::arrive(shared_address(&shared_.free[stage % product_slots]));
  }

  // The products of a stage: lo hi and hi lo first, the small ones (docs/numerics.md).
  template <bool begins>
  __device__ __forceinline__ void issue(unsigned stage) {
    constexpr int hi = 64;  // bytes, in a row
    const std::uint64_t v = hopper::matrix_descriptor<128>(shared_address(shared_.v[stage % product_slots]) +
                                                           warpgroup_ * (operand_bytes / 2));
    const std::uint64_t u = hopper::matrix_descriptor<128>(shared_address(shared_.u[stage % product_slots]));
    const auto multiply = [&](auto accumulate, int v_bytes, int u_bytes) {
      hopper::multiply_shared<half_t, accumulate()>(sums_, hopper::advance_descriptor(v, v_bytes),
                                                    hopper::advance_descriptor(u, u_bytes));
    };
    constexpr std::true_type add{};
    hopper::fence_products();
    multiply(std::bool_constant<!begins>{}, 0, hi), multiply(add, 32, hi + 32);
    multiply(add, hi, 0), multiply(add, hi + 32, 32);
    multiply(add, hi, hi), multiply(add, hi + 32, hi + 32);
    hopper::commit_products();
  }

  __device__ __forceinline__ void hand_over(unsigned task, int number) {
    constexpr unsigned slots = ProductStorage::publish_slots;
    const unsigned slot = task % slots;
    wait_in_place<role_multiply>(shared_.taken[slot], task / slots & 1 ^ 1, params_.report);
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      if (warpgroup_ == 0 && threadIdx.x % 128 == 0) shared_.number[slot] = number;
      hopper::arrive(shared_address(&shared_.stored[slot]));
    }
  }

  const Params<T>& params_;
  ProductStorage& shared_;
  const int warpgroup_;
  unsigned stage_ = 0;    // to be multiplied next
  const int* exponents_;  // of the task under way, at the lane's first row
  int least_[2];
  float totals_[64], sums_[64];
};

}  // namespace fastconv::algos::winograd_megakernel
