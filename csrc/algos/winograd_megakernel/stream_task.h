// A transform task as the dispatching warp describes it to a streaming warp.
#pragma once

namespace fastconv::algos::winograd_megakernel {

struct alignas(16) StreamTask {
  int kind;         // TaskKind, or -1: there are no more
  int tile, tiles;  // of the problem
  int row;          // of the first tile in its group
  int channel;      // the first channel, or filter
  int place;        // of the group in V or M
  int counter;      // to raise
  int number;
};

}  // namespace fastconv::algos::winograd_megakernel
