// The streaming side of a block: one thread hands out transforms, four or eight warps run them.
//
// The dispatching thread takes tickets, finds their tasks and waits for what they read. A streaming warp takes work
// tiles, a tile or a segment of M each, and copies the next one's values into its buffer as soon as it has this one's
// in registers, so that memory works while it transforms and stores.
#pragma once

#include "algos/winograd_megakernel/wgmma/output_task.cuh"

namespace fastconv::algos::winograd_megakernel::wgmma {

template <typename T>
constexpr int streaming_warps = is_split<T> ? 4 : 8;
constexpr int stream_task_slots = 2;  // one at work, one to follow: who holds more makes others wait
constexpr int patch_elements = 36 * chunk_channels;

template <typename T>
struct StreamControl {
  static_assert(streaming_warps<T> <= min_work_tiles);  // a warp takes one work tile of the last task, which says so
  hopper::Barrier full[streaming_warps<T>];
  hopper::Barrier ready[stream_task_slots], done[stream_task_slots], reusable[stream_task_slots];
  StreamTask tasks[stream_task_slots];
  int next;  // work tile to be taken next: Params::work_tiles() of each task, whether they exist or not

  __device__ __forceinline__ void init(int work_tiles) {
    for (int i = 0; i < streaming_warps<T>; ++i) hopper::barrier_init(full[i], 1);
    for (int i = 0; i < stream_task_slots; ++i) {
      hopper::barrier_init(ready[i], 1);
      hopper::barrier_init(done[i], work_tiles);
      hopper::barrier_init(reusable[i], 1);
    }
    next = 0;
  }
};

// Of x or of M, [36][64].
template <typename T>
struct Patches {
  static_assert(sizeof(T) == sizeof(Product<T>));
  static constexpr int bytes = patch_elements * sizeof(T);
  alignas(128) unsigned char patch[streaming_warps<T>][bytes];
};

// Tensor copies: x in boxes of {64 channels, 6, 6, 1}; M in segments of 64 values, {64, 1, 36 points, 1}.
struct StreamMaps {
  CUtensorMap x, m;
};

__device__ __forceinline__ bool is_input(const StreamTile& work_tile) {
  return work_tile.kind == static_cast<int>(TaskKind::input);
}
template <typename T>
__device__ __forceinline__ StreamTile describe(const StreamTask& task, int work_tiles_log2, int index) {
  constexpr int columns_log2 = form<T>.segments_in_a_row() == 4 ? 2 : 1;
  static_assert(form<T>.segments_in_a_row() == 1 << columns_log2);
  const int rows_log2 = work_tiles_log2 - columns_log2;
  StreamTile work_tile;
  work_tile.kind = task.kind;
  work_tile.place = task.place;
  // An output task has rows of segments.
  const int first_tile = is_input(work_tile) ? index : (index & ((1 << rows_log2) - 1)) * form<T>.segment_tiles;
  const int first_filter = is_input(work_tile) ? 0 : (index >> rows_log2) * form<T>.segment_filters;
  work_tile.tiles = first_filter < task.channels ? max(0, task.tiles - first_tile) : 0;
  work_tile.tile = task.tile + first_tile;
  work_tile.row = task.row + first_tile;
  work_tile.channel = task.channel + first_filter;
  return work_tile;
}
template <typename T>
__device__ __forceinline__ int segment_of(const StreamTile& work_tile) {
  return work_tile.channel / tile_n * (tile_m * tile_n / segment_values) +
         segment_at<T>(work_tile.row, work_tile.channel % tile_n);
}

// One thread.
template <typename T>
class TransformTaskFetcher {
 public:
  __device__ __forceinline__ TransformTaskFetcher(const Params<T>& params, StreamControl<T>& control)
      : params_(params), control_(control) {}

  __device__ __forceinline__ void run() {
    const TaskMap& map = params_.map;
    const int streams = map.streams();
    int* const ticket = params_.tickets + ticket_stride;
    int next = atomicAdd(ticket, 1);
#pragma unroll 1
    while (next < streams) {
      const int number = next;
      next = atomicAdd(ticket, 1);  // nobody needs it before the next turn
      const Task its = map.stream_task(number);
      const Extent extent = map.extent(its);
      const bool input = its.kind == TaskKind::input;
      StreamTask task;
      task.kind = static_cast<int>(its.kind);
      task.tile = its.group * tile_m + extent.first_tile;
      task.tiles = extent.tiles;
      task.row = extent.first_tile;
      task.channel = extent.first_channel, task.channels = extent.channels;
      task.place = its.group % (input ? map.v_groups : map.m_groups);
      task.counter = TaskMap::counter_of(its.kind, its.group);
      task.number = number;
      params_.trace.take(map.gemms() + number);
      // An input task waits until the products have read what had its place in V, an output task for its products.
      wait_for(params_, TaskKind::gemm, input ? its.group - map.v_groups : its.group, map.s_g)
          .template wait<role_dispatch>(params_.report);
      fence_global_copies();  // M was written by ordinary stores
      record_begin(params_, map.gemms() + number, number, its);
      hand_out(task);
    }
    StreamTask end{};
    end.kind = end.counter = -1;
    const int slot = hand_out(end);
    for (int i = 0; i < params_.work_tiles(); ++i) hopper::arrive(control_.done[slot]);
  }

 private:
  __device__ __forceinline__ int hand_out(const StreamTask& task) {
    const int slot = static_cast<int>(tasks_ % stream_task_slots);
    wait_in_place<role_dispatch>(control_.reusable[slot], tasks_ / stream_task_slots & 1 ^ 1, params_.report);
    control_.tasks[slot] = task;
    hopper::arrive(control_.ready[slot]);
    ++tasks_;
    return slot;
  }

  const Params<T>& params_;
  StreamControl<T>& control_;
  unsigned tasks_ = 0;  // so far
};

// A streaming warp, all lanes.
template <typename T, StoreMode output, bool plain>
class TransformWorker {
 public:
  __device__ __forceinline__ TransformWorker(const Params<T>& params, const StreamMaps& maps, StreamControl<T>& control,
                                             Patches<T>& patches, int warp)
      : params_(params),
        maps_(maps),
        control_(control),
        patch_(patches.patch[warp]),
        full_(shared_address(&control.full[warp])) {}

  __device__ __forceinline__ void run() {
    const int lane = threadIdx.x % 32;
    T* const x_patch = reinterpret_cast<T*>(patch_) + 2 * lane;
    const auto* const m_patch = reinterpret_cast<const Product<T>*>(patch_) + 2 * lane;
    unsigned number = take(), parity = 0;  // of the work tile; of the buffer
    bool started = false;
#pragma unroll 1
    while (true) {
      if (!started) {  // the first one, or one whose task was not there yet
        wait_in_place<role_stream>(control_.ready[slot_of(number)], parity_of(number), params_.report);
        start(number);
      }
      delay_randomly(params_.delay);
      Values values[6][6];
      float scale = 0.0f;
      OutputScales scales;
      {
        const StreamTile work_tile = describe_number(number);
        if (work_tile.kind < 0) break;
        if (work_tile.tiles > 0) {
          if (loads_early && !is_input(work_tile)) {  // on their way while the copy is
            scales = load_scales(params_, work_tile);
            if (!plain && params_.epilogue.residual != nullptr) {
              LaneResidual<T, output>::load_first(params_, work_tile, values);
            }
          }
          if (!is_input(work_tile) || params_.use_tma) {
            hopper::wait_in_place<kernel_winograd_megakernel, role_stream>(full_, parity, params_.report);
            parity ^= 1;
          }
          if (is_input(work_tile)) {
            scale = begin_input(params_, work_tile, x_patch, values);
          } else {
            begin_output(m_patch, values);
          }
        }
      }
      __syncwarp();  // nobody needs the buffer any more
      const unsigned current = number;
      number = take();
      // If its task has been handed out; to wait for that now could be to wait for what this work tile brings.
      started = __shfl_sync(0xffffffffu, test_wait(control_.ready[slot_of(number)], parity_of(number)), 0);
      if (started) start(number);
      {
        const StreamTile work_tile = describe_number(current);  // again: registers are scarce
        if (work_tile.tiles > 0) {
          if (is_input(work_tile)) {
            finish_input(params_, work_tile, scale, values);
          } else {
            if (!loads_early) scales = load_scales(params_, work_tile);
            finish_output<T, output, plain>(params_, work_tile, scales, values);
          }
        }
      }
      delay_randomly(params_.delay);
      __syncwarp();  // all lanes' stores happen before the arrival
      if (lane == 0) hopper::arrive(control_.done[slot_of(current)]);
    }
  }

 private:
  static constexpr bool loads_early = LaneResidual<T, output>::is_early;

  __device__ __forceinline__ int slot_of(unsigned number) const {
    return static_cast<int>((number >> params_.work_tiles_log2) % stream_task_slots);
  }
  __device__ __forceinline__ unsigned parity_of(unsigned number) const {
    return (number >> params_.work_tiles_log2) / stream_task_slots & 1;
  }
  __device__ __forceinline__ unsigned take() const {
    unsigned number = 0;
    if (threadIdx.x % 32 == 0) number = atomicAdd(reinterpret_cast<unsigned*>(&control_.next), 1u);
    return __shfl_sync(0xffffffffu, number, 0);
  }

  __device__ __forceinline__ StreamTile describe_number(unsigned number) const {
    return describe<T>(control_.tasks[slot_of(number)], params_.work_tiles_log2,
                       static_cast<int>(number) & (params_.work_tiles() - 1));
  }
  // The copy of a work tile's values, by one lane.
  __device__ __forceinline__ void start(unsigned number) const {
    if (threadIdx.x % 32 != 0) return;
    const StreamTile work_tile = describe_number(number);
    if (work_tile.kind < 0 || work_tile.tiles == 0) return;
    const std::uint32_t target = shared_address(patch_);
    if (!is_input(work_tile)) {
      const int segment = segment_of<T>(work_tile);
      hopper::arrive_expecting(full_, Patches<T>::bytes);
      tma_load(target, maps_.m, 0, segment, work_tile.place * 36, 0, full_, hint_once);
    } else if (params_.use_tma) {
      const TileCorner corner = corner_of(params_, work_tile.tile);
      hopper::arrive_expecting(full_, Patches<T>::bytes);
      hopper::tma_load(target, maps_.x, work_tile.channel, corner.w, corner.h, corner.n, full_);
    }
  }

  const Params<T>& params_;
  const StreamMaps& maps_;
  StreamControl<T>& control_;
  unsigned char* const patch_;  // of this warp
  const std::uint32_t full_;    // its barrier
};

}  // namespace fastconv::algos::winograd_megakernel::wgmma
