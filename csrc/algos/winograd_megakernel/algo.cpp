// F(4x4,3x3) in one kernel: tasks of four kinds, in the order of a task map, joined by counters.
#include <algorithm>
#include <cmath>
#include <memory>
#include <string>

#include "algos/winograd_megakernel/cpu/plan.h"
#include "algos/winograd_megakernel/ffma/plan.h"
#include "algos/winograd_megakernel/wgmma/plan.h"
#include "core/cost.h"
#include "core/error.h"
#include "core/fitted.h"
#include "core/names.h"
#include "core/roundoffs.h"
#include "winograd/limits.h"

namespace fastconv::algos::winograd_megakernel {
namespace {

namespace own = fitted::winograd_megakernel;

Support supports(const ConvProblem& problem, const DeviceInfo& device) {
  if (Support support = supports_winograd(problem, "winograd_megakernel"); !support.ok) return support;
  const bool cuda = device.type == DeviceType::cuda, ieee = problem.accuracy == AccuracyClass::ieee;
  if (cuda && (ieee ? device.compute_capability < 80 : device.compute_capability != 90)) {
    return Support::no("device", "compute capability is ", device.compute_capability, "; winograd_megakernel needs ",
                       (ieee ? "80 or more" : "90 (wgmma)"));
  }
  if (cuda && ieee && device.shared_memory_bytes < ffma::block_bytes) {
    return Support::no("device", "a block has ", device.shared_memory_bytes,
                       " bytes of shared memory; winograd_megakernel needs ", ffma::block_bytes);
  }
  if (problem.output_numel() == 0) return Support::yes();
  // Coordinates have 31 bits, a tensor copy's strides 40.
  constexpr double limit = 2147483648.0 - 64;
  const double image = static_cast<double>(size_of(problem.dtype)) * static_cast<double>(problem.x_pitch()) *
                       static_cast<double>(problem.h * problem.w);
  if (cuda &&
      (image >= 1099511627776.0 ||
       static_cast<double>(std::max({problem.n, problem.h, problem.w, 512 * problem.c, 512 * problem.k})) >= limit)) {
    return Support::no("size", "an image has ", image, " bytes, C is ", problem.c, ", K is ", problem.k,
                       "; winograd_megakernel needs below 2^40 and 2^22");
  }
  try {
    if (cuda && ieee) {
      ffma::make_plan(problem, device);
    } else if (cuda) {
      wgmma::make_cuda_plan(problem, device);
    } else {
      cpu::make_map(problem, device);
    }
  } catch (const InvalidArgument& error) {
    return Support::no("size", error.what(), " (the task map of winograd_megakernel)");
  }
  return Support::yes();
}

// The form of winograd_f4's model (winograd_staged/algo.cpp), with a time for each task.
double cpu_cost_us(const ConvProblem& problem, const TaskMap& map, const DeviceInfo& device) {
  const double elements = static_cast<double>(cpu::points) * static_cast<double>(map.tiles);
  const double c = static_cast<double>(cpu::padded_channels(problem)),
               k = static_cast<double>(cpu::padded_filters(problem));
  // Every batch reads U; what exceeds the caches costs more than the traffic of the first time (measured: 512 -> 512).
  constexpr double cached = 8e6;
  const double u = static_cast<double>(cpu::u_bytes(problem));
  const double again = 4.0 * std::max(0.0, u - cached) * static_cast<double>(map.batches() - 1);
  return 20.0 + own::task.of(device) * static_cast<double>(map.size()) / device.processors +
         memory_us(problem.compulsory_bytes() + elements * (c + k) * sizeof(float),
                   own::caches.of(device) * device.processors, device) +
         memory_us(u + again, 1.15, device) +
         fp32_us(2.0 * elements * c * k, own::products.of(device) * c / (c + own::half_channels.of(device)), device);
}

// Times seen on an H200 (docs/log/40-megakernel-fp32.md), in us: the map's beginning and end, where nothing overlaps;
// 64 channels of a product, and its output; 64 channels or filters of a tile in a transform. And the part of the
// shorter of products and transforms that the longer does not hide.
struct Rates {
  double launch, chunk, product, transform, not_hidden;
};

Rates rates_of(bool fp16) {
  if (fp16) return {own::half_launch, own::half_chunk, own::half_product, own::half_transform, own::half_not_hidden};
  return {own::split_launch, own::split_chunk, own::split_product, own::split_transform, own::split_not_hidden};
}

// What memory gives and takes: x and y, V and M of each group of tiles, and U for each group anew, but for what the L2
// cache keeps of it beside them.
double bytes_of(const ConvProblem& problem, const wgmma::CudaPlan& cuda, const DeviceInfo& device) {
  const double value = 2.0 * cuda.weights.form.limbs;
  const double values = 36.0 * static_cast<double>(cuda.map.shapes.group_tiles * (problem.c + problem.k));
  const double kept = 0.3 * static_cast<double>(device.l2_bytes), u = static_cast<double>(cuda.weights.u_bytes());
  return problem.compulsory_bytes() + static_cast<double>(cuda.map.groups) * (value * values + std::max(0.0, u - kept));
}

double cuda_cost_us(const ConvProblem& problem, const wgmma::CudaPlan& cuda, const DeviceInfo& device) {
  const TaskMap& map = cuda.map;
  const bool fp16 = cuda.weights.form.limbs == 1;
  const Rates rates = rates_of(fp16);
  const double gemms = static_cast<double>(map.gemms()) / device.processors + 1.1;  // the first and the last one wait
  const double products = gemms * (rates.chunk * static_cast<double>(cuda.weights.chunks) + rates.product);
  const double work_tiles = static_cast<double>(map.inputs() + map.outputs()) * map.shapes.input_tiles;
  // Transforms wait for memory, whose rate was an H200's.
  const double transforms =
      rates.transform * work_tiles / device.processors * h200_bytes_per_s / device.bandwidth_bytes_per_s;
  const double kernel =
      rates.launch + std::max(products, transforms) + rates.not_hidden * std::min(products, transforms);
  const double nhwc = std::max(kernel, memory_us(bytes_of(problem, cuda, device), 1.0, device));
  const bool element_by_element = problem.x_pitch() * static_cast<std::int64_t>(size_of(problem.dtype)) % 16 != 0 ||
                                  (fp16 && problem.layout == Layout::nhwc && problem.k % 2 != 0);
  // NCHW output leaves in pieces of 4 values where rows are whole ones, else by single values.
  const double value_us = problem.q() % 4 == 0 ? 0.8e-6 * h200_bytes_per_s / device.bandwidth_bytes_per_s
                          : fp16               ? 8.3e-6
                                               : 4.8e-6;
  const double scattered_us =
      problem.layout == Layout::nhwc ? 0.0 : value_us * static_cast<double>(problem.output_numel());
  return (element_by_element ? 2.0 : 1.0) * nhwc + scattered_us;
}

// Fitted to an H200 (docs/log/42-megakernel-ieee.md): a multiprocessor's products one after the other, the last ones
// with fewer teams at work; what of the transforms is not hidden, by their bytes; or, with few channels, the memory's
// time, of which V takes as many as there are blocks of filters.
double ffma_cost_us(const ConvProblem& problem, const ffma::Plan& plan, const DeviceInfo& device) {
  const TaskMap& map = plan.map;
  const double task = fp32_us(2.0 * ffma::tile_m * ffma::block_filters * ffma::stage_channels *
                                  static_cast<double>(plan.weights.stages) * device.processors,
                              1.15, device);
  const double tasks = static_cast<double>(map.gemms()) / device.processors + 0.6;
  const double value_bytes = 36.0 * sizeof(float) * static_cast<double>(map.tiles);  // of a channel of V or M
  const double v_bytes = value_bytes * static_cast<double>(problem.c);
  const double bytes = problem.compulsory_bytes() + 2.0 * (v_bytes + value_bytes * static_cast<double>(problem.k));
  const double again = v_bytes * static_cast<double>(plan.weights.filter_blocks - 1);
  const double cost =
      std::max(29.0 + tasks * task + memory_us(bytes, 3.0, device), memory_us(bytes + again, 0.8, device));
  return device.compute_capability == 90 ? cost : 1.3 * cost;  // elsewhere nobody has measured it
}

std::string describe(const TaskMap& map) {
  return text_of(map.groups, " groups of ", map.shapes.group_tiles, " tiles, tasks per group ", map.s_i, " + ", map.s_g,
                 " + ", map.s_o, ", D_IG ", map.mapping.d_ig, ", D_GO ", map.mapping.d_go, ", M ", map.m);
}

ConvPlan plan_ffma(const ConvProblem& problem, const DeviceInfo& device, const Instruments& instruments = {}) {
  ffma::Plan kernel = ffma::make_plan(problem, device, instruments);
  ConvPlan plan;
  plan.workspace_bytes = kernel.workspace_bytes();
  plan.config = describe(kernel.map);
  plan.cost_us = ffma_cost_us(problem, kernel, device);
  plan.kernel_plan = keep_plan(std::move(kernel));
  return plan;
}

ConvPlan plan_cuda(const ConvProblem& problem, const DeviceInfo& device, const Instruments& instruments = {}) {
  wgmma::CudaPlan kernel = wgmma::make_cuda_plan(problem, device, instruments);
  ConvPlan plan;
  plan.workspace_bytes = kernel.v_bytes() + kernel.m_bytes() + kernel.exponent_bytes() + kernel.counter_bytes();
  const bool fp16 = kernel.weights.form.limbs == 1;
  plan.config = std::string(fp16 ? "1" : "3") + " x float16, " + describe(kernel.map);
  // The warps of its output tasks are few.
  const double passes = problem.dtype == DType::f32 ? 3.0 : 4.0;
  plan.cost_us = cuda_cost_us(problem, kernel, device) + residual_us(problem, passes, device);
  plan.reads_nhwc = true;
  plan.kernel_plan = keep_plan(std::move(kernel));
  return plan;
}

ConvPlan plan(const ConvProblem& problem, const DeviceInfo& device) {
  if (device.type == DeviceType::cuda) {
    return problem.accuracy == AccuracyClass::ieee ? plan_ffma(problem, device) : plan_cuda(problem, device);
  }
  const TaskMap map = cpu::make_map(problem, device);
  ConvPlan plan;
  plan.workspace_bytes = static_cast<std::size_t>(map.v_groups * cpu::v_place(map, cpu::padded_channels(problem)) +
                                                  map.m_groups * cpu::m_place(map, cpu::padded_filters(problem))) *
                         sizeof(float);
  plan.config = describe(map);
  plan.cost_us = cpu_cost_us(problem, map, device);
  plan.kernel_plan = keep_plan(map);
  return plan;
}

// Half types: V, U and M are float16 in both (docs/concepts/numerics.md).
double roundoffs(const ConvProblem& problem, const DeviceInfo& device) {
  if (device.type == DeviceType::cpu) return winograd_in_fp32(f4_noise.gain, problem.c, 64.0);
  if (problem.accuracy == AccuracyClass::ieee) {
    return winograd_in_fp32(f4_noise.gain, problem.c, static_cast<double>(problem.c));
  }
  const double product = problem.c <= 32 ? 1.6 : 2.0;  // of few channels there is one step to sum
  if (problem.dtype == DType::f32) return winograd_in_split_fp16(f4_noise.gain, product, problem.c);
  return winograd_in_fp16(f4_noise.gain, 3.0);
}

PackedWeight packed_weight(const ConvProblem& problem, const DeviceInfo& device) {
  if (device.type == DeviceType::cpu) return {cpu::u_bytes(problem)};
  if (problem.accuracy == AccuracyClass::ieee) return {ffma::make_weights(problem).u_bytes()};
  return {wgmma::make_cuda_weights(problem).u_bytes() + align_bytes(problem.k * 4)};
}

}  // namespace

extern const Algorithm algorithm;
const Algorithm algorithm{
    .name = "winograd_megakernel",
    .family = "winograd",
    .summary = "F(4x4,3x3) in one kernel: tasks in the order of a map, joined by counters",
    .source = 1,
    .roundoffs = roundoffs,
    .supports = supports,
    .plan = plan,
    .packed_weight = packed_weight,
    .arithmetic = {.tile_rows = 4, .tile_columns = 4, .noise = f4_noise, .exact = false},
    .abilities = {.ranges = true},
};

}  // namespace fastconv::algos::winograd_megakernel

const fastconv::TaskMap& fastconv::task_map_of(const ConvPlan& plan) {
  namespace own = algos::winograd_megakernel;
  const KernelPlan* kept = plan.kernel_plan.get();
  if (const auto* kernel = dynamic_cast<const KernelPlanOf<own::wgmma::CudaPlan>*>(kept)) return kernel->plan.map;
  if (const auto* kernel = dynamic_cast<const KernelPlanOf<own::ffma::Plan>*>(kept)) return kernel->plan.map;
  return plan_as<TaskMap>(kept);
}

fastconv::ConvPlan fastconv::plan_instrumented_megakernel(const ConvProblem& problem, const DeviceInfo& device,
                                                          const Instruments& instruments) {
  namespace own = algos::winograd_megakernel;
  namespace ffma = own::ffma;
  if (instruments.filter != nullptr) {
    if (problem.accuracy != AccuracyClass::ieee) {
      throw InvalidArgument(std::string("weight is given in class ") + name_of(problem.accuracy) +
                            "; expected class ieee, whose kernel has filter tasks");
    }
    if (ffma::select_access(problem) != ffma::Access::nhwc_pairs) {
      throw InvalidArgument(text_of("weight is given with ", problem.c, " channels and ", problem.k, " filters in ",
                                    name_of(problem.layout), "; filter tasks need even numbers of both, in nhwc"));
    }
  }
  return problem.accuracy == AccuracyClass::ieee ? own::plan_ffma(problem, device, instruments)
                                                 : own::plan_cuda(problem, device, instruments);
}
