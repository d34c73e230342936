// F(2x2,3x3) and F(4x4,3x3), staged: input transform, batched GEMM of the library, output transform.
#include <string>

#include "algos/winograd/config.h"

namespace fastconv {
namespace winograd {
namespace {

Support supports(const ConvProblem& problem, const char* name) {
  const auto no = [name](const char* code, const std::string& what, const char* needs) {
    return Support::no(code, what + "; " + name + " needs " + needs);
  };
  const auto pair = [](std::int64_t a, std::int64_t b) { return std::to_string(a) + "x" + std::to_string(b); };
  if (problem.r != 3 || problem.s != 3) return no("kernel_size", "the kernel is " + pair(problem.r, problem.s), "3x3");
  if (problem.stride_h != 1 || problem.stride_w != 1) {
    return no("stride", "stride is " + pair(problem.stride_h, problem.stride_w), "1x1");
  }
  if (problem.dilation_h != 1 || problem.dilation_w != 1) {
    return no("dilation", "dilation is " + pair(problem.dilation_h, problem.dilation_w), "1x1");
  }
  if (problem.groups != 1) return no("groups", "groups is " + std::to_string(problem.groups), "1");
  if (problem.pad_h > 2 || problem.pad_w > 2) {
    return no("padding", "padding is " + pair(problem.pad_h, problem.pad_w), "0 to 2");
  }
  // The GPU kernels number tiles with 31 bits; F(2x2) has the most.
  if (problem.n * ((problem.p() + 1) / 2) * ((problem.q() + 1) / 2) >= (std::int64_t{1} << 31) - tile_multiple) {
    return no("size", "the output has " + std::to_string(problem.n * problem.p() * problem.q()) + " pixels", "below 2^33");
  }
  return Support::yes();
}

std::size_t pixel_maxima_bytes(const ConvProblem& problem, const Config& config) {
  const bool scaled = config.mode != Mode::fp32;
  return scaled && problem.layout == Layout::nchw
             ? Config::align(static_cast<std::size_t>(problem.n * problem.h * problem.w) * sizeof(float))
             : 0;
}

ConvPlan plan(int m, const ConvProblem& problem, const DeviceInfo& device) {
  const Config config = make_config(m, problem, device);
  ConvPlan plan;
  plan.workspace_bytes =
      config.v_bytes() + config.m_bytes() + config.tile_exponent_bytes() + pixel_maxima_bytes(problem, config);
  const std::int64_t chunks = (config.tiles + config.chunk_tiles - 1) / config.chunk_tiles;
  plan.config = "F(" + std::to_string(m) + "x" + std::to_string(m) + ") " +
                (config.mode == Mode::fp32 ? "float32" : config.mode == Mode::split ? "3 x float16" : "half") +
                " GEMM " + std::to_string(config.frequencies()) + " x " + std::to_string(config.chunk_tiles) + "x" +
                std::to_string(config.depth) + "x" + std::to_string(problem.k) + ", chunks " + std::to_string(chunks);
  // Bytes of the three stages at memory speed, plus the GEMM: neither overlaps the other.
  const double tiles = static_cast<double>(config.tiles), f = static_cast<double>(config.frequencies());
  const double v_bytes = f * tiles * static_cast<double>(config.depth) * static_cast<double>(config.element_bytes);
  const double m_bytes = f * tiles * static_cast<double>(config.k_pad) * 4.0;
  const double transform_us =
      1e6 * (problem.compulsory_bytes() + v_bytes + m_bytes) / (0.85 * device.bandwidth_bytes_per_s);
  const double flops = 2.0 * f * tiles * static_cast<double>(config.depth) * static_cast<double>(problem.k);
  // cuBLAS reaches its rate only with a long reduction (measured: 140-160 of 790 TFLOP/s at depth 192, 570+ at 1536).
  const double depth = static_cast<double>(config.depth);
  const double rate = device.type == DeviceType::cpu       ? 0.7 * device.fp32_flops_per_s
                      : config.mode == Mode::fp32          ? device.fp32_flops_per_s
                                                           : device.fp16_tensor_flops_per_s * depth / (depth + 500.0);
  const double launches = device.type == DeviceType::cpu ? 20.0 : 10.0;
  plan.cost_us = launches + transform_us + 1e6 * flops / rate;
  return plan;
}

PackedWeight packed_weight(int m, const ConvProblem& problem, const DeviceInfo& device) {
  const Config config = make_config(m, problem, device);
  return {config.u_bytes(problem.k) + Config::align(static_cast<std::size_t>(problem.k) * sizeof(std::int32_t))};
}

}  // namespace
}  // namespace winograd

// The error multiples are derived in docs/numerics.md: rounding in the transforms, amplified by their norms.
namespace algos::winograd_f2 {
namespace {

double error_multiple(AccuracyClass accuracy) {
  switch (accuracy) {
    case AccuracyClass::ieee:
    case AccuracyClass::fp32:
    case AccuracyClass::tf32:
    case AccuracyClass::fp16:
    case AccuracyClass::bf16: return 4.0;
    case AccuracyClass::other: return 0.0;
  }
  return 0.0;
}
Support supports(const ConvProblem& problem, const DeviceInfo&) { return winograd::supports(problem, "winograd_f2"); }
ConvPlan plan(const ConvProblem& problem, const DeviceInfo& device) { return winograd::plan(2, problem, device); }
PackedWeight packed_weight(const ConvProblem& problem, const DeviceInfo& device) {
  return winograd::packed_weight(2, problem, device);
}

}  // namespace
extern const Algorithm algorithm;
const Algorithm algorithm{"winograd_f2", "winograd", "F(2x2,3x3), transform kernels around a batched GEMM", 1, true,
                          true, error_multiple, supports, plan, packed_weight};
}  // namespace algos::winograd_f2

namespace algos::winograd_f4 {
namespace {

double error_multiple(AccuracyClass accuracy) {
  switch (accuracy) {
    case AccuracyClass::ieee:
    case AccuracyClass::fp32:
    case AccuracyClass::tf32: return 4.0;
    // One half-precision product: the transforms amplify the rounding of V and U; beyond what `auto` admits.
    case AccuracyClass::fp16:
    case AccuracyClass::bf16: return 12.0;
    case AccuracyClass::other: return 0.0;
  }
  return 0.0;
}
Support supports(const ConvProblem& problem, const DeviceInfo&) { return winograd::supports(problem, "winograd_f4"); }
ConvPlan plan(const ConvProblem& problem, const DeviceInfo& device) { return winograd::plan(4, problem, device); }
PackedWeight packed_weight(const ConvProblem& problem, const DeviceInfo& device) {
  return winograd::packed_weight(4, problem, device);
}

}  // namespace
extern const Algorithm algorithm;
const Algorithm algorithm{"winograd_f4", "winograd", "F(4x4,3x3), transform kernels around a batched GEMM", 1, true,
                          true, error_multiple, supports, plan, packed_weight};
}  // namespace algos::winograd_f4
}  // namespace fastconv
