// Roles of Winograd's batched product on Hopper: for each point M [T][K_pad] = V [T][C] U [K][C]^T in FP32, both
// operands split into halves lo and hi, copied into shared memory and multiplied there by wgmma.
//
// The work is cut into work tiles of 64 tiles or 64 filters, each the business of one of a block's two or three
// warpgroups, which go their own ways: while one writes its sums, the others multiply. What all need, a block holds
// (plan.h, Stationary). A stage is what 64 channels need: two limbs of each operand, lo and hi, a row of a limb 128
// bytes, its 16-byte pieces swizzled (piece p of row r at p ^ (r & 7)); multiplied lo*hi, hi*lo, hi*hi: the small
// products first.
//
// A stage's sums start from zero and join the totals by an FP32 addition, which rounds: wgmma truncates its accumulator
// (docs/concepts/numerics.md). On the way they are multiplied by a power of two for each tile and stage, which a tile's
// scales may differ by.
#pragma once

#include <cuda.h>

#include "algos/winograd_staged/transforms/tile_math.cuh"
#include "core/fast_divide.h"
#include "device/dependent_launch.cuh"
#include "device/mma.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/ptx/mbarrier.cuh"
#include "hopper/ptx/tma.cuh"
#include "hopper/ptx/warp.cuh"
#include "hopper/ptx/wgmma.cuh"
#include "hopper/wait_report.h"
namespace fastconv::algos::winograd_staged::gemm {

constexpr int row_bytes = 128;  // of a limb
constexpr int limbs = 2;
constexpr int depth = row_bytes / 32;  // products of 16 channels in a limb
constexpr int max_slots = 3;           // stages of the streaming operand, for a warpgroup
constexpr int start_barrier = 1;       // the first of named barriers

// The operand that stays, for all warpgroups. streaming_rows: tiles or filters of a work tile.
template <Stationary stationary, int streaming_rows>
struct StationaryOperand {
  static constexpr int warpgroups = winograd_staged::warpgroups(stationary);
  static_assert(stationary == Stationary::tiles || streaming_rows == tile_m);
  static constexpr bool filters = stationary != Stationary::tiles, resident = stationary != Stationary::few_stages;
  static constexpr int slots = filters ? stationary_filter_stages : stationary_tile_stages;
  static constexpr int rows = filters ? stationary_filters : tile_m;
  static constexpr int limb_bytes = rows * row_bytes, bytes = limbs * limb_bytes;  // a stage of it
  static constexpr int streaming_tile_rows = streaming_rows, streaming_limb_bytes = streaming_tile_rows * row_bytes,
                       streaming_tile_bytes = limbs * streaming_limb_bytes;
  static constexpr int columns =
      filters ? stationary_filters : streaming_tile_rows;  // filters of a work tile's product
  static constexpr int totals = columns / 2;               // of a thread
  static constexpr int v_limb_bytes = filters ? streaming_limb_bytes : limb_bytes,
                       u_limb_bytes = filters ? limb_bytes : streaming_limb_bytes;
  static_assert(limb_bytes % 1024 == 0 && streaming_limb_bytes % 1024 == 0);  // the swizzle's period
};

// Where something stays, blocks come in groups: those of a group take the same work tiles of all points, each with
// another part of the operand that it holds, so that the streaming one comes from memory once. Groups take equal shares
// of the work tiles, point by point. Else blocks take turns at pairs of work tiles, filters fastest, then tiles.
struct Grid {
  int padded_tiles, stages, slots;          // slots: stages of the streaming operand, for a warpgroup
  int segment_rows, row_segments;           // of a point of M (plan.h)
  int stationary_blocks, point_work_tiles;  // blocks of the stationary operand; work tiles of a point
  FastDivide by_stationary, by_pairs;       // stationary_blocks, point_units / 2
  int share, longer;                        // work tiles of a group: share, and one more in the first `longer` groups
  int pairs;                                // of all points
  bool overlaps_output;                     // blocks of the output transform begin beside this kernel's
  int lag;                                  // stages that a warpgroup starts behind the one before
  const int* exponents;                     // [stages][padded_tiles]
  int* __restrict__ tile_exponents;         // [padded_tiles]
  float* __restrict__ m;                    // segments
  WaitReport* report;
};

// The work tiles of a warpgroup: every second one of its block's.
template <typename H>
class WorkTileScheduler {
 public:
  __device__ __forceinline__ WorkTileScheduler(const Grid& grid, int warpgroup) : grid_(grid) {
    if constexpr (H::resident) {
      const int group = static_cast<int>(blockIdx.x) / grid.stationary_blocks;
      const int first = group * grid.share + min(group, grid.longer) + warpgroup;
      stationary_block_ = static_cast<int>(blockIdx.x) - group * grid.stationary_blocks;
      point_ = first / grid.point_work_tiles, work_tile_ = first - point_ * grid.point_work_tiles;
      left_ = grid.share + (group < grid.longer) - warpgroup;
    } else {
      left_ = grid.pairs - static_cast<int>(blockIdx.x);
      find(warpgroup);
    }
  }
  __device__ __forceinline__ bool exists() const { return left_ > 0; }
  // The last one to use the stationary operand that is there now.
  __device__ __forceinline__ bool is_last() const {
    return !H::resident || left_ <= H::warpgroups || work_tile_ + H::warpgroups >= grid_.point_work_tiles;
  }
  __device__ __forceinline__ bool is_only() const { return H::resident && left_ == 1; }
  __device__ __forceinline__ void advance() {
    if constexpr (H::resident) {
      left_ -= H::warpgroups, work_tile_ += H::warpgroups;
      while (work_tile_ >= grid_.point_work_tiles) work_tile_ -= grid_.point_work_tiles, ++point_;
    } else {
      left_ -= static_cast<int>(gridDim.x);
      find(work_tile_ & 1);
    }
  }
  __device__ __forceinline__ int point() const { return point_; }
  __device__ __forceinline__ int stationary_block() const { return stationary_block_; }  // of the stationary operand
  __device__ __forceinline__ int filter() const { return (H::filters ? stationary_block_ : work_tile_) * H::columns; }
  __device__ __forceinline__ int tile() const { return (H::filters ? work_tile_ : stationary_block_) * tile_m; }
  // Of the block's work tiles from this one on, the last one's point.
  __device__ __forceinline__ int last_point() const {
    return point_ + (work_tile_ + left_ - 1) / grid_.point_work_tiles;
  }

 private:
  __device__ __forceinline__ void find(int warpgroup) {
    auto index = static_cast<unsigned>(grid_.pairs - left_);
    stationary_block_ = static_cast<int>(grid_.by_stationary.divmod(index));
    work_tile_ = 2 * static_cast<int>(grid_.by_pairs.divmod(index)) + warpgroup;
    point_ = static_cast<int>(index);
  }

  const Grid& grid_;
  int left_;  // work tiles of the block from this one on; or pairs of all blocks
  int point_, work_tile_, stationary_block_;
};

// In shared memory at a multiple of 1024 bytes. Behind it, the stationary operand [stages or slots][limbs][rows][128
// bytes], and the streaming one [warpgroups][slots][limbs][64][128 bytes].
template <typename H>
struct alignas(1024) Storage {
  // Of a stage's sums, for each tile: [warpgroups][slots] as V passes, [stages] as it stays.
  alignas(16) float factors[H::filters ? H::warpgroups * max_slots : H::slots][tile_m];
  hopper::Barrier full[H::warpgroups][max_slots], free[H::warpgroups][max_slots];
  hopper::Barrier stationary_full[H::slots], stationary_free[H::slots];

  // By one thread; then the block synchronises.
  __device__ __forceinline__ void initialise() {
    for (int i = 0; i < H::warpgroups * max_slots; ++i) {
      hopper::barrier_init((&full[0][0])[i], 1);
      hopper::barrier_init((&free[0][0])[i], 4);
    }
    for (int i = 0; i < H::slots; ++i) {
      hopper::barrier_init(stationary_full[i], 1);
      hopper::barrier_init(stationary_free[i], 4 * H::warpgroups);
    }
    hopper::barrier_init_fence();
  }
  static __host__ __device__ __forceinline__ int stationary_bytes(int stages) {
    return (H::resident ? stages : H::slots) * H::bytes;
  }
  __device__ __forceinline__ std::uint32_t stationary(int slot) const {
    return shared_address(this + 1) + slot * H::bytes;
  }
  __device__ __forceinline__ std::uint32_t streaming(const Grid& grid, int warpgroup, int slot) const {
    return shared_address(this + 1) + stationary_bytes(grid.stages) +
           (warpgroup * grid.slots + slot) * H::streaming_tile_bytes;
  }
};

template <int role>
__device__ __forceinline__ void await(hopper::Barrier& barrier, unsigned parity, WaitReport* report) {
  hopper::wait_in_place<kernel_winograd_products, role>(barrier, parity, report);
}

// Of the lane's two tiles of 64. A tile's sums are brought to the scale of its largest group of channels before they
// are added up: exact, and neither too large nor, relative to the result, too small for FP32. What lies below that by
// more than FP32 can say becomes 0.
class Factors {
 public:
  Factors() = default;
  __device__ __forceinline__ Factors(const Grid& grid, int first_tile) : Factors(first_tile) {
#pragma unroll 4
    for (int stage = 0; stage < grid.stages; ++stage) lower(*exponents(grid, stage));
  }
  // From the exponents of all stages, which have been loaded.
  template <int most>
  __device__ __forceinline__ Factors(const int2 (&all)[most], int first_tile) : Factors(first_tile) {
#pragma unroll
    for (int i = 0; i < most; ++i) lower(all[i]);
  }
  // Not put off by the compiler until the values are needed.
  template <int most>
  static __device__ __forceinline__ void load(const Grid& grid, int first_tile, int2 (&all)[most]) {
    const Factors tiles(first_tile);
#pragma unroll
    for (int i = 0; i < most; ++i) all[i] = load_written(tiles.exponents(grid, min(i, grid.stages - 1)));
  }
  // Of a stage's sums: powers of two.
  __device__ __forceinline__ float2 operator()(const Grid& grid, int stage) const {
    return (*this)(*exponents(grid, stage));
  }
  __device__ __forceinline__ float2 operator()(int2 own) const {
    return make_float2(factor(min_exponent_.x, own.x), factor(min_exponent_.y, own.y));
  }
  __device__ __forceinline__ void signal(const Grid& grid) const {
    if (tile_ < grid.padded_tiles) *reinterpret_cast<int2*>(grid.tile_exponents + tile_) = min_exponent_;
  }

 private:
  static __device__ __forceinline__ float factor(int least, int own) {
    return power_of_two(max(least - own, -127));  // of -127: zero
  }
  __device__ __forceinline__ explicit Factors(int first_tile)
      : tile_(first_tile + 2 * static_cast<int>(threadIdx.x % 32)), min_exponent_(make_int2(127, 127)) {}
  __device__ __forceinline__ void lower(int2 own) {
    min_exponent_.x = min(min_exponent_.x, own.x), min_exponent_.y = min(min_exponent_.y, own.y);
  }
  __device__ __forceinline__ const int2* exponents(const Grid& grid, int stage) const {
    return reinterpret_cast<const int2*>(grid.exponents + stage * grid.padded_tiles +
                                         min(tile_, grid.padded_tiles - 2));
  }

  int tile_;
  int2 min_exponent_;
};

// The copies of a stage, by tensor maps: c within a group of channels innermost, then rows, points, and limbs
// [group][lo, hi]; outside of the sizes are zeros. Boxes: {64, rows, 1, limbs}.
__device__ __forceinline__ void copy_stage(std::uint32_t target, int bytes, const CUtensorMap& map, int row, int point,
                                           int stage, hopper::Barrier& full) {
  const std::uint32_t barrier = shared_address(&full);
  hopper::arrive_expecting(barrier, bytes);
  hopper::tma_load(target, map, 0, row, point, stage * limbs, barrier);
}

// The role that loads the stationary operand: one warp.
template <typename H>
__device__ __forceinline__ void load_stationary(const Grid& grid, Storage<H>& shared, const CUtensorMap& map) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  WorkTileScheduler<H> scheduler(grid, 0);
  const auto load = [&](int slot, unsigned parity, int point, int stage) {
    await<role_stream>(shared.stationary_free[slot], parity ^ 1, grid.report);
    copy_stage(shared.stationary(slot), H::bytes, map, scheduler.stationary_block() * H::rows, point, stage,
               shared.stationary_full[slot]);
  };
  if constexpr (!H::resident) {
    if (lane != 0) return;
    for (hopper::RingPosition ring; scheduler.exists(); scheduler.advance()) {
#pragma unroll 1
      for (int stage = 0; stage < grid.stages; ++stage, ring.advance(H::slots)) {
        load(ring.slot, ring.parity, scheduler.point(), stage);
      }
    }
  } else {
    int point = scheduler.point();
    unsigned parity = 0;
    if constexpr (!H::filters) {
      // The factors are those of all points. Their exponents come first: behind V of all blocks they would take
      // as long as it. V of the first point is on its way then: the bytes of a copy may come before the barrier has
      // been told to expect them, while an arrival is missing.
      int2 exponents[H::slots];
      Factors::load(grid, scheduler.tile(), exponents);
      for (int stage = 0; lane == 0 && stage < grid.stages; ++stage) {
        hopper::tma_load(shared.stationary(stage), map, 0, scheduler.tile(), point, stage * limbs,
                         shared_address(&shared.stationary_full[stage]));
      }
      const Factors factors(exponents, scheduler.tile());
#pragma unroll
      for (int i = 0; i < H::slots; ++i) {
        if (i < grid.stages) reinterpret_cast<float2*>(shared.factors[i])[lane] = factors(exponents[i]);
      }
      __syncwarp();
      for (int stage = 0; lane == 0 && stage < grid.stages; ++stage) {
        hopper::arrive_expecting(shared.stationary_full[stage], H::bytes);
      }
      factors.signal(grid);
      ++point, parity ^= 1;
    }
    if (lane != 0) return;
    for (; point <= scheduler.last_point(); ++point, parity ^= 1) {
#pragma unroll 1
      for (int stage = 0; stage < grid.stages; ++stage) load(stage, parity, point, stage);
    }
  }
}

// The role that loads the streaming operand, a warpgroup's work tiles: one warp.
template <typename H>
__device__ __forceinline__ void load_work_tiles(const Grid& grid, Storage<H>& shared, int warpgroup,
                                                const CUtensorMap& map) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  WorkTileScheduler<H> scheduler(grid, warpgroup);
  if (!H::filters && lane != 0) return;
  Factors factors, own;  // of the next work tile, and of this one
  bool first = true;
  for (hopper::RingPosition ring; scheduler.exists();) {
    const int row = H::filters ? scheduler.tile() : scheduler.filter(), point = scheduler.point();
    const bool signals = H::filters && point == 0 && scheduler.stationary_block() == 0;
    scheduler.advance();
#pragma unroll 1
    for (int stage = 0; stage < grid.stages; ++stage, ring.advance(grid.slots)) {
      const std::uint32_t target = shared.streaming(grid, warpgroup, ring.slot);
      hopper::Barrier& full = shared.full[warpgroup][ring.slot];
      await<role_load>(shared.free[warpgroup][ring.slot], ring.parity ^ 1, grid.report);
      if constexpr (H::filters) {
        // As in load_stationary(): the copy is on its way while the factors are found.
        if (lane == 0) hopper::tma_load(target, map, 0, row, point, stage * limbs, shared_address(&full));
        if (stage == 0) {
          if (first) factors = Factors(grid, row);
          first = false, own = factors;
          if (signals) own.signal(grid);
        }
        reinterpret_cast<float2*>(shared.factors[warpgroup * max_slots + ring.slot])[lane] = own(grid, stage);
        __syncwarp();
        if (lane == 0) hopper::arrive_expecting(full, H::streaming_tile_bytes);
        if (stage == 0 && scheduler.exists()) factors = Factors(grid, scheduler.tile());
      } else {
        copy_stage(target, H::streaming_tile_bytes, map, row, point, stage, full);
      }
    }
  }
}

// Issues a stage's products, from zero.
template <typename H>
__device__ __forceinline__ void issue(float (&sums)[H::totals], std::uint32_t v_address, std::uint32_t u_address) {
  const std::uint64_t v = hopper::matrix_descriptor<row_bytes>(v_address);
  const std::uint64_t u = hopper::matrix_descriptor<row_bytes>(u_address);
  const auto multiply = [&](auto accumulate, int v_limb, int u_limb, int i) {
    hopper::multiply_shared<half_t, accumulate()>(sums,
                                                  hopper::advance_descriptor(v, v_limb * H::v_limb_bytes + 32 * i),
                                                  hopper::advance_descriptor(u, u_limb * H::u_limb_bytes + 32 * i));
  };
  const auto add = [&](int v_limb, int u_limb, int first) {
#pragma unroll
    for (int i = first; i < depth; ++i) multiply(std::true_type{}, v_limb, u_limb, i);
  };
  hopper::fence_products();
  multiply(std::false_type{}, 0, 1, 0);
  add(0, 1, 1), add(1, 0, 0), add(1, 1, 0);
  hopper::commit_products();
}

// Writes the lane's totals as segments of M, 512 bytes by each instruction of a warp. m: the segment of the work tile's
// first tile and filter; of its rows of segments and of the segments of a row so many exist.
template <int count>
__device__ __forceinline__ void write_segments(const float (&totals)[count], float* m, std::int64_t row_pitch, int rows,
                                               int row_segments) {
  constexpr int segment_totals = segment_filters / 2;
  const int first_row = static_cast<int>(threadIdx.x) % 128 / 32 * 2;
  float* target = m + first_row * row_pitch + threadIdx.x % 32 * 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int existing = first_row + i < rows ? row_segments : 0;
#pragma unroll
    for (int segment = 0; segment < count / segment_totals; ++segment) {
      const float* values = totals + segment_totals * segment + 2 * i;
      asm volatile(  // predicated, not branched around
          "{\n.reg .pred p;\nsetp.gt.s32 p, %1, %2;\n@p st.global.v4.f32 [%0], {%3, %4, %5, %6};\n}" ::"l"(
              target + i * row_pitch + segment * segment_values),
          "r"(existing), "r"(segment), "f"(values[0]), "f"(values[1]), "f"(values[4]), "f"(values[5])
          : "memory");
    }
  }
}

template <typename H>
__device__ __forceinline__ void write_work_tile(const Grid& grid, const WorkTileScheduler<H>& scheduler,
                                                const float (&totals)[H::totals]) {
  const int row = scheduler.tile() / segment_tiles, segment = scheduler.filter() / segment_filters;
  const std::int64_t pitch = static_cast<std::int64_t>(grid.row_segments) * segment_values;
  const std::int64_t first_row = static_cast<std::int64_t>(scheduler.point()) * grid.segment_rows + row;
  write_segments(totals, grid.m + first_row * pitch + segment * segment_values, pitch, grid.segment_rows - row,
                 grid.row_segments - segment);
}

// The multiplying role, for all threads of a warpgroup.
template <typename H>
__device__ __forceinline__ void multiply_work_tiles(const Grid& grid, Storage<H>& shared, int warpgroup) {
  const bool elected = threadIdx.x % 32 == 0;
  // Of a work tile's 64 tiles, the first that the lane holds (hopper/ptx/wgmma.cuh): totals[4j], [4j + 1] are its
  // filters 8j + 2 (lane % 4) and the next, totals[4j + 2], [4j + 3] those of the tile 8 further.
  const int row = static_cast<int>(threadIdx.x) % 128 / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4;
  hopper::RingPosition ring, stationary;  // slots of the streaming and of the stationary operand
  WorkTileScheduler<H> scheduler(grid, warpgroup);
  const int first_point = WorkTileScheduler<H>(grid, 0).point();
  int passed = 0;  // points of the block that this warpgroup has done with
  bool starts_other = warpgroup + 1 < H::warpgroups && !scheduler.is_only();
  // Points without a work tile of this warpgroup, before its first one and behind its last one.
  const auto skip_to = [&](int point) {
#pragma unroll 1
    for (; passed < point; ++passed) {
#pragma unroll 1
      for (int stage = 0; stage < grid.stages; ++stage) {
        await<role_multiply>(shared.stationary_full[stage], passed & 1, grid.report);
        if (elected) hopper::arrive(shared.stationary_free[stage]);
      }
    }
  };
  if (warpgroup > 0 && scheduler.exists()) {
    if constexpr (H::resident) skip_to(scheduler.point() - first_point);  // the warpgroup before may wait for that
    hopper::synchronise(start_barrier + warpgroup - 1, 2 * 128);
  }
#pragma unroll 1
  for (bool fresh = true; scheduler.exists(); scheduler.advance()) {
    if constexpr (H::resident) {
      const int point = scheduler.point() - first_point;
      skip_to(point);
      stationary.slot = 0, stationary.parity = point & 1;
    }
    const bool last = scheduler.is_last();
    float totals[H::totals] = {}, sums[H::totals];
#pragma unroll 1
    for (int stage = 0; stage < grid.stages; ++stage) {
      if (fresh) await<role_multiply>(shared.stationary_full[stationary.slot], stationary.parity, grid.report);
      await<role_multiply>(shared.full[warpgroup][ring.slot], ring.parity, grid.report);
      const std::uint32_t streaming = shared.streaming(grid, warpgroup, ring.slot),
                          stationary_stage = shared.stationary(stationary.slot);
      issue<H>(sums, H::filters ? streaming : stationary_stage, H::filters ? stationary_stage : streaming);
      const float* all = shared.factors[H::filters ? warpgroup * max_slots + ring.slot : stationary.slot];
      const float factors[2] = {all[row], all[row + 8]};
      if (starts_other && stage == grid.lag) {
        hopper::arrive_at(start_barrier + warpgroup, 2 * 128);
        starts_other = false;
      }
      hopper::wait_for_products<0>();
      hopper::fence_operand(sums);
      __syncwarp();
      if (elected) {
        hopper::arrive(shared.free[warpgroup][ring.slot]);
        if (last) hopper::arrive(shared.stationary_free[stationary.slot]);
      }
#pragma unroll
      for (int i = 0; i < H::totals; ++i) totals[i] = fmaf(sums[i], factors[i / 2 % 2], totals[i]);
      ring.advance(grid.slots);
      if constexpr (H::resident) {
        ++stationary.slot;
      } else {
        stationary.advance(H::slots);
      }
    }
    if constexpr (H::resident) fresh = last, passed += last;
    write_work_tile(grid, scheduler, totals);
  }
  if constexpr (H::resident) skip_to(WorkTileScheduler<H>(grid, 0).last_point() - first_point);
}

}  // namespace fastconv::algos::winograd_staged::gemm
