// The filter of an input gradient: turned by half a turn, its channels exchanged with its filters.
#pragma once

#include <cstdint>

#include "core/problem.h"
#include "device/numeric.h"

namespace fastconv {

struct TurnedFilter {
  std::int64_t channels, filters, taps;  // C/G, K/G, R * S
  bool channels_last;                    // whether taps come before channels in memory, in both

  TurnedFilter(const ConvProblem& problem, bool channels_last)
      : channels(problem.c_per_group()),
        filters(problem.k_per_group()),
        taps(problem.r * problem.s),
        channels_last(channels_last) {}

  // Where in the weight [K, C/G, R, S] the element at `index` of the turned [C, K/G, R, S] lies; offsets in memory.
  FASTCONV_HOST_DEVICE std::int64_t source(std::int64_t index) const {
    const std::int64_t row = index / (filters * taps), rest = index % (filters * taps);  // row: group * C/G + channel
    const std::int64_t k = channels_last ? rest % filters : rest / taps;
    const std::int64_t tap = taps - 1 - (channels_last ? rest / filters : rest % taps);
    const std::int64_t filter = row / channels * filters + k, channel = row % channels;
    return filter * channels * taps + (channels_last ? tap * channels + channel : channel * taps + tap);
  }
};

}  // namespace fastconv
