// What `fastconv tune` measured: a table in each process, which `auto` asks before it believes the cost model.
#pragma once

#include <cstdint>
#include <string>

#include "core/device_info.h"
#include "core/problem.h"

namespace fastconv {

// The passes of a convolution, each of which has choices of its own.
enum class Pass : std::uint8_t { forward, backward_input, backward_weight };

// Throws InvalidArgument naming the known ones.
Pass pass_from_name(const std::string& name);

// The device as the table names it: what the same kernels take the same time on.
std::string measured_device(const DeviceInfo& device);

// Replaces the table by lines "device\tpass\tproblem\tchoice\n": measured_device(), a pass, to_string(problem), which
// is the forward convolution's for every pass, and what is the fastest, as the planner names it.
void set_measured(const std::string& lines);

// What was measured to be the fastest for the problem, with or without a bias, a gradient also whatever else is
// computed with the convolution; empty if that was not measured.
std::string find_measured(Pass pass, const ConvProblem& problem, const DeviceInfo& device);

// Grows with every replacement: what was chosen at a smaller one may be chosen otherwise now.
std::uint64_t measured_generation();

}  // namespace fastconv
