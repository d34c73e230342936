// Positions in a ring of stages.
#pragma once

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

}  // namespace fastconv::hopper
