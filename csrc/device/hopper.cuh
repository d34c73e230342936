// Hopper's own instructions (sm_90a): mbarriers, bulk and tensor copies, warpgroup matrix products, register budgets.
// Names and operands follow the PTX ISA, chapters "mbarrier", "cp.async.bulk", "wgmma" and "setmaxnreg".
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

#include "device/mma.cuh"
#include "device/wait_report.h"

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define FASTCONV_HAS_WGMMA \
  1  // elsewhere kernels that need it are compiled empty, and supports() keeps them from running
#endif

namespace fastconv::hopper {

// ---- mbarriers, addressed in shared memory (shared_address)

__device__ __forceinline__ void barrier_init(std::uint32_t barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives, and tells the barrier how many bytes the copies will bring before its phase ends.
__device__ __forceinline__ void arrive_expecting(std::uint32_t barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ bool try_wait(std::uint32_t barrier, unsigned parity) {
  unsigned done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}
// Until the phase of that parity has ended. Bounded: a wait that expires reports itself and stops the kernel.
__device__ __forceinline__ void wait(std::uint32_t barrier, unsigned parity, const WaitSite& site) {
  if (try_wait(barrier, parity)) return;
#pragma unroll 1
  for (int tries = 0; !try_wait(barrier, parity); ++tries) {
    if (tries == WaitSite::limit) site.expire();
  }
}

// The same in one asm block: around a loop and a call in C++, ptxas 13.0 gives a thread fewer registers than setmaxnreg
// does, and spills.
template <int kernel, int role>
__device__ __forceinline__ void wait_in_place(std::uint32_t barrier, unsigned parity, WaitReport* report) {
  static_assert(offsetof(WaitReport, kernel) == 4 && offsetof(WaitReport, role) == 8 &&
                offsetof(WaitReport, block) == 12);
  asm volatile(
      "{\n.reg .pred p;\n.reg .u32 tries, old;\nmov.u32 tries, 0;\n"
      "again:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra done;\n"
      "add.u32 tries, tries, 1;\nsetp.lt.u32 p, tries, %5;\n@p bra again;\n"
      "setp.eq.u64 p, %2, 0;\n@p bra stop;\n"
      "atom.sys.cas.b32 old, [%2], 0, 1;\nsetp.ne.u32 p, old, 0;\n@p bra stop;\n"
      "mov.u32 old, %%ctaid.x;\nst.u32 [%2+4], %3;\nst.u32 [%2+8], %4;\nst.u32 [%2+12], old;\nmembar.sys;\n"
      "stop:\ntrap;\ndone:\n}" ::"r"(barrier),
      "r"(parity), "l"(report), "n"(kernel), "n"(role), "n"(WaitSite::limit)
      : "memory");
}

// A position in a ring of barriers: the slot, and the parity of its current phase.
struct RingPosition {
  int slot = 0;
  unsigned parity = 0;

  __device__ __forceinline__ void advance(int slots) {
    if (++slot == slots) slot = 0, parity ^= 1;
  }
  // By `slots` at most.
  __device__ __forceinline__ void go_back(int positions, int slots) {
    slot -= positions;
    if (slot < 0) slot += slots, parity ^= 1;
  }
};

// The same for a number of slots that is a power of two, by a counter that never turns.
template <int slots>
struct RingCounter {
  static_assert((slots & (slots - 1)) == 0);
  unsigned count = 0;

  // Of the position `back` before this one.
  __device__ __forceinline__ int slot(unsigned back = 0) const { return static_cast<int>((count - back) % slots); }
  __device__ __forceinline__ unsigned parity() const { return count / slots & 1; }
};

// ---- Copies into shared memory that report to a barrier

// Orders what is known of ordinary accesses to shared memory before copies that this thread starts later.
__device__ __forceinline__ void fence_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// `bytes` (a multiple of 16) from global memory; both addresses multiples of 16.
__device__ __forceinline__ void copy_bulk(std::uint32_t target, const void* source, unsigned bytes,
                                          std::uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
               "l"(source), "r"(bytes), "r"(barrier)
               : "memory");
}
// A box of a 4-dimensional tensor; zeros outside the tensor.
__device__ __forceinline__ void copy_box(std::uint32_t target, const CUtensorMap& map, int x0, int x1, int x2, int x3,
                                         std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(target),
      "l"(&map), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(barrier)
      : "memory");
}
// `bytes` (a multiple of 16) from global memory into the L2 cache.
__device__ __forceinline__ void prefetch_bulk(const void* source, unsigned bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source), "r"(bytes) : "memory");
}
// A grid's data into the L2 cache, so many pieces of that many bytes: each block asks for its share, by one thread.
template <unsigned piece>
__device__ __forceinline__ void prefetch_pieces(const void* source, unsigned pieces) {
  static_assert(piece % 128 == 0 && piece <= 16384);
  constexpr unsigned copied = 16384 / piece;  // by a copy at most
  const unsigned share = pieces / gridDim.x + 1, first = share * blockIdx.x, end = min(pieces, first + share);
#pragma unroll 1
  for (unsigned at = first; at < end; at += copied) {
    prefetch_bulk(static_cast<const char*>(source) + std::int64_t{at} * piece, min(end - at, copied) * piece);
  }
}
__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// ---- Copies out of shared memory. Between ordinary stores and them: fence_copies() by the threads that have stored,
// then a barrier. A thread waits for what it has started itself.

// A box of shared memory into a 4-dimensional tensor, where it lies within.
__device__ __forceinline__ void store_box(const CUtensorMap& map, int x0, int x1, int x2, int x3,
                                          std::uint32_t source) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(&map),
               "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(source)
               : "memory");
}
__device__ __forceinline__ void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until all but `pending` groups have been read from shared memory.
template <int pending>
__device__ __forceinline__ void wait_for_reading() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}
// Until all but `pending` groups have been written.
template <int pending>
__device__ __forceinline__ void wait_for_writing() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(pending) : "memory");
}

// ---- Ordinary stores to shared memory, and named barriers

__device__ __forceinline__ void store_shared(std::uint32_t target, float first, float second) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(target), "f"(first), "f"(second) : "memory");
}
// Four matrices of 8 x 8 elements of 16 bits, transposed: lane l gives the address of column l % 8 of matrix l / 8, of
// 16 bytes, and holds (row l/4, columns 2 (l%4) and the next) of each. So two rows of D become columns.
__device__ __forceinline__ void store_transposed(std::uint32_t target, const std::uint32_t (&matrix)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(target), "r"(matrix[0]),
               "r"(matrix[1]), "r"(matrix[2]), "r"(matrix[3])
               : "memory");
}
// A warp's matrix of 8 x 8 elements of 16 bits, (row l/4, columns 2 (l%4) and the next) in lane l, transposed.
__device__ __forceinline__ std::uint32_t transpose(std::uint32_t matrix) {
  std::uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(matrix));
  return result;
}
__device__ __forceinline__ void store_shared(std::uint32_t target, const float* four) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(target), "f"(four[0]), "f"(four[1]), "f"(four[2]),
               "f"(four[3])
               : "memory");
}
__device__ __forceinline__ void load_shared(float* four, std::uint32_t source) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(four[0]), "=f"(four[1]), "=f"(four[2]), "=f"(four[3])
               : "r"(source)
               : "memory");
}
// A named barrier of so many threads.
__device__ __forceinline__ void synchronise(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// Arrives there without waiting.
__device__ __forceinline__ void arrive_at(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Whether this is the one lane of a whole warp that does what one must do. threadIdx.x % 32 == 0 says the same where
// all lanes are together anyway; this one brings them together, without the registers that a __syncwarp() before that
// costs (winograd_fused, which has none left, spills with it).
__device__ __forceinline__ bool leads_warp() {
  unsigned leads;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(leads));
  return leads != 0;
}

// ---- Registers of a warpgroup's threads (multiples of 8)

template <int registers>
__device__ __forceinline__ void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
__device__ __forceinline__ void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

// ---- Warpgroup matrix products: D[64][n] (+)= A[64][16] B[n][16]^T, FP32 accumulation
//
// A in registers, four of a thread; D in n/2. With l the lane and w the warp of the warpgroup, register by register:
//   A: (row 16w + l/4, k 2 (l%4) and the next), (row + 8, same k), then both at k + 8
//   D[4j .. 4j+3]: (row 16w + l/4, columns 8j + 2 (l%4) and the next), then row + 8
// B in shared memory, rows of 128 (or 64) bytes along k in the swizzle of that width, groups of 8 rows adjacent.

// The 16-byte piece in which piece `piece` of row `row` lies.
constexpr __host__ __device__ int swizzle_128(int row, int piece) { return piece ^ (row & 7); }
constexpr __host__ __device__ int swizzle_64(int row, int piece) { return piece ^ (row >> 1 & 3); }

// Of B at an address whose group of 8 rows starts at a multiple of 1024 (512) bytes. A step of 16 along k: 32 bytes.
template <int row_bytes>
__device__ __forceinline__ std::uint64_t matrix_descriptor(std::uint32_t address) {
  static_assert(row_bytes == 128 || row_bytes == 64);
  constexpr std::uint64_t swizzle = row_bytes == 128 ? 1 : 2;
  constexpr std::uint64_t group_stride = 8 * row_bytes / 16;
  return swizzle << 62 | group_stride << 32 | std::uint64_t{1} << 16 | (address & 0x3ffff) >> 4;
}
// The same, `bytes` further along k.
__device__ __forceinline__ std::uint64_t advance_descriptor(std::uint64_t descriptor, int bytes) {
  return descriptor + static_cast<std::uint64_t>(bytes / 16);
}

__device__ __forceinline__ void fence_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int pending>
__device__ __forceinline__ void wait_for_products() {  // until at most `pending` groups are under way
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}
// Keeps the compiler from moving accesses to an operand of asynchronous products across this point.
template <int count>
__device__ __forceinline__ void pin(float (&d)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

#define FASTCONV_D8(i)                                                                                        \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define FASTCONV_S16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define FASTCONV_S24 FASTCONV_S16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define FASTCONV_S28 FASTCONV_S24 ",%24,%25,%26,%27"
#define FASTCONV_S32 FASTCONV_S24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define FASTCONV_S48 FASTCONV_S32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define FASTCONV_S52 FASTCONV_S48 ",%48,%49,%50,%51"
#define FASTCONV_S56 FASTCONV_S48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define FASTCONV_S64 FASTCONV_S48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define FASTCONV_D16 FASTCONV_D8(0), FASTCONV_D8(8)
#define FASTCONV_D24 FASTCONV_D16, FASTCONV_D8(16)
#define FASTCONV_D28 FASTCONV_D24, "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27])
#define FASTCONV_D32 FASTCONV_D24, FASTCONV_D8(24)
#define FASTCONV_D48 FASTCONV_D32, FASTCONV_D8(32), FASTCONV_D8(40)
#define FASTCONV_D52 FASTCONV_D48, "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51])
#define FASTCONV_D56 FASTCONV_D48, FASTCONV_D8(48)
#define FASTCONV_D64 FASTCONV_D48, FASTCONV_D8(48), FASTCONV_D8(56)

// a0..p: numbers of the operands behind the accumulators
#define FASTCONV_PRODUCT(n, type, count, a0, a1, a2, a3, b, p)                                                       \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k16.f32." #type \
               "." #type " {" FASTCONV_S##count "}, {%" #a0 ",%" #a1 ",%" #a2 ",%" #a3 "}, %" #b ", p, 1, 1, 0;\n}"  \
               : FASTCONV_D##count                                                                                   \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor), "n"(accumulate ? 1 : 0))

// accumulate: whether D is added to, or replaced.
template <typename Half, bool accumulate, int count>
__device__ __forceinline__ void multiply(float (&d)[count], const std::uint32_t (&a)[4], std::uint64_t descriptor) {
  static_assert(count == 16 || count == 24 || count == 28 || count == 32 || count == 48 || count == 52 || count == 56 ||
                count == 64);
#if defined(FASTCONV_HAS_WGMMA)
  if constexpr (std::is_same_v<Half, bfloat16_t>) {
    if constexpr (count == 16) FASTCONV_PRODUCT(32, bf16, 16, 16, 17, 18, 19, 20, 21);
    if constexpr (count == 24) FASTCONV_PRODUCT(48, bf16, 24, 24, 25, 26, 27, 28, 29);
    if constexpr (count == 28) FASTCONV_PRODUCT(56, bf16, 28, 28, 29, 30, 31, 32, 33);
    if constexpr (count == 32) FASTCONV_PRODUCT(64, bf16, 32, 32, 33, 34, 35, 36, 37);
    if constexpr (count == 48) FASTCONV_PRODUCT(96, bf16, 48, 48, 49, 50, 51, 52, 53);
    if constexpr (count == 52) FASTCONV_PRODUCT(104, bf16, 52, 52, 53, 54, 55, 56, 57);
    if constexpr (count == 56) FASTCONV_PRODUCT(112, bf16, 56, 56, 57, 58, 59, 60, 61);
    if constexpr (count == 64) FASTCONV_PRODUCT(128, bf16, 64, 64, 65, 66, 67, 68, 69);
  } else {
    if constexpr (count == 16) FASTCONV_PRODUCT(32, f16, 16, 16, 17, 18, 19, 20, 21);
    if constexpr (count == 24) FASTCONV_PRODUCT(48, f16, 24, 24, 25, 26, 27, 28, 29);
    if constexpr (count == 28) FASTCONV_PRODUCT(56, f16, 28, 28, 29, 30, 31, 32, 33);
    if constexpr (count == 32) FASTCONV_PRODUCT(64, f16, 32, 32, 33, 34, 35, 36, 37);
    if constexpr (count == 48) FASTCONV_PRODUCT(96, f16, 48, 48, 49, 50, 51, 52, 53);
    if constexpr (count == 52) FASTCONV_PRODUCT(104, f16, 52, 52, 53, 54, 55, 56, 57);
    if constexpr (count == 56) FASTCONV_PRODUCT(112, f16, 56, 56, 57, 58, 59, 60, 61);
    if constexpr (count == 64) FASTCONV_PRODUCT(128, f16, 64, 64, 65, 66, 67, 68, 69);
  }
#endif
}

#undef FASTCONV_PRODUCT

// The same with A in shared memory, too, laid out like B: 64 rows of 32 bytes, 16 halves, or float32 read as 8 values
// of TF32. a0, b0, p0: numbers of the operands behind the accumulators
#define FASTCONV_SHARED_PRODUCT(shape, types, transposed, count, a0, b0, p0)                                      \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p0 ", 0;\nwgmma.mma_async.sync.aligned." shape ".f32." types \
               " {" FASTCONV_S##count "}, %" #a0 ", %" #b0 ", p, 1, 1" transposed ";\n}"                          \
               : FASTCONV_D##count                                                                                \
               : "l"(a), "l"(b), "n"(accumulate ? 1 : 0))
#define FASTCONV_SHARED_SIZES(depth, types, transposed)                                                  \
  if constexpr (count == 16) FASTCONV_SHARED_PRODUCT("m64n32" depth, types, transposed, 16, 16, 17, 18); \
  if constexpr (count == 24) FASTCONV_SHARED_PRODUCT("m64n48" depth, types, transposed, 24, 24, 25, 26); \
  if constexpr (count == 32) FASTCONV_SHARED_PRODUCT("m64n64" depth, types, transposed, 32, 32, 33, 34); \
  if constexpr (count == 64) FASTCONV_SHARED_PRODUCT("m64n128" depth, types, transposed, 64, 64, 65, 66);

template <typename T, bool accumulate, int count>
__device__ __forceinline__ void multiply_shared(float (&d)[count], std::uint64_t a, std::uint64_t b) {
  static_assert(count == 16 || count == 24 || count == 32 || count == 64);
#if defined(FASTCONV_HAS_WGMMA)
  if constexpr (std::is_same_v<T, float>) {
    FASTCONV_SHARED_SIZES("k8", "tf32.tf32", "")
  } else if constexpr (std::is_same_v<T, bfloat16_t>) {
    FASTCONV_SHARED_SIZES("k16", "bf16.bf16", ", 0, 0")
  } else {
    FASTCONV_SHARED_SIZES("k16", "f16.f16", ", 0, 0")
  }
#endif
}

#undef FASTCONV_SHARED_SIZES
#undef FASTCONV_SHARED_PRODUCT

}  // namespace fastconv::hopper
