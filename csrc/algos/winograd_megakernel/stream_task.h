// A transform as the dispatching warp describes it to a streaming warp: ITrans of one tile and 64 channels, or OTrans
// of a segment of M, 4 tiles and 16 filters.
#pragma once

namespace fastconv::algos::winograd_megakernel {

struct alignas(16) StreamItem {
  int kind;     // TaskKind, or -1: there are no more
  int tile;     // of the problem, the first
  int tiles;    // OTrans: that exist
  int row;      // in its group
  int channel;  // the first channel, or filter
  int place;    // ITrans: of the group in V
  int n, p, q;  // ITrans: the tile's image, and first output there
  int slot;     // of the task's barrier
  int number;   // of the item
};

}  // namespace fastconv::algos::winograd_megakernel
