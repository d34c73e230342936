// One thread of a block raises the counters of what the block has finished. A raise takes as long as the stores before
// it; so those who have stored go on, and this thread waits.
#pragma once

#include "algos/winograd_megakernel/multiply.cuh"
#include "algos/winograd_megakernel/stream.cuh"

namespace fastconv::algos::winograd_megakernel {

template <typename T>
__device__ __forceinline__ void publish(const Params<T>& params, ProductStorage<T>& shared_products,
                                        StreamControl<T>& streams) {
  const auto finish = [&params](int counter, int record) {
    delay_randomly(params.delay);
    raise(params.counters + counter);
    params.trace.end(record);
  };
  bool more_products = true, more_streams = true;
  unsigned product = 0, task = 0;
#pragma unroll 1
  for (int idle = 0; more_products || more_streams; ++idle) {
    if (idle == WaitSite::limit) expire_in_place<role_publish>(params.report);
    constexpr unsigned slots = ProductStorage<T>::publish_slots;
    if (more_products &&
        hopper::try_wait(shared_address(&shared_products.stored[product % slots]), product / slots & 1)) {
      const int number = shared_products.number[product % slots];
      more_products = number >= 0;
      if (more_products) finish(TaskMap::counter_of(TaskKind::gemm, params.map.gemm_task(number).group), number);
      hopper::arrive(shared_address(&shared_products.taken[product++ % slots]));
      idle = 0;
    }
    const unsigned slot = task % stream_task_slots;
    if (more_streams && hopper::try_wait(shared_address(&streams.done[slot]), task / stream_task_slots & 1)) {
      const int counter = streams.tasks[slot].counter;
      more_streams = counter >= 0;
      if (more_streams) finish(counter, params.map.gemms() + streams.tasks[slot].number);
      hopper::arrive(shared_address(&streams.reusable[slot]));
      ++task;
      idle = 0;
    }
  }
}

}  // namespace fastconv::algos::winograd_megakernel
