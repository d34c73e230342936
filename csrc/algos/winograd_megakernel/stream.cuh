// The streaming side of a block: one warp hands out transforms, five run them.
//
// The dispatching warp takes tickets, finds their tasks, waits for what they read and starts the copies of each tile
// into a ring of buffers in shared memory, in order. So the streaming warps wait neither for the ticket, the map, a
// counter nor for memory, one after the other; and what is under way does not depend on how many they are.
#pragma once

#include "algos/winograd_megakernel/output_task.cuh"

namespace fastconv::algos::winograd_megakernel {

constexpr int streaming_warps = 5;
#ifndef MK_BUF
#define MK_BUF 7
#endif
constexpr int buffers = MK_BUF;                  // tiles in shared memory
constexpr int stream_task_slots = 8;
constexpr int patch_elements = 36 * chunk_channels, patch_bytes = patch_elements * 4;

struct StreamControl {
  std::uint64_t full[buffers], free[buffers];
  std::uint64_t done[stream_task_slots], reusable[stream_task_slots];
  StreamItem items[buffers];
  int counter[stream_task_slots], number[stream_task_slots];  // of a task: to raise (-1: there are no more), its ticket
  int next;                                                   // item to be taken next

  __device__ __forceinline__ void init() {
    for (int i = 0; i < buffers; ++i) {
      hopper::barrier_init(shared_address(&full[i]), 1);
      hopper::barrier_init(shared_address(&free[i]), 1);
      items[i].number = -1;
    }
    for (int i = 0; i < stream_task_slots; ++i) {
      hopper::barrier_init(shared_address(&done[i]), most_items);
      hopper::barrier_init(shared_address(&reusable[i]), 1);
    }
    next = 0;
  }
};

struct Patches {
  alignas(128) float patch[buffers][patch_elements];
};

// Tensor copies: x in boxes of {64 channels, 6, 6, 1}; M in segments of 64, {64, 1, 36 frequencies, 1}.
struct StreamMaps {
  CUtensorMap x, m;
};

// All lanes of one warp; lane i works on the i-th of the tickets that are taken at once.
template <typename T>
class Dispatcher {
 public:
  __device__ __forceinline__ Dispatcher(const Params<T>& params, const StreamMaps& maps, StreamControl& control,
                                        Patches& patches)
      : params_(params), maps_(maps), control_(control), patches_(patches) {}

  __device__ __forceinline__ void run() {
    const TaskMap& map = params_.map;
    const int lane = threadIdx.x % 32, streams = map.streams(), grab = params_.stream_grab;
    int* ticket = params_.tickets + ticket_stride;
    int next = 0;
    if (lane == 0) next = atomicAdd(ticket, grab);
#pragma unroll 1
    while (true) {
      const int first = __shfl_sync(0xffffffffu, next, 0);
      if (first >= streams) break;
      if (lane == 0) next = atomicAdd(ticket, grab);  // nobody needs it before the next turn
      const int number = first + lane;
      const bool mine = lane < grab && number < streams;
      Task task{};
      Extent extent{};
      CounterWait wait{};
      bool ready = false;
      if (mine) {
        task = map.stream_task(number);
        extent = map.extent(task);
        // An input task waits until the products have read what had its place in V, an output task for its products.
        const bool input = task.kind == TaskKind::input;
        wait = wait_for(params_, TaskKind::gemm, input ? task.group - map.v_groups : task.group, map.s_g);
        ready = wait.is_over();
      }
      // In order: a later task may wait for what an earlier one brings.
#pragma unroll 1
      for (int i = 0; i < grab && first + i < streams; ++i) {
        if (lane == i && !ready) wait.template wait<role_dispatch>(params_.report);
        const auto of_lane = [i](int value) { return __shfl_sync(0xffffffffu, value, i); };
        const Task its_task{static_cast<TaskKind>(of_lane(static_cast<int>(task.kind))), of_lane(task.group),
                            of_lane(task.index)};
        start(its_task,
              {of_lane(extent.first_tile), of_lane(extent.tiles), of_lane(extent.first_channel),
               of_lane(extent.channels), 0, 0},
              first + i);
      }
    }
    if (lane == 0) finish();
  }

 private:
  // Lane i starts the i-th item of a task.
  __device__ __forceinline__ void start(const Task& task, const Extent& extent, int number) {
    const TaskMap& map = params_.map;
    const int lane = threadIdx.x % 32;
    const bool input = task.kind == TaskKind::input;
    // Segments along the tiles; an output task has at most 8 tiles.
    const int halves = (extent.tiles + segment_tiles - 1) / segment_tiles;
    const int items = input ? extent.tiles : (extent.channels + segment_filters - 1) / segment_filters * halves;
    int slot = 0;
    if (lane == 0) {
      slot = begin_task(TaskMap::counter_of(task.kind, task.group), number);
      if (params_.trace != nullptr) {
        params_.trace[map.gemms() + number] = {global_time(), 0,          static_cast<int>(task.kind),
                                               task.group,    task.index, processor()};
      }
    }
    __syncwarp();  // what one lane has waited for, and written, holds for those that go on
    slot = __shfl_sync(0xffffffffu, slot, 0);

    StreamItem item;
    item.kind = static_cast<int>(task.kind);
    item.place = task.group % (input ? map.v_groups : map.m_groups);
    item.slot = slot;
    const int first_tile = input ? lane : lane % halves * segment_tiles;  // of the task
    item.tiles = extent.tiles - first_tile;
    item.row = extent.first_tile + first_tile;
    item.tile = task.group * unit_tiles + item.row;
    item.channel = extent.first_channel + (input ? 0 : lane / halves * segment_filters);
    unsigned rest = static_cast<unsigned>(item.tile);
    item.q = 4 * static_cast<int>(params_.by_tiles_q.peel(rest));
    item.p = 4 * static_cast<int>(params_.by_tiles_p.peel(rest));
    item.n = static_cast<int>(rest);
    const int segment = item.channel / unit_filters * (unit_tiles * unit_filters / 64) +
                        m_segment(item.row, item.channel % unit_filters);

    if (!input) fence_global_copies();  // M was written by ordinary stores
    const unsigned mine = items_ + static_cast<unsigned>(lane);
    const int buffer = static_cast<int>(mine % buffers);
    if (lane >= items && lane < most_items) {  // the barrier counts the most items that a task has
      hopper::arrive(shared_address(&control_.done[slot]));
    }
    // Each as soon as its buffer is free.
    bool waits = lane < items;
#pragma unroll 1
    for (int tries = 0;; ++tries) {
      const unsigned waiting = __ballot_sync(0xffffffffu, waits);
      if (waiting == 0) break;
      if (tries == WaitSite::limit) expire_in_place<role_dispatch>(params_.report);
      // A barrier's parity tells two turns apart, not three: the buffer's item before comes first.
      if (!waits || (lane >= buffers && (waiting >> (lane - buffers) & 1) != 0) || 
          !test_wait(control_.free[buffer], mine / buffers & 1 ^ 1)) continue;
      waits = false;
      item.number = static_cast<int>(mine);
      control_.items[buffer] = item;
      const std::uint32_t full = shared_address(&control_.full[buffer]);
      const std::uint32_t target = shared_address(patches_.patch[buffer]);
      if (!input) {
        hopper::arrive_expecting(full, patch_bytes);
        hopper::copy_box(target, maps_.m, 0, segment, item.place * 36, 0, full);
      } else if (params_.boxes) {
        hopper::arrive_expecting(full, patch_bytes);
        hopper::copy_box(target, maps_.x, item.channel, item.q - params_.pad_w, item.p - params_.pad_h, item.n, full);
      } else {
        hopper::arrive(full);
      }
    }
    __syncwarp();
    items_ += static_cast<unsigned>(items);
    ++tasks_;
  }

  __device__ __forceinline__ int begin_task(int counter, int number) {
    const int slot = static_cast<int>(tasks_ % stream_task_slots);
    wait_in_place<role_dispatch>(control_.reusable[slot], tasks_ / stream_task_slots & 1 ^ 1, params_.report);
    control_.counter[slot] = counter, control_.number[slot] = number;
    return slot;
  }

  __device__ __forceinline__ void finish() {
    const int slot = begin_task(-1, 0);
    for (int i = 0; i < most_items; ++i) hopper::arrive(shared_address(&control_.done[slot]));
#pragma unroll 1
    for (int i = 0; i < streaming_warps; ++i, ++items_) {
      const int buffer = static_cast<int>(items_ % buffers);
      wait_in_place<role_dispatch>(control_.free[buffer], items_ / buffers & 1 ^ 1, params_.report);
      control_.items[buffer].kind = -1;
      control_.items[buffer].number = static_cast<int>(items_);
      hopper::arrive(shared_address(&control_.full[buffer]));
    }
  }

  const Params<T>& params_;
  const StreamMaps& maps_;
  StreamControl& control_;
  Patches& patches_;
  unsigned items_ = 0, tasks_ = 0;  // so far
};

// A streaming warp, all lanes.
template <typename T, Output output>
__device__ __forceinline__ void stream(const Params<T>& params, StreamControl& control, Patches& patches) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  while (true) {
    unsigned number = 0;
    if (lane == 0) number = atomicAdd(reinterpret_cast<unsigned*>(&control.next), 1u);
    number = __shfl_sync(0xffffffffu, number, 0);
    const int buffer = static_cast<int>(number % buffers);
    // Copies arrive in any order, so other warps may still wait for this buffer's items before; and a barrier's parity
    // tells two turns apart, not three.
    wait_in_place<role_stream>(control.free[buffer], number / buffers & 1 ^ 1, params.report);
    const volatile int& current = control.items[buffer].number;
#pragma unroll 1
    for (int tries = 0; current != static_cast<int>(number); ++tries) {
      if (tries == WaitSite::limit) expire_in_place<role_stream>(params.report);
    }
    wait_in_place<role_stream>(control.full[buffer], number / buffers & 1, params.report);
    const StreamItem item = control.items[buffer];
    float* patch = patches.patch[buffer] + 2 * lane;
    delay_randomly(params.delay);
    const auto release = [&] {
      __syncwarp();
      if (lane == 0) hopper::arrive(shared_address(&control.free[buffer]));
    };
    if (item.kind < 0) {
      release();
      break;
    }
    if (item.kind == static_cast<int>(TaskKind::input)) {
      if (!params.boxes) {
        load_patch(params, item, patch, 1.0f);
        hopper::fence_copies();  // the next patch comes by a copy
      }
      transform_input(params, item, patch, release);
    } else {
      transform_output<T, output>(params, item, patch, release);
    }
    delay_randomly(params.delay);
    __syncwarp();  // all lanes' stores happen before the arrival
    if (lane == 0) hopper::arrive(shared_address(&control.done[item.slot]));
  }
}

}  // namespace fastconv::algos::winograd_megakernel
