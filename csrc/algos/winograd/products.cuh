// Roles of Winograd's batched product on Hopper: for each frequency M [T][K_pad] = V [T][C] U [K][C]^T in FP32, both
// operands copied into shared memory and multiplied there by wgmma. One thread loads, two warpgroups multiply. What
// there is to do and how it is loaded comes from a Source, what becomes of the result is the business of a Sink: so the
// staged algorithms (products.cu) and a kernel with tasks of other kinds use the same roles.
//
// A stage is what a block of 128 tiles and 128 filters needs of some channels: two planes of 64 channels of each operand,
// a row of a plane 128 bytes, its 16-byte pieces swizzled (piece p of row r at p ^ (r & 7)).
//   split       64 channels; the planes are the parts lo and hi, multiplied lo*hi, hi*lo, hi*hi: the small ones first
//   fp16, bf16  128 channels, a plane for each half of them
//
// A stage's sums start from zero and join the totals by an FP32 addition, which rounds: wgmma truncates its accumulator
// (docs/numerics.md).
#pragma once

#include <cuda.h>

#include "algos/winograd/tile_math.cuh"
#include "device/hopper.cuh"
#include "device/mma.cuh"
#include "device/wait_report.h"

namespace fastconv::winograd::products {

constexpr int tile_rows = 128;     // tiles (rows of V and M) of a block
constexpr int tile_filters = 128;  // filters (rows of U, columns of M) of a block
constexpr int row_bytes = 128;     // of a plane
constexpr int planes = 2;
constexpr int plane_bytes = tile_rows * row_bytes;
constexpr int stage_bytes = 2 * planes * plane_bytes;
constexpr int multiply_warpgroups = 2;
constexpr int task_slots = 8;

// A kernel instantiation.
//   sets       2: sets of sums, 64 registers each: a stage's products run while the sums of the one before join the
//              totals, and the first stage of a task runs while the totals of the task before are written.
//              1: fewer registers; the warpgroups fill each other's gaps
//   paired     blocks work in clusters of two, on different rows and the same filters, of which each loads half for
//              both: both Sources must give as many tasks, and tasks of the same number the same filters
//   may_block  Source::next() may wait for other blocks: then a task is written before its successor is waited for
//   kernel     WaitKernel, for waits that expire
template <Mode mode_, int sets_ = 2, bool paired_ = false, bool may_block_ = false, int slots_ = 3,
          int kernel_ = kernel_winograd_products>
struct Shape {
  static_assert(mode_ != Mode::fp32);
  using Half = typename Operand<mode_>::type;
  static constexpr Mode mode = mode_;
  static constexpr bool split = mode == Mode::split, paired = paired_, may_block = may_block_;
  static constexpr int sets = sets_, slots = slots_, kernel = kernel_;
  static_assert(sets == 1 || sets == 2);
  static_assert(slots >= 2 && slots + 1 < task_slots);  // tasks that the loading thread can be ahead
  static constexpr int stage_channels = split ? 64 : 128;
  // What setmaxnreg has to leave to a thread of each role; that is the caller's business.
  static constexpr int multiply_registers = sets == 2 ? 232 : 160, load_registers = 40;
};

// In shared memory at a multiple of 1024 bytes; sizeof is all that the roles need. Task: trivially copyable.
template <typename S, typename Task>
struct alignas(1024) Storage {
  unsigned char v[S::slots][planes][plane_bytes], u[S::slots][planes][plane_bytes];
  std::uint64_t full[S::slots], free[S::slots];
  struct Entry {
    Task task;
    bool exists;
  } entries[task_slots];

  // By one thread; then the block (paired: the cluster) synchronises.
  __device__ __forceinline__ void initialise() {
    for (int i = 0; i < S::slots; ++i) {
      hopper::barrier_init(shared_address(&full[i]), 1);
      hopper::barrier_init(shared_address(&free[i]), 4 * multiply_warpgroups * (S::paired ? 2 : 1));
    }
    hopper::barrier_init_fence();
  }
};

// Where a Source brings a stage: plane p of an operand at + p * plane_bytes. The copies report to `full`, stage_bytes in
// all, zeros for channels, tiles and filters that do not exist.
struct Stage {
  std::uint32_t v, u;  // shared addresses, [planes][128][128 bytes]
  std::uint32_t full;  // mbarrier
};

// Copies of a stage by tensor maps. Maps: c innermost (size C_pad), then rows, then an index (the frequency), then the
// part (split: lo, hi; else size 1); outside of the sizes are zeros. Boxes: {64, box_rows, 1, box_parts}.
template <typename S>
constexpr int box_rows(bool is_filter) {
  return is_filter && S::paired ? tile_filters / 2 : tile_rows;
}
template <typename S>
constexpr int box_parts(bool is_filter) {
  return S::split && !(is_filter && S::paired) ? 2 : 1;
}
template <typename S>
__device__ __forceinline__ void load_stage(const Stage& stage, int index, const CUtensorMap& v, int row, int v_index,
                                           const CUtensorMap& u, int filter, int u_index) {
  const int c = index * S::stage_channels;
  if constexpr (S::split) {
    hopper::copy_box(stage.v, v, c, row, v_index, 0, stage.full);
    if constexpr (!S::paired) hopper::copy_box(stage.u, u, c, filter, u_index, 0, stage.full);
  } else {
#pragma unroll
    for (int plane = 0; plane < planes; ++plane) {
      hopper::copy_box(stage.v + plane * plane_bytes, v, c + 64 * plane, row, v_index, 0, stage.full);
      if constexpr (!S::paired) {
        hopper::copy_box(stage.u + plane * plane_bytes, u, c + 64 * plane, filter, u_index, 0, stage.full);
      }
    }
  }
  if constexpr (S::paired) {
    const int first = static_cast<int>(hopper::cluster_rank()) * (tile_filters / 2);
#pragma unroll
    for (int plane = 0; plane < planes; ++plane) {
      hopper::copy_box_to(stage.u + plane * plane_bytes + first * row_bytes, u, S::split ? c : c + 64 * plane,
                          filter + first, u_index, S::split ? plane : 0, stage.full, 3);
    }
  }
}

// The loading role, for one thread. Source:
//   bool next(Task&)                             false when there are no more. Where it waits for V that ordinary stores
//                                                of other blocks have written, it has to acquire, and to fence the copies
//                                                (fence.proxy.async)
//   void load(const Task&, int index, const Stage&)   starts the copies of a stage
template <typename S, typename Task, typename Source>
__device__ __forceinline__ void load_products(Storage<S, Task>& shared, int stages, Source&& source,
                                              WaitReport* report) {
  hopper::RingPosition ring;
  unsigned number = 0;
  const auto await_slot = [&] {
    hopper::wait_in_place<S::kernel, role_load>(shared_address(&shared.free[ring.slot]), ring.parity ^ 1, report);
  };
  Task task;
  while (source.next(task)) {
#pragma unroll 1
    for (int index = 0; index < stages; ++index) {
      await_slot();
      if (index == 0) {
        shared.entries[number % task_slots].task = task;
        shared.entries[number++ % task_slots].exists = true;
      }
      const std::uint32_t full = shared_address(&shared.full[ring.slot]);
      hopper::arrive_expecting(full, stage_bytes);
      source.load(task, index, Stage{shared_address(shared.v[ring.slot]), shared_address(shared.u[ring.slot]), full});
      ring.advance(S::slots);
    }
  }
  await_slot();
  shared.entries[number % task_slots].exists = false;
  hopper::arrive(shared_address(&shared.full[ring.slot]));
}

// Of the block's 128, the first row that the lane of a multiplying warpgroup holds (hopper.cuh): totals[4j], [4j + 1] are
// its columns 8j + 2 (lane % 4) and the next, totals[4j + 2], [4j + 3] those of the row 8 further.
__device__ __forceinline__ int lane_row(int warpgroup) {
  return warpgroup * 64 + static_cast<int>(threadIdx.x) % 128 / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4;
}

// Writes the lane's totals to rows of `pitch` floats. m: the block's first row and column, 8-byte aligned; of its rows
// and columns so many exist, columns a multiple of 8.
__device__ __forceinline__ void write_rows(const float (&totals)[64], int warpgroup, float* m, std::int64_t pitch,
                                           int rows, int columns) {
  const int row = lane_row(warpgroup);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float* target = m + (row + 8 * i) * pitch + threadIdx.x % 4 * 2;
    asm volatile("" : "+l"(target));  // computed once, not for each store
    const int width = row + 8 * i < rows ? columns : 0;
#pragma unroll
    for (int j = 0; j < tile_filters / 8; ++j) {
      asm volatile(  // predicated, not branched around; and the compiler may not see that this is global memory
          "{\n.reg .pred p;\nsetp.gt.s32 p, %1, %2;\n@p st.global.v2.f32 [%0], {%3, %4};\n}" ::"l"(target + 8 * j),
          "r"(width), "r"(8 * j), "f"(totals[4 * j + 2 * i]), "f"(totals[4 * j + 2 * i + 1])
          : "memory");
    }
  }
}

// The Sink of a multiplying thread:
//   void begin(const Task&, int warpgroup)       before the task's first stage joins the totals
//   float factor(int index, int i)               of the stage's sums of the lane's row i (0: lane_row(); 1: 8 further), a
//                                                power of two; called beside the stage's products
//   void write(const Task&, int warpgroup, const float (&totals)[64])
// All are called by all threads of a warpgroup. A Sink without scales:
struct Unscaled {
  template <typename Task>
  __device__ __forceinline__ void begin(const Task&, int) const {}
  __device__ __forceinline__ float factor(int, int) const { return 1.0f; }
};

// The multiplying role, for all threads of a warpgroup (aligned to 128 threads), 0 or 1. barrier: the number of a named
// barrier for this warpgroup alone, used if the Source may block and there are two sets.
template <typename S, int barrier, typename Task, typename Sink>
class Multiplier {
 public:
  __device__ __forceinline__ Multiplier(Storage<S, Task>& shared, int stages, int warpgroup, Sink& sink,
                                        WaitReport* report)
      : shared_(shared), sink_(sink), report_(report), stages_(stages), warpgroup_(warpgroup) {}

  __device__ __forceinline__ void run() {
#pragma unroll
    for (int i = 0; i < 64; ++i) totals_[i] = 0.0f;
    if constexpr (S::sets == 2) {
      if (!start<0>()) return;
#pragma unroll 1
      while (step<1>() && step<0>()) {
      }
    } else {
#pragma unroll 1
      while (start<0>()) {
        complete<0, 0>(0);
#pragma unroll 1
        while (index_ < stages_) {
          await_stage();
          issue_next(sums_[0]);
          complete<0, 0>(index_ - 1);
        }
      }
    }
  }

 private:
  // Issues the products of a task's first stage; none of another stage are unfinished. False if there are no more tasks.
  template <int set>
  __device__ __forceinline__ bool start() {
    await_stage();
    if (!shared_.entries[written_ % task_slots].exists) return false;
    index_ = 0;
    issue_next(sums_[set]);
    return true;
  }

  // Issues the products of the next stage, then completes the one before. False after the last one.
  template <int set>
  __device__ __forceinline__ bool step() {
    constexpr int other = set ^ 1;
    const bool begins = index_ == stages_;
    if constexpr (S::may_block) {
      if (begins && !is_ready()) {
        complete<other, 0>(stages_ - 1);
        return start<set>();
      }
    }
    await_stage();
    if (begins) {
      if (!shared_.entries[(written_ + 1) % task_slots].exists) {
        complete<other, 0>(stages_ - 1);
        return false;
      }
      index_ = 0;
    }
    issue_next(sums_[set]);
    complete<other, 1>(begins ? stages_ - 1 : index_ - 2);
    return true;
  }

  __device__ __forceinline__ void await_stage() const {
    hopper::wait_in_place<S::kernel, role_multiply>(shared_address(&shared_.full[slot_.slot]), slot_.parity, report_);
  }
  __device__ __forceinline__ void issue_next(float (&sums)[64]) {
    issue(sums);
    ++index_;
    slot_.advance(S::slots);
  }

  // Waits for a stage's products, gives its slot back, adds its sums to the totals and, if it is its task's last, writes
  // them. under_way: products that were issued since.
  template <int set, int under_way>
  __device__ __forceinline__ void complete(int index) {
    if (index == 0) sink_.begin(shared_.entries[written_ % task_slots].task, warpgroup_);
    const float factors[2] = {sink_.factor(index, 0), sink_.factor(index, 1)};
    hopper::wait_for_products<under_way>();
    hopper::pin(sums_[set]);
    const int slot = (slot_.slot + S::slots - 1 - under_way) % S::slots;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const std::uint32_t free = shared_address(&shared_.free[slot]);
    __syncwarp();
    if (lane == 0) hopper::arrive(free);
    if (S::paired && lane == 1) hopper::arrive_at(free, hopper::cluster_rank() ^ 1);
#pragma unroll
    for (int i = 0; i < 64; ++i) totals_[i] = fmaf(sums_[set][i], factors[i / 2 % 2], totals_[i]);
    if (index + 1 < stages_) return;
    sink_.write(shared_.entries[written_++ % task_slots].task, warpgroup_, totals_);
#pragma unroll
    for (int i = 0; i < 64; ++i) totals_[i] = 0.0f;
  }

  __device__ __forceinline__ void issue(float (&sums)[64]) const {
    using Half = typename S::Half;
    const std::uint64_t v = hopper::matrix_descriptor<row_bytes>(shared_address(shared_.v[slot_.slot]) +
                                                                 warpgroup_ * 64 * row_bytes);
    const std::uint64_t u = hopper::matrix_descriptor<row_bytes>(shared_address(shared_.u[slot_.slot]));
    constexpr int depth = row_bytes / 32;  // products of 16 channels in a plane
    const auto multiply = [&](int v_plane, int u_plane) {
#pragma unroll
      for (int i = 0; i < depth; ++i) {
        hopper::multiply_shared<Half, true>(sums, hopper::advance_descriptor(v, v_plane * plane_bytes + 32 * i),
                                            hopper::advance_descriptor(u, u_plane * plane_bytes + 32 * i));
      }
    };
    const auto first = [&](int v_plane, int u_plane) {
      hopper::multiply_shared<Half, false>(sums, hopper::advance_descriptor(v, v_plane * plane_bytes),
                                           hopper::advance_descriptor(u, u_plane * plane_bytes));
#pragma unroll
      for (int i = 1; i < depth; ++i) {
        hopper::multiply_shared<Half, true>(sums, hopper::advance_descriptor(v, v_plane * plane_bytes + 32 * i),
                                            hopper::advance_descriptor(u, u_plane * plane_bytes + 32 * i));
      }
    };
    hopper::fence_products();
    if constexpr (S::split) {
      first(0, 1), multiply(1, 0), multiply(1, 1);
    } else {
      first(0, 0), multiply(1, 1);
    }
    hopper::commit_products();
  }

  // Whether the next stage is loaded; the same answer for the whole warpgroup.
  __device__ __forceinline__ bool is_ready() const {
    unsigned ready = hopper::try_wait(shared_address(&shared_.full[slot_.slot]), slot_.parity);
    asm volatile(
        "{\n.reg .pred p, q;\nsetp.ne.u32 p, %0, 0;\nbarrier.cta.red.and.pred q, %1, 128, p;\n"
        "selp.u32 %0, 1, 0, q;\n}"
        : "+r"(ready)
        : "n"(barrier)
        : "memory");
    return ready != 0;
  }

  Storage<S, Task>& shared_;
  Sink& sink_;
  WaitReport* const report_;
  const int stages_, warpgroup_;
  hopper::RingPosition slot_;         // of the next stage
  int index_ = 0;                     // of the next stage in its task; stages: it begins the next task
  unsigned written_ = 0;              // tasks
  float totals_[64], sums_[S::sets][64];
};

template <typename S, int barrier, typename Task, typename Sink>
__device__ __forceinline__ void multiply_products(Storage<S, Task>& shared, int stages, int warpgroup, Sink&& sink,
                                                  WaitReport* report) {
  Multiplier<S, barrier, Task, std::remove_reference_t<Sink>>(shared, stages, warpgroup, sink, report).run();
}

}  // namespace fastconv::winograd::products
