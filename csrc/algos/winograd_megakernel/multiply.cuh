// The multiplying side of a block: one thread loads, two warpgroups multiply, one thread raises the counters.
//
// The scheme is that of winograd/products.cuh, with stages of half the size and one set of sums, which leaves shared
// memory and registers to the streaming warps. While one warpgroup joins its sums to its totals, the other one's
// products run.
#pragma once

#include "algos/winograd_megakernel/params.cuh"
#include "device/power_of_two.h"

namespace fastconv::algos::winograd_megakernel {

constexpr int product_units = 2 * 5, product_task_slots = 16, multiplying_warps = 8;
static_assert(product_units + 1 < product_task_slots);  // tasks that the loading thread can be ahead

// Where stages lie in the ring. Where U's block of 128 filters fits, it stays for all the tasks in a row that use it: a
// third of the operands' traffic less, or half.
struct ProductRing {
  int slots;     // of the ring
  int resident;  // units of U in front of it; 0: U comes with V, stage by stage

  static constexpr int least_slots = 4;
  static __host__ __device__ ProductRing of(int stages) {
    return stages + least_slots <= product_units ? ProductRing{product_units - stages, stages}
                                                 : ProductRing{product_units / 2, 0};
  }
  __device__ __forceinline__ int v_unit(int slot) const { return resident > 0 ? resident + slot : 2 * slot; }
  __device__ __forceinline__ int u_unit(int slot, int stage) const { return resident > 0 ? stage : 2 * slot + 1; }
};

struct ProductTask {
  const char* v;         // [2 chunks][128 tiles][lo, hi][32]
  const char* u;         // [2 chunks][128 filters][lo, hi][32]
  const int* exponents;  // [128][chunks]
  float* m;              // M of 128 tiles x 128 filters, in the order of m_segment()
  int rows, columns;     // that exist; rows 0: there are no more tasks
  int number;            // of the GEMM task
  std::uint64_t v_hint;
};

// In shared memory at a multiple of 1024 bytes.
struct alignas(1024) ProductStorage {
  unsigned char units[product_units][operand_bytes];  // U that stays, then a ring; or a ring of V and U in turn
  ProductTask tasks[product_task_slots];
  std::uint64_t full[product_units], free[product_units];
  // Raising a counter takes as long as the stores before it. A thread of its own waits for that; the multiplying warps
  // hand it the numbers of tasks whose results they have stored. -1: there are no more.
  static constexpr int publish_slots = 2;
  std::uint64_t stored[publish_slots], taken[publish_slots];
  int number[publish_slots];

  __device__ __forceinline__ void init() {
    for (int i = 0; i < product_units; ++i) {
      hopper::barrier_init(shared_address(&full[i]), 1);
      hopper::barrier_init(shared_address(&free[i]), multiplying_warps);
    }
    for (int i = 0; i < publish_slots; ++i) {
      hopper::barrier_init(shared_address(&stored[i]), multiplying_warps);
      hopper::barrier_init(shared_address(&taken[i]), 1);
    }
  }
};

template <typename T>
__device__ __forceinline__ ProductTask describe_product(const Params<T>& params, int number) {
  const TaskMap& map = params.map;
  const Task task = map.gemm_task(number);
  const Extent extent = map.extent(task);
  const int frequency = extent.first_frequency, filter = extent.first_channel;
  const std::int64_t bytes = static_cast<std::int64_t>(2 * params.chunks) * operand_bytes;
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

// The loading warp: GEMM tasks in the order of the map. Lane i works on the i-th of the tickets that are taken at once.
template <typename T>
class Loader {
 public:
  __device__ __forceinline__ Loader(const Params<T>& params, ProductStorage& shared)
      : params_(params), shared_(shared), ring_(ProductRing::of(2 * params.chunks)) {}

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
        if (lane == i) ticket = load(pending, i == count - 1);
        __syncwarp();
        resident_ = reinterpret_cast<const char*>(
            __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(pending.product.u), i));
        for (position_.slot += 2 * params_.chunks; position_.slot >= ring_.slots; position_.slot -= ring_.slots) {
          position_.parity ^= 1;
        }
      }
      first = __shfl_sync(0xffffffffu, ticket, count - 1);
    }
    if (lane == 0) {
      await_slot(position_);
      shared_.tasks[tasks_ % product_task_slots].rows = 0;
      hopper::arrive(shared_address(&shared_.full[position_.slot]));
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

  // One lane. Takes the next tickets when the last stage but two is on its way, no earlier: who holds a ticket and does
  // not work on it makes others wait.
  __device__ __forceinline__ int load(const Pending& pending, bool takes) {
    int ticket = 0;
    const ProductTask& product = pending.product;
    params_.trace.take(product.number);
    if (!pending.ready) {
      pending.input.template wait<role_load>(params_.report);
      pending.output.template wait<role_load>(params_.report);
    }
    fence_global_copies();
    record_begin(params_, product.number, product.number, [this](int number) { return params_.map.gemm_task(number); });
    const bool loads_u = ring_.resident == 0 || product.u != resident_;
    hopper::RingPosition position = position_;
#pragma unroll 1
    for (int i = 0; i < 2 * params_.chunks; ++i, position.advance(ring_.slots)) {
      if (takes && i == max(0, 2 * params_.chunks - 3)) ticket = atomicAdd(params_.tickets, params_.product_grab);
      await_slot(position);
      if (i == 0) shared_.tasks[tasks_ % product_task_slots] = product;
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
    return ticket;
  }
  __device__ __forceinline__ void await_slot(const hopper::RingPosition& position) const {
    wait_in_place<role_load>(shared_.free[position.slot], position.parity ^ 1, params_.report);
  }

  const Params<T>& params_;
  ProductStorage& shared_;
  const ProductRing ring_;
  hopper::RingPosition position_;   // of the next stage
  const char* resident_ = nullptr;  // the U of the task before
  unsigned tasks_ = 0;              // so far
};

// All threads of a warpgroup, 0 or 1: rows [64 warpgroup, 64 warpgroup + 64) of each task.
template <typename T>
class Multiplier {
 public:
  __device__ __forceinline__ Multiplier(const Params<T>& params, ProductStorage& shared, int warpgroup)
      : params_(params), shared_(shared), ring_(ProductRing::of(2 * params.chunks)), warpgroup_(warpgroup) {}

  __device__ __forceinline__ void run() {
    zero_totals();
    unsigned task = 0;
#pragma unroll 1
    for (;; ++task) {
      Stage first = next_stage(0);
      const ProductTask& product = shared_.tasks[task % product_task_slots];
      if (product.rows == 0) {
        break;
      }
      exponents_ = product.exponents + (warp_row() + static_cast<int>(threadIdx.x) % 32 / 4) * params_.chunks;
#pragma unroll 1
      for (int chunk = 0; chunk < params_.chunks; ++chunk) {
        issue<true>(first);
        const Stage second = next_stage(2 * chunk + 1);
        issue<false>(second);
        if (chunk == 0) find_least();
        const float factors[2] = {factor(chunk, 0), factor(chunk, 1)};
        const int first_slot = first.slot;
        if (chunk + 1 < params_.chunks) first = next_stage(2 * chunk + 2);  // so that little is left to do in between
        hopper::wait_for_products<1>();
        release(first_slot);
        hopper::wait_for_products<0>();
        release(second.slot);
        hopper::pin(sums_);
#pragma unroll
        for (int i = 0; i < 64; ++i) totals_[i] = fmaf(sums_[i], factors[i / 2 % 2], totals_[i]);
      }
      finish(product, task);
    }
    hand_over(task, -1);
  }

 private:
  // The warp's first row: lane l has its rows l / 4 and 8 further (hopper.cuh).
  __device__ __forceinline__ int warp_row() const {
    return warpgroup_ * 64 + static_cast<int>(threadIdx.x) % 128 / 32 * 16;
  }

  // The sums of a chunk are brought to the scale of the tile's largest one before they are added up: exact, and neither
  // too large nor, relative to the result, too small for FP32. Four lanes share a row.
  __device__ __forceinline__ void find_least() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int least = 127;
#pragma unroll
      for (int j = 0; j < kept_exponents; ++j) {
        const int chunk = 4 * j + static_cast<int>(threadIdx.x) % 4;
        kept_[j][i] = chunk < params_.chunks ? exponent(chunk, i) : 127;
      }
#pragma unroll
      for (int j = 0; j < kept_exponents; ++j) least = min(least, kept_[j][i]);
#pragma unroll 1
      for (int chunk = 4 * kept_exponents + threadIdx.x % 4; chunk < params_.chunks; chunk += 4) {
        least = min(least, exponent(chunk, i));
      }
      least = min(least, __shfl_xor_sync(0xffffffffu, least, 1));
      least_[i] = min(least, __shfl_xor_sync(0xffffffffu, least, 2));
    }
  }
  __device__ __forceinline__ float factor(int chunk, int i) const {
    int of_chunk;
    if (chunk < 4 * kept_exponents) {
      static_assert(kept_exponents == 2);
      of_chunk = __shfl_sync(0xffffffffu, chunk < 4 ? kept_[0][i] : kept_[1][i], chunk % 4, 4);
    } else {
      of_chunk = exponent(chunk, i);
    }
    return power_of_two(max(-126, least_[i] - of_chunk));
  }
  // Past the first cache: written by other multiprocessors of this very kernel.
  __device__ __forceinline__ int exponent(int chunk, int i) const {
    return __ldcg(exponents_ + i * 8 * params_.chunks + chunk);
  }

  // A stage that is there: its slot, and the low words of its operands' descriptors.
  struct Stage {
    int slot;
    std::uint32_t v, u;
  };
  __device__ __forceinline__ Stage next_stage(int index) {
    wait_in_place<role_multiply>(shared_.full[position_.slot], position_.parity, params_.report);
    const int slot = position_.slot;
    const std::uint32_t units = shared_address(shared_.units);
    position_.advance(ring_.slots);
    const auto low = [](std::uint32_t address) {
      return static_cast<std::uint32_t>(hopper::matrix_descriptor<128>(address));
    };
    return {slot, low(units + ring_.v_unit(slot) * operand_bytes + warpgroup_ * (operand_bytes / 2)),
            low(units + ring_.u_unit(slot, index) * operand_bytes)};
  }
  __device__ __forceinline__ void release(int slot) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      hopper::arrive(shared_address(&shared_.free[slot]));
    }
  }

  // The products of a stage: lo hi and hi lo first, the small ones (docs/numerics.md).
  template <bool begins>
  __device__ __forceinline__ void issue(const Stage& stage) {
    constexpr int hi = 64;  // bytes, in a row
    // Addresses have 14 bits there, and steps within a row do not carry.
    const auto descriptor = [](std::uint32_t low, int bytes) {
      constexpr std::uint64_t high = (std::uint64_t{1} << 62) | (std::uint64_t{64} << 32);
      return high | (low + static_cast<std::uint32_t>(bytes / 16));
    };
    const auto multiply = [&](auto accumulate, int v_bytes, int u_bytes) {
      hopper::multiply_shared<half_t, accumulate()>(sums_, descriptor(stage.v, v_bytes), descriptor(stage.u, u_bytes));
    };
    constexpr std::true_type add{};
    hopper::fence_products();
    multiply(std::bool_constant<!begins>{}, 0, hi), multiply(add, 32, hi + 32);
    multiply(add, hi, 0), multiply(add, hi + 32, 32);
    multiply(add, hi, hi), multiply(add, hi + 32, hi + 32);
    hopper::commit_products();
  }

  __device__ __forceinline__ void zero_totals() {
#pragma unroll
    for (int i = 0; i < 64; ++i) totals_[i] = 0.0f;
  }
  __device__ __forceinline__ void finish(const ProductTask& product, unsigned task) {
    delay_randomly(params_.delay);
    write(product);
    zero_totals();
    hand_over(task, product.number);
  }

  // In the order of the registers: rows would be pieces of 32 bytes.
  __device__ __forceinline__ void write(const ProductTask& product) {
    const int lane = threadIdx.x % 32, row = warp_row();
    float* target = product.m + m_segment(row, 0) * 64 + lane * 4;
    asm volatile("" : "+l"(target));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int width = row + 8 * h < product.rows ? product.columns : 0;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float* t = totals_ + 8 * j + 2 * h;
        asm volatile(  // predicated, not branched around; and the compiler may not see that this is global memory
            "{\n.reg .pred p;\nsetp.gt.s32 p, %1, %2;\n@p st.global.v4.f32 [%0], {%3, %4, %5, %6};\n}" ::"l"(
                target + (4 * j + 2 * h) * 64),
            "r"(width), "r"(16 * j), "f"(t[0]), "f"(t[1]), "f"(t[4]), "f"(t[5])
            : "memory");
      }
    }
  }

  __device__ __forceinline__ void hand_over(unsigned task, int number) {
    constexpr unsigned slots = ProductStorage::publish_slots;
    const unsigned slot = task % slots;
    wait_in_place<role_multiply>(shared_.taken[slot], task / slots & 1 ^ 1, params_.report);
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      if (warpgroup_ == 0 && threadIdx.x % 128 == 0) shared_.number[slot] = number;
      hopper::arrive(shared_address(&shared_.stored[slot]));
    }
  }

  const Params<T>& params_;
  ProductStorage& shared_;
  const ProductRing ring_;
  const int warpgroup_;
  hopper::RingPosition position_;           // of the stage to be multiplied next
  const int* exponents_;                    // of the task under way, at the lane's first row
  static constexpr int kept_exponents = 2;  // of a lane: chunk 4j + lane % 4
  int least_[2], kept_[kept_exponents][2];
  float totals_[64], sums_[64];
};

}  // namespace fastconv::algos::winograd_megakernel
