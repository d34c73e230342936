// The multiplying side of a block: where the products' roles (winograd/products.cuh) get their tasks from, and what
// becomes of finished ones.
#pragma once

#include "algos/winograd/products.cuh"
#include "algos/winograd_megakernel/params.cuh"

namespace fastconv::algos::winograd_megakernel {

using winograd::products::ProductTask;

// GEMM tasks in the order of the map. Used by the one thread that loads.
template <typename T>
class ProductSource {
 public:
  __device__ __forceinline__ explicit ProductSource(const Params<T>& params)
      : params_(params),
        site_{params.report, kernel_winograd_megakernel, role_load},
        ticket_(atomicAdd(params.tickets, 1)) {}

  // The next task, once all that it reads has been written and all that it overwrites has been read.
  __device__ __forceinline__ bool next(ProductTask& product) {
    const TaskMap& map = params_.map;
    const int number = ticket_;
    if (number >= map.gemms()) return false;
    ticket_ = atomicAdd(params_.tickets, 1);  // nobody needs it before the next call
    const Task task = map.gemm_task(number);
    const Extent extent = map.extent(task);
    const int frequency = extent.first_frequency, filter = extent.first_channel;
    product.m = params_.products + (task.group % map.m_groups) * params_.m_place() +
                static_cast<std::int64_t>(frequency) * unit_tiles * params_.k_pad + filter;
    product.unscale = params_.unscale + static_cast<std::int64_t>(task.group) * unit_tiles;
    product.row = 0;
    product.v_index = task.group % map.v_groups * 36 + frequency;
    product.filter = filter;
    product.u_index = frequency;
    product.rows = extent.tiles;
    product.columns = min(unit_filters, params_.k_pad - filter);
    product.token = static_cast<unsigned>(number);
    await(map.signals(task), params_.counters, site_);
    fence_global_copies();
    if (params_.trace != nullptr) {
      params_.trace[number] = {global_time(), 0, static_cast<int>(task.kind), task.group, task.index, processor()};
    }
    return true;
  }

 private:
  const Params<T>& params_;
  WaitSite site_;
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
      : control_(control), site_{params.report, kernel_winograd_megakernel, role_multiply} {}

  // By all lanes, after their stores.
  __device__ __forceinline__ void operator()(const ProductTask& task, int warpgroup) {
    hand_over(static_cast<int>(task.token), warpgroup);
  }
  __device__ __forceinline__ void finish(int warpgroup) { hand_over(-1, warpgroup); }

 private:
  __device__ __forceinline__ void hand_over(int number, int warpgroup) {
    const int slot = slot_.slot;
    hopper::wait(shared_address(&control_.taken[slot]), slot_.parity ^ 1, site_);
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      if (warpgroup == 0 && threadIdx.x % 128 == 0) control_.number[slot] = number;
      hopper::arrive(shared_address(&control_.stored[slot]));
    }
    slot_.advance(PublishControl::slots);
  }

  PublishControl& control_;
  WaitSite site_;
  hopper::RingPosition slot_;
};

// The publishing warp; one lane.
template <typename T>
__device__ __forceinline__ void publish(const Params<T>& params, PublishControl& control) {
  const WaitSite site{params.report, kernel_winograd_megakernel, role_publish};
  hopper::RingPosition slot;
#pragma unroll 1
  while (true) {
    hopper::wait(shared_address(&control.stored[slot.slot]), slot.parity, site);
    const int number = control.number[slot.slot];
    if (number < 0) break;
    delay_randomly(params.delay);
    raise(params.counters + params.map.signals(params.map.gemm_task(number)).raises);
    if (params.trace != nullptr) params.trace[number].end = global_time();
    hopper::arrive(shared_address(&control.taken[slot.slot]));
    slot.advance(PublishControl::slots);
  }
}

}  // namespace fastconv::algos::winograd_megakernel
