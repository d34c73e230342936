// The task map on torch's threads, and the offline filter transform.
#include <cstring>

#include "algos/winograd_megakernel/cpu/execution.h"
#include "algos/winograd_megakernel/cpu/plan.h"
#include "algos/winograd_megakernel/cpu/tasks.h"
#include "core/kernels.h"

namespace fastconv::algos::winograd_megakernel {
namespace {

constexpr std::chrono::minutes wait_limit{2};  // a healthy wait is one task long: milliseconds on a busy machine

template <typename T>
void pack_filters(const PackArgs& args, std::int64_t begin, std::int64_t end) {
  const ConvProblem& problem = args.problem;
  const std::int64_t c_pad = cpu::padded_channels(problem), k_pad = cpu::padded_filters(problem), size = problem.c * 9;
  const FilterStrides strides = args.strides();
  const auto* weight = static_cast<const T*>(args.weight);  // [K, C, 3, 3]
  auto* snapshot = static_cast<T*>(args.snapshot);          // like weight, or null
  auto* u = static_cast<float*>(args.packed);               // [36][K_pad / 16][C_pad][16]
  for (std::int64_t k = begin; k < end; ++k) {
    const bool padding = k >= problem.k;
    const T* filter = weight + k * size;
    const std::size_t bytes = static_cast<std::size_t>(size) * sizeof(T);
    if (snapshot != nullptr && (padding || std::memcmp(snapshot + k * size, filter, bytes) == 0)) continue;
    for (std::int64_t c = 0; c < c_pad; c += winograd::block_channels) {
      const auto count = static_cast<int>(std::min<std::int64_t>(winograd::block_channels, c_pad - c));
      alignas(64) float transformed[cpu::points * winograd::block_channels] = {};  // [36][count]
      if (!padding) {
        const auto channels = static_cast<int>(std::min<std::int64_t>(count, problem.c - c));
        winograd::transform_filter<cpu::tile_outputs>(filter + c * strides.channel, strides, channels, count,
                                                      transformed, count);
      }
      for (std::int64_t f = 0; f < cpu::points; ++f) {
        float* target = u + (f * k_pad + k / cpu::filter_lanes * cpu::filter_lanes) * c_pad + k % cpu::filter_lanes;
        for (int i = 0; i < count; ++i) target[(c + i) * cpu::filter_lanes] = transformed[f * count + i];
      }
    }
    if (snapshot != nullptr) std::memcpy(snapshot + k * size, filter, bytes);
  }
}

}  // namespace

void run_cpu(const ConvArgs& args, Runtime& runtime) {
  const TaskMap& map = plan_as<TaskMap>(args.kernel_plan);
  cpu::Execution execution(map, wait_limit);
  dispatch_dtype(args.problem.dtype, [&](auto zero) {
    const cpu::Tasks<decltype(zero)> tasks(args, map);
    runtime.parallel_for(0, runtime.device().processors, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t worker = begin; worker < end; ++worker) execution.work(tasks);
    });
  });
  execution.rethrow();
}

void pack_cpu(const PackArgs& args, Runtime& runtime) {
  dispatch_dtype(args.problem.dtype, [&](auto zero) {
    runtime.parallel_for(0, cpu::padded_filters(args.problem), cpu::filter_lanes,
                         [&](std::int64_t begin, std::int64_t end) { pack_filters<decltype(zero)>(args, begin, end); });
  });
}

}  // namespace fastconv::algos::winograd_megakernel
