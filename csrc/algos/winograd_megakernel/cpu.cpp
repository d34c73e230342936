// The task map on torch's threads, and the offline filter transform.
#include "algos/winograd_megakernel/cpu/execution.h"
#include "algos/winograd_megakernel/cpu/plan.h"
#include "algos/winograd_megakernel/cpu/tasks.h"
#include "core/kernels.h"
#include "host/pack.h"

namespace fastconv::algos::winograd_megakernel {
namespace {

constexpr std::chrono::minutes wait_limit{2};  // a healthy wait is one task long: milliseconds on a busy machine

// The transforms of 16 filters at a time, lane by lane, for some channels.
template <typename T>
FASTCONV_CPU_CLONES void transform_lanes(const T* filters,  // [count][C][3][3], where `strides` says, `apart` apart
                                         std::int64_t apart, FilterStrides strides, int count, int channels,
                                         int padded_channels,
                                         float* u,  // [36][padded_channels][16], the last ones zero
                                         std::int64_t point_stride) {
  using Step = winograd::FilterStep<cpu::tile_outputs>;
  constexpr int lanes = cpu::filter_lanes, alpha = Step::out;
  for (int c = 0; c < padded_channels; ++c) {
    alignas(64) float taps[9 * lanes] = {};  // [3][3][16]
    alignas(64) float half[alpha * 3 * lanes];
    for (int lane = 0; lane < (c < channels ? count : 0); ++lane) {
      const T* filter = filters + lane * apart + c * strides.channel;
      for (int tap = 0; tap < 9; ++tap) taps[tap * lanes + lane] = to_float(filter[tap * strides.tap]);
    }
    winograd::transform_lines<Step>(taps, 3 * lanes, half, 3 * lanes, 3 * lanes);
    for (int i = 0; i < alpha; ++i) {
      winograd::transform_lines<Step>(half + i * 3 * lanes, lanes, u + i * alpha * point_stride + c * lanes,
                                      point_stride, lanes);
    }
  }
}

template <typename T>
void pack(const PackArgs& args, Runtime& runtime) {
  const ConvProblem& problem = args.problem;
  const std::int64_t c_pad = cpu::padded_channels(problem), k_pad = cpu::padded_filters(problem);
  auto* u = static_cast<float*>(args.packed);  // [36][K_pad / 16][C_pad][16]
  const auto pack_lanes = [&](std::int64_t k, const T* filters, std::int64_t count) {
    transform_lanes(filters, problem.c * 9, args.strides(), static_cast<int>(count), static_cast<int>(problem.c),
                    static_cast<int>(c_pad), u + k * c_pad, k_pad * c_pad);
  };
  pack_changed_blocks<T>(args, runtime, cpu::filter_lanes, 1, pack_lanes);
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
