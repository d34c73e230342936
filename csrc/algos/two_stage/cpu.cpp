#include "algos/two_stage/plan.h"
#include "core/kernels.h"
#include "device/epilogue.h"
#include "device/indexing.h"

namespace fastconv::algos::two_stage {
namespace {

// One pass: some images, all taps.
template <typename T>
struct Pass {
  const ConvProblem& problem;
  const T* x;       // [images, C, H, W]
  const T* weight;  // [K, C/G, R, S]
  T* y;             // [images, K, P, Q]
  float* planes;    // [R*S][images, K, P, Q], each like y; null if there is one tap
  Strides4 in, out;
  Epilogue<T> epilogue;
  std::int64_t images;
  CpuConfig config;

  std::int64_t map() const { return problem.p() * problem.q(); }
  std::int64_t pixels() const { return images * map(); }
  std::int64_t pixel_tiles() const { return ceil_div<std::int64_t>(pixels(), cpu_pixel_tile); }
  std::int64_t numel() const { return images * problem.k * map(); }
};

// The scratch memory of one thread.
struct Scratch {
  std::int64_t* origins;  // [64]: offset of an output's input at the tap in x, channel 0; -1: padding or no output
  std::int64_t* targets;  // [64]: offset of an output in y, channel 0
  float* x;               // [channels, 64]
  float* filters;         // [channels, k_tile]
  float* sum;             // [64 / 8, k_tile / F, F, 8], F filters and 8 outputs to a register tile
  std::int32_t* offsets;  // [channels]: rows of x

  Scratch(void* base, const CpuConfig& config)
      : origins(static_cast<std::int64_t*>(base)),
        targets(origins + cpu_pixel_tile),
        x(reinterpret_cast<float*>(targets + cpu_pixel_tile)),
        filters(x + config.x_floats),
        sum(filters + config.filter_floats),
        offsets(reinterpret_cast<std::int32_t*>(sum + config.sum_floats)) {
    for (std::int64_t c = 0; c < config.channels; ++c) offsets[c] = static_cast<std::int32_t>(c * cpu_pixel_tile);
  }
};

// What a task computes: tap (r, s) of 64 outputs of the flattened [images, P, Q], filters from k0 of group g.
struct Position {
  std::int64_t r, s, g, k0, pixel0;

  template <typename T>
  Position(std::int64_t task, const Pass<T>& pass) {
    k0 = task % pass.config.k_tiles * pass.config.k_tile, task /= pass.config.k_tiles;
    g = task % pass.problem.groups, task /= pass.problem.groups;
    pixel0 = task % pass.pixel_tiles() * cpu_pixel_tile, task /= pass.pixel_tiles();
    r = task / pass.problem.s, s = task % pass.problem.s;
  }
};

template <typename T>
void find_pixels(const Pass<T>& pass, const Position& at, const Scratch& scratch) {
  const ConvProblem& problem = pass.problem;
  for (std::int64_t i = 0; i < cpu_pixel_tile; ++i) {
    const std::int64_t pixel = at.pixel0 + i;
    const std::int64_t q = pixel % problem.q(), p = pixel / problem.q() % problem.p(), n = pixel / pass.map();
    const std::int64_t h = p * problem.stride_h + at.r * problem.dilation_h - problem.pad_h;
    const std::int64_t w = q * problem.stride_w + at.s * problem.dilation_w - problem.pad_w;
    const bool inside = n < pass.images && h >= 0 && h < problem.h && w >= 0 && w < problem.w;
    scratch.origins[i] = inside ? pass.in(n, 0, h, w) : -1;
    scratch.targets[i] = pass.out(n, 0, p, q);
  }
}

template <typename T>
void load_x(const Pass<T>& pass, std::int64_t first_channel, std::int64_t channels, const Scratch& scratch) {
  const auto load = [&](std::int64_t c, std::int64_t i) {
    const std::int64_t origin = scratch.origins[i];
    scratch.x[c * cpu_pixel_tile + i] = origin < 0 ? 0.0f : to_float(pass.x[origin + (first_channel + c) * pass.in.c]);
  };
  if (pass.problem.layout == Layout::nhwc) {
    for (std::int64_t i = 0; i < cpu_pixel_tile; ++i) {
      for (std::int64_t c = 0; c < channels; ++c) load(c, i);
    }
  } else {
    for (std::int64_t c = 0; c < channels; ++c) {
      for (std::int64_t i = 0; i < cpu_pixel_tile; ++i) load(c, i);
    }
  }
}

template <typename T>
void load_filters(const Pass<T>& pass, const Position& at, std::int64_t c0, std::int64_t channels, float* filters) {
  const ConvProblem& problem = pass.problem;
  const std::int64_t kernel_size = problem.r * problem.s, count = problem.k_per_group() - at.k0;
  const T* tap = pass.weight + at.r * problem.s + at.s;
  for (std::int64_t k = 0; k < pass.config.k_tile; ++k) {
    const std::int64_t row = (at.g * problem.k_per_group() + at.k0 + k) * problem.c_per_group() + c0;
    for (std::int64_t c = 0; c < channels; ++c) {
      filters[c * pass.config.k_tile + k] = k < count ? to_float(tap[(row + c) * kernel_size]) : 0.0f;
    }
  }
}

// To the tap's plane, or, if there is only one, through the epilogue to y.
template <typename T>
void store(const Pass<T>& pass, const Position& at, const Scratch& scratch) {
  const ConvProblem& problem = pass.problem;
  const std::int64_t count = std::min(pass.config.k_tile, problem.k_per_group() - at.k0);
  const std::int64_t columns = std::min(cpu_pixel_tile, pass.pixels() - at.pixel0);
  const std::int64_t first = at.g * problem.k_per_group() + at.k0, plane = at.r * problem.s + at.s;
  const auto put = [&](std::int64_t k, std::int64_t i) {
    const std::int64_t index = scratch.targets[i] + (first + k) * pass.out.c;
    const std::int64_t row = i / register_tile::pixels * pass.config.k_tile + k;
    const float value = scratch.sum[row * register_tile::pixels + i % register_tile::pixels];
    if (pass.planes != nullptr) {
      pass.planes[plane * pass.numel() + index] = value;
    } else {
      pass.y[index] = pass.epilogue(value, index, first + k);
    }
  };
  if (problem.layout == Layout::nhwc) {
    for (std::int64_t i = 0; i < columns; ++i) {
      for (std::int64_t k = 0; k < count; ++k) put(k, i);
    }
  } else {
    for (std::int64_t k = 0; k < count; ++k) {
      for (std::int64_t i = 0; i < columns; ++i) put(k, i);
    }
  }
}

template <typename T>
void scalar_products(const Pass<T>& pass, char* scratch_memory, Runtime& runtime) {
  const ConvProblem& problem = pass.problem;
  const CpuConfig& config = pass.config;
  const auto kernel = register_tile::kernel_for(config.filters);
  const std::int64_t tasks = problem.r * problem.s * problem.groups * config.k_tiles * pass.pixel_tiles();
  // One range of tasks per thread, so that each has its part of the workspace.
  const std::int64_t workers = runtime.device().processors, c_size = problem.c_per_group();
  runtime.parallel_for(0, workers, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t worker = begin; worker < end; ++worker) {
      const Scratch scratch(scratch_memory + worker * config.scratch_bytes(), config);
      for (std::int64_t task = tasks * worker / workers; task < tasks * (worker + 1) / workers; ++task) {
        const Position at(task, pass);
        find_pixels(pass, at, scratch);
        std::fill_n(scratch.sum, config.sum_floats, 0.0f);
        for (std::int64_t c0 = 0; c0 < c_size; c0 += config.channels) {
          const std::int64_t channels = std::min(config.channels, c_size - c0);
          load_x(pass, at.g * c_size + c0, channels, scratch);
          load_filters(pass, at, c0, channels, scratch.filters);
          for (std::int64_t i = 0; i < cpu_pixel_tile; i += register_tile::pixels) {
            for (std::int64_t k = 0; k < config.k_tile; k += config.filters) {
              kernel(channels, scratch.filters + k, config.k_tile, scratch.x + i, scratch.offsets,
                     scratch.sum + i * config.k_tile + k * register_tile::pixels);
            }
          }
        }
        store(pass, at, scratch);
      }
    }
  });
}

template <typename T>
void sum_planes(const Pass<T>& pass, Runtime& runtime) {
  constexpr std::int64_t run = 256;  // elements whose sums stay in L1 while the planes pass by
  const std::int64_t numel = pass.numel(), planes = pass.problem.r * pass.problem.s;
  runtime.parallel_for(0, ceil_div(numel, run), 16, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t first = begin * run; first < std::min(end * run, numel); first += run) {
      const std::int64_t count = std::min(run, numel - first);
      float sum[run] = {};
      for (std::int64_t plane = 0; plane < planes; ++plane) {
        const float* row = pass.planes + plane * numel + first;
        for (std::int64_t i = 0; i < count; ++i) sum[i] += row[i];
      }
      for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t index = first + i;
        pass.y[index] = pass.epilogue(sum[i], index, index / pass.out.c % pass.problem.k);
      }
    }
  });
}

template <typename T>
void convolve(const ConvArgs& args, Runtime& runtime) {
  const ConvProblem& problem = args.problem;
  const Strides4 in = input_strides(problem), out = output_strides(problem);
  const std::int64_t step = images_per_chunk(problem);
  auto* planes = static_cast<float*>(args.workspace);
  char* scratch = static_cast<char*>(args.workspace) + (planes_bytes(problem) + 63) / 64 * 64;
  for (std::int64_t n = 0; n < problem.n; n += step) {
    auto epilogue = make_epilogue<T>(args);
    if (epilogue.residual != nullptr) epilogue.residual += n * out.n;
    const Pass<T> pass{problem,
                       static_cast<const T*>(args.x) + n * in.n,
                       static_cast<const T*>(args.weight),
                       static_cast<T*>(args.y) + n * out.n,
                       single_stage(problem) ? nullptr : planes,
                       in,
                       out,
                       epilogue,
                       std::min(step, problem.n - n),
                       plan_as<CpuConfig>(args.kernel_plan)};
    scalar_products(pass, scratch, runtime);
    if (pass.planes != nullptr) sum_planes(pass, runtime);
  }
}

}  // namespace

void run_cpu(const ConvArgs& args, Runtime& runtime) {
  dispatch_dtype(args.problem.dtype, [&](auto zero) { convolve<decltype(zero)>(args, runtime); });
}

}  // namespace fastconv::algos::two_stage
