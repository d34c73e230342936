// A thread for each side of a block raises the counters of what that side has finished. A raise takes as long as the
// stores before it; so those who have stored go on, and this thread waits.
#pragma once

#include "algos/winograd_megakernel/multiply.cuh"
#include "algos/winograd_megakernel/stream.cuh"

namespace fastconv::algos::winograd_megakernel {

// counter, record: of a task of the trace.
template <typename T>
__device__ __forceinline__ void publish(const Params<T>& params, int counter, int record) {
  delay_randomly(params.delay);
  raise(params.counters + counter);
  params.trace.end(record);
}

template <typename T>
__device__ __forceinline__ void publish_products(const Params<T>& params, ProductStorage<T>& products) {
  constexpr unsigned slots = ProductStorage<T>::publish_slots;
#pragma unroll 1
  for (unsigned task = 0;; ++task) {
    wait_in_place<role_publish>(products.stored[task % slots], task / slots & 1, params.report);
    const int number = products.number[task % slots];
    if (number < 0) break;
    publish(params, TaskMap::counter_of(TaskKind::gemm, params.map.gemm_task(number).group), number);
    hopper::arrive(shared_address(&products.taken[task % slots]));
  }
}

template <typename T>
__device__ __forceinline__ void publish_transforms(const Params<T>& params, StreamControl<T>& streams) {
#pragma unroll 1
  for (unsigned task = 0;; ++task) {
    const unsigned slot = task % stream_task_slots;
    wait_in_place<role_publish>(streams.done[slot], task / stream_task_slots & 1, params.report);
    const int counter = streams.tasks[slot].counter;
    if (counter < 0) break;
    publish(params, counter, params.map.gemms() + streams.tasks[slot].number);
    hopper::arrive(shared_address(&streams.reusable[slot]));
  }
}

}  // namespace fastconv::algos::winograd_megakernel
