#include "algos/direct_tiled/plan.h"
#include "core/kernels.h"
#include "device/epilogue.h"
#include "device/indexing.h"

namespace fastconv::algos::direct_tiled {
namespace {

constexpr std::int64_t q_tile = register_tile::pixels;

// The scratch memory of one thread.
struct Scratch {
  float* patch;           // [channels, patch_h, stride_w, phase_w]
  float* filters;         // [channels * R * S, k_tile]
  float* sum;             // [p_tile, k_tile / F, F, 8], F filters and 8 outputs to a register tile
  std::int32_t* offsets;  // [channels * R * S]: where in the patch a tap of output (0, 0) lies

  Scratch(void* base, const CpuConfig& config)
      : patch(static_cast<float*>(base)),
        filters(patch + config.patch_floats),
        sum(filters + config.filter_floats),
        offsets(reinterpret_cast<std::int32_t*>(sum + config.sum_floats)) {}
};

// What a task computes: outputs from (n, p0, q0), filters from k0 of group g.
struct Position {
  std::int64_t n, g, k0, p0, q0;

  Position(std::int64_t task, const ConvProblem& problem, const CpuConfig& config) {
    q0 = task % config.q_tiles * q_tile, task /= config.q_tiles;
    p0 = task % config.p_tiles * config.p_tile, task /= config.p_tiles;
    k0 = task % config.k_tiles * config.k_tile, task /= config.k_tiles;
    g = task % problem.groups, n = task / problem.groups;
  }
};

void fill_offsets(const ConvProblem& problem, const CpuConfig& config, std::int32_t* offsets) {
  std::int64_t t = 0;
  for (std::int64_t c = 0; c < config.channels; ++c) {
    for (std::int64_t r = 0; r < problem.r; ++r) {
      for (std::int64_t s = 0; s < problem.s; ++s, ++t) {
        const std::int64_t row = c * config.patch_h + r * problem.dilation_h, column = s * problem.dilation_w;
        offsets[t] = static_cast<std::int32_t>(row * config.patch_pitch + column % problem.stride_w * config.phase_w +
                                               column / problem.stride_w);
      }
    }
  }
}

// x: channel c0 of the group in image n; padding becomes zeros.
template <typename T>
void load_patch(const ConvProblem& problem, const CpuConfig& config, const Strides4& in, const T* x, const Position& at,
                std::int64_t channels, float* patch) {
  const std::int64_t channel_floats = config.patch_h * config.patch_pitch;
  const std::int64_t h0 = at.p0 * problem.stride_h - problem.pad_h, w0 = at.q0 * problem.stride_w - problem.pad_w;
  // Channels run inside where they are contiguous in memory, else outside.
  const bool nhwc = problem.layout == Layout::nhwc;
  const std::int64_t outer = nhwc ? 1 : channels, inner = nhwc ? channels : 1;
  for (std::int64_t c = 0; c < outer; ++c) {
    for (std::int64_t i = 0; i < config.patch_h; ++i) {
      const std::int64_t h = h0 + i;
      for (std::int64_t phase = 0; phase < problem.stride_w; ++phase) {
        float* row = patch + c * channel_floats + i * config.patch_pitch + phase * config.phase_w;
        for (std::int64_t j = 0; j < config.phase_w; ++j) {
          const std::int64_t w = w0 + j * problem.stride_w + phase;
          const bool inside = h >= 0 && h < problem.h && w >= 0 && w < problem.w;
          const T* source = inside ? x + c * in.c + h * in.h + w * in.w : nullptr;
          for (std::int64_t v = 0; v < inner; ++v) {
            row[j + v * channel_floats] = inside ? to_float(source[v]) : 0.0f;
          }
        }
      }
    }
  }
}

// weight: channel c0 of the task's first filter; filters beyond `count` become zeros.
template <typename T>
void load_filters(const ConvProblem& problem, const CpuConfig& config, const T* weight, std::int64_t count,
                  std::int64_t taps, float* filters) {
  const std::int64_t filter_size = problem.c_per_group() * problem.r * problem.s;
  for (std::int64_t k = 0; k < config.k_tile; ++k) {
    for (std::int64_t t = 0; t < taps; ++t) {
      filters[t * config.k_tile + k] = k < count ? to_float(weight[k * filter_size + t]) : 0.0f;
    }
  }
}

void multiply_add(const ConvProblem& problem, const CpuConfig& config, std::int64_t rows, std::int64_t taps,
                  const Scratch& scratch) {
  const auto kernel = register_tile::kernel_for(config.filters);
  for (std::int64_t p = 0; p < rows; ++p) {
    const float* row = scratch.patch + p * problem.stride_h * config.patch_pitch;
    for (std::int64_t k = 0; k < config.k_tile; k += config.filters) {
      kernel(taps, scratch.filters + k, config.k_tile, row, scratch.offsets,
             scratch.sum + (p * config.k_tile + k) * q_tile);
    }
  }
}

template <typename T>
void store(const ConvProblem& problem, const CpuConfig& config, const Strides4& out, const Epilogue<T>& epilogue,
           const Position& at, std::int64_t rows, std::int64_t count, const float* sum, T* y) {
  const std::int64_t columns = std::min(q_tile, problem.q() - at.q0);
  const std::int64_t first = at.g * problem.k_per_group() + at.k0;
  for (std::int64_t p = 0; p < rows; ++p) {
    const float* row = sum + p * config.k_tile * q_tile;
    const auto put = [&](std::int64_t k, std::int64_t q) {
      const std::int64_t index = out(at.n, first + k, at.p0 + p, at.q0 + q);
      y[index] = epilogue(row[k * q_tile + q], index, first + k);
    };
    if (problem.layout == Layout::nhwc) {
      for (std::int64_t q = 0; q < columns; ++q) {
        for (std::int64_t k = 0; k < count; ++k) put(k, q);
      }
    } else {
      for (std::int64_t k = 0; k < count; ++k) {
        for (std::int64_t q = 0; q < columns; ++q) put(k, q);
      }
    }
  }
}

template <typename T>
void convolve(const ConvArgs& args, Runtime& runtime) {
  const ConvProblem& problem = args.problem;
  const auto* x = static_cast<const T*>(args.x);            // [N, C, H, W]
  const auto* weight = static_cast<const T*>(args.weight);  // [K, C/G, R, S]
  auto* y = static_cast<T*>(args.y);                        // [N, K, P, Q]
  const Strides4 in = input_strides(problem), out = output_strides(problem);
  const auto epilogue = make_epilogue<T>(args);
  const CpuConfig& config = plan_as<CpuConfig>(args.kernel_plan);
  const std::int64_t kernel_size = problem.r * problem.s, c_size = problem.c_per_group();

  // One range of tasks per thread, so that each has its part of the workspace.
  const std::int64_t workers = runtime.device().processors;
  runtime.parallel_for(0, workers, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t worker = begin; worker < end; ++worker) {
      const Scratch scratch(static_cast<char*>(args.workspace) + worker * config.scratch_bytes(), config);
      fill_offsets(problem, config, scratch.offsets);
      for (std::int64_t task = config.tasks * worker / workers; task < config.tasks * (worker + 1) / workers; ++task) {
        const Position at(task, problem, config);
        const std::int64_t rows = std::min(config.p_tile, problem.p() - at.p0);
        const std::int64_t count = std::min(config.k_tile, problem.k_per_group() - at.k0);
        const T* image = x + at.n * in.n + at.g * c_size * in.c;
        const T* filter = weight + (at.g * problem.k_per_group() + at.k0) * c_size * kernel_size;
        std::fill_n(scratch.sum, config.sum_floats, 0.0f);
        for (std::int64_t c0 = 0; c0 < c_size; c0 += config.channels) {
          const std::int64_t channels = std::min(config.channels, c_size - c0);
          load_patch(problem, config, in, image + c0 * in.c, at, channels, scratch.patch);
          load_filters(problem, config, filter + c0 * kernel_size, count, channels * kernel_size, scratch.filters);
          multiply_add(problem, config, rows, channels * kernel_size, scratch);
        }
        store(problem, config, out, epilogue, at, rows, count, scratch.sum, y);
      }
    }
  });
}

}  // namespace

void run_cpu(const ConvArgs& args, Runtime& runtime) {
  dispatch_dtype(args.problem.dtype, [&](auto zero) { convolve<decltype(zero)>(args, runtime); });
}

}  // namespace fastconv::algos::direct_tiled
