// The filter of an input gradient: flipped along both dimensions, its channels exchanged with its filters.
#pragma once

#include <cstdint>

#include "core/flipped_taps.h"
#include "core/problem.h"
#include "device/numeric.h"

namespace fastconv {

struct FlippedFilter {
  std::int64_t channels, filters;  // C/G, K/G
  std::int64_t c, r, s;            // of the weight
  FlippedTaps rows, columns;
  bool channels_last;  // whether taps come before channels in memory, in both

  FlippedFilter(const ConvProblem& problem, const FlippedTaps& rows, const FlippedTaps& columns, bool channels_last)
      : channels(problem.c_per_group()),
        filters(problem.k_per_group()),
        c(problem.c),
        r(problem.r),
        s(problem.s),
        rows(rows),
        columns(columns),
        channels_last(channels_last) {}

  std::int64_t size() const { return rows.residues * columns.residues * c * filters * rows.count * columns.count; }

  // Where in the weight [K, C/G, R, S] the element at `index` of the flipped [residues * C, K/G, rows, columns] lies,
  // or -1 if it is zero; offsets in memory.
  FASTCONV_HOST_DEVICE std::int64_t source(std::int64_t index) const {
    const std::int64_t taps = rows.count * columns.count;
    const std::int64_t line = index / (filters * taps), rest = index % (filters * taps);  // line: residue * C + channel
    const std::int64_t k = channels_last ? rest % filters : rest / taps;
    const std::int64_t tap = channels_last ? rest / filters : rest % taps;
    const std::int64_t residue = line / c, row = line % c;  // row: group * C/G + channel
    const std::int64_t y = rows.of_residue(residue / columns.residues) - rows.step * (tap / columns.count);
    const std::int64_t x = columns.of_residue(residue % columns.residues) - columns.step * (tap % columns.count);
    if (y < 0 || y >= r || x < 0 || x >= s) return -1;
    const std::int64_t filter = row / channels * filters + k, channel = row % channels, area = r * s;
    return filter * channels * area + (channels_last ? (y * s + x) * channels + channel : channel * area + y * s + x);
  }
};

}  // namespace fastconv
