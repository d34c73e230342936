// What the selections of all three passes ask of a candidate.
#pragma once

#include "core/algorithm.h"

namespace fastconv {

// Reasons that hold for every algorithm of ours, so that none has to repeat them.
Support supports_common(const Algorithm& algorithm, const ConvProblem& problem, const DeviceInfo& device);

// What `auto`, or a caller who gave a limit, does not accept. error: a multiple of PyTorch's.
Support too_inaccurate(const char* name, double error, double limit);

// Over PyTorch's own, each with the rounding of the result.
double relative_error(double roundoffs, double torch_roundoffs, AccuracyClass accuracy);

}  // namespace fastconv
