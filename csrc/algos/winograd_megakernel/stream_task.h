// A transform of one tile and 64 channels or filters, as the dispatching warp describes it to a streaming warp.
#pragma once

namespace fastconv::algos::winograd_megakernel {

struct alignas(16) StreamItem {
  int kind;     // TaskKind, or -1: there are no more
  int tile;     // of the problem
  int row;      // in its group
  int channel;  // the first channel, or filter
  int place;    // of the group in V; OTrans: unused
  int n, p, q;  // the tile's image, and first output there
  int slot;     // of the task's barrier
};

}  // namespace fastconv::algos::winograd_megakernel
