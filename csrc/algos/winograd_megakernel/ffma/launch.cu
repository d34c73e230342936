// Class `ieee`: from a plan to a launch.
#include <algorithm>

#include "algos/winograd_megakernel/ffma/kernel.cuh"
#include "algos/winograd_megakernel/ffma/pack.cuh"
#include "core/kernels.h"
#include "device/cuda_check.h"
#include "device/indexing.h"
#include "device/launch.h"
#include "device/shared_memory.h"

namespace fastconv::algos::winograd_megakernel::ffma {
namespace {

Params make_params(const ConvArgs& args, const Plan& plan, const Runtime& runtime) {
  const ConvProblem& problem = args.problem;
  const Strides4 in = input_strides(problem), out = output_strides(problem);
  auto* v = static_cast<char*>(args.workspace);
  char* products = v + plan.v_bytes();
  char* filters = products + plan.m_bytes();
  auto* ticket = reinterpret_cast<int*>(filters + plan.u_bytes());
  const void* u = plan.map.n_f > 0 ? filters : args.weight;
  Params params{.map = plan.map,
                .x = static_cast<const float*>(args.x),
                .y = static_cast<float*>(args.y),
                .u = static_cast<const float*>(u),
                .weight = static_cast<const float*>(plan.instruments.filter),
                .v = reinterpret_cast<float*>(v),
                .products = reinterpret_cast<float*>(products),
                .ticket = ticket,
                .counters = ticket + ticket_stride,
                .end = plan.map.size(),
                .trace = {static_cast<TaskRecord*>(plan.instruments.records)},
                .epilogue = make_epilogue<float>(args),
                .report = runtime.wait_report(),
                .x_image = in.n,
                .x_channel = in.c,
                .x_row = in.h,
                .x_pixel = in.w,
                .y_image = out.n,
                .y_filter = out.c,
                .y_row = out.h,
                .y_pixel = out.w,
                .stages = as_int(plan.weights.stages),
                .filter_blocks = as_int(plan.weights.filter_blocks),
                .by_tiles_q = ceil_div(problem.q(), 4),
                .by_tiles_p = ceil_div(problem.p(), 4),
                .delay = plan.instruments.delay,
                .x_step = as_int(in.w),
                .y_step = as_int(out.w)};
  set_sizes(params, problem);
  return params;
}

__global__ void set_ticket(int* ticket, int position) { *ticket = position; }

// The tasks kind by kind, a launch each. In this map all ITrans come first, all OTrans last.
template <typename Launch>
void launch_series(const Params& params, cudaStream_t stream, Launch&& launch) {
  const int inputs = params.map.n_f + params.map.inputs();
  const int ends[] = {params.map.n_f, inputs, inputs + params.map.gemms(), params.map.size()};
  int first = 0;
  for (const int end : ends) {
    if (end == first) continue;  // no filter tasks
    set_ticket<<<1, 1, 0, stream>>>(params.ticket, first);
    check_launch("winograd_megakernel: ticket");
    Params part = params;
    part.end = end;
    launch(part);
    first = end;
  }
}

template <Access access, bool plain, bool filters = false>
void launch_kernel(const Params& params, const Plan& plan, int processors, cudaStream_t stream) {
  const auto kernel = convolve<access, plain, filters>;
  allow_shared_memory<convolve<access, plain, filters>>(shared_bytes, "winograd_megakernel: shared memory");
  // Any number of blocks comes to an end (docs/concepts/megakernel.md); more than there are tasks would find nothing to
  // do.
  const int wanted = plan.instruments.blocks > 0 ? plan.instruments.blocks : processors;
  const int grid = std::min(wanted, static_cast<int>(params.map.size()));
  const auto launch = [&](const Params& its) {
    kernel<<<static_cast<unsigned>(grid), threads, shared_bytes, stream>>>(its);
    check_launch("winograd_megakernel");
  };
  plan.instruments.series ? launch_series(params, stream, launch) : launch(params);
}

}  // namespace

void run_cuda(const ConvArgs& args, Runtime& runtime) {
  const Plan& plan = plan_as<Plan>(args.kernel_plan);
  const cudaStream_t stream = stream_of(runtime);
  const Params params = make_params(args, plan, runtime);
  check_cuda(cudaMemsetAsync(params.ticket, 0, plan.counter_bytes(), stream), "winograd_megakernel: counters");
  const int processors = runtime.device().processors;
  if (plan.map.n_f > 0) return launch_kernel<Access::nhwc_pairs, true, true>(params, plan, processors, stream);
  dispatch_value<Access::nhwc_pairs, Access::nhwc, Access::nchw_quads, Access::nchw>(plan.access, [&](auto access) {
    dispatch_value<true, false>(
        plan.plain, [&](auto plain) { launch_kernel<access(), plain()>(params, plan, processors, stream); });
  });
}

void pack_cuda(const PackArgs& args, Runtime& runtime) {
  const ConvProblem& problem = args.problem;
  const Weights weights = make_weights(problem);
  const auto blocks = static_cast<unsigned>(weights.filter_blocks * (block_filters / pack_lanes) * weights.stages);
  pack_filters<<<blocks, pack_threads, 0, stream_of(runtime)>>>(
      static_cast<int>(problem.c), static_cast<int>(problem.k), static_cast<int>(weights.stages), args.strides(),
      static_cast<const float*>(args.weight), static_cast<float*>(args.packed), static_cast<float*>(args.snapshot));
  check_launch("winograd_megakernel: packing");
}

}  // namespace fastconv::algos::winograd_megakernel::ffma
