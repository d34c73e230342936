// Taps of a filter that is flipped along both dimensions.
#pragma once

#include <cstdint>

namespace fastconv {

// Along one dimension, the taps of the weight that make up the flipped filter: tap i for residue a is the weight's tap
// base + a - step i, or zero if there is none. Each residue is a separate filter.
struct FlippedTaps {
  std::int64_t count, residues, base, step;
};

}  // namespace fastconv
