// What the selections of all three passes ask of a candidate.
#pragma once

#include "core/algorithm.h"

namespace fastconv {

// Reasons that hold for every algorithm of ours, so that none has to repeat them.
Support supports_common(const Algorithm& algorithm, const ConvProblem& problem, const DeviceInfo& device);

// What `auto`, or a caller who gave a limit, does not accept. error: a multiple of PyTorch's.
Support too_inaccurate(const char* name, double error, double limit);

// A plan with more workspace than the caller admits. Holds for algorithms of ours: PyTorch's is PyTorch's own.
Support within_workspace(const char* name, const ConvPlan& plan, const ConvProblem& problem);

// Over PyTorch's own, each with the rounding of the result.
double relative_error(double roundoffs, double torch_roundoffs, AccuracyClass accuracy);

}  // namespace fastconv
