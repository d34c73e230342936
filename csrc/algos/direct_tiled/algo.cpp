#include <algorithm>

#include "algos/direct_tiled/resident/plan.h"
#include "core/algorithm.h"
#include "core/fitted.h"
#include "core/names.h"
#include "core/roundoffs.h"

namespace fastconv::algos::direct_tiled {
namespace {

namespace own = fitted::direct_tiled;

std::string extent(const ConvProblem& problem) {
  return text_of(problem.r, "x", problem.s, " with stride ", problem.stride_h, "x", problem.stride_w, ", dilation ",
                 problem.dilation_h, "x", problem.dilation_w);
}

// On CUDA: what the kernel of two channels a thread has in half types.
Support supports_gated(const ConvProblem& problem, const DeviceInfo& device) {
  const auto no = [&](const std::string& met, const std::string& needed) {
    return Support::no("activation", met, "; direct_tiled needs ", needed, " for ", name_of(problem.activation));
  };
  if (size_of(problem.dtype) != 2) {
    return no(std::string("the class is ") + name_of(problem.accuracy), "fp16 or bf16");
  }
  const auto config = depthwise::choose(problem, device);
  if (!config || !config->pairs) {
    return no(text_of("the kernel is ", extent(problem), " of ", problem.c, " channels in ", problem.groups,
                      " groups, ", name_of(problem.layout)),
              "a depthwise one, 3x3, 5x5 or 7x7, of pairs of channels in nhwc");
  }
  return Support::yes();
}

Support supports(const ConvProblem& problem, const DeviceInfo& device) {
  const bool cpu = device.type == DeviceType::cpu;
  const std::int64_t limit = cpu ? cpu_max_scratch_bytes : max_bytes(device);
  if (!is_moderate(problem, limit / 4)) {
    return Support::no("kernel_size", "the kernel is ", extent(problem), "; no patch of that fits ",
                       (cpu ? "scratch" : "shared memory"));
  }
  if (!cpu && is_gated(problem.activation)) return supports_gated(problem, device);
  const bool fits = cpu ? choose_cpu_config(problem).scratch_bytes() <= limit : choose(problem, device).has_value();
  if (fits) return Support::yes();
  const std::int64_t needed =
      cpu ? choose_cpu_config(problem).scratch_bytes() : channel_bytes(problem, tiles[tile_count - 1], 1);
  return Support::no("kernel_size", "the kernel is ", extent(problem), "; one channel's patch and filters take ",
                     needed, " bytes of ", (cpu ? "scratch" : "shared memory"), ", direct_tiled has ", limit);
}

ConvPlan plan_cpu(const ConvProblem& problem, const DeviceInfo& device) {
  const CpuConfig config = choose_cpu_config(problem);
  ConvPlan plan;
  plan.kernel_plan = keep_plan(config);
  plan.config = text_of("tile ", config.p_tile, "x", register_tile::pixels, " outputs, ", config.k_tile, " filters, ",
                        config.channels, " channels");
  plan.workspace_bytes = static_cast<std::size_t>(device.processors * config.scratch_bytes());
  const double flops = 2.0 * static_cast<double>(config.tasks * config.sum_floats) *
                       static_cast<double>(problem.c_per_group() * problem.r * problem.s);
  plan.cost_us = 15.0 + std::max(fp32_us(flops, own::product.of(device), device),
                                 memory_us(problem.compulsory_bytes(), 1.0, device));
  return plan;
}

ConvPlan plan(const ConvProblem& problem, const DeviceInfo& device) {
  if (device.type == DeviceType::cpu) return plan_cpu(problem, device);
  const Choice choice = choose(problem, device);
  ConvPlan plan;
  plan.kernel_plan = keep_plan(choice);
  const auto& kernel = choice.value();
  if (const auto* config = std::get_if<depthwise::Config>(&kernel)) {
    plan.config = text_of("depthwise, strips of ", config->strip, " rows, ",
                          problem.layout == Layout::nhwc ? depthwise::columns : 1, " columns",
                          (config->pairs ? " of 2 channels" : ""), " a thread");
    plan.cost_us = config->cost_us * (config->pairs                    ? 1.0
                                      : problem.layout == Layout::nhwc ? own::depthwise_nhwc
                                                                       : own::depthwise_nchw);
    return plan;
  }
  if (const auto* config = std::get_if<few_filters::Config>(&kernel)) {
    plan.config = text_of("few filters, tile ", few_filters::tile_p, "x", few_filters::tile_q(problem.layout),
                          " outputs, ", config->k_tile, " filters, ", config->blocks, " blocks");
    plan.cost_us = config->cost_us;
    return plan;
  }
  if (const auto* config = std::get_if<pointwise::Plan>(&kernel)) {
    plan.config = text_of("1x1, tile ", config->pixels(), " outputs, ", config->filters(), " filters, ",
                          config->split(), " blocks a tile, ", config->shared_bytes, " bytes shared, ",
                          config->vector_x        ? "vectors"
                          : config->vector_weight ? "vectors of weights"
                                                  : "elements");
    plan.cost_us = config->cost_us;
    return plan;
  }
  if (const auto* config = std::get_if<resident::Config>(&kernel)) {
    plan.config =
        text_of("tile ", config->tile_p, "x", config->tile_q, " outputs, ", config->k_tile, " filters that stay, ",
                config->threads(), " threads, ", config->shared_bytes, " bytes shared");
    // Made for the windows of first layers: a patch that is used by one tap is staged for few products.
    plan.cost_us = (problem.r * problem.s == 1 ? own::resident_1x1 : 1.0) * config->cost_us;
    return plan;
  }
  const Config& config = std::get<Config>(kernel);
  const Tile& tile = tiles[config.tile];
  plan.config = text_of("tile ", tile.p, "x", tile.q, " outputs, ", config.k_tile, " filters of ", config.group_tile,
                        " groups, ", config.channels, " channels, ", config.shared_bytes, " bytes shared");
  // Few channels of a group are few products for a patch, unless their filters are large.
  const double taps = static_cast<double>(std::max<std::int64_t>(problem.r * problem.s, 9)) / 9.0;
  const double slowness =
      own::tiled_groups + own::tiled_group_channels / (taps * static_cast<double>(problem.c_per_group()));
  const bool large_depthwise = problem.groups > 1 && problem.c_per_group() == 1 && problem.r * problem.s > 49;
  plan.cost_us = (large_depthwise ? 0.68 : 1.0) * (problem.groups > 1 ? slowness : 1.0) * config.cost_us;
  return plan;
}

double roundoffs(const ConvProblem& problem, const DeviceInfo&) {
  return blocked_sum(reduction_length(problem), std::max(256.0, 64.0 * static_cast<double>(problem.r * problem.s)));
}

}  // namespace

extern const Algorithm algorithm;
const Algorithm algorithm{
    .name = "direct_tiled",
    .family = "direct",
    .summary = "direct, input patch and filters in shared memory",
    .source = 2,
    .roundoffs = roundoffs,
    .supports = supports,
    .plan = plan,
    .abilities = {.ranges = true, .gated = true},
};

}  // namespace fastconv::algos::direct_tiled
