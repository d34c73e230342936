// What `fastconv tune` measured: a table in each process, which `auto` asks before it believes the cost model.
#pragma once

#include <cstdint>
#include <string>

#include "core/device_info.h"
#include "core/problem.h"

namespace fastconv {

// The device as the table names it: what the same kernels take the same time on.
std::string measured_device(const DeviceInfo& device);

// Replaces the table by lines "device\tproblem\talgorithm\n": measured_device(), to_string(problem), a registry name.
void set_measured(const std::string& lines);

// The algorithm measured to be the fastest for the problem, with or without a bias; empty if it was not measured.
std::string find_measured(const ConvProblem& problem, const DeviceInfo& device);

// Grows with every replacement: what was chosen at a smaller one may be chosen otherwise now.
std::uint64_t measured_generation();

}  // namespace fastconv
