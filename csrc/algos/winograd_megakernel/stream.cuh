// The streaming side of a block: one warp hands out transforms, five run them.
//
// The dispatching warp takes tickets, finds their tasks, waits for what they read and starts the copies of each tile
// into a ring of buffers in shared memory, in order. So the streaming warps wait neither for the ticket, the map, a
// counter nor for memory, one after the other; and what is under way does not depend on how many they are.
#pragma once

#include "algos/winograd_megakernel/output_task.cuh"

namespace fastconv::algos::winograd_megakernel {

constexpr int streaming_warps = 5;
constexpr int buffers = 8;                  // tiles in shared memory
static_assert(streaming_warps <= buffers);  // each is told of the end in a buffer of its own
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
        if (lane == i) {
          if (!ready) wait.template wait<role_dispatch>(params_.report);
          start(task, extent, number);
        }
        items_ += static_cast<unsigned>(__shfl_sync(0xffffffffu, items_of(task, extent), i));
        ++tasks_;
      }
    }
    if (lane == 0) finish();
  }

 private:
  // An output task has at most 8 tiles.
  static __device__ __forceinline__ int items_of(const Task& task, const Extent& extent) {
    if (task.kind == TaskKind::input) return extent.tiles;
    return (extent.channels + segment_filters - 1) / segment_filters *
           ((extent.tiles + segment_tiles - 1) / segment_tiles);
  }

  __device__ __forceinline__ void start(const Task& task, const Extent& extent, int number) {
    const TaskMap& map = params_.map;
    const bool input = task.kind == TaskKind::input;
    const int slot = begin_task(TaskMap::counter_of(task.kind, task.group), number);
    if (params_.trace != nullptr) {
      params_.trace[map.gemms() + number] = {global_time(), 0,          static_cast<int>(task.kind),
                                             task.group,    task.index, processor()};
    }
    if (!input) fence_global_copies();  // M was written by ordinary stores
    StreamItem item;
    item.kind = static_cast<int>(task.kind);
    item.tile = task.group * unit_tiles + extent.first_tile;
    item.tiles = extent.tiles;
    item.row = extent.first_tile;
    item.channel = extent.first_channel;
    const int items = items_of(task, extent), halves = (extent.tiles + segment_tiles - 1) / segment_tiles;
    int segment = extent.first_channel / unit_filters * (unit_tiles * unit_filters / 64) +
                  m_segment(extent.first_tile, extent.first_channel % unit_filters);
    item.place = task.group % (input ? map.v_groups : map.m_groups);
    item.slot = slot;
    unsigned rest = static_cast<unsigned>(item.tile);
    int tq = static_cast<int>(params_.by_tiles_q.peel(rest)), tp = static_cast<int>(params_.by_tiles_p.peel(rest));
    item.n = static_cast<int>(rest);
#pragma unroll 1
    for (int i = 0; i < items; ++i) {
      const unsigned number_of_item = items_ + static_cast<unsigned>(i);
      const int buffer = static_cast<int>(number_of_item % buffers);
      item.p = 4 * tp, item.q = 4 * tq;
      wait_in_place<role_dispatch>(control_.free[buffer], number_of_item / buffers & 1 ^ 1, params_.report);
      control_.items[buffer] = item;
      const std::uint32_t full = shared_address(&control_.full[buffer]);
      const std::uint32_t target = shared_address(patches_.patch[buffer]);
      if (!input) {
        hopper::arrive_expecting(full, patch_bytes);
        hopper::copy_box(target, maps_.m, 0, segment, item.place * 36, 0, full);
        if (i % halves < halves - 1) {  // the other 4 tiles
          ++segment, item.tile += segment_tiles, item.tiles -= segment_tiles;
        } else {
          segment += 5 - halves, item.channel += segment_filters;
          item.tile -= (halves - 1) * segment_tiles, item.tiles += (halves - 1) * segment_tiles;
        }
        continue;
      } else if (params_.boxes) {
        hopper::arrive_expecting(full, patch_bytes);
        hopper::copy_box(target, maps_.x, item.channel, item.q - params_.pad_w, item.p - params_.pad_h, item.n, full);
      } else {
        hopper::arrive(full);
      }
      ++item.tile, ++item.row;
      if (++tq == params_.tiles_q) {
        tq = 0;
        if (++tp == params_.tiles_p) tp = 0, ++item.n;
      }
    }
    // The barrier counts the most items that a task has.
#pragma unroll 1
    for (int i = items; i < most_items; ++i) hopper::arrive(shared_address(&control_.done[slot]));
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
    // Copies arrive in any order, so another warp may still wait for this buffer's item before; and a barrier's parity
    // tells two turns apart, not three.
    wait_in_place<role_stream>(control.free[buffer], number / buffers & 1 ^ 1, params.report);
    wait_in_place<role_stream>(control.full[buffer], number / buffers & 1, params.report);
    const StreamItem item = control.items[buffer];
    if (item.kind < 0) break;
    float* patch = patches.patch[buffer] + 2 * lane;
    delay_randomly(params.delay);
    if (item.kind == static_cast<int>(TaskKind::input)) {
      if (!params.boxes) load_patch(params, item, patch, 1.0f);
      transform_input(params, item, patch);
    } else {
      transform_output<T, output>(params, item, patch);
    }
    delay_randomly(params.delay);
    hopper::fence_copies();  // the next one comes by a copy
    __syncwarp();            // all lanes' stores happen before the arrivals
    if (lane == 0) {
      hopper::arrive(shared_address(&control.free[buffer]));
      hopper::arrive(shared_address(&control.done[item.slot]));
    }
  }
}

}  // namespace fastconv::algos::winograd_megakernel
