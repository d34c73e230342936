// The dispatching warp: takes tickets, finds their tasks, waits for what they need, loads the operands of products.
#pragma once

#include "algos/winograd_megakernel/ffma/params.cuh"

namespace fastconv::algos::winograd_megakernel::ffma {

// The largest i in [0, count) that holds; 0 does, and those that do come first. All lanes ask at once.
template <typename Holds>
__device__ __forceinline__ int warp_last(int count, const Holds& holds) {
  const int lane = threadIdx.x % 32;
  int low = 0;
#pragma unroll 1
  while (count > 1) {
    const int step = (count + 31) / 32, offset = lane * step;
    const unsigned votes = __ballot_sync(0xffffffffu, offset < count && (lane == 0 || holds(low + offset)));
    const int last = (31 - __clz(votes)) * step;
    low += last, count = min(step, count - last);
  }
  return low;
}

// TaskMap::task_at(), by a warp. filters: whether there are filter tasks.
template <bool filters>
__device__ __forceinline__ Task find_task(const TaskMap& map, int position) {
  if constexpr (filters) {
    if (position < map.n_f) return {TaskKind::filter, 0, position};
  }
  if (position < map.start(0, 0)) return map.input_task(filters ? position - map.n_f : position);
  const int end = map.start(map.batches(), 0);
  if (position >= end) return map.output_task(map.outputs_before(map.batches(), 0) + position - end);
  const int batch = warp_last(map.batches(), [&](int b) { return map.start(b, 0) <= position; });
  const int block = warp_last(map.s_g, [&](int j) { return map.start(batch, j) <= position; });
  int rest = position - map.start(batch, block);
  const int first_input = map.inputs_before(batch, block);
  const int new_inputs = map.inputs_before(batch, block + 1) - first_input;
  if (rest < new_inputs) return map.input_task(first_input + rest);
  rest -= new_inputs;
  if (rest < map.groups_of(batch)) return {TaskKind::gemm, batch * map.m + rest, block};
  return map.output_task(map.outputs_before(batch, block) + rest - map.groups_of(batch));
}

template <bool filters>
class TransformTaskFetcher {
 public:
  __device__ __forceinline__ TransformTaskFetcher(const Params& params, Shared& shared, int team)
      : params_(params), shared_(shared), team_(team) {}

  __device__ __forceinline__ void run() {
    const int lane = threadIdx.x % 32;
    const TaskMap& map = params_.map;
#pragma unroll 1
    for (unsigned count = 0;; ++count) {
      const unsigned at = count % 2;
      // The other work tile is at work: no more than one ticket is held beyond it.
      wait<role_dispatch>(shared_.work_tile_empty[at], (count / 2 & 1) ^ 1, params_.report);
      int position = 0;
      if (lane == 0) position = atomicAdd(params_.ticket, 1);
      position = __shfl_sync(0xffffffffu, position, 0);
      if (position >= params_.end) {
        if (lane == 0) {
          shared_.work_tiles[at].kind = work_tile_stop;
          arrive(shared_.work_tile_full[at]);
        }
        return;
      }
      if (lane == 0) params_.trace.take(position);
      const Task task = find_task<filters>(map, position);
      delay_randomly(params_.delay);
      wait_for_parents(task);
      if (lane == 0) {
        params_.trace.begin(position, static_cast<int>(task.kind), task.group, task.index, position, team_);
      }
      const Extent extent = map.extent(task);
      const bool gemm = task.kind == TaskKind::gemm;
      if (lane == 0) {
        shared_.work_tiles[at] = {static_cast<int>(task.kind),
                                  task.group,
                                  task.kind == TaskKind::input ? task.group % map.v_groups : task.group % map.m_groups,
                                  TaskMap::counter_of(task.kind, task.group),
                                  extent.first_tile,
                                  extent.tiles,
                                  extent.first_channel,
                                  gemm ? extent.first_point : extent.channels,
                                  position};
        arrive(shared_.work_tile_full[at]);
      }
      if (gemm) load(task.group % map.v_groups, extent);
    }
  }

 private:
  // What TaskMap::signals() says, a lane for each counter.
  __device__ __forceinline__ void wait_for_parents(const Task& task) const {
    const TaskMap& map = params_.map;
    const int lane = threadIdx.x % 32, group = task.group;
    int counter = 0, value = 0;
    if constexpr (filters) {
      if (task.kind == TaskKind::filter) return;
      if (task.kind == TaskKind::gemm && lane == 2) value = map.n_f;
    }
    if (task.kind == TaskKind::input) {
      if (lane == 0 && group >= map.v_groups) {
        counter = TaskMap::counter_of(TaskKind::gemm, group - map.v_groups), value = map.s_g;
      }
    } else if (task.kind == TaskKind::gemm) {
      if (lane == 0) counter = TaskMap::counter_of(TaskKind::input, group), value = map.inputs_of(group);
      if (lane == 1 && group >= map.m_groups) {
        counter = TaskMap::counter_of(TaskKind::output, group - map.m_groups);
        value = map.outputs_of(group - map.m_groups);
      }
    } else if (lane == 0) {
      counter = TaskMap::counter_of(TaskKind::gemm, group), value = map.s_g;
    }
    if (value > 0) wait_for(params_.counters + counter, value, params_.report);
    __syncwarp();
  }

  // All stages of a product, as slots of the ring become free.
  __device__ __forceinline__ void load(int place, const Extent& extent) {
    const int lane = threadIdx.x % 32, point = extent.first_point;
    const std::int64_t block_floats = std::int64_t{36} * params_.stages * stage_u;
    const float* v = params_.v + place * params_.v_place() + point * stage_v;
    const float* u = params_.u + extent.first_channel / block_filters * block_floats +
                     std::int64_t{point} * params_.stages * stage_u;
#if __CUDA_ARCH__ >= 900
    // V was written by ordinary stores, which this warp has waited for.
    if (lane == 0) asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
#pragma unroll 1
    for (int stage = 0; stage < params_.stages; ++stage, v += 36 * stage_v, u += stage_u) {
      const int slot = static_cast<int>(stage_ % slots);
      wait<role_load>(shared_.empty[slot], (stage_ / slots & 1) ^ 1, params_.report);
      ++stage_;
      Shared::Stage& target = shared_.stages[slot];
      const std::uint32_t barrier = shared_address(&shared_.full[slot]);
#if __CUDA_ARCH__ >= 900
      if (lane == 0) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                     "n"(4 * (stage_v + stage_u))
                     : "memory");
        copy_bulk<4 * stage_v>(target.v, v, barrier);
        copy_bulk<4 * stage_u>(target.u, u, barrier);
      }
      __syncwarp();
#else
      copy_by_lanes<stage_v>(target.v, v);
      copy_by_lanes<stage_u>(target.u, u);
      asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
#endif
    }
  }
  template <int bytes>
  static __device__ __forceinline__ void copy_bulk(void* target, const void* source, std::uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(target)),
                 "l"(source), "n"(bytes), "r"(barrier)
                 : "memory");
  }
  template <int floats>
  static __device__ __forceinline__ void copy_by_lanes(void* target, const float* source) {
    const int lane = threadIdx.x % 32;
#pragma unroll 4
    for (int i = lane * 4; i < floats; i += 128) copy_async(shared_address(target) + i * 4, source + i, true);
  }

  const Params& params_;
  Shared& shared_;
  const int team_;
  unsigned stage_ = 0;  // loaded so far
};

}  // namespace fastconv::algos::winograd_megakernel::ffma
