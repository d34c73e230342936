// The stages in order: for each chunk of tiles, input transform, batched product, output transform.
#include <algorithm>
#include <type_traits>

#include "algos/winograd_staged/gemm/launch.h"
#include "algos/winograd_staged/transforms/filter.cuh"
#include "algos/winograd_staged/transforms/input.cuh"
#include "algos/winograd_staged/transforms/output.cuh"
#include "core/gemm.h"
#include "core/kernels.h"
#include "device/cuda_check.h"
#include "device/dependent_launch.cuh"
#include "device/indexing.h"
#include "device/launch.h"
#include "device/shared_memory.h"

namespace fastconv::algos::winograd_staged {
namespace {

template <typename Visitor>
void dispatch_mode(Mode mode, const Visitor& visit) {
  dispatch_value<Mode::fp32, Mode::split, Mode::fp16, Mode::bf16>(mode, visit);
}

// Only the combinations that select_mode() produces are compiled: f32 with fp32 or split, f16 with fp16, bf16 with
// bf16.
template <typename T>
constexpr bool fits(Mode mode) {
  if (std::is_same_v<T, float>) return mode == Mode::fp32 || mode == Mode::split;
  return mode == (std::is_same_v<T, half_t> ? Mode::fp16 : Mode::bf16);
}

// Lanes of a block's row of so many vectors: a power of two from 8 to 32, then a multiple of 32, up to max_lanes.
int row_lanes(int vectors, int max_lanes) {
  int lanes = 8;
  while (lanes < vectors && lanes < 32) lanes *= 2;
  return vectors <= 32 ? lanes : std::min(ceil_div(vectors, 32) * 32, max_lanes);
}

dim3 row_block(int lanes, int threads) { return dim3(lanes, std::max(1, threads / lanes)); }

Chunk make_chunk(const ConvProblem& problem, const Config& config) {
  Chunk chunk{};
  set_sizes(chunk, problem);
  chunk.p = as_int(problem.y_p()), chunk.q = as_int(problem.y_q());
  chunk.tiles_p = as_int(config.tiles_p), chunk.tiles_q = as_int(config.tiles_q);
  chunk.by_tiles_p = config.tiles_p;
  chunk.by_tiles_q = config.tiles_q;
  chunk.by_groups = config.groups;
  chunk.by_filter_blocks = ceil_div(chunk.k, segment_block_filters);
  chunk.c_pad = as_int(config.c_pad), chunk.k_pad = as_int(config.k_pad);
  chunk.depth = as_int(config.depth);
  chunk.groups = as_int(config.groups), chunk.group_channels = as_int(config.group_channels);
  chunk.in = dense_strides(Layout::nhwc, problem.x_pitch(), problem.h, problem.w), chunk.out = output_strides(problem);
  return chunk;
}

template <typename T, int m, Mode mode>
void transform_input(const Config& config, const Chunk& chunk, const T* x, void* v, int* exponents,
                     cudaStream_t stream) {
  const bool even = config.x_vector == 2;
  // Small blocks: one that waits for its maxima leaves more others at work (measured: 10 % against 256 threads).
  const dim3 block = row_block(row_lanes(even ? chunk.c_pad / 2 : chunk.c_pad, 512), 64);
  const unsigned grid = ceil_div(chunk.tiles, static_cast<int>(block.y));
  const auto kernel = even ? input_transform_nhwc<T, m, mode, 2> : input_transform_nhwc<T, m, mode, 1>;
  kernel<<<grid, block, 0, stream>>>(chunk, x, static_cast<typename Operand<mode>::type*>(v), exponents);
  check_launch("winograd input transform");
}

template <int m>
void transform_input_groups(const Config& config, const Chunk& chunk, const float* x, void* v, int* exponents,
                            cudaStream_t stream) {
  const auto launch = [&](auto by_vectors) {
    prefer_shared_memory<input_transform_groups<m, by_vectors()>>("winograd input transform");
    input_transform_groups<m, by_vectors()><<<static_cast<unsigned>(chunk.tiles) * chunk.groups, 32, 0, stream>>>(
        chunk, x, static_cast<half_t*>(v), exponents);
    check_launch("winograd input transform");
  };
  config.x_vector == 4 ? launch(std::true_type{}) : launch(std::false_type{});
}

template <typename T, int m, bool rows, bool pools>
void transform_output(const Config& config, const Chunk& chunk, const float* products, const int* tile_exponents,
                      const int* filter_exponents, const ConvArgs& args, cudaStream_t stream) {
  const auto launch = [&](auto kernel, dim3 grid, dim3 block) {
    // It may be launched before the product has ended.
    LaunchPlan{.grid = grid, .block = block, .early = config.overlaps_product && grid.x * grid.y <= few_blocks}.launch(
        kernel, stream, "winograd output transform", chunk, products, tile_exponents, filter_exponents,
        static_cast<T*>(args.y), make_epilogue<T>(args));
  };
  if (args.problem.layout == Layout::nhwc) {
    const bool even = config.y_vector == 2;
    const int lanes = even ? chunk.k / 2 : chunk.k;
    const dim3 block = rows ? row_block(row_lanes(lanes, 128), 128) : dim3(segment_threads);
    const dim3 grid =
        rows ? dim3(ceil_div(chunk.tiles, static_cast<int>(block.y)), ceil_div(lanes, static_cast<int>(block.x)))
             : dim3(static_cast<unsigned>(segment_blocks(chunk.tiles, chunk.k, Layout::nhwc)));
    const auto launch_nhwc = [&](auto plain) {
      auto kernel = even ? output_transform_nhwc<T, m, 2, rows, plain(), pools, false, false>
                         : output_transform_nhwc<T, m, 1, rows, plain(), pools, false, false>;
      if constexpr (!rows) {
        if (config.cached) kernel = output_transform_nhwc<T, m, 2, rows, plain(), pools, true, false>;
        if (config.cached && config.overlaps_output)
          kernel = output_transform_nhwc<T, m, 2, rows, plain(), pools, true, m == 2>;
      }
      launch(kernel, grid, block);
    };
    config.plain ? launch_nhwc(std::true_type{}) : launch_nhwc(std::false_type{});
  } else {
    const dim3 grid(ceil_div(chunk.tiles, output_block_tiles), ceil_div(chunk.k, output_block_filters));
    launch(output_transform_nchw<T, m, rows, pools>, grid, output_block_threads);
  }
}

// M = V U^T at every point.
void multiply(const Config& config, std::int64_t filters, std::int64_t tiles, const void* v, const void* u, float* m,
              const int* group_exponents, int* tile_exponents, Runtime& runtime) {
  if (config.wgmma_gemm) {
    gemm::run({.stationary = config.stationary,
               .tile_n = config.tile_n,
               .v = v,
               .u = u,
               .m = m,
               .group_exponents = group_exponents,
               .tile_exponents = tile_exponents,
               .points = config.points(),
               .tiles = tiles,
               .filters = filters,
               .groups = config.groups,
               .group_channels = config.group_channels,
               .k_pad = config.k_pad,
               .processors = runtime.device().processors,
               .overlaps_output = config.overlaps_output,
               .stream = runtime.stream(),
               .report = runtime.wait_report()});
    return;
  }
  GemmArgs gemm;
  gemm.batch = config.points();
  gemm.m = tiles, gemm.n = filters, gemm.k = config.depth;
  gemm.a = v, gemm.lda = config.depth, gemm.stride_a = tiles * config.depth;
  gemm.b = u, gemm.ldb = config.depth, gemm.stride_b = filters * config.depth;
  gemm.d = m, gemm.ldd = config.k_pad, gemm.stride_d = tiles * config.k_pad;
  gemm.in = config.mode == Mode::fp32 ? DType::f32 : config.mode == Mode::bf16 ? DType::bf16 : DType::f16;
  gemm.out = DType::f32;
  runtime.gemm(gemm);
}

template <typename T, int m, Mode mode>
void run(const ConvArgs& args, const Config& config, Runtime& runtime) {
  const ConvProblem& problem = args.problem;
  const cudaStream_t stream = stream_of(runtime);
  const T* x = static_cast<const T*>(args.x);  // [N, C, H, W] in NHWC
  const auto* u = static_cast<const char*>(args.weight);
  const auto* filter_exponents = reinterpret_cast<const int*>(u + config.u_bytes(problem.k));
  constexpr bool scaled = mode != Mode::fp32;

  auto* v = static_cast<char*>(args.workspace);
  auto* products = reinterpret_cast<float*>(v + config.v_bytes());
  auto* tile_exponents = reinterpret_cast<int*>(reinterpret_cast<char*>(products) + config.m_bytes());
  auto* group_exponents =
      reinterpret_cast<int*>(reinterpret_cast<char*>(tile_exponents) + config.tile_exponent_bytes());

  Chunk chunk = make_chunk(problem, config);
  for (std::int64_t first = 0; first < config.tiles; first += config.chunk_tiles) {
    chunk.first_tile = static_cast<int>(first);
    chunk.tiles = static_cast<int>(std::min(config.chunk_tiles, config.tiles - first));
    if (config.wgmma_gemm) {
      if constexpr (mode == Mode::split) transform_input_groups<m>(config, chunk, x, v, group_exponents, stream);
    } else {
      transform_input<T, m, mode>(config, chunk, x, v, tile_exponents, stream);
    }
    multiply(config, problem.k, chunk.tiles, v, u, products, group_exponents, tile_exponents, runtime);
    const auto transform = [&](auto rows) {
      const auto kernel =
          problem.max_pool ? transform_output<T, m, rows(), true> : transform_output<T, m, rows(), false>;
      kernel(config, chunk, products, scaled ? tile_exponents : nullptr, filter_exponents, args, stream);
    };
    if (config.wgmma_gemm) {
      if constexpr (mode == Mode::split) transform(std::false_type{});
    } else {
      transform(std::true_type{});
    }
  }
}

template <int m>
void run_cuda(const ConvArgs& args, Runtime& runtime) {
  const Config& config = plan_as<Config>(args.kernel_plan);
  dispatch_dtype(args.problem.dtype, [&](auto zero) {
    using T = decltype(zero);
    dispatch_mode(config.mode, [&](auto mode) {
      if constexpr (fits<T>(mode())) run<T, m, mode()>(args, config, runtime);
    });
  });
}

template <int m>
void pack_cuda(const PackArgs& args, Runtime& runtime) {
  const Config config = make_config(m, args.problem, runtime.device());
  dispatch_dtype(args.problem.dtype, [&](auto zero) {
    using T = decltype(zero);
    dispatch_mode(config.mode, [&](auto mode) {
      if constexpr (fits<T>(mode())) {
        auto* packed = static_cast<char*>(args.packed);
        filter_transform<T, m, mode()>
            <<<static_cast<unsigned>(args.problem.k), filter_threads, 0, stream_of(runtime)>>>(
                static_cast<int>(args.problem.c), static_cast<int>(config.c_pad),
                static_cast<int>(config.group_channels), static_cast<int>(config.depth), args.strides(),
                static_cast<const T*>(args.weight), reinterpret_cast<typename Operand<mode()>::type*>(packed),
                reinterpret_cast<int*>(packed + config.u_bytes(args.problem.k)), static_cast<T*>(args.snapshot));
        check_launch("winograd filter transform");
      }
    });
  });
}

}  // namespace
}  // namespace fastconv::algos::winograd_staged

namespace fastconv::algos::winograd_f2 {
void run_cuda(const ConvArgs& args, Runtime& runtime) { winograd_staged::run_cuda<2>(args, runtime); }
void pack_cuda(const PackArgs& args, Runtime& runtime) { winograd_staged::pack_cuda<2>(args, runtime); }
}  // namespace fastconv::algos::winograd_f2

namespace fastconv::algos::winograd_f4 {
void run_cuda(const ConvArgs& args, Runtime& runtime) { winograd_staged::run_cuda<4>(args, runtime); }
void pack_cuda(const PackArgs& args, Runtime& runtime) { winograd_staged::pack_cuda<4>(args, runtime); }
}  // namespace fastconv::algos::winograd_f4
