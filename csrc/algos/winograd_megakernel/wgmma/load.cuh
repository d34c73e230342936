// The loading side of the products: tasks found, their operands copied into shared memory.
#pragma once

#include "algos/winograd_megakernel/wgmma/params.cuh"

namespace fastconv::algos::winograd_megakernel::wgmma {

constexpr int product_task_slots = 16, multiplying_warps = 8;

struct ProductTask {
  const char* v;         // [stages][128 tiles][64]
  const char* u;         // [stages][128 filters][64]
  const int* exponents;  // [128][chunks]
  void* m;               // M of 128 tiles x 128 filters: [segments][64]
  int rows, columns;     // that exist; rows 0: there are no more tasks
  int number;            // of the GEMM task
  std::uint64_t v_hint;
};

// In shared memory at a multiple of 1024 bytes.
template <typename T>
struct alignas(1024) ProductStorage {
  static constexpr int count = form<T>.buffers;
  static_assert(count + 2 < product_task_slots);  // tasks that fetcher and loading thread can be ahead
  unsigned char buffers[count][operand_bytes];    // U that stays, then a ring; or a ring of V and U in turn
  ProductTask tasks[product_task_slots];
  hopper::Barrier full[count], free[count];
  // Raising a counter takes as long as the stores before it. A thread of its own waits for that; the multiplying warps
  // hand it the numbers of tasks whose results they have stored. -1: there are no more.
  static constexpr int signal_slots = 2;
  hopper::Barrier stored[signal_slots], taken[signal_slots];
  int number[signal_slots];
  // The fetcher hands the loading thread its tasks one at a time, by number.
  hopper::Barrier found, loaded;
  bool common[is_split<T> ? 1 : product_task_slots];  // whether all V of a task has the common scale (values.cuh)

  __device__ __forceinline__ void init() {
    for (int i = 0; i < count; ++i) {
      hopper::barrier_init(full[i], 1);
      hopper::barrier_init(free[i], multiplying_warps);
    }
    for (int i = 0; i < signal_slots; ++i) {
      hopper::barrier_init(stored[i], multiplying_warps);
      hopper::barrier_init(taken[i], 1);
    }
    hopper::barrier_init(found, 1);
    hopper::barrier_init(loaded, 1);
  }
};

template <typename T>
__device__ __forceinline__ ProductTask describe_product(const Params<T>& params, int number) {
  const TaskMap& map = params.map;
  const Task task = map.gemm_task(number);
  const Extent extent = map.extent(task);
  const int point = extent.first_point, filter = extent.first_channel;
  const std::int64_t bytes = static_cast<std::int64_t>(params.stages()) * operand_bytes;
  ProductTask product;
  product.v = params.v + task.group % map.v_groups * params.v_place_bytes() + point * bytes;
  product.u = params.u + (point * params.filter_blocks + filter / tile_n) * bytes;
  product.exponents = params.tile_exponents + static_cast<std::int64_t>(task.group) * tile_m * params.chunks;
  product.m = params.products + task.group % map.m_groups * params.m_place() +
              (static_cast<std::int64_t>(point) * params.filter_blocks + filter / tile_n) * (tile_m * tile_n);
  product.rows = extent.tiles;
  product.columns = extent.channels;
  product.number = number;
  product.v_hint = filter + tile_n >= map.k ? hint_once : hint_normal;  // the last one to read it
  return product;
}

// A warp that takes tickets, finds their tasks and waits for their counters while the task before is being loaded. GEMM
// tasks in the order of the map; lane i works on the i-th of the tickets that are taken at once.
template <typename T>
class GemmTaskFetcher {
 public:
  __device__ __forceinline__ GemmTaskFetcher(const Params<T>& params, ProductStorage<T>& shared)
      : params_(params), shared_(shared) {}

  __device__ __forceinline__ void run() {
    const int lane = threadIdx.x % 32, grab = params_.product_grab, gemms = params_.map.gemms();
    int ticket = 0;
    if (lane == 0) ticket = atomicAdd(params_.tickets, grab);
    int first = __shfl_sync(0xffffffffu, ticket, 0);
#pragma unroll 1
    while (first < gemms) {
      const Pending pending = look_up(first, grab);
      const int count = min(grab, gemms - first);
#pragma unroll 1
      for (int i = 0; i < count; ++i, ++tasks_) {
        if (lane == i) {
          hand_over(pending);
          // No earlier: who holds a ticket and does not work on it makes others wait.
          if (i == count - 1) ticket = atomicAdd(params_.tickets, grab);
        }
        __syncwarp();
      }
      first = __shfl_sync(0xffffffffu, ticket, count - 1);
    }
    if (lane == 0) {
      await_loader();
      shared_.tasks[tasks_ % product_task_slots].rows = 0;
      hopper::arrive(shared_.found);
    }
  }

 private:
  struct Pending {
    ProductTask product;
    CounterWait input, output;  // all that it reads has been written, all that it overwrites been read
    bool ready;
  };

  __device__ __forceinline__ Pending look_up(int first, int grab) const {
    const TaskMap& map = params_.map;
    const int lane = threadIdx.x % 32, number = first + lane;
    Pending pending{};
    if (lane >= grab || number >= map.gemms()) return pending;
    pending.product = describe_product(params_, number);
    const int group = map.gemm_task(number).group, before = group - map.m_groups;
    pending.input = wait_for(params_, TaskKind::input, group, map.inputs_of(group));
    pending.output = wait_for(params_, TaskKind::output, before, map.outputs_of(before));
    const bool input = pending.input.is_over(), output = pending.output.is_over();
    pending.ready = input && output;
    return pending;
  }

  // One lane.
  __device__ __forceinline__ void hand_over(const Pending& pending) {
    const int number = pending.product.number;
    params_.trace.take(number);
    if (!pending.ready) {
      pending.input.template wait<role_load>(params_.report);
      pending.output.template wait<role_load>(params_.report);
    }
    bool common = true;
    if constexpr (!is_split<T>) common = __ldcg(params_.own_scales + params_.map.gemm_task(number).group) == 0;
    await_loader();
    if (params_.trace.records != nullptr) record_begin(params_, number, number, params_.map.gemm_task(number));
    shared_.tasks[tasks_ % product_task_slots] = pending.product;
    if constexpr (!is_split<T>) shared_.common[tasks_ % product_task_slots] = common;
    hopper::arrive(shared_.found);
  }
  __device__ __forceinline__ void await_loader() const {
    wait_in_place<role_load>(shared_.loaded, tasks_ & 1 ^ 1, params_.report);
  }

  const Params<T>& params_;
  ProductStorage<T>& shared_;
  unsigned tasks_ = 0;  // so far
};

// The loading thread: the tasks that the fetcher finds.
template <typename T>
class Loader {
 public:
  __device__ __forceinline__ Loader(const Params<T>& params, ProductStorage<T>& shared)
      : params_(params), shared_(shared), ring_(params.ring) {}

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (unsigned task = 0;; ++task) {
      wait_in_place<role_load>(shared_.found, task & 1, params_.report);
      const ProductTask& product = shared_.tasks[task % product_task_slots];
      if (product.rows == 0) break;
      fence_global_copies();
      load(product.v, product.u, product.v_hint);
      hopper::arrive(shared_.loaded);
    }
    await_slot();
    hopper::arrive(shared_.full[position_.slot]);
  }

 private:
  __device__ __forceinline__ void load(const char* v, const char* u, std::uint64_t v_hint) {
    const bool loads_u = ring_.resident == 0 || u != resident_;
#pragma unroll 1
    for (int i = 0; i < params_.stages(); ++i, position_.advance(ring_.slots)) {
      await_slot();
      const std::uint32_t full = shared_address(&shared_.full[position_.slot]);
      const std::int64_t offset = static_cast<std::int64_t>(i) * operand_bytes;
      hopper::arrive_expecting(full, loads_u ? 2 * operand_bytes : operand_bytes);
      copy_bulk(shared_address(shared_.buffers[ring_.v_buffer(position_.slot)]), v + offset, operand_bytes, full,
                v_hint);
      if (!loads_u) continue;
      // The task before this one has to be done with it. (It is, if the ring has turned since.)
      if (0 < ring_.resident && ring_.resident < ring_.slots && resident_ != nullptr) {
        hopper::RingPosition last = position_;
        last.go_back(ring_.resident, ring_.slots);
        wait_in_place<role_load>(shared_.free[last.slot], last.parity, params_.report);
      }
      copy_bulk(shared_address(shared_.buffers[ring_.u_buffer(position_.slot, i)]), u + offset, operand_bytes, full,
                hint_keep);
    }
    resident_ = u;
  }
  __device__ __forceinline__ void await_slot() const {
    wait_in_place<role_load>(shared_.free[position_.slot], position_.parity ^ 1, params_.report);
  }

  const Params<T>& params_;
  ProductStorage<T>& shared_;
  const ProductRing ring_;
  hopper::RingPosition position_;   // of the next stage
  const char* resident_ = nullptr;  // the U of the task before
};

}  // namespace fastconv::algos::winograd_megakernel::wgmma
