// A transform task as the dispatching thread hands it to the streaming warps.
#pragma once

namespace fastconv::algos::winograd_megakernel::wgmma {

struct alignas(16) StreamTask {
  int kind;               // TaskKind, or -1: there are no more
  int tile, tiles;        // of the problem, the first; how many
  int row;                // of the first, in its group
  int channel, channels;  // the first channel or filter; how many
  int place;              // of the group, in V (ITrans) or M (OTrans)
  int counter;            // to raise at the end
  int number;             // of the task, for the trace
};

// What a warp does at a time: ITrans of one tile and 64 channels, or OTrans of a segment of M, 4 tiles and 16 filters.
struct StreamTile {
  int kind;
  int tile;     // of the problem, the first
  int tiles;    // that exist; 0: nothing to do
  int row;      // in its group
  int channel;  // the first channel, or filter
  int place;    // of the group
};

}  // namespace fastconv::algos::winograd_megakernel::wgmma
