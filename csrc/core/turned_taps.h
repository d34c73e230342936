// Taps of a filter that is turned by half a turn.
#pragma once

#include <cstdint>

namespace fastconv {

// Which taps of the weight are those of the turned filter, along one dimension: tap i of residue a is base + a - step i
// of the weight, or zero where there is no such tap. A filter of its own for each residue.
struct TurnedTaps {
  std::int64_t count, residues, base, step;
};

}  // namespace fastconv
