// What the kernel's roles share: parameters, shared memory, counters in device memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "algos/winograd_megakernel/shared/counters.cuh"
#include "algos/winograd_megakernel/wgmma/plan.h"
#include "core/fast_divide.h"
#include "device/epilogue.h"
#include "device/mma.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/ptx/mbarrier.cuh"
#include "hopper/ptx/tma.cuh"
#include "hopper/ptx/warp.cuh"
#include "hopper/ptx/wgmma.cuh"
#include "winograd/task_map.h"
#include "winograd/task_trace.cuh"

namespace fastconv::algos::winograd_megakernel::wgmma {

// A GEMM task has 128 tiles and 128 filters of one point. Its operands lie in global memory as they will in shared
// memory, in *stages*: 128 rows of 64 halves, in the 128-byte swizzle. So a stage of an operand is one bulk copy, and
// no tensor map is needed. A row is a tile's (or filter's) 64 channels, or, where values are split, 32 lo and 32 hi
// halves of as many channels. A tile has a scale for each 64 channels, a *chunk*.

// M of 128 tiles x 128 filters consists of segments of 64 values, as lanes hold them after wgmma, 16 bytes each, so
// that a warp writes 512 bytes side by side:
//   float32  4 tiles x 16 filters; lane l = 0 .. 15 has tile l / 4, filters 2 (l % 4), the next, and both + 8
//   float16  2 tiles x 32 filters; lane l = 0 .. 7 likewise, and both + 16, + 24
// T: the tensors' type.
template <typename T>
constexpr Form form = std::is_same_v<T, float> ? split_form : half_form;
template <typename T>
constexpr bool is_split = form<T>.limbs == 2;
template <typename T>
using Product = std::conditional_t<is_split<T>, float, half_t>;
static_assert(sizeof(Product<float>) == split_form.product_bytes && sizeof(Product<half_t>) == half_form.product_bytes);
// threadIdx.x. Half types: found anew each time; what the compiler derives from the variable it keeps in registers.
template <typename T>
__device__ __forceinline__ auto thread() {
  if constexpr (is_split<T>) {
    return threadIdx.x;
  } else {
    int number;
    asm volatile("mov.u32 %0, %tid.x;" : "=r"(number));
    return number;
  }
}

// The segment of a tile and a filter of the 128.
template <typename T>
constexpr __host__ __device__ int segment_at(int tile, int filter) {
  constexpr int tiles = form<T>.segment_tiles, filters = form<T>.segment_filters, of_16_tiles = 16 / tiles;
  return (tile / 16 * (tile_n / filters) + filter / filters) * of_16_tiles + tile / tiles % of_16_tiles;
}

// Where stages lie in the ring. Where U's block of 128 filters fits, it stays for all the tasks in a row that use it: a
// third of the operands' traffic less, or half.
struct ProductRing {
  int slots;     // of the ring
  int resident;  // stages of U in front of it; 0: U comes with V, stage by stage

  static constexpr int min_slots = 4;
  static ProductRing of(int stages, int buffers) {
    return stages + min_slots <= buffers ? ProductRing{buffers - stages, stages} : ProductRing{buffers / 2, 0};
  }
  __device__ __forceinline__ int v_buffer(int slot) const { return resident > 0 ? resident + slot : 2 * slot; }
  __device__ __forceinline__ int u_buffer(int slot, int stage) const { return resident > 0 ? stage : 2 * slot + 1; }
};

template <typename T>
struct Params {
  TaskMap map;
  const T* x;                   // [N, H, W, C]
  T* y;                         // [N, K, P, Q], either layout
  const char* u;                // [36][filter blocks][stages][128 filters][64]
  const int* filter_exponents;  // [K]
  char* v;                      // [v_groups][36][stages][128 tiles][64]
  int* tile_exponents;          // [groups * 128][chunks]: of the scales of V, or of those that would fit best
  Product<T>* products;         // M [m_groups][36][filter blocks][segments][64]
  int* tickets;                 // two, 128 bytes apart: of the GEMM tasks, and of all others
  int* counters;                // the map's
  TaskTrace trace;              // [map.size()], GEMM tasks first; or off
  Epilogue<T> epilogue;
  WaitReport* report;
  int n, c, h, w, k, p, q, pad_h, pad_w;
  std::int64_t y_image, y_filter, y_row, y_pixel;  // strides of y and residual, in elements
  bool use_tma;                                    // x can be copied as a tensor
  int tiles_p, tiles_q;
  int chunks, filter_blocks;
  ProductRing ring;
  int product_grab;     // tickets of GEMM tasks that a block takes at once, up to 32
  int work_tiles_log2;  // work tiles of a transform task
  FastDivide by_tiles_q, by_tiles_p;
  unsigned delay;   // tests: a mask of ns by which tasks are delayed at random
  int* own_scales;  // half types: [groups], 0 as long as all V of a group has the common scale (values.cuh)
  int x_pixel;      // elements of x from one pixel to the next

  __host__ __device__ int work_tiles() const { return 1 << work_tiles_log2; }
  __host__ __device__ int stages() const { return form<T>.limbs * chunks; }
  __host__ __device__ std::int64_t v_place_bytes() const { return std::int64_t{36} * stages() * operand_bytes; }
  __host__ __device__ std::int64_t m_place() const {
    return std::int64_t{36} * filter_blocks * tile_m * tile_n;
  }  // elements
};

// ---- Counters of the task map, in device memory

__device__ __forceinline__ int load_acquire(const int* counter) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}
// A wait has expired: says so and stops the kernel. (expire_wait() as a call would cost the kernel its registers: the
// products' accumulators and a call do not go together, ptxas 13.0 says C7600.)
template <int role>
__device__ __forceinline__ void expire_in_place(WaitReport* report) {
  static_assert(offsetof(WaitReport, kernel) == 4 && offsetof(WaitReport, role) == 8 &&
                offsetof(WaitReport, block) == 12);
  asm volatile(
      "{\n.reg .pred p;\n.reg .u32 old;\nsetp.eq.u64 p, %0, 0;\n@p bra stop;\n"
      "atom.sys.cas.b32 old, [%0], 0, 1;\nsetp.ne.u32 p, old, 0;\n@p bra stop;\n"
      "mov.u32 old, %%ctaid.x;\nst.u32 [%0+4], %1;\nst.u32 [%0+8], %2;\nst.u32 [%0+12], old;\nmembar.sys;\n"
      "stop:\ntrap;\n}" ::"l"(report),
      "n"(static_cast<int>(kernel_winograd_megakernel)), "n"(role)
      : "memory");
}

// That a counter has reached a value; counter null: nothing to wait for. (TaskMap::signals() without arrays.)
struct CounterWait {
  const int* counter;
  int value;

  __device__ __forceinline__ bool is_over() const { return counter == nullptr || load_acquire(counter) >= value; }
  // Bounded, like every wait, and in one asm block for the reason given at hopper::wait_in_place().
  template <int role>
  __device__ __forceinline__ void wait(WaitReport* report) const {
    if (counter == nullptr) return;
    unsigned over;
    asm volatile(
        "{\n.reg .pred p;\n.reg .s32 seen;\n.reg .u32 tries;\nmov.u32 tries, 0;\n"
        "again:\nld.acquire.gpu.global.s32 seen, [%1];\nsetp.ge.s32 p, seen, %2;\n@p bra done;\n"
        "add.u32 tries, tries, 1;\nsetp.lt.u32 p, tries, %3;\n@p bra again;\n"
        "setp.ne.u32 p, tries, tries;\ndone:\nselp.u32 %0, 1, 0, p;\n}"
        : "=r"(over)
        : "l"(counter), "r"(value), "n"(WaitSite::limit)
        : "memory");
    if (over == 0) expire_in_place<role>(report);
  }
};
template <int role>
__device__ __forceinline__ void wait_in_place(hopper::Barrier& barrier, unsigned parity, WaitReport* report) {
  hopper::wait_in_place<kernel_winograd_megakernel, role>(barrier, parity, report);
}
template <typename T>
__device__ __forceinline__ CounterWait wait_for(const Params<T>& params, TaskKind kind, int group, int value) {
  return {group < 0 ? nullptr : params.counters + TaskMap::counter_of(kind, group), value};
}
// Whether the phase of that parity has ended; does not wait.
__device__ __forceinline__ bool test_wait(hopper::Barrier& barrier, unsigned parity) {
  unsigned done;
  asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(done)
               : "r"(shared_address(&barrier)), "r"(parity)
               : "memory");
  return done != 0;
}

// Orders ordinary accesses to global memory that are known here before copies that this thread starts later.
__device__ __forceinline__ void fence_global_copies() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// What a copy reads is not wanted again / is: hints to the L2 cache, as createpolicy makes them.
constexpr std::uint64_t hint_once = 0x12F0000000000000, hint_keep = 0x14F0000000000000,
                        hint_normal = 0x1000000000000000;
__device__ __forceinline__ void copy_bulk(std::uint32_t target, const void* source, unsigned bytes,
                                          std::uint32_t barrier, std::uint64_t hint) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(target),
      "l"(source), "r"(bytes), "r"(barrier), "l"(hint)
      : "memory");
}
__device__ __forceinline__ void tma_load(std::uint32_t target, const CUtensorMap& map, int x0, int x1, int x2, int x3,
                                         std::uint32_t barrier, std::uint64_t hint) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, "
      "%3, %4, %5}], [%6], %7;" ::"r"(target),
      "l"(&map), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(barrier), "l"(hint)
      : "memory");
}

// A task's waits are over.
template <typename T>
__device__ __forceinline__ void record_begin(const Params<T>& params, int row, int ticket, const Task& task) {
  if (params.trace.records == nullptr) return;
  const bool gemm = task.kind == TaskKind::gemm;
  params.trace.begin(row, static_cast<int>(task.kind), task.group, task.index, ticket, gemm ? 0 : 1);
}

}  // namespace fastconv::algos::winograd_megakernel::wgmma
