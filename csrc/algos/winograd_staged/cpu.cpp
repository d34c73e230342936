// Winograd on torch's thread pool: the three stages, a chunk of tiles at a time, FP32 arithmetic for every class.
#include "algos/winograd_staged/plan.h"
#include "core/gemm.h"
#include "core/kernels.h"
#include "host/pack.h"
#include "winograd/cpu_tiles.h"

namespace fastconv {
namespace algos::winograd_staged {
namespace {

template <int m, typename T>
void run(const ConvArgs& args, Runtime& runtime) {
  const ConvProblem& problem = args.problem;
  const Config& config = plan_as<Config>(args.kernel_plan);
  auto* v = static_cast<float*>(args.workspace);           // [alpha^2][chunk][C_pad]
  float* products = v + config.v_bytes() / sizeof(float);  // [alpha^2][chunk][K_pad]
  const auto* u = static_cast<const float*>(args.weight);  // [alpha^2][K][C_pad]
  constexpr std::int64_t grain = 16;                       // tiles: less is not worth a thread
  for (std::int64_t first = 0; first < config.tiles; first += config.chunk_tiles) {
    const std::int64_t chunk = std::min(config.chunk_tiles, config.tiles - first);
    const winograd::TileGrid grid{config.tiles_p, config.tiles_q};
    const winograd::Runs inputs(m, grid, first, chunk, config.c_pad), outputs(m, grid, first, chunk, config.k_pad);
    runtime.parallel_for(0, inputs.size(), grain, [&](std::int64_t begin, std::int64_t end) {
      winograd::transform_inputs<m, T>(args, inputs, begin, end, v);
    });
    runtime.gemm({.batch = config.points(),
                  .m = chunk,
                  .n = problem.k,
                  .k = config.c_pad,
                  .a = v,
                  .lda = config.c_pad,
                  .stride_a = chunk * config.c_pad,
                  .b = u,
                  .ldb = config.c_pad,
                  .stride_b = problem.k * config.c_pad,
                  .d = products,
                  .ldd = config.k_pad,
                  .stride_d = chunk * config.k_pad});
    runtime.parallel_for(0, outputs.size(), grain, [&](std::int64_t begin, std::int64_t end) {
      winograd::transform_outputs<m, T>(args, outputs, begin, end, products);
    });
  }
}

template <int m, typename T>
void pack(const PackArgs& args, Runtime& runtime) {
  const ConvProblem& problem = args.problem;
  const Config config = make_config(m, problem, runtime.device());
  auto* u = static_cast<float*>(args.packed);  // [alpha^2][K][C_pad]
  auto* exponents =
      reinterpret_cast<std::int32_t*>(static_cast<char*>(args.packed) + config.u_bytes(problem.k));  // [K]
  const FilterStrides strides = args.strides();
  pack_changed_filters<T>(args, runtime, 4, [&](std::int64_t k, const T* filter) {
    for (std::int64_t c = 0; c < config.c_pad; c += winograd::block_channels) {
      const auto padded = static_cast<int>(std::min<std::int64_t>(winograd::block_channels, config.c_pad - c));
      const auto channels = static_cast<int>(std::min<std::int64_t>(padded, problem.c - c));
      winograd::transform_filter<m>(filter + c * strides.channel, strides, channels, padded, u + k * config.c_pad + c,
                                    problem.k * config.c_pad);
    }
    exponents[k] = 0;  // FP32 needs no scale
  });
}

}  // namespace
}  // namespace algos::winograd_staged

#define FASTCONV_WINOGRAD_CPU(NAME, M)                                                                               \
  namespace algos::NAME {                                                                                            \
  void run_cpu(const ConvArgs& args, Runtime& runtime) {                                                             \
    dispatch_dtype(args.problem.dtype, [&](auto zero) { winograd_staged::run<M, decltype(zero)>(args, runtime); });  \
  }                                                                                                                  \
  void pack_cpu(const PackArgs& args, Runtime& runtime) {                                                            \
    dispatch_dtype(args.problem.dtype, [&](auto zero) { winograd_staged::pack<M, decltype(zero)>(args, runtime); }); \
  }                                                                                                                  \
  }
FASTCONV_WINOGRAD_CPU(winograd_f2, 2)
FASTCONV_WINOGRAD_CPU(winograd_f4, 4)
#undef FASTCONV_WINOGRAD_CPU

}  // namespace fastconv
