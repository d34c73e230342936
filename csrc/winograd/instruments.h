// What tests and measurements can change in a launch of winograd_megakernel: the map, the grid, delays, records of its
// tasks. Part of a plan (ConvPlan::kernel_plan) that no ordinary call makes; only fastconv::instrumented_megakernel
// does.
#pragma once

#include <cstdint>

#include "core/device_info.h"
#include "core/problem.h"
#include "winograd/task_map.h"

namespace fastconv {

struct ConvPlan;  // core/algorithm.h

struct Instruments {
  std::int32_t d_ig = -1, d_go = -1, m = 0;  // of the map; -1, -1, 0: as planned
  std::int32_t blocks = 0;                   // of the grid; 0: all that fit
  std::uint32_t delay = 0;                   // tasks wait now and then, for some of these bits as ns; 0: none does
  bool series = false;                       // the tasks kind by kind, a launch each, each kind in the order of the map
  void* records = nullptr;                   // TaskRecord [tasks] on the device (winograd/task_trace.cuh), or null
  const void* filter = nullptr;  // the plain contiguous weight [K, C, 3, 3]: U by tasks of the kernel, not beforehand

  Mapping mapping(Mapping planned) const {
    if (d_ig >= 0) planned.d_ig = d_ig;
    if (d_go >= 0) planned.d_go = d_go;
    if (m > 0) planned.m = m;
    if (series) planned.d_ig = planned.d_go = 1 << 28, planned.bounded = false;
    return planned;
  }
};

// The map of a plan of winograd_megakernel, on any device. (Defined by the algorithm.)
const TaskMap& task_map_of(const ConvPlan& plan);

// The plan with which winograd_megakernel runs so, without the way of NCHW input into NHWC. CUDA; requires its
// supports(). Throws InvalidArgument for a map that is too large. (Defined by the algorithm.)
ConvPlan plan_instrumented_megakernel(const ConvProblem& problem, const DeviceInfo& device,
                                      const Instruments& instruments);

}  // namespace fastconv
