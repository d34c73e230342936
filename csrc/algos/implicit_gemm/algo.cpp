// Convolution as one matrix product whose left operand is never stored, on tensor cores.
#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <variant>

#include "algos/implicit_gemm/kernels.h"
#include "core/algorithm.h"
#include "core/cost.h"
#include "core/fitted.h"
#include "core/names.h"
#include "core/roundoffs.h"

namespace fastconv::algos::implicit_gemm {
namespace {

namespace own = fitted::implicit_gemm;

// Products of halves are not IEEE float32 arithmetic. Split ones err by 1.6 roundoffs, their sums are promoted.
double roundoffs(const ConvProblem& problem, const DeviceInfo& device) {
  const double terms = reduction_length(problem);
  if (problem.accuracy == AccuracyClass::ieee) return 0.0;
  if (device.type == DeviceType::cpu) return blocked_sum(terms, 300.0);
  return problem.accuracy == AccuracyClass::tf32 ? tf32_products : std::sqrt(2.6 + 0.0027 * terms);
}

// On CUDA, where the kernel that multiplies reads each value once, on its way into registers.
Support supports_affine(const ConvProblem& problem, const DeviceInfo& device) {
  const auto no = [](const std::string& met, const std::string& needed) {
    return Support::no("affine", met, "; implicit_gemm needs ", needed, " for an affine input");
  };
  if (!persistent::is_used(problem, device)) {
    return no(text_of("compute capability is ", device.compute_capability, " and a pixel has ", problem.c,
                      " channels in ", problem.groups, " groups"),
              "90, whole 16 bytes and one group");
  }
  if (problem.r * problem.s != 1 || problem.pad_h != 0 || problem.pad_w != 0) {
    return no(text_of("the filter is ", problem.r, "x", problem.s, ", the padding ", problem.pad_h, "x", problem.pad_w),
              "1x1 and 0x0");
  }
  if (problem.input_activation == Activation::silu) return no("its activation is silu", "none, relu or relu6");
  if (persistent::make_weights(problem).filter_tile < persistent::min_affine_filters) {
    return no(text_of("the filters are ", problem.k), "more");
  }
  return Support::yes();
}

// On CUDA, where kernels of their own end with a gated activation: Hopper's, in classes of 11 bits and fewer.
Support supports_gated(const ConvProblem& problem, const DeviceInfo& device) {
  const auto no = [&](const std::string& met, const std::string& needed) {
    return Support::no("activation", met, "; implicit_gemm needs ", needed, " for ", name_of(problem.activation));
  };
  const bool single = problem.accuracy == AccuracyClass::tf32;
  if (!single && size_of(problem.dtype) != 2) {
    return no(std::string("the class is ") + name_of(problem.accuracy), "fp16, bf16 or tf32");
  }
  if (!persistent::is_used(problem, device)) {
    return no(text_of("compute capability is ", device.compute_capability, " and a pixel has ", problem.c,
                      " channels in ", problem.groups, " groups"),
              "90, whole 16 bytes and one group");
  }
  if (single && problem.r * problem.s != 1) {
    return no(text_of("the filter is ", problem.r, "x", problem.s), "1x1 in class tf32");
  }
  if (problem.has_residual()) return no("there is a residual", "none");
  if (problem.input_affine) return no("the input is affine", "a plain one");
  return Support::yes();
}

// In Hopper's kernels, where all filters of a block belong to one pixel of the shuffle.
Support supports_shuffle(const ConvProblem& problem, const DeviceInfo& device) {
  const auto no = [](const std::string& met, const std::string& needed) {
    return Support::no("shuffle", met, "; implicit_gemm needs ", needed, " for a shuffle");
  };
  if (!persistent::is_used(problem, device)) {
    return no(text_of("a pixel has ", problem.c, " channels, or the device is not of compute capability 90"),
              "whole 16 bytes there");
  }
  if (const int tile = persistent::make_weights(problem).filter_tile;
      !fits_shuffle(problem, tile) && !(tile == 128 && fits_shuffle(problem, 64))) {
    return no(text_of("y has ", problem.y_k(), " channels"), text_of("a multiple of ", tile == 128 ? 64 : tile));
  }
  constexpr std::int64_t limit = std::int64_t{1} << 30;
  if (problem.y_q() * problem.y_pitch() >= limit) {
    return no(text_of("a row of y has ", problem.y_q(), " pixels of ", problem.y_pitch(), " channels"), "fewer");
  }
  return Support::yes();
}

ConvPlan plan(const ConvProblem& problem, const DeviceInfo& device);

// The persistent kernel copies a residual to shared memory, and adds it to partial sums, as a tensor of its own.
bool reads_dense_residual(const ConvProblem& problem, const DeviceInfo& device) {
  if (!problem.has_residual() || problem.y_channels == 0 || problem.output_numel() == 0) return false;
  if (!persistent::is_used(problem, device)) return false;
  return std::holds_alternative<persistent::Plan>(plan_as<Plan>(plan(problem, device).kernel_plan.get()));
}

Support supports(const ConvProblem& problem, const DeviceInfo& device) {
  if (problem.groups > max_groups) {
    return Support::no("groups", "groups is ", problem.groups, "; implicit_gemm needs at most ", max_groups);
  }
  if (device.type == DeviceType::cuda && device.compute_capability < 80) {
    return Support::no("device", "compute capability is ", device.compute_capability,
                       "; implicit_gemm needs 80 or more");
  }
  // The kernels number pixels, taps and blocks with 31 bits.
  constexpr double limit = 2147483648.0 - portable::pixel_tile;
  const double padded = static_cast<double>(problem.n) * static_cast<double>(problem.h + 2 * problem.pad_h) *
                        static_cast<double>(problem.w + 2 * problem.pad_w);
  const portable::Plan config = portable::make_plan(problem);
  const double blocks = static_cast<double>(config.pixel_tiles) * static_cast<double>(config.filter_tiles);
  if (std::max({padded, static_cast<double>(config.reduction), blocks}) >= limit) {
    return Support::no("size", "the padded input has ", padded, " pixels, the filter ", config.reduction,
                       " weights; implicit_gemm needs both below 2^31");
  }
  if (persistent::is_used(problem, device) && std::max(problem.stride_h, problem.stride_w) > persistent::max_stride) {
    return Support::no("stride", "stride is ", problem.stride_h, "x", problem.stride_w,
                       "; implicit_gemm needs at most ", persistent::max_stride, " on this GPU");
  }
  if (device.type == DeviceType::cuda && is_gated(problem.activation)) {
    if (Support support = supports_gated(problem, device); !support.ok) return support;
  }
  if (problem.shuffles()) {
    if (Support support = supports_shuffle(problem, device); !support.ok) return support;
  }
  if (problem.input_affine && device.type == DeviceType::cuda) return supports_affine(problem, device);
  if (reads_dense_residual(problem, device)) {
    return Support::no("ranges", "y, and with it the residual, is a range of a tensor of ", problem.y_channels,
                       " channels; implicit_gemm's persistent kernel needs a residual of its own");
  }
  return Support::yes();
}

// Tensor time of whole tiles in whole waves, at the rate seen on an H200; loads and stores hide only partly behind it.
double cuda_cost_us(const ConvProblem& problem, const portable::Plan& config, const DeviceInfo& device) {
  const double blocks =
      static_cast<double>(config.pixel_tiles) * static_cast<double>(config.filter_tiles * problem.groups);
  const double slots = static_cast<double>(device.processors) * portable::blocks_per_processor;
  const double steps = static_cast<double>(config.steps);
  const double rounded = in_whole_waves(blocks, slots);
  const double flops =
      2.0 * config.products * rounded * portable::pixel_tile * config.filter_tile * steps * portable::depth_tile;
  const double share = config.mode == Mode::split && config.filter_tile == 48 ? own::portable_48 : 0.30;
  const double tensor_us = fastconv::tensor_us(flops, share, device);
  // Element by element the gathering decides, not the tensor cores.
  const double gathered = blocks * portable::pixel_tile * steps * portable::depth_tile;
  const bool half = config.mode != Mode::split && problem.groups == 1, narrow = config.filter_tile <= 32;
  const double gather_rate = config.mode == Mode::split ? 0.0045 : !half ? 0.007 : narrow ? 0.0144 : 0.01;
  const bool gathers = !loads_vectors(problem);
  const double gather_us = gathers ? fp32_us(gathered, gather_rate, device) : 0.0;
  // What a block needs for its reduction, however few blocks there are; the short ones of groups stand in line.
  const double step_us = half && gathers ? (narrow ? 1.1 : 2.0) : 0.8;
  const double in_line = config.mode == Mode::split ? 1.0 : own::portable_half_groups;
  const double latency_us = problem.groups == 1 ? step_us * steps : in_line * (2.0 + 0.5 * steps) * rounded / slots;
  return (half ? 6.4 : 8.0) +
         (!gathers ? 0.0
          : half   ? 0.6
                   : 5.5) +
         std::max({tensor_us, latency_us, gather_us}) + memory_us(problem.compulsory_bytes(), 0.6, device);
}

std::string describe_tile(const persistent::Plan& plan) {
  const std::string tile = plan.flat ? text_of(plan.tile_q, " outputs in a row")
                                     : text_of(plan.tile_n, "x", plan.tile_p, "x", plan.tile_q, " outputs");
  std::string parts;
  if (plan.split_k > 1) {
    parts =
        text_of(", ", (plan.whole > 0 ? text_of("the last ", plan.tiles() - plan.whole, " tiles in ") : std::string()),
                plan.split_k, " splits", (plan.clusters ? " in a cluster" : ""));
  }
  return text_of(describe(plan.weights.mode), (plan.source == persistent::Source::converted ? " beforehand" : ""),
                 (plan.affine() ? " of an affine input" : ""), ", tile ", tile, ", ", plan.filter_tile, " filters, ",
                 plan.stages * plan.stage_taps, " steps of ", plan.step_channels(),
                 (plan.whole_window ? ", whole windows" : ", single taps"), parts);
}

std::string describe_tile(const single_tile::Plan& plan, AccuracyClass accuracy) {
  const std::string tile = plan.kind == single_tile::Tile::rows
                               ? text_of(plan.pixels, " outputs in a row")
                               : text_of(plan.tile_n, "x", plan.tile_p, "x", plan.tile_q, " outputs");
  const char* type = accuracy == AccuracyClass::tf32 ? "TF32" : describe(select_mode(accuracy));  // fp32: 3 x float16
  return text_of("single tile, ", type, ", tile ", tile, ", ", plan.filter_tile, " filters, ", plan.steps, " steps of ",
                 plan.step_channels, (plan.stage_taps > 1 ? ", whole windows" : ", single taps"),
                 (plan.split_k > 1 ? text_of(", ", plan.split_k, " splits in a cluster") : ""));
}

std::string describe_tile(const few_channels::Plan& plan) {
  return text_of("few channels, ", describe(plan.weights.mode), ", tile ", plan.tile_p, "x", plan.tile_q, " outputs, ",
                 plan.weights.filter_tile, " filters, ", plan.steps, " steps of ", 2 * few_channels::step_pairs,
                 (plan.dense ? ", dense" : ", padded"));
}

// What the larger `wgmma` kernel takes of the time that is planned for it, by kind of problem: fitted to runs on an
// H200 (docs/log/12-implicit-gemm-wgmma-2.md).
double wgmma_factor(const persistent::Plan& plan, const ConvProblem& problem) {
  if (size_of(problem.dtype) == 2) return own::half;
  if (plan.source == persistent::Source::converted) return own::converted;
  if (plan.weights.filter_tile == 48) return problem.n < 8 ? own::few_filters_small_batch : own::few_filters;
  if (plan.weights.mode == Mode::single) return problem.r * problem.s == 1 ? own::tf32_1x1 : own::tf32;
  return plan.filter_tile == 64 && plan.split_k == 1 ? own::fp32_narrow : own::fp32;
}

// A tile's outputs that are stored neither by vectors nor by quads go to memory one by one.
double element_stores_us(const persistent::Plan& plan, const ConvProblem& problem, const DeviceInfo& device) {
  if (plan.stores_vectors || plan.stores_quads) return 0.0;
  const bool few = problem.layout == Layout::nhwc && problem.k <= persistent::few_filters;  // a lane has one in turn
  const double values = static_cast<double>(plan.pixel_tile()) * (few ? 4.0 : plan.filter_tile);
  return clocks_us(
      own::element_store * values * static_cast<double>(ceil_div<std::int64_t>(plan.tiles(), device.processors)),
      device);
}

// Its time, without a transposition. The rates of NCHW were fitted like the factors.
double wgmma_cost_us(const persistent::Plan& plan, const ConvProblem& problem, const DeviceInfo& device) {
  const persistent::Weights& weights = plan.weights;  // class tf32: half as many bytes as the problem's
  const double values = static_cast<double>(problem.k * problem.c * weights.taps);
  const double x = static_cast<double>(problem.n * problem.c * problem.h * problem.w) * size_of(problem.dtype);
  const double bytes = problem.compulsory_bytes() - (1.0 - touched_share(problem)) * x -
                       (weights.mode == Mode::single ? 2.0 : 0.0) * values;
  const double kernel_us = std::max(clocks_us(persistent::plan_clocks(plan, device.processors), device),
                                    memory_us(bytes, own::memory, device));
  const double quads_us =
      (size_of(problem.dtype) == 2 ? own::nchw_half : own::nchw) * 1e-6 * static_cast<double>(problem.output_numel());
  const double launch_us = plan.weights.mode == Mode::single ? own::single_launch : own::launch;
  return wgmma_factor(plan, problem) * (launch_us + kernel_us) + element_stores_us(plan, problem, device) +
         (plan.stores_quads ? quads_us : 0.0);
}

// NCHW: a block of the single tile stores its values one by one, however few blocks there are. Of a full machine's the
// tile's own cost knows (single_tile/plan.h).
double few_blocks_us(const single_tile::Plan& plan, const ConvProblem& problem) {
  if (problem.layout != Layout::nchw) return 0.0;
  return own::single_stores * 1e-3 * static_cast<double>(plan.pixels) * plan.filter_tile;
}

ConvPlan plan_for_hopper(const ConvProblem& problem, const DeviceInfo& device) {
  const persistent::Weights weights = persistent::make_weights(problem);
  persistent::Plan plan = persistent::make_plan(problem, weights, device.processors);
  const double persistent_us = wgmma_cost_us(plan, problem, device);
  std::optional<single_tile::Plan> other;
  if (!problem.input_affine) other = single_tile::make_plan(problem, weights.filter_tile, device);
  if (other) {
    other->exponents_offset = weights.weight_bytes();
    other->weights_offset = weights.mode == Mode::single ? weights.rounded_offset() : 0;
    const double factor = problem.r * problem.s == 1 ? own::single_tile_1x1 : own::single_tile;
    const double us = factor * single_tile::cost_us(*other, problem, device) + few_blocks_us(*other, problem);
    if (us < persistent_us) {
      return {"wgmma, " + describe_tile(*other, problem.accuracy), 0, us, keep_plan<Plan>(*other), true};
    }
  }
  return {"wgmma, " + describe_tile(plan), plan.workspace_bytes(problem), persistent_us, keep_plan<Plan>(plan), true};
}

ConvPlan plan_portable(const ConvProblem& problem, const DeviceInfo& device) {
  const portable::Plan config = portable::make_plan(problem);
  return {
      text_of(describe(config.mode), ", tile ", portable::pixel_tile, " outputs, ", config.filter_tile, " filters, ",
              config.steps, " steps of ", portable::depth_tile, ", ", (config.loads_vectors ? "vectors" : "elements")),
      0, cuda_cost_us(problem, config, device), keep_plan<Plan>(config), config.loads_vectors};
}

// Beyond what the tiles' bytes have of it.
double residual_passes(const ConvProblem& problem) {
  const bool product = problem.r * problem.s == 1;
  if (problem.dtype != DType::f32) return product ? 0.2 : 0.9;
  if (problem.accuracy == AccuracyClass::tf32) return product ? 0.15 : 1.6;
  return product ? 0.2 : 1.3;
}

// And what it takes however small it is, known of 1x1 layers.
double residual_start_us(const ConvProblem& problem) {
  if (!problem.has_residual() || problem.r * problem.s != 1) return 0.0;
  return problem.accuracy == AccuracyClass::tf32 ? 3.0 : problem.dtype != DType::f32 ? 1.0 : 0.0;
}

ConvPlan plan(const ConvProblem& problem, const DeviceInfo& device) {
  if (device.type == DeviceType::cpu) {
    return {"float32, a pixel at a time", 0, reference_us(problem, device)};
  }
  const bool hopper = persistent::is_used(problem, device);
  ConvPlan other = hopper ? plan_for_hopper(problem, device) : plan_portable(problem, device);
  if (hopper) other.cost_us += residual_us(problem, residual_passes(problem), device) + residual_start_us(problem);
  if (is_gated(problem.activation) || problem.shuffles()) return other;  // few_channels has no kernels for that
  std::optional<few_channels::Plan> few = few_channels::make_plan(problem, device);
  if (!few) return other;
  const double transposition = other.reads_nhwc && problem.layout == Layout::nchw
                                   ? transposition_us(static_cast<double>(nhwc_input_bytes(problem)), device)
                                   : 0.0;
  if (few->cost_us >= other.cost_us + transposition) return other;
  few->weights_offset = few_channels_offset(problem, device);
  return {describe_tile(*few), 0, few->cost_us, keep_plan<Plan>(*few)};
}

PackedWeight packed_weight(const ConvProblem& problem, const DeviceInfo& device) {
  if (device.type == DeviceType::cpu) {
    const std::int64_t reduction = problem.r * problem.s * problem.c_per_group();
    return {align_bytes(static_cast<std::size_t>(reduction * problem.k) * sizeof(float))};
  }
  const std::size_t offset = few_channels_offset(problem, device);
  if (const auto few = few_channels::make_weights(problem, device)) return {offset + few->bytes()};
  return {offset};
}

}  // namespace

extern const Algorithm algorithm;
const Algorithm algorithm{
    .name = "implicit_gemm",
    .family = "gemm",
    .summary = "one tensor-core GEMM that gathers its input on the fly, FP32 as split FP16",
    .roundoffs = roundoffs,
    .supports = supports,
    .plan = plan,
    .packed_weight = packed_weight,
    .abilities = {.affine = true, .ranges = true, .gated = true, .shuffle = true},
};

}  // namespace fastconv::algos::implicit_gemm
