// Checks that the selection of all three passes shares.
#pragma once

#include "core/algorithm.h"

namespace fastconv {

// Requirements of every algorithm of this library, checked before its own supports().
Support supports_common(const Algorithm& algorithm, const ConvProblem& problem, const DeviceInfo& device);

// The refusal of an algorithm whose expected error, a multiple of PyTorch's, exceeds the limit.
Support too_inaccurate(const char* name, double error, double limit);

// Refuses a plan that needs more workspace than the caller allows. PyTorch's own convolution is exempt.
Support within_workspace(const char* name, const ConvPlan& plan, const ConvProblem& problem);

// Over PyTorch's own, each with the rounding of the result.
double relative_error(double roundoffs, double torch_roundoffs, AccuracyClass accuracy);

}  // namespace fastconv
