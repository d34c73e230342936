// The multiplying side of a block: one thread loads, two warpgroups multiply, one thread raises the counters.
//
// Split operands: the scheme of winograd/products.cuh, with stages of half the size and one set of sums, which leaves
// shared memory and registers to the streaming warps. While one warpgroup joins its sums to its totals, the other one's
// products run. Halves: the sums of all chunks stay where they are, and change their scale where a chunk has another.
#pragma once

#include "algos/winograd_megakernel/params.cuh"
#include "algos/winograd_megakernel/values.cuh"
#include "device/power_of_two.h"

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

// In shared memory at a multiple of 1024 bytes.
template <typename T>
struct alignas(1024) ProductStorage {
  static constexpr int count = form<T>.units;
  static_assert(count + 1 < product_task_slots);  // tasks that the loading thread can be ahead
  unsigned char units[count][operand_bytes];      // U that stays, then a ring; or a ring of V and U in turn
  ProductTask tasks[product_task_slots];
  std::uint64_t full[count], free[count];
  // Raising a counter takes as long as the stores before it. A thread of its own waits for that; the multiplying warps
  // hand it the numbers of tasks whose results they have stored. -1: there are no more.
  static constexpr int publish_slots = 2;
  std::uint64_t stored[publish_slots], taken[publish_slots];
  int number[publish_slots];

  __device__ __forceinline__ void init() {
    for (int i = 0; i < count; ++i) {
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

// The loading warp: GEMM tasks in the order of the map. Lane i works on the i-th of the tickets that are taken at once.
template <typename T>
class Loader {
 public:
  __device__ __forceinline__ Loader(const Params<T>& params, ProductStorage<T>& shared)
      : params_(params), shared_(shared), ring_(ProductRing::of(params.stages(), form<T>.units)) {}

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
        for (position_.slot += params_.stages(); position_.slot >= ring_.slots; position_.slot -= ring_.slots) {
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
    for (int i = 0; i < params_.stages(); ++i, position.advance(ring_.slots)) {
      if (takes && i == max(0, params_.stages() - 3)) ticket = atomicAdd(params_.tickets, params_.product_grab);
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
  ProductStorage<T>& shared_;
  const ProductRing ring_;
  hopper::RingPosition position_;   // of the next stage
  const char* resident_ = nullptr;  // the U of the task before
  unsigned tasks_ = 0;              // so far
};

// All threads of a warpgroup, 0 or 1: rows [64 warpgroup, 64 warpgroup + 64) of each task.
template <typename T>
class Multiplier {
 public:
  __device__ __forceinline__ Multiplier(const Params<T>& params, ProductStorage<T>& shared, int warpgroup)
      : params_(params),
        shared_(shared),
        ring_(ProductRing::of(params.stages(), form<T>.units)),
        warpgroup_(warpgroup) {}

  __device__ __forceinline__ void run() {
    if constexpr (is_split<T>) zero_totals();
    unsigned task = 0;
#pragma unroll 1
    for (;; ++task) {
      Stage first = next_stage(0);
      const ProductTask& product = shared_.tasks[task % product_task_slots];
      if (product.rows == 0) {
        break;
      }
      if constexpr (is_split<T>) {
        exponents_ = product.exponents + lane_row() * params_.chunks;
        sum_chunks(first);
      } else {
        sum_in_place(first, product);
      }
      finish(product, task);
    }
    hand_over(task, -1);
  }

 private:
  // A stage that is there: its slot, and the low words of its operands' descriptors.
  struct Stage {
    int slot;
    std::uint32_t v, u;
  };

  // ---- Split operands: a chunk's sums start from zero and join the totals.

  __device__ __forceinline__ void sum_chunks(Stage first) {
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
  }
  // ----

  // The warp's first row: lane l has its rows l / 4 and 8 further (hopper.cuh).
  __device__ __forceinline__ int warp_row() const {
    return warpgroup_ * 64 + static_cast<int>(threadIdx.x) % 128 / 32 * 16;
  }
  __device__ __forceinline__ int lane_row() const { return warp_row() + static_cast<int>(threadIdx.x) % 32 / 4; }

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


  // ---- Halves: one set of sums for all chunks. Nearly always all of them have the common scale (values.cuh); where a
  // row of the warpgroup does not, the sums change their scale on the way. At last they get M's.

  __device__ __forceinline__ void sum_in_place(Stage stage, const ProductTask& product) {
    issue<true>(stage);
    const bool common = find_scales(product);
    int scale[2] = {common_exponent, common_exponent};
    if (common) {
#pragma unroll 1
      for (int chunk = 1; chunk < params_.chunks; ++chunk) {
        const Stage next = next_stage(chunk);
        issue<false>(next);
        hopper::wait_for_products<1>();
        release(stage.slot);
        stage = next;
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) scale[i] = scale_of(product, 0, i);
#pragma unroll 1
      for (int chunk = 1; chunk < params_.chunks; ++chunk) {
        const Stage next = next_stage(chunk);
        float factors[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int own = scale_of(product, chunk, i);
          factors[i] = power_of_two(max(-126, own - scale[i]));
          scale[i] = own;
        }
        hopper::wait_for_products<0>();
        release(stage.slot);
        multiply_sums(factors);
        issue<false>(next);
        stage = next;
      }
    }
    const int shift = product_shift(params_.chunks);
    const float factors[2] = {power_of_two(max(-126, least_[0] - scale[0] - shift)),
                              power_of_two(max(-126, least_[1] - scale[1] - shift))};
    hopper::wait_for_products<0>();
    release(stage.slot);
    multiply_sums(factors);
  }
  __device__ __forceinline__ void multiply_sums(const float (&factors)[2]) {
    hopper::pin(sums_);
#pragma unroll
    for (int i = 0; i < 64; ++i) sums_[i] *= factors[i / 2 % 2];
  }
  // The least exponent of each of the lane's rows. Returns whether all of the warpgroup's chunks have the common scale.
  __device__ __forceinline__ bool find_scales(const ProductTask& product) {
    bool common = true;
    least_[0] = least_[1] = zero_exponent;
#pragma unroll 1
    for (int first = threadIdx.x % 4; first < params_.chunks; first += 8) {
      int exponents[2][2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          exponents[j][i] = first + 4 * j < params_.chunks ? exponent(product, first + 4 * j, i) : zero_exponent;
        }
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          least_[i] = min(least_[i], exponents[j][i]);
          common &= v_exponent(exponents[j][i]) == common_exponent;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      least_[i] = min(least_[i], __shfl_xor_sync(0xffffffffu, least_[i], 1));
      least_[i] = min(least_[i], __shfl_xor_sync(0xffffffffu, least_[i], 2));
    }
    return all_of_warpgroup(common);
  }
  __device__ __forceinline__ bool all_of_warpgroup(bool value) const {
    unsigned all;
    __syncwarp();  // the barrier counts warps
    asm volatile(
        "{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbarrier.cta.red.and.aligned.pred q, %2, 128, p;\n"
        "selp.u32 %0, 1, 0, q;\n}"
        : "=r"(all)
        : "r"(static_cast<unsigned>(value)), "r"(1 + warpgroup_)
        : "memory");
    return all != 0;
  }
  // That of the row's sums when a chunk joins them: the chunk's, but not so far above the least one that the sums could
  // exceed FP32's range. (What is that much smaller does not count, whatever its scale.)
  __device__ __forceinline__ int scale_of(const ProductTask& product, int chunk, int i) const {
    return min(v_exponent(exponent(product, chunk, i)), v_exponent(least_[i]) + 72);
  }
  // Of the row 8 i further; read anew each time, since registers are scarce.
  __device__ __forceinline__ int exponent(const ProductTask& product, int chunk, int i) const {
    const int row = lane_row() + 8 * i;
    return row < product.rows ? __ldcg(product.exponents + row * params_.chunks + chunk) : zero_exponent;
  }

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

  // The products of a stage; of split operands lo hi and hi lo first, the small ones (docs/numerics.md).
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
    constexpr std::bool_constant<!begins> first{};
    hopper::fence_products();
    if constexpr (is_split<T>) {
      multiply(first, 0, hi), multiply(add, 32, hi + 32);
      multiply(add, hi, 0), multiply(add, hi + 32, 32);
      multiply(add, hi, hi), multiply(add, hi + 32, hi + 32);
    } else {
      multiply(first, 0, 0), multiply(add, 32, 32), multiply(add, 64, 64), multiply(add, 96, 96);
    }
    hopper::commit_products();
  }

  __device__ __forceinline__ void zero_totals() {
#pragma unroll
    for (int i = 0; i < 64; ++i) totals_[i] = 0.0f;
  }
  __device__ __forceinline__ void finish(const ProductTask& product, unsigned task) {
    delay_randomly(params_.delay);
    write(product);
    if constexpr (is_split<T>) zero_totals();
    hand_over(task, product.number);
  }

  // Predicated, not branched around; and the compiler may not see that this is global memory.
  static __device__ __forceinline__ void store_if(int width, int column, void* target, float a, float b, float c,
                                                  float d) {
    asm volatile("{\n.reg .pred p;\nsetp.gt.s32 p, %1, %2;\n@p st.global.v4.f32 [%0], {%3, %4, %5, %6};\n}" ::"l"(target),
                 "r"(width), "r"(column), "f"(a), "f"(b), "f"(c), "f"(d)
                 : "memory");
  }
  static __device__ __forceinline__ void store_if(int width, int column, void* target, half2 a, half2 b, half2 c,
                                                  half2 d) {
    asm volatile("{\n.reg .pred p;\nsetp.gt.s32 p, %1, %2;\n@p st.global.v4.b32 [%0], {%3, %4, %5, %6};\n}" ::"l"(target),
                 "r"(width), "r"(column), "r"(to_bits(a)), "r"(to_bits(b)), "r"(to_bits(c)), "r"(to_bits(d))
                 : "memory");
  }
  // In the order of the registers: rows would be pieces of 32 bytes.
  __device__ __forceinline__ void write(const ProductTask& product) {
    constexpr int filters = form<T>.segment_filters;
    const int lane = threadIdx.x % 32, row = warp_row();
    auto* target =
        static_cast<Product<T>*>(product.m) + segment_at<T>(row, 0) * segment_values + lane * (filters / 4);
    asm volatile("" : "+l"(target));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int width = row + 8 * h < product.rows ? product.columns : 0;
#pragma unroll
      for (int j = 0; j < unit_filters / filters; ++j) {
        Product<T>* const place = target + segment_at<T>(8 * h, filters * j) * segment_values;
        if constexpr (is_split<T>) {
          const float* t = totals_ + 8 * j + 2 * h;
          store_if(width, filters * j, place, t[0], t[1], t[4], t[5]);
        } else {
          const float* t = sums_ + 16 * j + 2 * h;
          const auto pair = [t](int i) { return __floats2half2_rn(t[i], t[i + 1]); };
          store_if(width, filters * j, place, pair(0), pair(4), pair(8), pair(12));
        }
      }
    }
  }

  __device__ __forceinline__ void hand_over(unsigned task, int number) {
    constexpr unsigned slots = ProductStorage<T>::publish_slots;
    const unsigned slot = task % slots;
    wait_in_place<role_multiply>(shared_.taken[slot], task / slots & 1 ^ 1, params_.report);
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      if (warpgroup_ == 0 && threadIdx.x % 128 == 0) shared_.number[slot] = number;
      hopper::arrive(shared_address(&shared_.stored[slot]));
    }
  }

  const Params<T>& params_;
  ProductStorage<T>& shared_;
  const ProductRing ring_;
  const int warpgroup_;
  hopper::RingPosition position_;           // of the stage to be multiplied next
  const int* exponents_;                    // of the task under way, at the lane's first row
  static constexpr int kept_exponents = 2;  // of a lane: chunk 4j + lane % 4
  int least_[2], kept_[kept_exponents][2];
  float totals_[is_split<T> ? 64 : 1], sums_[64];
};

}  // namespace fastconv::algos::winograd_megakernel
