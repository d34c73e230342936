// Winograd on torch's thread pool: the three stages, a chunk of tiles at a time, FP32 arithmetic for every class.
#include <cstring>

#include "algos/winograd/config.h"
#include "algos/winograd/cpu_stages.h"
#include "core/kernels.h"

namespace fastconv {
namespace winograd {
namespace {

// Cuts a range of (channel block, tile of a chunk) pairs, tiles innermost, into runs of tiles that are neighbours in
// one tile row.
class Runs {
 public:
  struct Run {
    std::int64_t n, tile_p, tile_q;  // of the first tile
    std::int64_t tile;               // its number within the chunk
    int tiles;
    std::int64_t channel;  // first channel
    int padded_channels;   // channels, the padding ones included
  };

  Runs(const Config& config, std::int64_t first_tile, std::int64_t chunk, std::int64_t padded_channels)
      : config_(config), first_tile_(first_tile), chunk_(chunk), padded_channels_(padded_channels) {}

  std::int64_t size() const { return ceil_div<std::int64_t>(padded_channels_, block_channels) * chunk_; }

  template <typename Visitor>
  void visit(std::int64_t begin, std::int64_t end, Visitor&& visitor) const {
    while (begin < end) {
      Run run;
      run.tile = begin % chunk_;
      run.channel = begin / chunk_ * block_channels;
      run.padded_channels = static_cast<int>(std::min<std::int64_t>(block_channels, padded_channels_ - run.channel));
      const std::int64_t tile = first_tile_ + run.tile;
      run.tile_q = tile % config_.tiles_q;
      run.tile_p = tile / config_.tiles_q % config_.tiles_p;
      run.n = tile / config_.tiles_q / config_.tiles_p;
      const std::int64_t most = (block_elements / run.padded_channels - 2) / config_.m;
      run.tiles = static_cast<int>(
          std::min({most, end - begin, chunk_ - run.tile, config_.tiles_q - run.tile_q}));
      visitor(run);
      begin += run.tiles;
    }
  }

 private:
  const Config& config_;
  std::int64_t first_tile_, chunk_, padded_channels_;
};

template <int m, typename T>
void transform_inputs(const ConvArgs& args, const Config& config, const Runs& runs, std::int64_t begin,
                      std::int64_t end, std::int64_t frequency_stride,
                      float* v) {  // [alpha^2][chunk][C_pad]
  const ConvProblem& problem = args.problem;
  const auto* x = static_cast<const T*>(args.x);  // [N, C, H, W]
  const Strides4 in = input_strides(problem);
  runs.visit(begin, end, [&](const Runs::Run& run) {
    const int channels = static_cast<int>(std::min<std::int64_t>(run.padded_channels, problem.c - run.channel));
    const Window window{run.tile_p * m - problem.pad_h, run.tile_q * m - problem.pad_w, m + 2, run.tiles * m + 2};
    const T* image = x + in(run.n, run.channel, 0, 0);
    float* target = v + run.tile * config.c_pad + run.channel;
    if constexpr (std::is_same_v<T, float>) {
      // Nothing to convert, transpose or pad: read the input where it is.
      if (in.c == 1 && channels == run.padded_channels && window.h >= 0 && window.h + window.rows <= problem.h &&
          window.w >= 0 && window.w + window.columns <= problem.w) {
        transform_input<m>(image + window.h * in.h + window.w * in.w, in.h, in.w, run.tiles, channels, target,
                           frequency_stride, config.c_pad);
        return;
      }
    }
    alignas(64) float patch[(m + 2) * block_elements];
    gather(image, in, problem.h, problem.w, window, channels, run.padded_channels, patch);
    transform_input<m>(patch, static_cast<std::int64_t>(window.columns) * run.padded_channels, run.padded_channels,
                       run.tiles, run.padded_channels, target, frequency_stride, config.c_pad);
  });
}

template <int m, typename T>
void transform_outputs(const ConvArgs& args, const Config& config, const Runs& runs, std::int64_t begin,
                       std::int64_t end, std::int64_t frequency_stride,
                       const float* products) {  // [alpha^2][chunk][K_pad]
  const ConvProblem& problem = args.problem;
  const Strides4 out = output_strides(problem);
  const auto epilogue = make_epilogue<T>(args);
  runs.visit(begin, end, [&](const Runs::Run& run) {
    const int channels = static_cast<int>(std::min<std::int64_t>(run.padded_channels, problem.k - run.channel));
    const Window window{run.tile_p * m, run.tile_q * m, m, run.tiles * m};
    alignas(64) float patch[m * block_elements];
    transform_output<m>(products + run.tile * config.k_pad + run.channel, frequency_stride, config.k_pad, run.tiles,
                        run.padded_channels, patch);
    scatter(patch, window, channels, run.padded_channels, run.channel, out(run.n, run.channel, 0, 0), problem.p(),
            problem.q(), out, epilogue, static_cast<T*>(args.y));
  });
}

template <int m, typename T>
void run(const ConvArgs& args, Runtime& runtime) {
  const ConvProblem& problem = args.problem;
  const Config config = make_config(m, problem, runtime.device());
  auto* v = static_cast<float*>(args.workspace);                     // [alpha^2][chunk][C_pad]
  float* products = v + config.v_bytes() / sizeof(float);            // [alpha^2][chunk][K_pad]
  const auto* u = static_cast<const float*>(args.weight);            // [alpha^2][K][C_pad]
  constexpr std::int64_t grain = 16;                                 // tiles: less is not worth a thread
  for (std::int64_t first = 0; first < config.tiles; first += config.chunk_tiles) {
    const std::int64_t chunk = std::min(config.chunk_tiles, config.tiles - first);
    const Runs inputs(config, first, chunk, config.c_pad), outputs(config, first, chunk, config.k_pad);
    runtime.parallel_for(0, inputs.size(), grain, [&](std::int64_t begin, std::int64_t end) {
      transform_inputs<m, T>(args, config, inputs, begin, end, chunk * config.c_pad, v);
    });
    runtime.gemm({.batch = config.frequencies(),
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
      transform_outputs<m, T>(args, config, outputs, begin, end, chunk * config.k_pad, products);
    });
  }
}

template <int m, typename T>
void pack(const PackArgs& args, Runtime& runtime) {
  const ConvProblem& problem = args.problem;
  const Config config = make_config(m, problem, runtime.device());
  const auto* weight = static_cast<const T*>(args.weight);  // [K, C, 3, 3]
  auto* snapshot = static_cast<T*>(args.snapshot);          // like weight, or null
  auto* u = static_cast<float*>(args.packed);               // [alpha^2][K][C_pad]
  auto* exponents = reinterpret_cast<std::int32_t*>(static_cast<char*>(args.packed) + config.u_bytes(problem.k));  // [K]
  const std::int64_t filter_size = problem.c * 9;
  runtime.parallel_for(0, problem.k, 4, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t k = begin; k < end; ++k) {
      const T* filter = weight + k * filter_size;
      const std::size_t bytes = static_cast<std::size_t>(filter_size) * sizeof(T);
      if (snapshot != nullptr && std::memcmp(snapshot + k * filter_size, filter, bytes) == 0) continue;
      for (std::int64_t c = 0; c < config.c_pad; c += block_channels) {
        const auto padded = static_cast<int>(std::min<std::int64_t>(block_channels, config.c_pad - c));
        const auto channels = static_cast<int>(std::min<std::int64_t>(padded, problem.c - c));
        transform_filter<m>(filter + c * 9, channels, padded, u + k * config.c_pad + c, problem.k * config.c_pad);
      }
      exponents[k] = 0;  // FP32 needs no scale
      if (snapshot != nullptr) std::memcpy(snapshot + k * filter_size, filter, bytes);
    }
  });
}

}  // namespace
}  // namespace winograd

#define FASTCONV_WINOGRAD_CPU(NAME, M)                                                                          \
  namespace algos::NAME {                                                                                       \
  void run_cpu(const ConvArgs& args, Runtime& runtime) {                                                        \
    dispatch_dtype(args.problem.dtype, [&](auto zero) { winograd::run<M, decltype(zero)>(args, runtime); });    \
  }                                                                                                             \
  void pack_cpu(const PackArgs& args, Runtime& runtime) {                                                       \
    dispatch_dtype(args.problem.dtype, [&](auto zero) { winograd::pack<M, decltype(zero)>(args, runtime); });   \
  }                                                                                                             \
  }
FASTCONV_WINOGRAD_CPU(winograd_f2, 2)
FASTCONV_WINOGRAD_CPU(winograd_f4, 4)
#undef FASTCONV_WINOGRAD_CPU

}  // namespace fastconv
