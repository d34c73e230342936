// The loading side of the products: tasks found, their operands copied into shared memory.
#pragma once

#include "algos/winograd_megakernel/params.cuh"

namespace fastconv::algos::winograd_megakernel {

constexpr int product_task_slots = 16, multiplying_warps = 8;

// Where stages lie in the ring. Where U's block of 128 filters fits, it stays for all the tasks in a row that use it: a
// third of the operands' traffic less, or half.
struct ProductRing {
  int slots;     // of the ring
  int resident;  // units of U in front of it; 0: U comes with V, stage by stage

  static constexpr int least_slots = 4;
  static __host__ __device__ ProductRing of(int stages, int units) {
    return stages + least_slots <= units ? ProductRing{units - stages, stages} : ProductRing{units / 2, 0};
  }
  __device__ __forceinline__ int v_unit(int slot) const { return resident > 0 ? resident + slot : 2 * slot; }
  __device__ __forceinline__ int u_unit(int slot, int stage) const { return resident > 0 ? stage : 2 * slot + 1; }
};

struct ProductTask {
  const char* v;         // [stages][128 tiles][64]
  const char* u;         // [stages][128 filters][64]
  const int* exponents;  // [128][chunks]
  void* m;               // M of 128 tiles x 128 filters: [segments][64]
  int rows, columns;     // that exist; rows 0: there are no more tasks
  int number;            // of the GEMM task
  std::uint64_t v_hint;
};

// Half types: a warp of its own finds the tasks for the loading thread, one at a time.
template <typename T>
struct Scouting {
  std::uint64_t found, loaded;
  bool common[product_task_slots];  // whether all of a task's V has the common scale (values.cuh)

  __device__ __forceinline__ void init() {
    hopper::barrier_init(shared_address(&found), 1);
    hopper::barrier_init(shared_address(&loaded), 1);
  }
};
template <>
struct Scouting<float> {
  __device__ __forceinline__ void init() {}
};

// In shared memory at a multiple of 1024 bytes.
template <typename T>
struct alignas(1024) ProductStorage {
  static constexpr int count = form<T>.units;
  static_assert(count + 2 < product_task_slots);  // tasks that scout and loading thread can be ahead
  unsigned char units[count][operand_bytes];      // U that stays, then a ring; or a ring of V and U in turn
  ProductTask tasks[product_task_slots];
  std::uint64_t full[count], free[count];
  // Raising a counter takes as long as the stores before it. A thread of its own waits for that; the multiplying warps
  // hand it the numbers of tasks whose results they have stored. -1: there are no more.
  static constexpr int publish_slots = 2;
  std::uint64_t stored[publish_slots], taken[publish_slots];
  int number[publish_slots];
  Scouting<T> scouting;

  __device__ __forceinline__ void init() {
    for (int i = 0; i < count; ++i) {
      hopper::barrier_init(shared_address(&full[i]), 1);
      hopper::barrier_init(shared_address(&free[i]), multiplying_warps);
    }
    for (int i = 0; i < publish_slots; ++i) {
      hopper::barrier_init(shared_address(&stored[i]), multiplying_warps);
      hopper::barrier_init(shared_address(&taken[i]), 1);
    }
    scouting.init();
  }
};

template <typename T>
__device__ __forceinline__ ProductTask describe_product(const Params<T>& params, int number) {
  const TaskMap& map = params.map;
  const Task task = map.gemm_task(number);
  const Extent extent = map.extent(task);
  const int frequency = extent.first_frequency, filter = extent.first_channel;
  const std::int64_t bytes = static_cast<std::int64_t>(params.stages()) * operand_bytes;
  ProductTask product;
  product.v = params.v + task.group % map.v_groups * params.v_place_bytes() + frequency * bytes;
  product.u = params.u + (frequency * params.filter_blocks + filter / unit_filters) * bytes;
  product.exponents = params.tile_exponents + static_cast<std::int64_t>(task.group) * unit_tiles * params.chunks;
  product.m = params.products + task.group % map.m_groups * params.m_place() +
              (static_cast<std::int64_t>(frequency) * params.filter_blocks + filter / unit_filters) *
                  (unit_tiles * unit_filters);
  product.rows = extent.tiles;
  product.columns = extent.channels;
  product.number = number;
  product.v_hint = filter + unit_filters >= map.k ? hint_once : hint_normal;  // the last one to read it
  return product;
}

// GEMM tasks in the order of the map, for a whole warp. Lane i works on the i-th of the tickets that are taken at once.
template <typename T>
class Tickets {
 public:
  struct Pending {
    ProductTask product;
    CounterWait input, output;  // all that it reads has been written, all that it overwrites been read
    bool ready;
  };

  // begin(pending, is_last): by one lane, task after task; returns the next ticket if it is the last of those that were
  // taken at once. end(u): by all lanes, with the task's U.
  template <typename Begin, typename End>
  static __device__ __forceinline__ void take_all(const Params<T>& params, const Begin& begin, const End& end) {
    const int lane = threadIdx.x % 32, grab = params.product_grab, gemms = params.map.gemms();
    int ticket = 0;
    if (lane == 0) ticket = atomicAdd(params.tickets, grab);
    int first = __shfl_sync(0xffffffffu, ticket, 0);
#pragma unroll 1
    while (first < gemms) {
      const Pending pending = look_up(params, first, grab);
      const int count = min(grab, gemms - first);
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        if (lane == i) ticket = begin(pending, i == count - 1);
        __syncwarp();
        end(reinterpret_cast<const char*>(
            __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(pending.product.u), i)));
      }
      first = __shfl_sync(0xffffffffu, ticket, count - 1);
    }
  }
  static __device__ __forceinline__ int next(const Params<T>& params) {
    return atomicAdd(params.tickets, params.product_grab);
  }
  // One lane.
  template <int role>
  static __device__ __forceinline__ void wait(const Params<T>& params, const Pending& pending) {
    params.trace.take(pending.product.number);
    if (!pending.ready) {
      pending.input.template wait<role>(params.report);
      pending.output.template wait<role>(params.report);
    }
  }
  static __device__ __forceinline__ void record(const Params<T>& params, const Pending& pending) {
    const int number = pending.product.number;
    record_begin(params, number, number, [&params](int number) { return params.map.gemm_task(number); });
  }

 private:
  static __device__ __forceinline__ Pending look_up(const Params<T>& params, int first, int grab) {
    const TaskMap& map = params.map;
    const int lane = threadIdx.x % 32, number = first + lane;
    Pending pending{};
    if (lane >= grab || number >= map.gemms()) return pending;
    pending.product = describe_product(params, number);
    const int group = map.gemm_task(number).group, before = group - map.m_groups;
    pending.input = wait_for(params, TaskKind::input, group, map.inputs_of(group));
    pending.output = wait_for(params, TaskKind::output, before, map.outputs_of(before));
    const bool input = pending.input.is_over(), output = pending.output.is_over();
    pending.ready = input && output;
    return pending;
  }
};

// The loading warp. Split operands: it finds its tasks itself.
template <typename T>
class Loader {
 public:
  __device__ __forceinline__ Loader(const Params<T>& params, ProductStorage<T>& shared)
      : params_(params), shared_(shared), ring_(ProductRing::of(params.stages(), form<T>.units)) {}

  __device__ __forceinline__ void run() {
    using Pending = typename Tickets<T>::Pending;
    Tickets<T>::take_all(
        params_, [this](const Pending& pending, bool takes) { return load(pending, takes); },
        [this](const char* u) {
          pass(u);
          ++tasks_;
        });
    if (threadIdx.x % 32 == 0) {
      await_slot(position_);
      shared_.tasks[tasks_ % product_task_slots].rows = 0;
      hopper::arrive(shared_address(&shared_.full[position_.slot]));
    }
  }

  // Half types: one lane, the tasks that the scout finds.
  __device__ __forceinline__ void run_behind_scout() {
#pragma unroll 1
    for (;; ++tasks_) {
      wait_in_place<role_load>(shared_.scouting.found, tasks_ & 1, params_.report);
      const ProductTask product = shared_.tasks[tasks_ % product_task_slots];
      if (product.rows == 0) break;
      fence_global_copies();
      copy_stages(product, [](int) {}, [](int) {});
      hopper::arrive(shared_address(&shared_.scouting.loaded));
      pass(product.u);
    }
    await_slot(position_);
    hopper::arrive(shared_address(&shared_.full[position_.slot]));
  }

 private:
  // One lane. Takes the next tickets when the last stage but two is on its way, no earlier: who holds a ticket and does
  // not work on it makes others wait.
  __device__ __forceinline__ int load(const typename Tickets<T>::Pending& pending, bool takes) {
    int ticket = 0;
    const ProductTask& product = pending.product;
    Tickets<T>::template wait<role_load>(params_, pending);
    fence_global_copies();
    Tickets<T>::record(params_, pending);
    copy_stages(
        product,
        [&](int i) {
          if (takes && i == max(0, params_.stages() - 3)) ticket = Tickets<T>::next(params_);
        },
        [&](int i) {
          if (i == 0) shared_.tasks[tasks_ % product_task_slots] = product;
        });
    return ticket;
  }
  // before(i), after(i): called before and after the wait for a stage's slot.
  template <typename Before, typename After>
  __device__ __forceinline__ void copy_stages(const ProductTask& product, const Before& before, const After& after) {
    const bool loads_u = ring_.resident == 0 || product.u != resident_;
    hopper::RingPosition position = position_;
#pragma unroll 1
    for (int i = 0; i < params_.stages(); ++i, position.advance(ring_.slots)) {
      before(i);
      await_slot(position);
      after(i);
      const std::uint32_t full = shared_address(&shared_.full[position.slot]);
      const std::int64_t offset = static_cast<std::int64_t>(i) * operand_bytes;
      hopper::arrive_expecting(full, loads_u ? 2 * operand_bytes : operand_bytes);
      copy_bulk(shared_address(shared_.units[ring_.v_unit(position.slot)]), product.v + offset, operand_bytes, full,
                product.v_hint);
      if (!loads_u) continue;
      // The task before this one has to be done with it. (It is, if the ring has turned since.)
      if (0 < ring_.resident && ring_.resident < ring_.slots && resident_ != nullptr) {
        hopper::RingPosition last = position;
        if ((last.slot -= ring_.resident) < 0) last.slot += ring_.slots, last.parity ^= 1;
        wait_in_place<role_load>(shared_.free[last.slot], last.parity, params_.report);
      }
      copy_bulk(shared_address(shared_.units[ring_.u_unit(position.slot, i)]), product.u + offset, operand_bytes, full,
                hint_keep);
    }
  }
  // A task's stages, with its U.
  __device__ __forceinline__ void pass(const char* u) {
    resident_ = u;
    for (position_.slot += params_.stages(); position_.slot >= ring_.slots; position_.slot -= ring_.slots) {
      position_.parity ^= 1;
    }
  }
  __device__ __forceinline__ void await_slot(const hopper::RingPosition& position) const {
    wait_in_place<role_load>(shared_.free[position.slot], position.parity ^ 1, params_.report);
  }

  const Params<T>& params_;
  ProductStorage<T>& shared_;
  const ProductRing ring_;
  hopper::RingPosition position_;   // of the next stage
  const char* resident_ = nullptr;  // the U of the task before
  unsigned tasks_ = 0;              // so far
};

// A warp that takes tickets, finds their tasks and waits for their counters while the task before is being loaded:
// those of half types are too short for one warp to do both.
template <typename T>
class Scout {
 public:
  __device__ __forceinline__ Scout(const Params<T>& params, ProductStorage<T>& shared)
      : params_(params), shared_(shared) {}

  __device__ __forceinline__ void run() {
    Tickets<T>::take_all(
        params_,
        [this](const typename Tickets<T>::Pending& pending, bool takes) {
          const ProductTask& product = pending.product;
          Tickets<T>::template wait<role_dispatch>(params_, pending);
          const int group = params_.map.gemm_task(product.number).group;
          const bool common = __ldcg(params_.own_scales + group) == 0;
          await_loader();
          Tickets<T>::record(params_, pending);
          shared_.tasks[tasks_ % product_task_slots] = product;
          shared_.scouting.common[tasks_ % product_task_slots] = common;
          hopper::arrive(shared_address(&shared_.scouting.found));
          return takes ? Tickets<T>::next(params_) : 0;
        },
        [this](const char*) { ++tasks_; });
    if (threadIdx.x % 32 == 0) {
      await_loader();
      shared_.tasks[tasks_ % product_task_slots].rows = 0;
      hopper::arrive(shared_address(&shared_.scouting.found));
    }
  }

 private:
  __device__ __forceinline__ void await_loader() const {
    wait_in_place<role_dispatch>(shared_.scouting.loaded, tasks_ & 1 ^ 1, params_.report);
  }

  const Params<T>& params_;
  ProductStorage<T>& shared_;
  unsigned tasks_ = 0;  // so far
};

}  // namespace fastconv::algos::winograd_megakernel
