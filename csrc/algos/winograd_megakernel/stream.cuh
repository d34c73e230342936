// The streaming side of a block: one warp hands out transform tasks, four (or more) run them.
//
// The dispatching warp takes tickets, finds their tasks, waits for what they read and puts them into a ring in shared
// memory, in order; so the streaming warps never wait for the ticket, the map or a counter one after the other.
#pragma once

#include "algos/winograd_megakernel/input_task.cuh"
#include "algos/winograd_megakernel/output_task.cuh"
#include "algos/winograd_megakernel/params.cuh"

namespace fastconv::algos::winograd_megakernel {

constexpr int streaming_warps = 4;
constexpr int grab = 2;  // tickets taken at once
// Of the ring: tasks that are ready beyond those under way. Not fewer than the warps: two that wait for the same slot
// could not tell whose turn its parity means.
constexpr int task_slots = 4;
static_assert(task_slots >= streaming_warps);

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
__device__ __forceinline__ StreamTask describe(const Params<T>& params, int number, CounterWait& wait) {
  const TaskMap& map = params.map;
  const Task task = map.stream_task(number);
  const Extent extent = map.extent(task);
  const bool input = task.kind == TaskKind::input;
  // An input task waits until the products have read what had its place in V, an output task for its products.
  wait = wait_for(params, TaskKind::gemm, input ? task.group - map.v_groups : task.group, map.s_g);
  StreamTask result;
  result.kind = static_cast<int>(task.kind);
  result.row = extent.first_tile;
  result.tile = task.group * unit_tiles + extent.first_tile;
  result.tiles = extent.tiles;
  result.channel = extent.first_channel;
  result.place = task.group % (input ? map.v_groups : map.m_groups);
  result.counter = TaskMap::counter_of(task.kind, task.group);
  result.number = number;
  return result;
}

// All lanes of one warp.
template <typename T>
__device__ __forceinline__ void dispatch(const Params<T>& params, StreamControl& control) {
  const int lane = threadIdx.x % 32, streams = params.map.streams();
  int* ticket = params.tickets + ticket_stride;
  hopper::RingPosition slot;
  const auto put = [&](const StreamTask& task) {
    wait_in_place<role_dispatch>(control.free[slot.slot], slot.parity ^ 1, params.report);
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
    PROF_BEGIN;
    const bool mine = lane < grab && number < streams;
    StreamTask task{};
    CounterWait wait{};
    bool ready = false;
    if (mine) {
      task = describe(params, number, wait);
      ready = wait.is_over();
    }
    PROF(12);
    // In order: a later task may wait for what an earlier one brings.
#pragma unroll 1
    for (int i = 0; i < grab; ++i) {
      if (mine && lane == i) {
        if (!ready) wait.template wait<role_dispatch>(params.report);
        put(task);
      }
      __syncwarp();
      if (first + i < streams) slot.advance(task_slots);
    }
    PROF(13);
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
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  while (true) {
    PROF_BEGIN;
    int entry = 0;
    if (lane == 0) entry = atomicAdd(&control.next, 1);
    entry = __shfl_sync(0xffffffffu, entry, 0);
    const int slot = entry % task_slots;
    wait_in_place<role_stream>(control.full[slot], entry / task_slots & 1, params.report);
    const StreamTask task = control.tasks[slot];
    __syncwarp();
    if (lane == 0) hopper::arrive(shared_address(&control.free[slot]));
#ifdef DEBUG_WAIT
    if (lane == 0) printf("warp %d entry %d kind %d tile %d tiles %d channel %d\n", threadIdx.x / 32, entry, task.kind, task.tile, task.tiles, task.channel);
#endif
    if (task.kind < 0) break;
    PROF(8);
    const unsigned long long begin = params.trace != nullptr ? global_time() : 0;
    delay_randomly(params.delay);
    if (task.kind == static_cast<int>(TaskKind::input)) {
      transform_input<T, vectors>(params, task);
    } else {
      transform_output<T, vectors>(params, task);
    }
    delay_randomly(params.delay);
    PROF(9);
    __syncwarp();  // all lanes' stores happen before the raise
    if (lane == 0) {
      raise(params.counters + task.counter);
      if (params.trace != nullptr) {
        params.trace[params.map.gemms() + task.number] = {begin, global_time(), task.kind, task.counter / 3,
                                                          task.number, processor()};
      }
    }
    PROF(10);
  }
}

}  // namespace fastconv::algos::winograd_megakernel
