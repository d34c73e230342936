// One thread of a block raises the counters of what the block has finished. A raise takes as long as the stores before
// it; so those who have stored go on, and this thread waits, for both sides at once.
#pragma once

#include "algos/winograd_megakernel/wgmma/multiply.cuh"
#include "algos/winograd_megakernel/wgmma/stream.cuh"

namespace fastconv::algos::winograd_megakernel::wgmma {

template <typename T>
__device__ __forceinline__ void signal(const Params<T>& params, ProductStorage<T>& products,
                                       StreamControl<T>& streams) {
  constexpr unsigned slots = ProductStorage<T>::signal_slots, task_slots = stream_task_slots;
  constexpr int patience = 64;  // this loop does not wait in the instruction, so it turns more often than others
  bool more_products = true, more_streams = true;
  unsigned product = 0, task = 0;
#pragma unroll 1
  for (int idle = 0; more_products || more_streams; ++idle) {
    if (idle == WaitSite::limit * patience) expire_in_place<role_signal>(params.report);
    const bool has_product = more_products && test_wait(products.stored[product % slots], product / slots & 1);
    const bool has_task = more_streams && test_wait(streams.done[task % task_slots], task / task_slots & 1);
    if (!has_product && !has_task) continue;
    idle = 0;
    int number = -1, counter = -1, row = 0;
    if (has_product) {
      number = products.number[product % slots];
      more_products = number >= 0;
      hopper::arrive(products.taken[product++ % slots]);
    }
    if (has_task) {
      const StreamTask& its = streams.tasks[task % task_slots];
      counter = its.counter, row = params.map.gemms() + its.number;
      more_streams = counter >= 0;
      hopper::arrive(streams.reusable[task++ % task_slots]);
    }
    delay_randomly(params.delay);
    fence_device();
    if (number >= 0) {
      raise_fenced(params.counters + TaskMap::counter_of(TaskKind::gemm, params.map.gemm_task(number).group));
      params.trace.end(number);
    }
    if (counter >= 0) {
      raise_fenced(params.counters + counter);
      params.trace.end(row);
    }
  }
}

}  // namespace fastconv::algos::winograd_megakernel::wgmma
