// Taps of a filter that is flipped along both dimensions.
#pragma once

#include <cstdint>

namespace fastconv {

// Which taps of the weight are those of the flipped filter, along one dimension: tap i of residue a is base + a - step
// i of the weight, or zero where there is no such tap. A filter of its own for each residue.
struct FlippedTaps {
  std::int64_t count, residues, base, step;
};

}  // namespace fastconv
