// Rings of stages in shared memory: positions, and the barriers of those that one thread fills and warps empty.
#pragma once

#include <cstdint>

#include "hopper/ptx/mbarrier.cuh"

namespace fastconv::hopper {

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

// The barriers of a ring's slots, by one thread, which calls barrier_init_fence() then.
template <int slots>
__device__ __forceinline__ void initialise(Barrier (&full)[slots], Barrier (&free)[slots], unsigned readers,
                                           unsigned writers = 1) {
#pragma unroll
  for (int i = 0; i < slots; ++i) {
    barrier_init(full[i], writers);
    barrier_init(free[i], readers);
  }
}

// A ring of up to max_slots stages, as one of its two sides sees it: the thread that fills slots by copies, or a warp
// that reads them.
template <int max_slots>
struct Pipeline {
  struct Barriers {  // in shared memory
    Barrier full[max_slots], free[max_slots];
  };

  Barriers& barriers;
  const int slots;
  const WaitSite site;
  RingPosition position{};

  __device__ __forceinline__ int slot() const { return position.slot; }
  // Waits until the slot is free for copies of so many bytes, and returns the barrier that they report to.
  __device__ __forceinline__ std::uint32_t acquire(unsigned bytes) const {
    const std::uint32_t full = shared_address(&barriers.full[position.slot]);
    hopper::wait(barriers.free[position.slot], position.parity ^ 1, site);
    arrive_expecting(full, bytes);
    return full;
  }
  // Waits until the slot is full.
  __device__ __forceinline__ void wait() const { hopper::wait(barriers.full[position.slot], position.parity, site); }
  // By a warp that has read the slot.
  __device__ __forceinline__ void release() const { arrive_for_warp(barriers.free[position.slot]); }
  __device__ __forceinline__ void advance() { position.advance(slots); }
};

}  // namespace fastconv::hopper
