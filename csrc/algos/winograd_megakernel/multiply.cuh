// The multiplying side of a block: one thread loads, two warpgroups multiply, one thread raises the counters.
//
// The scheme is that of winograd/products.cuh, with stages of half the size and one set of sums, which leaves shared
// memory and registers to the streaming warps. While one warpgroup joins its sums to its totals, the other one's
// products run.
#pragma once

#include "algos/winograd_megakernel/params.cuh"
#include "device/power_of_two.h"

namespace fastconv::algos::winograd_megakernel {

#ifndef MK_RING
#define MK_RING 5
#endif
constexpr int product_slots = MK_RING, product_task_slots = 8, multiplying_warps = 8;
static_assert(product_slots + 1 < product_task_slots);  // tasks that the loading thread can be ahead

struct ProductTask {
  const char* v;         // [2 chunks][128 tiles][lo, hi][32]
  const char* u;         // [2 chunks][128 filters][lo, hi][32]
  const int* exponents;  // [128][chunks]
  float* m;              // M of 128 tiles x 128 filters, in the order of m_segment()
  int rows, columns;     // that exist; rows 0: there are no more tasks
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
              (static_cast<std::int64_t>(frequency) * params.filter_blocks + filter / unit_filters) *
                  (unit_tiles * unit_filters);
  product.rows = extent.tiles;
  product.columns = extent.channels;
  product.number = number;
  return product;
}

// The loading warp: GEMM tasks in the order of the map. Lane i works on the i-th of the tickets that are taken at once;
// the next ones are looked up, and their counters read, while the last of these is being loaded.
template <typename T>
class Loader {
 public:
  __device__ __forceinline__ Loader(const Params<T>& params, ProductStorage& shared)
      : params_(params), shared_(shared) {}

  __device__ __forceinline__ void run() {
    const int lane = threadIdx.x % 32, grab = params_.product_grab, gemms = params_.map.gemms();
    int ticket = 0;
    const auto take = [&] {
      if (lane == 0) ticket = atomicAdd(params_.tickets, grab);
    };
    take();
    int first = __shfl_sync(0xffffffffu, ticket, 0);
    take();
    Pending now = look_up(first, grab);
#pragma unroll 1
    while (first < gemms) {
      const int count = min(grab, gemms - first);
      Pending next{};
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        if (i == count - 1) {
          first = __shfl_sync(0xffffffffu, ticket, 0);
          take();
          next = look_up(first, grab);
        }
        if (lane == i) load(now);
        __syncwarp();
        stages_ += static_cast<unsigned>(2 * params_.chunks);
        ++tasks_;
      }
      now = next;
    }
    if (lane == 0) {
      await_slot(stages_);
      shared_.tasks[tasks_ % product_task_slots].rows = 0;
      hopper::arrive(shared_address(&shared_.full[stages_ % product_slots]));
    }
  }

 private:
  struct Pending {
    ProductTask product;
    CounterWait input, output;  // all that it reads has been written, all that it overwrites been read
    bool ready;
  };

  __device__ __forceinline__ Pending look_up(int first, int grab) const {
    const TaskMap& map = params_.map;
    const int lane = threadIdx.x % 32, number = first + lane;
    Pending pending{};
    if (lane >= grab || number >= map.gemms()) return pending;
    pending.product = describe_product(params_, number);
    const int group = map.gemm_task(number).group, before = group - map.m_groups;
    pending.input = wait_for(params_, TaskKind::input, group, map.inputs_of(group));
    pending.output = wait_for(params_, TaskKind::output, before, map.outputs_of(before));
    const bool input = pending.input.is_over(), output = pending.output.is_over();
    pending.ready = input && output;
    return pending;
  }

  // One lane.
  __device__ __forceinline__ void load(const Pending& pending) {
    const ProductTask& product = pending.product;
    if (!pending.ready) {
      pending.input.template wait<role_load>(params_.report);
      pending.output.template wait<role_load>(params_.report);
    }
    fence_global_copies();
    if (params_.trace != nullptr) {
      const Task task = params_.map.gemm_task(product.number);
      params_.trace[product.number] = {global_time(), 0, 2, task.group, task.index, processor()};
    }
#pragma unroll 1
    for (int i = 0; i < 2 * params_.chunks; ++i) {
      const unsigned stage = stages_ + static_cast<unsigned>(i), slot = stage % product_slots;
      await_slot(stage);
      if (i == 0) shared_.tasks[tasks_ % product_task_slots] = product;
      const std::uint32_t full = shared_address(&shared_.full[slot]);
      const std::int64_t offset = static_cast<std::int64_t>(i) * operand_bytes;
      hopper::arrive_expecting(full, 2 * operand_bytes);
      hopper::copy_bulk(shared_address(shared_.v[slot]), product.v + offset, operand_bytes, full);
      hopper::copy_bulk(shared_address(shared_.u[slot]), product.u + offset, operand_bytes, full);
    }
  }
  __device__ __forceinline__ void await_slot(unsigned stage) const {
    wait_in_place<role_load>(shared_.free[stage % product_slots], stage / product_slots & 1 ^ 1, params_.report);
  }

  const Params<T>& params_;
  ProductStorage& shared_;
  unsigned stages_ = 0, tasks_ = 0;  // so far
};

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
      exponents_ = product.exponents + (warp_row() + static_cast<int>(threadIdx.x) % 32 / 4) * params_.chunks;
#pragma unroll
      for (int i = 0; i < 64; ++i) totals_[i] = 0.0f;
#pragma unroll 1
      for (int chunk = 0; chunk < params_.chunks; ++chunk, stage_ += 2) {
        if (chunk > 0) await_stage(stage_);
        issue<true>(stage_);
        if (chunk == 0) find_least();
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
      write(product);
      hand_over(task, product.number);
    }
  }

 private:
  // The warp's first row: lane l has its rows l / 4 and 8 further (hopper.cuh).
  __device__ __forceinline__ int warp_row() const {
    return warpgroup_ * 64 + static_cast<int>(threadIdx.x) % 128 / 32 * 16;
  }

  // The sums of a chunk are brought to the scale of the tile's largest one before they are added up: exact, and neither
  // too large nor, relative to the result, too small for FP32. Four lanes share a row.
  __device__ __forceinline__ void find_least() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int least = 127;
#pragma unroll 2
      for (int chunk = threadIdx.x % 4; chunk < params_.chunks; chunk += 4) least = min(least, exponent(chunk, i));
      least = min(least, __shfl_xor_sync(0xffffffffu, least, 1));
      least_[i] = min(least, __shfl_xor_sync(0xffffffffu, least, 2));
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

  // In the order of the registers: rows would be pieces of 32 bytes.
  __device__ __forceinline__ void write(const ProductTask& product) {
    const int lane = threadIdx.x % 32, row = warp_row();
    float* target = product.m + m_segment(row, 0) * 64 + lane * 4;
    asm volatile("" : "+l"(target));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int width = row + 8 * h < product.rows ? product.columns : 0;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float* t = totals_ + 8 * j + 2 * h;
        asm volatile(  // predicated, not branched around; and the compiler may not see that this is global memory
            "{\n.reg .pred p;\nsetp.gt.s32 p, %1, %2;\n@p st.global.v4.f32 [%0], {%3, %4, %5, %6};\n}" ::"l"(
                target + (4 * j + 2 * h) * 64),
            "r"(width), "r"(16 * j), "f"(t[0]), "f"(t[1]), "f"(t[4]), "f"(t[5])
            : "memory");
      }
    }
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
