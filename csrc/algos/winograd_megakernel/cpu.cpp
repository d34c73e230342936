// The task map on torch's threads, and the offline filter transform.
#include "algos/winograd_megakernel/cpu/execution.h"
#include "algos/winograd_megakernel/cpu/plan.h"
#include "algos/winograd_megakernel/cpu/tasks.h"
#include "core/kernels.h"
#include "host/pack.h"

namespace fastconv::algos::winograd_megakernel {
namespace {

constexpr std::chrono::minutes wait_limit{2};  // a healthy wait is one task long: milliseconds on a busy machine

template <typename T>
void pack(const PackArgs& args, Runtime& runtime) {
  const ConvProblem& problem = args.problem;
  const std::int64_t c_pad = cpu::padded_channels(problem), k_pad = cpu::padded_filters(problem);
  const FilterStrides strides = args.strides();
  auto* u = static_cast<float*>(args.packed);                      // [36][K_pad / 16][C_pad][16]
  const auto pack_filter = [&](std::int64_t k, const T* filter) {  // null: zeros
    for (std::int64_t c = 0; c < c_pad; c += winograd::block_channels) {
      const auto count = static_cast<int>(std::min<std::int64_t>(winograd::block_channels, c_pad - c));
      alignas(64) float transformed[cpu::points * winograd::block_channels] = {};  // [36][count]
      if (filter != nullptr) {
        const auto channels = static_cast<int>(std::min<std::int64_t>(count, problem.c - c));
        winograd::transform_filter<cpu::tile_outputs>(filter + c * strides.channel, strides, channels, count,
                                                      transformed, count);
      }
      for (std::int64_t f = 0; f < cpu::points; ++f) {
        float* target = u + (f * k_pad + k / cpu::filter_lanes * cpu::filter_lanes) * c_pad + k % cpu::filter_lanes;
        for (int i = 0; i < count; ++i) target[(c + i) * cpu::filter_lanes] = transformed[f * count + i];
      }
    }
  };
  pack_changed_filters<T>(args, runtime, cpu::filter_lanes, pack_filter);
  if (args.snapshot != nullptr) return;
  for (std::int64_t k = problem.k; k < k_pad; ++k) pack_filter(k, nullptr);
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
  dispatch_dtype(args.problem.dtype, [&](auto zero) { pack<decltype(zero)>(args, runtime); });
}

}  // namespace fastconv::algos::winograd_megakernel
