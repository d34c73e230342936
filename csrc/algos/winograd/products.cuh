// Roles of Winograd's batched product on Hopper: for each frequency M [T][K_pad] = V [T][C] U [K][C]^T in FP32, both
// operands brought by tensor copies and multiplied from shared memory by wgmma. One thread loads, two warpgroups
// multiply and write M. What there is to do comes from a Source, what follows from a finished task is a Sink: so the
// staged algorithms (products.cu) and a kernel with tasks of other kinds use the same roles.
//
// A stage is what all 128 tiles and 128 filters need of some channels: two planes of 64 channels of each operand, a row
// of a plane 128 bytes, swizzled.
//   split       64 channels; the planes are the parts lo and hi, multiplied lo*hi, hi*lo, hi*hi: the small ones first
//   fp16, bf16  128 channels, a plane for each half of them
//
// A stage's sums start from zero and join the totals by an FP32 addition, which rounds: wgmma truncates its accumulator
// (docs/numerics.md). There are two sets of sums, so a stage's products run while the sums of the one before join the
// totals, and the first stage of a task runs while the totals of the task before are written.
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
constexpr int multiply_warpgroups = 2;
constexpr int task_slots = 8;

// A kernel instantiation.
//   chunk_scales  the sums of a stage are multiplied by a factor of the tile and the stage (ProductTask::unscale), so
//                 that each chunk of a tile's channels may have a scale of its own
//   paired        blocks work in clusters of two, on different rows and the same filters, of which each loads half for
//                 both: both Sources must give as many tasks, and tasks of the same number the same filters
//   may_block     Source::next() may wait for other blocks: then a task is written before its successor is waited for
template <Mode mode_, bool chunk_scales_ = false, bool paired_ = false, bool may_block_ = false, int slots_ = 3>
struct Shape {
  static_assert(mode_ != Mode::fp32);
  using Half = typename Operand<mode_>::type;
  static constexpr Mode mode = mode_;
  static constexpr bool split = mode == Mode::split, chunk_scales = chunk_scales_, paired = paired_;
  static constexpr bool may_block = may_block_;
  static constexpr int slots = slots_;
  static_assert(slots >= 2 && slots + 1 < task_slots);  // tasks that the loading thread can be ahead
  static constexpr int stage_channels = split ? 64 : 128;
  static constexpr int stage_bytes = 2 * planes * plane_bytes + (chunk_scales ? tile_rows * 4 : 0);
  // Registers that a thread of each role needs: the argument of setmaxnreg, which is the caller's business.
  static constexpr int multiply_registers = 232, load_registers = 40;
};

// One block of M: `rows` tiles by `columns` filters, all channels.
struct ProductTask {
  float* m;              // of the first row and filter; 8-byte aligned
  const float* unscale;  // [stage][Params::unscale_pitch], at the first row, 16-byte aligned; null without chunk_scales
  int row, v_index;      // coordinates of the first row in V's map
  int filter, u_index;   // of the first filter in U's map
  int rows;              // that are written: 1 .. 128; 0 is reserved
  int columns;           // that are written: up to 128 of the multiple-of-8 K_pad
  unsigned token;        // for the Sink
};

// What is common to all tasks.
//
// Maps: 4-dimensional, c innermost (size C_pad), then rows, then an index (frequency), then the part (split: lo, hi;
// else size 1). Beyond the sizes are zeros, so rows and channels need no multiples. Boxes: box_of() below.
struct Params {
  std::int64_t m_pitch;        // elements from row to row of M
  std::int64_t unscale_pitch;  // elements from stage to stage of the scales
  int stages;                  // ceil(C_pad / stage_channels), at least 1
  WaitReport* report;
  int kernel;  // WaitKernel
};

// {c, rows, index, part} of the boxes of V's and U's maps, swizzled.
template <typename S>
constexpr int box_rows(bool is_filter) {
  return is_filter && S::paired ? tile_filters / 2 : tile_rows;
}
template <typename S>
constexpr int box_parts(bool is_filter) {
  return S::split && !(is_filter && S::paired) ? 2 : 1;
}

// In shared memory at a multiple of 1024 bytes; sizeof is all that the roles need.
template <typename S>
struct alignas(1024) Storage {
  unsigned char v[S::slots][planes][plane_bytes], u[S::slots][planes][plane_bytes];
  float unscale[S::slots][S::chunk_scales ? tile_rows : 4];  // [tile]
  ProductTask tasks[task_slots];
  std::uint64_t full[S::slots], free[S::slots];

  // By one thread; then the block (paired: the cluster) synchronises.
  __device__ __forceinline__ void initialise() {
    for (int i = 0; i < S::slots; ++i) {
      hopper::barrier_init(shared_address(&full[i]), 1);
      hopper::barrier_init(shared_address(&free[i]), 4 * multiply_warpgroups * (S::paired ? 2 : 1));
    }
    hopper::barrier_init_fence();
  }
};

// The loading role, for one thread. Source: bool next(ProductTask&), false when there are no more; where it waits for V
// that ordinary stores of other blocks have written, it has to acquire and to fence the copies (fence.proxy.async).
template <typename S, typename Source>
__device__ __forceinline__ void load_products(Storage<S>& shared, const Params& params, const CUtensorMap& v,
                                              const CUtensorMap& u, Source&& source) {
  const WaitSite site{params.report, params.kernel, role_load};
  const unsigned rank = S::paired ? hopper::cluster_rank() : 0;
  hopper::RingPosition ring;
  unsigned number = 0;
  const auto await_slot = [&] { hopper::wait(shared_address(&shared.free[ring.slot]), ring.parity ^ 1, site); };
  ProductTask task;
  while (source.next(task)) {
#pragma unroll 1
    for (int stage = 0; stage < params.stages; ++stage) {
      await_slot();
      if (stage == 0) shared.tasks[number++ % task_slots] = task;
      const std::uint32_t full = shared_address(&shared.full[ring.slot]);
      hopper::arrive_expecting(full, S::stage_bytes);
      const std::uint32_t v_slot = shared_address(shared.v[ring.slot]), u_slot = shared_address(shared.u[ring.slot]);
      const int c = stage * S::stage_channels;
      if constexpr (S::split) {
        hopper::copy_box(v_slot, v, c, task.row, task.v_index, 0, full);
        if constexpr (!S::paired) hopper::copy_box(u_slot, u, c, task.filter, task.u_index, 0, full);
      } else {
#pragma unroll
        for (int plane = 0; plane < planes; ++plane) {
          hopper::copy_box(v_slot + plane * plane_bytes, v, c + 64 * plane, task.row, task.v_index, 0, full);
          if constexpr (!S::paired) {
            hopper::copy_box(u_slot + plane * plane_bytes, u, c + 64 * plane, task.filter, task.u_index, 0, full);
          }
        }
      }
      if constexpr (S::paired) {
        const int first = static_cast<int>(rank) * (tile_filters / 2);
#pragma unroll
        for (int plane = 0; plane < planes; ++plane) {
          hopper::copy_box_to(u_slot + plane * plane_bytes + first * row_bytes, u, S::split ? c : c + 64 * plane,
                              task.filter + first, task.u_index, S::split ? plane : 0, full, 3);
        }
      }
      if constexpr (S::chunk_scales) {
        hopper::copy_bulk(shared_address(shared.unscale[ring.slot]), task.unscale + stage * params.unscale_pitch,
                          tile_rows * 4, full);
      }
      ring.advance(S::slots);
    }
  }
  await_slot();
  shared.tasks[number % task_slots].rows = 0;  // no more
  hopper::arrive(shared_address(&shared.full[ring.slot]));
}

// The multiplying role: for all threads of a warpgroup, 0 or 1. Sink: operator()(const ProductTask&, int warpgroup),
// called by all its threads when they have issued their stores of a task (not yet visible to others): rows
// [64 warpgroup, 64 warpgroup + 64). barrier: a named barrier for this warpgroup alone, used if the Source may block.
template <typename S, typename Sink>
class Multiplier {
 public:
  __device__ __forceinline__ Multiplier(Storage<S>& shared, const Params& params, int warpgroup, int barrier,
                                        Sink& sink)
      : shared_(shared),
        params_(params),
        sink_(sink),
        site_{params.report, params.kernel, role_multiply},
        warpgroup_(warpgroup),
        barrier_(barrier) {}

  __device__ __forceinline__ void run() {
#pragma unroll
    for (int i = 0; i < 64; ++i) totals_[i] = 0.0f;
#pragma unroll 1
    while (step<0>() && step<1>()) {
    }
  }

 private:
  // Issues the products of the next stage, then finishes those of the stage before. False after the last one.
  template <int set>
  __device__ __forceinline__ bool step() {
    const bool begins = stages_left_ == 0;
    if constexpr (S::may_block) {
      if (begins && pending_ && !is_ready()) {
        hopper::wait_for_products<0>();
        finish<set ^ 1>(true);
        pending_ = false;
      }
    }
    hopper::wait(shared_address(&shared_.full[slot_.slot]), slot_.parity, site_);
    if (begins) {
      if (shared_.tasks[begun_ % task_slots].rows == 0) {
        hopper::wait_for_products<0>();
        if (pending_) finish<set ^ 1>(true);
        return false;
      }
      ++begun_;
      stages_left_ = params_.stages;
    }
    --stages_left_;
    issue(sums_[set]);
    hopper::wait_for_products<1>();
    if (pending_) finish<set ^ 1>(begins);
    pending_ = true;
    slot_.advance(S::slots);
    return true;
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

  // The products of the stage before this one are complete: gives its slot back, adds its sums to the totals and, if it
  // was its task's last, writes them.
  template <int set>
  __device__ __forceinline__ void finish(bool ends_task) {
    hopper::pin(sums_[set]);
    const int slot = slot_.slot == 0 ? S::slots - 1 : slot_.slot - 1, lane = static_cast<int>(threadIdx.x) % 32;
    float unscale[2] = {1.0f, 1.0f};  // of the lane's two rows
    if constexpr (S::chunk_scales) {
      unscale[0] = shared_.unscale[slot][lane_row()], unscale[1] = shared_.unscale[slot][lane_row() + 8];
    }
    __syncwarp();
    const std::uint32_t free = shared_address(&shared_.free[slot]);
    if (lane == 0) hopper::arrive(free);
    if (S::paired && lane == 1) hopper::arrive_at(free, hopper::cluster_rank() ^ 1);
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      totals_[i] = S::chunk_scales ? fmaf(sums_[set][i], unscale[i / 2 % 2], totals_[i]) : totals_[i] + sums_[set][i];
    }
    if (ends_task) write();
  }

  __device__ __forceinline__ void write() {
    const ProductTask& task = shared_.tasks[written_++ % task_slots];
    const int row = lane_row(), columns = task.columns;
    const std::int64_t pitch = params_.m_pitch;
    float* first = task.m + row * pitch + threadIdx.x % 4 * 2;
    const bool stores[2] = {row < task.rows, row + 8 < task.rows};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float* target = first + i * 8 * pitch;
      if (stores[i]) {
#pragma unroll
        for (int j = 0; j < tile_filters / 8; ++j) {
          if (8 * j < columns) {
            *reinterpret_cast<float2*>(target + 8 * j) = make_float2(totals_[4 * j + 2 * i], totals_[4 * j + 2 * i + 1]);
          }
        }
      }
    }
    sink_(task, warpgroup_);
#pragma unroll
    for (int i = 0; i < 64; ++i) totals_[i] = 0.0f;
  }

  // Of the task, the lane's first row; the other one is 8 further (hopper.cuh).
  __device__ __forceinline__ int lane_row() const {
    return warpgroup_ * 64 + static_cast<int>(threadIdx.x) % 128 / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4;
  }

  // Whether the next stage is loaded; the same answer for the whole warpgroup.
  __device__ __forceinline__ bool is_ready() const {
    unsigned ready = hopper::try_wait(shared_address(&shared_.full[slot_.slot]), slot_.parity);
    asm volatile(
        "{\n.reg .pred p, q;\nsetp.ne.u32 p, %0, 0;\nbarrier.cta.red.and.pred q, %1, 128, p;\n"
        "selp.u32 %0, 1, 0, q;\n}"
        : "+r"(ready)
        : "r"(barrier_)
        : "memory");
    return ready != 0;
  }

  Storage<S>& shared_;
  const Params& params_;
  Sink& sink_;
  WaitSite site_;
  int warpgroup_, barrier_;
  hopper::RingPosition slot_;  // of the next stage
  int stages_left_ = 0;        // of the task under way
  unsigned begun_ = 0, written_ = 0;  // tasks
  bool pending_ = false;       // the stage before is not finished
  float totals_[64], sums_[2][64];
};

template <typename S, typename Sink>
__device__ __forceinline__ void multiply_products(Storage<S>& shared, const Params& params, int warpgroup, int barrier,
                                                  Sink&& sink) {
  Multiplier<S, std::remove_reference_t<Sink>>(shared, params, warpgroup, barrier, sink).run();
}

}  // namespace fastconv::winograd::products
