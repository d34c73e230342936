// F(4x4,3x3) in one kernel: tasks of four kinds, in the order of a task map, joined by counters.
#include <algorithm>
#include <memory>
#include <string>

#include "algos/winograd_megakernel/config.h"
#include "core/error.h"
#include "plan/winograd_limits.h"

namespace fastconv::algos::winograd_megakernel {
namespace {

Support supports(const ConvProblem& problem, const DeviceInfo& device) {
  if (Support support = supports_winograd(problem, "winograd_megakernel"); !support.ok) return support;
  if (problem.output_numel() == 0) return Support::yes();
  try {
    make_map(problem, device);
  } catch (const InvalidArgument& error) {
    return Support::no("size", std::string(error.what()) + " (the task map of winograd_megakernel)");
  }
  return Support::yes();
}

// The form and unit of winograd_f4's model (winograd/algo.cpp), with the ratios that were measured against it:
// README.md.
double cpu_cost_us(const ConvProblem& problem, const TaskMap& map, const DeviceInfo& device) {
  const double elements = static_cast<double>(frequencies) * static_cast<double>(map.tiles);
  const double c = static_cast<double>(padded_channels(problem)), k = static_cast<double>(padded_filters(problem));
  const double cache_bandwidth = 1.8 * device.bandwidth_bytes_per_s * device.processors;
  const double transforms = (problem.compulsory_bytes() + elements * (c + k) * sizeof(float)) / cache_bandwidth;
  // Every batch reads U; what exceeds the caches costs more than the traffic of the first time (measured: 512 -> 512).
  constexpr double cached = 8e6;
  const double u = static_cast<double>(u_bytes(problem));
  const double again = 4.0 * std::max(0.0, u - cached) * static_cast<double>(map.batches() - 1);
  const double filters = (u + again) / (1.15 * device.bandwidth_bytes_per_s);
  const double rate = 2.2 * device.fp32_flops_per_s * c / (c + 16.0);
  const double tasks = 0.3 * static_cast<double>(map.size()) / device.processors;
  return 20.0 + tasks + 1e6 * (transforms + filters + 2.0 * elements * c * k / rate);
}

ConvPlan plan(const ConvProblem& problem, const DeviceInfo& device) {
  const auto map = std::make_shared<const TaskMap>(make_map(problem, device));
  ConvPlan plan;
  plan.workspace_bytes = static_cast<std::size_t>(map->v_groups * v_place(*map, padded_channels(problem)) +
                                                  map->m_groups * m_place(*map, padded_filters(problem))) *
                         sizeof(float);
  plan.config = std::to_string(map->groups) + " groups of " + std::to_string(map->shapes.group_tiles) +
                " tiles, tasks per group " + std::to_string(map->s_i) + " + " + std::to_string(map->s_g) + " + " +
                std::to_string(map->s_o) + ", D_IG " + std::to_string(map->mapping.d_ig) + ", D_GO " +
                std::to_string(map->mapping.d_go) + ", M " + std::to_string(map->m);
  plan.cost_us = cpu_cost_us(problem, *map, device);
  plan.detail = map;
  return plan;
}

PackedWeight packed_weight(const ConvProblem& problem, const DeviceInfo&) { return {u_bytes(problem)}; }

}  // namespace

extern const Algorithm algorithm;
const Algorithm algorithm{"winograd_megakernel",
                          "winograd",
                          "F(4x4,3x3) in one kernel: tasks in the order of a map, joined by counters",
                          1,
                          true,
                          false,
                          winograd_f4_error_multiple,  // the same sums in another order
                          supports,
                          plan,
                          packed_weight};

}  // namespace fastconv::algos::winograd_megakernel
