// The streaming side of a block: one warp hands out transform tasks, four (or more) run them.
//
// The dispatching warp takes tickets, finds their tasks, waits for what they read and puts them into a ring in shared
// memory, in order; so the streaming warps never wait for the ticket, the map or a counter one after the other.
#pragma once

#include "algos/winograd_megakernel/input_task.cuh"
#include "algos/winograd_megakernel/output_task.cuh"
#include "algos/winograd_megakernel/params.cuh"

namespace fastconv::algos::winograd_megakernel {

constexpr int grab = 2;        // tickets taken at once
constexpr int task_slots = 2;  // of the ring: tasks that are ready beyond those under way

struct StreamControl {
  std::uint64_t full[task_slots], free[task_slots];
  StreamTask tasks[task_slots];
  int next;  // entry of the ring to be taken next

  __device__ __forceinline__ void init() {
    for (int i = 0; i < task_slots; ++i) {
      hopper::barrier_init(shared_address(&full[i]), 1);
      hopper::barrier_init(shared_address(&free[i]), 1);
    }
    next = 0;
  }
};

template <typename T>
__device__ __forceinline__ StreamTask describe(const Params<T>& params, int number) {
  const TaskMap& map = params.map;
  const Task task = map.stream_task(number);
  const Extent extent = map.extent(task);
  const Signals signals = map.signals(task);
  const bool input = task.kind == TaskKind::input;
  StreamTask result;
  result.kind = static_cast<int>(task.kind);
  result.row = extent.first_tile;
  result.tile = task.group * unit_tiles + extent.first_tile;
  result.tiles = extent.tiles;
  result.channel = extent.first_channel;
  result.place = task.group % (input ? map.v_groups : map.m_groups);
  result.counter = signals.raises;
  result.number = number;
  return result;
}

// All lanes of one warp. `streaming_warps`: how many to tell of the end.
template <typename T>
__device__ __forceinline__ void dispatch(const Params<T>& params, StreamControl& control, int streaming_warps) {
  const WaitSite site{params.report, kernel_winograd_megakernel, role_dispatch};
  const int lane = threadIdx.x % 32, streams = params.map.streams();
  int* ticket = params.tickets + ticket_stride;
  hopper::RingPosition slot;
  const auto put = [&](const StreamTask& task) {
    hopper::wait(shared_address(&control.free[slot.slot]), slot.parity ^ 1, site);
    control.tasks[slot.slot] = task;
    hopper::arrive(shared_address(&control.full[slot.slot]));
  };
  int next = 0;
  if (lane == 0) next = atomicAdd(ticket, grab);
#pragma unroll 1
  while (true) {
    const int first = __shfl_sync(0xffffffffu, next, 0);
    if (first >= streams) break;
    if (lane == 0) next = atomicAdd(ticket, grab);  // nobody needs it before the turn after this one
    const int number = first + lane;
    const bool mine = lane < grab && number < streams;
    StreamTask task{};
    Signals signals{};
    bool ready = false;
    if (mine) {
      task = describe(params, number);
      signals = params.map.signals(params.map.stream_task(number));
      ready = is_ready(signals, params.counters);
    }
    // In order: a later task may wait for what an earlier one brings.
#pragma unroll 1
    for (int i = 0; i < grab; ++i) {
      if (mine && lane == i) {
        if (!ready) await(signals, params.counters, site);
        put(task);
      }
      __syncwarp();
      if (first + i < streams) slot.advance(task_slots);
    }
  }
  if (lane == 0) {
#pragma unroll 1
    for (int i = 0; i < streaming_warps; ++i) {
      StreamTask end{};
      end.kind = -1;
      put(end);
      slot.advance(task_slots);
    }
  }
}

// A streaming warp, all lanes.
template <typename T, bool vectors>
__device__ __forceinline__ void stream(const Params<T>& params, StreamControl& control) {
  const WaitSite site{params.report, kernel_winograd_megakernel, role_stream};
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  while (true) {
    int entry = 0;
    if (lane == 0) entry = atomicAdd(&control.next, 1);
    entry = __shfl_sync(0xffffffffu, entry, 0);
    const int slot = entry % task_slots;
    hopper::wait(shared_address(&control.full[slot]), entry / task_slots & 1, site);
    const StreamTask task = control.tasks[slot];
    __syncwarp();
    if (lane == 0) hopper::arrive(shared_address(&control.free[slot]));
    if (task.kind < 0) break;
    const unsigned long long begin = params.trace != nullptr ? global_time() : 0;
    delay_randomly(params.delay);
    if (task.kind == static_cast<int>(TaskKind::input)) {
      transform_input<T, vectors>(params, task);
    } else {
      transform_output<T, vectors>(params, task);
    }
    delay_randomly(params.delay);
    __syncwarp();  // all lanes' stores happen before the raise
    if (lane == 0) {
      raise(params.counters + task.counter);
      if (params.trace != nullptr) {
        params.trace[params.map.gemms() + task.number] = {begin, global_time(), task.kind, task.counter / 3,
                                                          task.number, processor()};
      }
    }
  }
}

}  // namespace fastconv::algos::winograd_megakernel
