// Launches of the wgmma kernel.
#pragma once

#include <algorithm>
#include <bit>

#include "algos/winograd_megakernel/wgmma/kernel.cuh"
#include "algos/winograd_megakernel/wgmma/pack.cuh"
#include "core/kernels.h"
#include "device/cuda_check.h"
#include "device/indexing.h"
#include "device/launch.h"
#include "device/shared_memory.h"
#include "hopper/tensor_map.h"

namespace fastconv::algos::winograd_megakernel::wgmma {

// x: [N, H, W, C].
template <typename T>
Params<T> make_params(const ConvArgs& args, const CudaPlan& plan, const T* x, const Runtime& runtime) {
  const ConvProblem& problem = args.problem;
  const std::int64_t tiles_p = ceil_div(problem.p(), 4), tiles_q = ceil_div(problem.q(), 4);
  const Strides4 out = output_strides(problem);
  const auto* u = static_cast<const char*>(args.weight);
  auto* v = static_cast<char*>(args.workspace);
  char* products = v + plan.v_bytes();
  char* exponents = products + plan.m_bytes();
  auto* tickets = reinterpret_cast<int*>(exponents + plan.exponent_bytes());
  const ProductRing ring = ProductRing::of(as_int(plan.weights.stages()), form<T>.buffers);
  Params<T> params{.map = plan.map,
                   .x = x,
                   .y = static_cast<T*>(args.y),
                   .u = u,
                   .filter_exponents = reinterpret_cast<const int*>(u + plan.weights.u_bytes()),
                   .v = v,
                   .tile_exponents = reinterpret_cast<int*>(exponents),
                   .products = reinterpret_cast<Product<T>*>(products),
                   .tickets = tickets,
                   .counters = tickets + 2 * ticket_stride,
                   .trace = {static_cast<TaskRecord*>(plan.instruments.records)},
                   .epilogue = make_epilogue<T>(args),
                   .report = runtime.wait_report(),
                   .y_image = out.n,
                   .y_filter = out.c,
                   .y_row = out.h,
                   .y_pixel = out.w,
                   .use_tma = plan.use_tma,
                   .tiles_p = as_int(tiles_p),
                   .tiles_q = as_int(tiles_q),
                   .chunks = as_int(plan.weights.chunks),
                   .filter_blocks = as_int(plan.weights.filter_blocks),
                   .ring = ring,
                   .product_grab = ring.resident > 0 ? std::int32_t{plan.map.m} : 1,
                   .work_tiles_log2 = std::countr_zero(static_cast<unsigned>(plan.map.shapes.input_tiles)),
                   .by_tiles_q = tiles_q,
                   .by_tiles_p = tiles_p,
                   .delay = plan.instruments.delay,
                   .own_scales = tickets + 2 * ticket_stride + plan.map.counters(),
                   .x_pixel = as_int(problem.x_pitch())};
  set_sizes(params, problem);
  return params;
}

template <typename T>
StreamMaps make_maps(const ConvProblem& problem, const CudaPlan& plan, const Params<T>& params) {
  StreamMaps maps{};
  if (params.use_tma) {
    maps.x = make_tensor_map(params.x, problem.dtype, problem.n, problem.h, problem.w, problem.c,
                             Box4{.c = chunk_channels, .w = 6, .h = 6, .n = 1, .swizzled = false}, problem.x_pitch());
  }
  constexpr int values = tile_m * tile_n;
  constexpr cuuint64_t bytes = segment_values * sizeof(Product<T>);
  const auto segments = static_cast<cuuint64_t>(plan.weights.filter_blocks * (values / segment_values));
  const auto rows = static_cast<cuuint64_t>(plan.map.m_groups) * 36;
  maps.m = make_tensor_map(params.products, is_split<T> ? DType::f32 : DType::f16,
                           TensorMap4{.sizes = {segment_values, segments, rows, 1},
                                      .strides = {bytes, segments * bytes, segments * bytes * rows},
                                      .box = {segment_values, 1, 36, 1},
                                      .swizzled = false});
  return maps;
}

static __global__ void set_tickets(int* tickets, int product, int stream) {
  tickets[0] = product;
  tickets[ticket_stride] = stream;
}

// The transforms of the inputs, the products, the transforms of the outputs: a launch each, with the same tasks and
// counters. A launch finds the tickets of all others taken. In this map all ITrans come first, all OTrans last.
template <typename T, typename Launch>
void launch_series(const Params<T>& params, cudaStream_t stream, Launch&& launch) {
  const TaskMap& map = params.map;
  for (const TaskKind kind : {TaskKind::input, TaskKind::gemm, TaskKind::output}) {
    Params<T> part = params;
    if (kind == TaskKind::input) part.map.s_o = part.map.last_s_o = 0;  // and there is nothing behind them
    const int product = kind == TaskKind::gemm ? 0 : map.gemms();
    const int other = kind == TaskKind::input ? 0 : kind == TaskKind::gemm ? map.streams() : map.inputs();
    set_tickets<<<1, 1, 0, stream>>>(params.tickets, product, other);
    check_launch("winograd_megakernel: tickets");
    launch(part);
  }
}

template <StoreMode output, bool plain, typename T>
void launch_kernel(const Params<T>& params, const StreamMaps& maps, const CudaPlan& plan, int processors,
                   cudaStream_t stream) {
  const auto kernel = convolve<T, output, plain>;
  allow_shared_memory<convolve<T, output, plain>>(shared_bytes<T>, "winograd_megakernel: shared memory");
  int blocks = 0;  // of a multiprocessor
  check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads<T>, shared_bytes<T>),
             "winograd_megakernel: occupancy");
  // Any number of blocks comes to an end (docs/concepts/megakernel.md): more than fit would only find nothing left to
  // do.
  const int grid = plan.instruments.blocks > 0 ? plan.instruments.blocks : std::max(1, blocks) * processors;
  const auto launch = [&](const Params<T>& its) {
    kernel<<<static_cast<unsigned>(grid), threads<T>, shared_bytes<T>, stream>>>(its, maps);
    check_launch("winograd_megakernel");
  };
  plan.instruments.series ? launch_series(params, stream, launch) : launch(params);
}

template <typename T>
void run(const ConvArgs& args, Runtime& runtime) {
  const ConvProblem& problem = args.problem;
  const CudaPlan& plan = plan_as<CudaPlan>(args.kernel_plan);
  const cudaStream_t stream = stream_of(runtime);
  const Params<T> params = make_params(args, plan, static_cast<const T*>(args.x), runtime);
  const StreamMaps maps = make_maps(problem, plan, params);
  check_cuda(cudaMemsetAsync(params.tickets, 0, plan.counter_bytes(), stream), "winograd_megakernel: counters");
  const int processors = runtime.device().processors;
  dispatch_value<StoreMode::filters, StoreMode::pixels, StoreMode::elements>(plan.store, [&](auto output) {
    if constexpr (output() != StoreMode::elements) {
      if (plan.plain) return launch_kernel<output(), true>(params, maps, plan, processors, stream);
    }
    launch_kernel<output(), false>(params, maps, plan, processors, stream);
  });
}

template <typename T>
void pack(const PackArgs& args, Runtime& runtime) {
  const ConvProblem& problem = args.problem;
  const CudaWeights weights = make_cuda_weights(problem);
  auto* packed = static_cast<char*>(args.packed);
  pack_filters<T><<<static_cast<unsigned>(weights.filter_blocks * tile_n), pack_threads, 0, stream_of(runtime)>>>(
      static_cast<int>(problem.c), static_cast<int>(problem.k), static_cast<int>(weights.chunks), args.strides(),
      static_cast<const T*>(args.weight), packed, reinterpret_cast<int*>(packed + weights.u_bytes()),
      static_cast<T*>(args.snapshot));
  check_launch("winograd_megakernel: packing");
}

}  // namespace fastconv::algos::winograd_megakernel::wgmma
