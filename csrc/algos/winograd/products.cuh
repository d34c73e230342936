// Roles of Winograd's batched product on Hopper: for each frequency M [T][K_pad] = V [T][C] U [K][C]^T in FP32, both
// operands copied into shared memory and multiplied there by wgmma. One thread loads, a warp finds the scales, two
// warpgroups multiply. What there is to do and how it is loaded comes from a Source, what becomes of the result is the
// business of a Sink: so the staged algorithms (products.cu) and a kernel with tasks of other kinds use the same roles.
//
// A stage is what a block of 128 tiles and 128 filters needs of some channels: two planes of 64 channels of each
// operand, a row of a plane 128 bytes, its 16-byte pieces swizzled (piece p of row r at p ^ (r & 7)).
//   split       64 channels; the planes are the parts lo and hi, multiplied lo*hi, hi*lo, hi*hi: the small ones first
//   fp16, bf16  128 channels, a plane for each half of them
//
// A stage's sums start from zero and join the totals by an FP32 addition, which rounds: wgmma truncates its accumulator
// (docs/numerics.md). On the way they are multiplied by a power of two for each tile and stage, which a tile's scales
// may differ by.
#pragma once

#include <cuda.h>

#include "algos/winograd/tile_math.cuh"
#include "device/hopper.cuh"
#include "device/mma.cuh"
#include "device/wait_report.h"

namespace fastconv::winograd::products {

constexpr int tile_rows = product_tiles;       // tiles (rows of V and M) of a block
constexpr int tile_filters = product_filters;  // filters (rows of U, columns of M) of a block
constexpr int row_bytes = 128;                 // of a plane
constexpr int planes = 2;
constexpr int plane_bytes = tile_rows * row_bytes;
constexpr int stage_bytes = 2 * planes * plane_bytes;
constexpr int multiply_warpgroups = 2;
constexpr int task_slots = 8;

// A kernel instantiation.
//   sets       2: sets of sums, 64 registers each: a stage's products run while the sums of the one before join the
//              totals, and the first stage of a task runs while the totals of the task before are written.
//              1: fewer registers; the warpgroups fill each other's gaps
//   may_block  Source::next() may wait for other blocks: then a task is written before its successor is waited for
//   kernel     WaitKernel, for waits that expire
template <Mode mode_, int sets_ = 2, bool may_block_ = false, int slots_ = 3, int kernel_ = kernel_winograd_products>
struct Shape {
  static_assert(mode_ != Mode::fp32);
  using Half = typename Operand<mode_>::type;
  static constexpr Mode mode = mode_;
  static constexpr bool split = mode == Mode::split, may_block = may_block_;
  static constexpr int sets = sets_, slots = slots_, kernel = kernel_;
  static_assert(sets == 1 || sets == 2);
  static_assert(slots >= 2 && slots + 1 < task_slots);  // tasks that the loading thread can be ahead
  static constexpr int stage_channels = split ? product_channels : 2 * product_channels;
  // What setmaxnreg has to leave to a thread of each role; that is the caller's business.
  static constexpr int multiply_registers = sets == 2 ? 232 : 160, load_registers = 40;
};

// In shared memory at a multiple of 1024 bytes; sizeof is all that the roles need. Task: trivially copyable.
template <typename S, typename Task>
struct alignas(1024) Storage {
  unsigned char v[S::slots][planes][plane_bytes], u[S::slots][planes][plane_bytes];
  alignas(16) float factors[S::slots][tile_rows];  // of a stage's sums, for each tile
  std::uint64_t full[S::slots], free[S::slots];
  struct Entry {
    Task task;
    bool exists;
  } entries[task_slots];

  // By one thread; then the block synchronises.
  __device__ __forceinline__ void initialise() {
    for (int i = 0; i < S::slots; ++i) {
      hopper::barrier_init(shared_address(&full[i]), 2);  // the copies, and the factors
      hopper::barrier_init(shared_address(&free[i]), 4 * multiply_warpgroups);
    }
    hopper::barrier_init_fence();
  }
};

// Where a Source brings a stage: plane p of an operand at + p * plane_bytes. The copies report to `full`, stage_bytes
// in all, zeros for channels, tiles and filters that do not exist.
struct Stage {
  std::uint32_t v, u;  // shared addresses, [planes][128][128 bytes]
  std::uint32_t full;  // mbarrier
};

// Copies of a stage by tensor maps. Maps: c innermost, then rows, then an index (the frequency), then parts; outside of
// the sizes are zeros. Boxes: {64, 128, 1, box_parts}.
//   split       c within a group, parts [group][lo, hi]: a group is a stage
//   fp16, bf16  c of all, one part
template <typename S>
constexpr int box_parts = S::split ? 2 : 1;
template <typename S>
__device__ __forceinline__ void load_stage(const Stage& stage, int index, const CUtensorMap& v, int row, int v_index,
                                           const CUtensorMap& u, int filter, int u_index) {
  const int c = S::split ? 0 : index * S::stage_channels, part = S::split ? index * planes : 0;
#pragma unroll
  for (int plane = 0; plane < planes; plane += box_parts<S>) {
    hopper::copy_box(stage.v + plane * plane_bytes, v, c + 64 * plane, row, v_index, part, stage.full);
    hopper::copy_box(stage.u + plane * plane_bytes, u, c + 64 * plane, filter, u_index, part, stage.full);
  }
}

// The loading role, for one thread. Source:
//   bool next(Task&)                             false when there are no more. Where it waits for V that ordinary
//   stores
//                                                of other blocks have written, it has to acquire, and to fence the
//                                                copies (fence.proxy.async)
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

// The scaling role, for a warp: the same tasks. make_scales(task), called while the task before is under way, finds
// what is needed of the lane's four tiles, the block's 4 lane and those behind it, and gives an object with
//   float4 factors(int index)      of the stage's sums of these tiles: powers of two
template <typename S, typename Task, typename Source, typename MakeScales>
__device__ __forceinline__ void scale_products(Storage<S, Task>& shared, int stages, Source&& source,
                                               const MakeScales& make_scales, WaitReport* report) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  hopper::RingPosition ring;
  const auto await_slot = [&] {
    hopper::wait_in_place<S::kernel, role_transform>(shared_address(&shared.free[ring.slot]), ring.parity ^ 1, report);
  };
  const auto hand_over = [&] {
    __syncwarp();
    if (lane == 0) hopper::arrive(shared_address(&shared.full[ring.slot]));
  };
  Task task;
  bool exists = source.next(task);
  auto next = make_scales(task);
  while (exists) {
    const auto scales = next;
#pragma unroll 1
    for (int index = 0; index < stages; ++index) {
      const float4 factors = scales.factors(index);
      await_slot();
      reinterpret_cast<float4*>(shared.factors[ring.slot])[lane] = factors;
      hand_over();
      ring.advance(S::slots);
      if (index == 0) {
        exists = source.next(task);
        if (exists) next = make_scales(task);
      }
    }
  }
  await_slot();
  hand_over();
}

// Of the block's 128, the first row that the lane of a multiplying warpgroup holds (hopper.cuh): totals[4j], [4j + 1]
// are its columns 8j + 2 (lane % 4) and the next, totals[4j + 2], [4j + 3] those of the row 8 further.
__device__ __forceinline__ int lane_row(int warpgroup) {
  return warpgroup * 64 + static_cast<int>(threadIdx.x) % 128 / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4;
}

// Registers cannot be indexed, and straight-line code that runs once a task is fetched anew each time, at some 50
// clocks for 8 instructions. So the totals are written by a short loop, a quarter at a turn, and the next ones move up;
// the last turn leaves zeros.
constexpr int turns = 4, turn_columns = tile_filters / turns, turn_totals = 64 / turns;
__device__ __forceinline__ void move_up(float (&totals)[64]) {
#pragma unroll
  for (int i = 0; i < 64; ++i) totals[i] = i + turn_totals < 64 ? totals[i + turn_totals] : 0.0f;
}

// Writes the lane's totals to rows of `pitch` floats, and leaves zeros. m: the block's first row and column, 8-byte
// aligned; of its rows and columns so many exist, columns a multiple of 8.
__device__ __forceinline__ void write_rows(float (&totals)[64], int warpgroup, float* m, std::int64_t pitch, int rows,
                                           int columns) {
  const int row = lane_row(warpgroup);
  float* target = m + row * pitch + threadIdx.x % 4 * 2;
#pragma unroll 1
  for (int turn = 0; turn < turns; ++turn, target += turn_columns, columns -= turn_columns) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float* first = target + 8 * i * pitch;
      const int width = row + 8 * i < rows ? columns : 0;
#pragma unroll
      for (int j = 0; j < turn_columns / 8; ++j) {
        asm volatile(  // predicated, not branched around; and the compiler may not see that this is global memory
            "{\n.reg .pred p;\nsetp.gt.s32 p, %1, %2;\n@p st.global.v2.f32 [%0], {%3, %4};\n}" ::"l"(first + 8 * j),
            "r"(width), "r"(8 * j), "f"(totals[4 * j + 2 * i]), "f"(totals[4 * j + 2 * i + 1])
            : "memory");
      }
    }
    move_up(totals);
  }
}

// The same through shared memory and by tensor copies, whole lines, beside whatever comes next: for all threads of a
// warpgroup, with a named barrier of its own. Map: columns, rows, an index, size 1; boxes {32, 64, 1, 1}, swizzled.
// Nothing is written outside of the sizes. The caller's first thread at last waits for reading.
struct alignas(1024) WriteStage {
  unsigned char boxes[2]
                     [64 * turn_columns * 4];  // [row of the warpgroup][128 bytes], one being filled, one being copied
};
__device__ __forceinline__ void write_boxes(float (&totals)[64], std::uint32_t stage, int barrier,
                                            const CUtensorMap& map, int column, int row, int index, int columns) {
  static_assert(turn_columns == 32);
  const int lane = static_cast<int>(threadIdx.x) % 32, lane_row = lane / 4;
  const bool leads = threadIdx.x % 128 == 0, odd = lane_row % 2 == 1;
  // Of a box's four groups of 8 columns, rows with odd numbers write another one than those with even ones, so that the
  // 16 lanes of an access meet all banks.
  const int piece = lane_row ^ lane % 4 / 2 ^ (odd ? 4 : 0);
  const std::uint32_t address = (threadIdx.x % 128 / 32 * 16 + lane_row) * 128 + lane % 2 * 8;
#pragma unroll 1
  for (int turn = 0; turn < turns; ++turn) {
    const std::uint32_t box = stage + turn % 2 * sizeof(WriteStage::boxes[0]);
    if (leads) hopper::wait_for_reading<1>();
    hopper::synchronise(barrier, 128);
#pragma unroll
    for (int group = 0; group < 4; ++group) {
      const std::uint32_t target = box + address + ((piece ^ 2 * group) << 4);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int even_total = 4 * group + 2 * i, odd_total = 4 * (group ^ 2) + 2 * i;
        hopper::store_shared(target + i * 8 * 128, odd ? totals[odd_total] : totals[even_total],
                             odd ? totals[odd_total + 1] : totals[even_total + 1]);
      }
    }
    move_up(totals);
    hopper::fence_copies();
    hopper::synchronise(barrier, 128);
    if (leads) {
      if (turn_columns * turn < columns) {
        hopper::store_box(map, column + turn_columns * turn, row, index, 0, box);
      }
      hopper::commit_stores();  // a group for every turn, so that the other box's is always the one before
    }
  }
}

// The Sink of a multiplying thread:
//   void write(const Task&, int warpgroup, float (&totals)[64])   by all threads of a warpgroup; leaves zeros
//
// The multiplying role, for all threads of a warpgroup (aligned to 128 threads), 0 or 1. first_barrier: the
// number of a named barrier, one for each warpgroup, used if the Source may block and there are two sets.
template <typename S, int first_barrier, typename Task, typename Sink>
class Multiplier {
 public:
  __device__ __forceinline__ Multiplier(Storage<S, Task>& shared, int stages, int warpgroup, Sink& sink,
                                        WaitReport* report)
      : shared_(shared), sink_(sink), report_(report), stages_(stages), warpgroup_(warpgroup) {}

  __device__ __forceinline__ void run() {
#pragma unroll
    for (int i = 0; i < 64; ++i) totals_[i] = 0.0f;
    if constexpr (S::sets == 1) {
#pragma unroll 1
      while (await_next(0)) {
        issue_next(sums_[0]);
        complete<0, 0>(index_ - 1);
      }
    } else {
      if (!start<0>()) return;
#pragma unroll 1
      while (step<1>() && step<0>()) {
      }
    }
  }

 private:
  static constexpr int depth = row_bytes / 32;  // products of 16 channels in a plane

  // Issues the products of a task's first stage, while none are under way. False if there are no more tasks.
  template <int set>
  __device__ __forceinline__ bool start() {
    if (!await_next(0)) return false;
    issue_next(sums_[set]);
    return true;
  }

  // Issues the products of the next stage, then completes the one before. False after the last one.
  template <int set>
  __device__ __forceinline__ bool step() {
    constexpr int other = set ^ 1;
    const int before = index_ - 1;
    if constexpr (S::may_block) {
      if (index_ == stages_ && !is_ready()) {
        complete<other, 0>(before);
        return start<set>();
      }
    }
    if (!await_next(1)) {
      complete<other, 0>(before);
      return false;
    }
    issue_next(sums_[set]);
    complete<other, 1>(before);
    return true;
  }

  // False if there is no next stage. unwritten: tasks begun and not written.
  __device__ __forceinline__ bool await_next(int unwritten) const {
    hopper::wait_in_place<S::kernel, role_multiply>(shared_address(&shared_.full[slot_.slot]), slot_.parity, report_);
    return index_ < stages_ || shared_.entries[(written_ + unwritten) % task_slots].exists;
  }
  __device__ __forceinline__ void issue_next(float (&sums)[64]) {
    issue(sums);
    index_ = index_ == stages_ ? 1 : index_ + 1;
    slot_.advance(S::slots);
  }

  // Waits for a stage's products, gives its slot back, adds its sums to the totals and, if it is its task's last,
  // writes them. since: stages issued since.
  template <int set, int since>
  __device__ __forceinline__ void complete(int index) {
    const int slot = (slot_.slot + S::slots - 1 - since) % S::slots, row = lane_row(warpgroup_);
    const float factors[2] = {shared_.factors[slot][row], shared_.factors[slot][row + 8]};
    hopper::wait_for_products<since>();
    hopper::pin(sums_[set]);
    __syncwarp();
    if (threadIdx.x % 32 == 0) hopper::arrive(shared_address(&shared_.free[slot]));
#pragma unroll
    for (int i = 0; i < 64; ++i) totals_[i] = fmaf(sums_[set][i], factors[i / 2 % 2], totals_[i]);
    if (index + 1 == stages_) sink_.write(shared_.entries[written_++ % task_slots].task, warpgroup_, totals_);
  }

  // Issues a stage's products, from zero.
  __device__ __forceinline__ void issue(float (&sums)[64]) const {
    const std::uint32_t rows = shared_address(shared_.v[slot_.slot]) + warpgroup_ * 64 * row_bytes;
    const std::uint64_t u = hopper::matrix_descriptor<row_bytes>(shared_address(shared_.u[slot_.slot]));
    const std::uint64_t v = hopper::matrix_descriptor<row_bytes>(rows);
    const auto multiply = [&](auto accumulate, int v_plane, int u_plane, int i) {
      hopper::multiply_shared<typename S::Half, accumulate()>(
          sums, hopper::advance_descriptor(v, v_plane * plane_bytes + 32 * i),
          hopper::advance_descriptor(u, u_plane * plane_bytes + 32 * i));
    };
    const auto add = [&](int v_plane, int u_plane, int first) {
#pragma unroll
      for (int i = first; i < depth; ++i) multiply(std::true_type{}, v_plane, u_plane, i);
    };
    hopper::fence_products();
    if constexpr (S::split) {
      multiply(std::false_type{}, 0, 1, 0);
      add(0, 1, 1), add(1, 0, 0), add(1, 1, 0);
    } else {
      multiply(std::false_type{}, 0, 0, 0);
      add(0, 0, 1), add(1, 1, 0);
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
        : "r"(first_barrier + warpgroup_)
        : "memory");
    return ready != 0;
  }

  Storage<S, Task>& shared_;
  Sink& sink_;
  WaitReport* const report_;
  const int stages_, warpgroup_;
  hopper::RingPosition slot_;  // of the next stage
  int index_ = stages_;        // of the next stage in its task; stages_: it begins the next task
  unsigned written_ = 0;       // tasks
  float totals_[64], sums_[S::sets][64];
};

template <typename S, int first_barrier, typename Task, typename Sink>
__device__ __forceinline__ void multiply_products(Storage<S, Task>& shared, int stages, int warpgroup, Sink&& sink,
                                                  WaitReport* report) {
  Multiplier<S, first_barrier, Task, std::remove_reference_t<Sink>>(shared, stages, warpgroup, sink, report).run();
}

}  // namespace fastconv::winograd::products
