// Our own batched product of split operands for the staged algorithms, on Hopper (gemm/kernel.cuh has its roles).
#pragma once

#include <cstdint>

#include "algos/winograd_staged/plan.h"
#include "hopper/wait_report.h"

namespace fastconv::algos::winograd_staged::gemm {

struct Arguments {
  Stationary stationary;
  int tile_n;                  // filters of a work tile, where V is stationary: 48 or 64
  const void* v;               // float16 [points][tiles][groups][2][group_channels]: lo, hi
  const void* u;               // float16 [points][filters][groups][2][group_channels]: lo, hi
  float* m;                    // [points][tiles / 8][K_pad / 16] segments (plan.h)
  const int* group_exponents;  // [groups][exponent_pitch(tiles)]: V of the group is scaled by 2 to that power
  int* tile_exponents;         // [exponent_pitch(tiles)]: written; so is M, by the least of the tile's
  std::int64_t points, tiles, filters, groups, group_channels, k_pad;
  int processors;
  bool overlaps_output;  // the kernel behind it on the stream may begin beside it
  void* stream;          // cudaStream_t
  WaitReport* report;
};

// Begins before the kernel before it on the stream has ended, which writes V and its exponents, but not U.
void run(const Arguments& args);

}  // namespace fastconv::algos::winograd_staged::gemm
