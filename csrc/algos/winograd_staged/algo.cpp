// F(2x2,3x3) and F(4x4,3x3), staged: input transform, batched GEMM, output transform.
#include <algorithm>
#include <cmath>
#include <string>

#include "algos/winograd_staged/plan.h"
#include "core/cost.h"
#include "core/fitted.h"
#include "core/roundoffs.h"
#include "winograd/limits.h"

namespace fastconv {
namespace algos::winograd_staged {
namespace {

Support supports(const ConvProblem& problem, const char* name) {
  if (Support support = supports_winograd(problem, name); !support.ok) return support;
  // The GPU kernels number tiles with 31 bits; F(2x2) has the most.
  if (problem.n * ((problem.p() + 1) / 2) * ((problem.q() + 1) / 2) >= (std::int64_t{1} << 31) - tile_multiple) {
    return Support::no("size", "the output has ", problem.n * problem.p() * problem.q(), " pixels; ", name,
                       " needs below 2^33");
  }
  return Support::yes();
}

struct Volume {
  double u_bytes, v_bytes, m_bytes, flops;  // U once, the rest for all tiles

  // How fast the stages exchange V and M, as a part of the memory's bandwidth: so many bytes of them stay in an H200's
  // L2 cache of 60 MB, beside what else is written and read there, and come faster.
  double rate(double of_memory) const {
    constexpr double cached_bytes = 24.5e6, of_cache = 1.5;
    const double cached = std::min(1.0, cached_bytes / (v_bytes + m_bytes));
    return 1.0 / (cached / of_cache + (1.0 - cached) / of_memory);
  }
};

Volume volume_of(const ConvProblem& problem, const Config& config) {
  const double elements = static_cast<double>(config.points()) * static_cast<double>(config.tiles);
  const double products = config.mode == Mode::split ? 3.0 : 1.0;
  return {static_cast<double>(config.u_bytes(problem.k)),
          elements * static_cast<double>(config.depth) * static_cast<double>(config.element_bytes),
          elements * static_cast<double>(config.k_pad) * sizeof(float),
          2.0 * elements * products * static_cast<double>(config.c_pad) * static_cast<double>(problem.k)};
}

// Of our own product: a block's work tiles one after the other, a stage at 1.19 times the tensor cores' sustained rate
// (which longer runs do not keep up) and 0.48 us for a work tile's output; or the memory's time.
double wgmma_gemm_us(const ConvProblem& problem, const Config& config, const DeviceInfo& device, const Volume& w) {
  const Stationary stationary = config.stationary;
  const ProductGrid grid(stationary, config.tile_n, config.points(), config.tiles, problem.k, device.processors);
  const double columns = stationary == Stationary::tiles ? config.tile_n : stationary_filters;
  const double stage = tensor_us(6.0 * tile_m * columns * product_channels * device.processors, 1.19, device);
  const double work_tile = static_cast<double>(config.groups) * stage + 0.48;
  return std::max(static_cast<double>(grid.block_work_tiles) * work_tile,
                  memory_us(w.u_bytes + (w.v_bytes + w.m_bytes) / w.rate(0.84), 1.0, device));
}

// The library's FP32 product: whole tiles of 64 x 64, or the memory's time; and a block walks the whole reduction.
double plain_product_us(const ConvProblem& problem, const Config& config, const DeviceInfo& device, const Volume& w) {
  const auto whole = [](std::int64_t size) { return static_cast<double>(round_up(size, 64)); };
  const double padding = whole(config.tiles) * whole(problem.k) / static_cast<double>(config.tiles * problem.k);
  return std::max(memory_us(w.u_bytes + w.v_bytes + w.m_bytes, 0.85, device),
                  fp32_us(w.flops * padding, 1.07, device)) +
         0.0163 * static_cast<double>(config.c_pad);
}

// Each stage at the rate it was measured to reach on an H200 (docs/log/01-staged-winograd-fp32.md); they do not
// overlap. The GEMM is bound by memory too until C and K are large.
double cuda_cost_us(const ConvProblem& problem, const Config& config, const DeviceInfo& device) {
  const Volume w = volume_of(problem, config);
  const double element = static_cast<double>(size_of(problem.dtype));
  const double x_bytes = element * static_cast<double>(problem.n * problem.c * problem.h * problem.w);
  const double y_bytes = element * static_cast<double>(problem.y_numel()) * (problem.has_residual() ? 2.0 : 1.0);
  const bool nchw = problem.layout == Layout::nchw, plain = config.mode == Mode::fp32;
  const double rate = config.wgmma_gemm ? w.rate(0.95) : plain ? w.rate(0.6) : w.rate(0.78);  // of the transforms
  const double input = memory_us(x_bytes + w.v_bytes, rate, device);
  const double library_share = problem.k % 8 == 0 ? 0.70 : 0.10;  // in half types; V's channels are padded
  const double gemm = config.wgmma_gemm ? wgmma_gemm_us(problem, config, device, w)
                      : plain ? plain_product_us(problem, config, device, w)
                              : std::max(memory_us(w.u_bytes + (w.v_bytes + w.m_bytes) / w.rate(0.84), 1.0, device),
                                         tensor_us(w.flops, library_share, device));
  const double output =
      memory_us(w.m_bytes, rate, device) + memory_us(y_bytes, nchw ? std::min(rate, 0.8) : rate, device);
  // Three launches; the larger tile's transforms take longer to walk, and our own product's first and last work tiles
  // more channels; what begins beside the product is there at its end.
  const double own =
      9.8 + 0.4 * config.m - (config.overlaps_output ? 1.1 : 0.0) + 0.39 * static_cast<double>(config.groups);
  const double launches = config.wgmma_gemm ? own : plain ? 9.0 + 1.4 * config.m : 11.0 + 1.2 * config.m;
  // Beyond the bytes, which the output has: NCHW waits for it row by row.
  const bool waits = nchw && config.m == 4, floats = problem.dtype == DType::f32;
  const double passes = waits ? (floats ? 2.3 : 2.9) : floats ? 0.1 : 0.2;
  return launches + input + gemm + output + (plain ? 0.0 : residual_us(problem, passes, device));
}

// V and M stay in the caches, which give so many times the memory's bandwidth to each thread; U comes from memory once
// per chunk; the library's products reach a share of the vectors' rate, half of it with so many channels.
double cpu_cost_us(const ConvProblem& problem, const Config& config, std::int64_t chunks, const DeviceInfo& device) {
  namespace own = fitted::winograd_staged;
  const Volume w = volume_of(problem, config);
  const double depth = static_cast<double>(config.depth);
  return 15.0 * static_cast<double>(chunks) +
         memory_us(problem.compulsory_bytes() + w.v_bytes + w.m_bytes, own::caches.of(device) * device.processors,
                   device) +
         memory_us(w.u_bytes * static_cast<double>(chunks), 1.0, device) +
         fp32_us(w.flops, own::products.of(device) * depth / (depth + own::half_channels.of(device)), device);
}

// What selects a kernel on a GPU.
std::string describe_kernels(const Config& config, Layout layout) {
  std::string text;
  if (config.wgmma_gemm) {
    text = config.stationary == Stationary::filters ? " by wgmma, U stays"
           : config.stationary == Stationary::tiles ? text_of(" by wgmma, V stays, ", config.tile_n, " filters")
                                                    : " by wgmma, U in stages";
  }
  text += text_of(", channels by ", config.x_vector);
  if (layout == Layout::nchw) return text;
  text += text_of(", filters by ", config.y_vector, config.plain ? ", plain end" : "");
  if (config.cached) text += config.overlaps_output ? ", M cached, overlapped" : ", M cached";
  return text;
}

ConvPlan plan(int m, const ConvProblem& problem, const DeviceInfo& device) {
  const Config config = make_config(m, problem, device);
  ConvPlan plan;
  plan.workspace_bytes =
      config.v_bytes() + config.m_bytes() + config.tile_exponent_bytes() + config.group_exponent_bytes();
  const std::int64_t chunks = (config.tiles + config.chunk_tiles - 1) / config.chunk_tiles;
  plan.config =
      text_of("F(", m, "x", m, ") ",
              config.mode == Mode::fp32    ? "float32"
              : config.mode == Mode::split ? "3 x float16"
                                           : "half",
              " GEMM ", config.points(), " x ", config.chunk_tiles, "x", config.depth, "x", problem.k,
              device.type == DeviceType::cuda ? describe_kernels(config, problem.layout) : "", ", chunks ", chunks);
  plan.cost_us = device.type == DeviceType::cpu ? cpu_cost_us(problem, config, chunks, device)
                                                : cuda_cost_us(problem, config, device);
  plan.kernel_plan = keep_plan(config);
  plan.reads_nhwc = device.type == DeviceType::cuda;  // every access runs along C
  return plan;
}

// Half types are multiplied as they are, the class `tf32` as `fp32`.
double roundoffs(double noise_gain, const ConvProblem& problem, const DeviceInfo& device) {
  const bool cpu = device.type == DeviceType::cpu;
  if (cpu || problem.accuracy == AccuracyClass::ieee) {
    constexpr double block = 256.0;  // of MKL's sums; cuBLAS has none
    return winograd_in_fp32(noise_gain, problem.c, cpu ? block : static_cast<double>(problem.c));
  }
  if (problem.dtype == DType::f32) return winograd_in_split_fp16(noise_gain, 1.6, problem.c);
  return winograd_in_fp16(noise_gain, 2.0, problem.dtype == DType::bf16 ? 8.0 : 1.0);
}

PackedWeight packed_weight(int m, const ConvProblem& problem, const DeviceInfo& device) {
  const Config config = make_config(m, problem, device);
  return {config.u_bytes(problem.k) + align_bytes(static_cast<std::size_t>(problem.k) * sizeof(std::int32_t))};
}

// name: of the instance, which supports() says, too.
template <int m>
constexpr const char* name = m == 2 ? "winograd_f2" : "winograd_f4";
template <int m>
constexpr TransformNoise noise = m == 2 ? f2_noise : f4_noise;

template <int m>
constexpr Algorithm make_algorithm(const char* summary) {
  return {
      .name = name<m>,
      .family = "winograd",
      .summary = summary,
      .source = 1,
      .roundoffs = [](const ConvProblem& problem,
                      const DeviceInfo& device) { return roundoffs(noise<m>.gain, problem, device); },
      .supports = [](const ConvProblem& problem, const DeviceInfo&) { return supports(problem, name<m>); },
      .plan = [](const ConvProblem& problem, const DeviceInfo& device) { return plan(m, problem, device); },
      .packed_weight = [](const ConvProblem& problem,
                          const DeviceInfo& device) { return packed_weight(m, problem, device); },
      .arithmetic = {.tile_rows = m, .tile_columns = m, .noise = noise<m>, .exact = m == 2},
      .abilities = {.pool = true, .ranges = true},
  };
}

}  // namespace
}  // namespace algos::winograd_staged

namespace algos::winograd_f2 {
extern const Algorithm algorithm;
constinit const Algorithm algorithm =
    winograd_staged::make_algorithm<2>("F(2x2,3x3), transform kernels around a batched GEMM");
}  // namespace algos::winograd_f2

namespace algos::winograd_f4 {
extern const Algorithm algorithm;
constinit const Algorithm algorithm =
    winograd_staged::make_algorithm<4>("F(4x4,3x3), transform kernels around a batched GEMM");
}  // namespace algos::winograd_f4
}  // namespace fastconv
