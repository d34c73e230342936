// Taps of a filter that is flipped along both dimensions.
#pragma once

#include <cstdint>

namespace fastconv {

// Along one dimension, the taps of the weight that make up the flipped filter: tap i for residue a is the weight's tap
// base + a - step i, or zero if there is none; where windows are shifted (Shuffle::windows), base - a - step i. Each
// residue is a separate filter.
struct FlippedTaps {
  std::int64_t count, residues, base, step;
  bool shifted = false;

  constexpr std::int64_t of_residue(std::int64_t a) const { return shifted ? base - a : base + a; }
};

}  // namespace fastconv
