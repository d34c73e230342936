// F(4x4,3x3) in one kernel: tasks of four kinds, in the order of a task map, joined by counters.
#include <algorithm>
#include <cmath>
#include <memory>
#include <string>

#include "algos/winograd_megakernel/config.h"
#include "algos/winograd_megakernel/cuda_config.h"
#include "algos/winograd_megakernel/ffma_config.h"
#include "core/error.h"
#include "plan/winograd_limits.h"

namespace fastconv::algos::winograd_megakernel {
namespace {

Support supports(const ConvProblem& problem, const DeviceInfo& device) {
  if (Support support = supports_winograd(problem, "winograd_megakernel"); !support.ok) return support;
  const bool cuda = device.type == DeviceType::cuda, ieee = problem.accuracy == AccuracyClass::ieee;
  if (cuda && (ieee ? device.compute_capability < 80 : device.compute_capability != 90)) {
    return Support::no("device", "compute capability is " + std::to_string(device.compute_capability) +
                                     "; winograd_megakernel needs " + (ieee ? "80 or more" : "90 (wgmma)"));
  }
  if (problem.output_numel() == 0) return Support::yes();
  // Coordinates have 31 bits, a tensor copy's strides 40.
  constexpr double limit = 2147483648.0 - 64;
  const double image = static_cast<double>(size_of(problem.dtype)) * static_cast<double>(problem.c) *
                       static_cast<double>(problem.h * problem.w);
  if (cuda &&
      (image >= 1099511627776.0 ||
       static_cast<double>(std::max({problem.n, problem.h, problem.w, 512 * problem.c, 512 * problem.k})) >= limit)) {
    return Support::no("size", "an image has " + std::to_string(image) + " bytes, C is " + std::to_string(problem.c) +
                                   ", K is " + std::to_string(problem.k) +
                                   "; winograd_megakernel needs below 2^40 and 2^22");
  }
  try {
    if (cuda && ieee) {
      ffma::make_plan(problem, device);
    } else if (cuda) {
      make_cuda_plan(problem, device);
    } else {
      make_map(problem, device);
    }
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

// Class fp32: no layer that was measured is more than a few percent faster than with the staged kernels, so `auto` is
// not to guess that another one would be.
constexpr double pessimism = 1.2;

// Fitted to an H200 (docs/performance.md): the products, the transforms by their bytes, of which the larger one hides
// most of the smaller, and the map's beginning and end, where nothing overlaps.
double cuda_cost_us(const ConvProblem& problem, const CudaPlan& cuda, const DeviceInfo& device) {
  const TaskMap& map = cuda.map;
  const double waves = std::ceil(static_cast<double>(map.gemms()) / device.processors);
  const double gemm = waves * (1.25 * static_cast<double>(cuda.weights.chunks) + 2.0);
  const double items = static_cast<double>(map.inputs() + map.outputs()) * map.shapes.input_tiles;
  const double streams = items / device.processors * 0.64;
  const double turned = 2.0 * static_cast<double>(turned_input_bytes(problem)) / (0.9 * device.bandwidth_bytes_per_s);
  return 25.0 + pessimism * (std::max(gemm, streams) + 0.3 * std::min(gemm, streams) + 1e6 * turned);
}

// The same for half types: what the transforms add to the products, most of which wait for the caches.
double half_cost_us(const ConvProblem& problem, const CudaPlan& cuda, const DeviceInfo& device) {
  const TaskMap& map = cuda.map;
  const double waves = std::ceil(static_cast<double>(map.gemms()) / device.processors);
  const double gemm = waves * (0.376 * static_cast<double>(cuda.weights.stages()) + 1.75);
  const double items = static_cast<double>(map.inputs() + map.outputs()) * map.shapes.input_tiles;
  const double nhwc = 16.3 + gemm + 0.178 * items / device.processors;
  const bool element_by_element = problem.c % 8 != 0 || (problem.layout == Layout::nhwc && problem.k % 2 != 0);
  const double turned = 2.0 * static_cast<double>(turned_input_bytes(problem)) / (0.9 * device.bandwidth_bytes_per_s);
  const double scattered = problem.layout == Layout::nhwc ? 0.0 : 5e-12 * static_cast<double>(problem.output_numel());
  return (element_by_element ? 2.0 : 1.0) * nhwc + 1e6 * (turned + scattered);
}

// Fitted to an H200 (docs/performance.md): a multiprocessor's products one after the other, the last ones with fewer
// teams at work; what of the transforms is not hidden, by their bytes; or, with few channels, the memory's time.
double ffma_cost_us(const ConvProblem& problem, const ffma::Plan& plan, const DeviceInfo& device) {
  const TaskMap& map = plan.map;
  const double rate = 1.1 * device.fp32_flops_per_s / device.processors;
  const double task = 0.45 + 1e6 * 2.0 * ffma::unit_tiles * ffma::block_filters * ffma::stage_channels *
                                 static_cast<double>(plan.weights.stages) / rate;
  const double rounds = std::ceil(static_cast<double>(map.gemms()) / device.processors);
  const double elements = 36.0 * static_cast<double>(map.tiles) * static_cast<double>(problem.c + problem.k);
  const double bytes = problem.compulsory_bytes() + 2.0 * elements * sizeof(float);
  const double products = 18.0 + (rounds + 0.7) * task;
  const double seconds = bytes / device.bandwidth_bytes_per_s;
  const double cost = std::max(products + 1e6 * seconds / 2.6, 1e6 * seconds / 0.75);
  return device.compute_capability == 90 ? cost : 1.3 * cost;  // elsewhere nobody has measured it
}

std::string describe(const TaskMap& map) {
  return std::to_string(map.groups) + " groups of " + std::to_string(map.shapes.group_tiles) +
         " tiles, tasks per group " + std::to_string(map.s_i) + " + " + std::to_string(map.s_g) + " + " +
         std::to_string(map.s_o) + ", D_IG " + std::to_string(map.mapping.d_ig) + ", D_GO " +
         std::to_string(map.mapping.d_go) + ", M " + std::to_string(map.m);
}

ConvPlan plan_ffma(const ConvProblem& problem, const DeviceInfo& device, const Instruments& instruments = {}) {
  const auto detail = std::make_shared<const ffma::Plan>(ffma::make_plan(problem, device, instruments));
  ConvPlan plan;
  plan.workspace_bytes = detail->workspace_bytes();
  plan.config = describe(detail->map);
  plan.cost_us = ffma_cost_us(problem, *detail, device);
  plan.detail = detail;
  return plan;
}

ConvPlan plan_cuda(const ConvProblem& problem, const DeviceInfo& device, const Instruments& instruments = {}) {
  const auto detail = std::make_shared<const CudaPlan>(make_cuda_plan(problem, device, instruments));
  ConvPlan plan;
  plan.workspace_bytes = detail->v_bytes() + detail->m_bytes() + detail->exponent_bytes() + detail->counter_bytes() +
                         turned_input_bytes(problem);
  const bool halves = detail->weights.form.parts == 1;
  plan.config = std::string(halves ? "1" : "3") + " x float16, " + describe(detail->map);
  plan.cost_us = halves ? half_cost_us(problem, *detail, device) : cuda_cost_us(problem, *detail, device);
  plan.detail = detail;
  return plan;
}

ConvPlan plan(const ConvProblem& problem, const DeviceInfo& device) {
  if (device.type == DeviceType::cuda) {
    return problem.accuracy == AccuracyClass::ieee ? plan_ffma(problem, device) : plan_cuda(problem, device);
  }
  const auto map = std::make_shared<const TaskMap>(make_map(problem, device));
  ConvPlan plan;
  plan.workspace_bytes = static_cast<std::size_t>(map->v_groups * v_place(*map, padded_channels(problem)) +
                                                  map->m_groups * m_place(*map, padded_filters(problem))) *
                         sizeof(float);
  plan.config = describe(*map);
  plan.cost_us = cpu_cost_us(problem, *map, device);
  plan.detail = map;
  return plan;
}

// Half types: V, U and M are float16 in both (docs/numerics.md).
double error_multiple(AccuracyClass accuracy) {
  return accuracy == AccuracyClass::bf16 ? 4.0 : winograd_f4_error_multiple(accuracy);
}

PackedWeight packed_weight(const ConvProblem& problem, const DeviceInfo& device) {
  if (device.type == DeviceType::cpu) return {u_bytes(problem)};
  if (problem.accuracy == AccuracyClass::ieee) return {ffma::make_weights(problem).u_bytes()};
  return {make_cuda_weights(problem).u_bytes() + align_bytes(problem.k * 4)};
}

}  // namespace

extern const Algorithm algorithm;
const Algorithm algorithm{"winograd_megakernel",
                          "winograd",
                          "F(4x4,3x3) in one kernel: tasks in the order of a map, joined by counters",
                          1,
                          true,
                          true,
                          error_multiple,
                          supports,
                          plan,
                          packed_weight};

}  // namespace fastconv::algos::winograd_megakernel

fastconv::ConvPlan fastconv::plan_instrumented_megakernel(const ConvProblem& problem, const DeviceInfo& device,
                                                          const Instruments& instruments) {
  namespace own = algos::winograd_megakernel;
  return problem.accuracy == AccuracyClass::ieee ? own::plan_ffma(problem, device, instruments)
                                                 : own::plan_cuda(problem, device, instruments);
}
