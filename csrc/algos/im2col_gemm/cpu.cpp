#include <algorithm>

#include "algos/im2col_gemm/chunks.h"
#include "device/epilogue.h"
#include "device/indexing.h"

namespace fastconv::algos::im2col_gemm {
namespace {

// Elements that are worth a task of their own.
constexpr std::int64_t grain_elements = 1 << 14;

// columns [samples, C*R*S, rows*Q]: a task unrolls one channel, R*S lines.
template <typename T>
void unroll_nchw(const ConvProblem& problem, const Chunk& chunk,
                 const T* x,      // [N, C, H, W]
                 float* columns,  // [samples, C*R*S, rows*Q]
                 Runtime& runtime) {
  const std::int64_t q_size = problem.q(), pixels = chunk.rows * q_size, taps = problem.r * problem.s;
  const std::int64_t grain = std::max<std::int64_t>(1, grain_elements / (taps * pixels));
  runtime.parallel_for(0, chunk.samples * problem.c, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t map = begin; map < end; ++map) {
      const T* source = x + (chunk.n0 * problem.c + map) * problem.h * problem.w;
      for (std::int64_t tap = 0; tap < taps; ++tap) {
        float* line = columns + (map * taps + tap) * pixels;
        const std::int64_t s_shift = tap % problem.s * problem.dilation_w - problem.pad_w;
        const std::int64_t r_shift = tap / problem.s * problem.dilation_h - problem.pad_h;
        // q for which 0 <= q*stride + s_shift < W; the rest reads padding
        const auto first_at = [&](std::int64_t w) {
          return w <= s_shift ? 0 : std::min(q_size, ceil_div(w - s_shift, problem.stride_w));
        };
        const std::int64_t q_begin = first_at(0), q_end = first_at(problem.w);
        for (std::int64_t p = 0; p < chunk.rows; ++p, line += q_size) {
          const std::int64_t h = (chunk.p0 + p) * problem.stride_h + r_shift;
          if (h < 0 || h >= problem.h) {
            std::fill_n(line, q_size, 0.0f);
            continue;
          }
          const T* row = source + h * problem.w + s_shift;
          std::fill(line, line + q_begin, 0.0f);
          for (std::int64_t q = q_begin; q < q_end; ++q) line[q] = to_float(row[q * problem.stride_w]);
          std::fill(line + q_end, line + q_size, 0.0f);
        }
      }
    }
  });
}

// columns [samples*rows*Q, C*R*S]: a task unrolls whole pixels.
template <typename T>
void unroll_nhwc(const ConvProblem& problem, const Chunk& chunk,
                 const T* x,      // [N, H, W, C]
                 float* columns,  // [samples*rows*Q, C*R*S]
                 Runtime& runtime) {
  const std::int64_t q_size = problem.q(), taps = problem.r * problem.s, depth = problem.c * taps;
  const std::int64_t grain = std::max<std::int64_t>(1, grain_elements / depth);
  runtime.parallel_for(0, chunk.samples * chunk.rows * q_size, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t pixel = begin; pixel < end; ++pixel) {
      const std::int64_t q = pixel % q_size, p = chunk.p0 + pixel / q_size % chunk.rows;
      const std::int64_t n = chunk.n0 + pixel / q_size / chunk.rows;
      float* line = columns + pixel * depth;
      for (std::int64_t tap = 0; tap < taps; ++tap) {
        const std::int64_t h = p * problem.stride_h + tap / problem.s * problem.dilation_h - problem.pad_h;
        const std::int64_t w = q * problem.stride_w + tap % problem.s * problem.dilation_w - problem.pad_w;
        if (h < 0 || h >= problem.h || w < 0 || w >= problem.w) {
          for (std::int64_t c = 0; c < problem.c; ++c) line[c * taps + tap] = 0.0f;
        } else {
          const T* source = x + ((n * problem.h + h) * problem.w + w) * problem.c;
          for (std::int64_t c = 0; c < problem.c; ++c) line[c * taps + tap] = to_float(source[c]);
        }
      }
    }
  });
}

template <typename T>
void finish_chunk(const ConvProblem& problem, const OutputView& view,
                  const float* product,  // [view.lines, view.length], or null: y holds it
                  T* y,                  // [N, K, P, Q] in problem.layout
                  const Epilogue<T>& epilogue, Runtime& runtime) {
  const bool nhwc = problem.layout == Layout::nhwc;
  const std::int64_t grain = std::max<std::int64_t>(1, grain_elements / view.length);
  runtime.parallel_for(0, view.lines, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t line = begin; line < end; ++line) {
      for (std::int64_t i = 0; i < view.length; ++i) {
        const std::int64_t index = view.offset + line * view.pitch + i, k = nhwc ? i : line % problem.k;
        y[index] = epilogue(product != nullptr ? product[line * view.length + i] : to_float(y[index]), index, k);
      }
    }
  });
}

template <typename T>
void convolve(const ConvArgs& args, Runtime& runtime) {
  const ConvProblem& problem = args.problem;
  const auto* x = static_cast<const T*>(args.x);
  const auto* weight = static_cast<const T*>(args.weight);  // [K, C/G, R, S]
  auto* y = static_cast<T*>(args.y);
  const auto epilogue = make_epilogue<T>(args);
  run_chunks(
      args, runtime,
      [&](const Chunk& chunk, void* columns) {
        const auto unroll = problem.layout == Layout::nhwc ? unroll_nhwc<T> : unroll_nchw<T>;
        unroll(problem, chunk, x, static_cast<float*>(columns), runtime);
      },
      [&](const OutputView& view, const float* product) { finish_chunk(problem, view, product, y, epilogue, runtime); },
      [](const OutputView&) {},  // whose products end in nothing
      [&](float* converted) {
        const std::int64_t size = problem.k * problem.c_per_group() * problem.r * problem.s;
        runtime.parallel_for(0, size, grain_elements, [&](std::int64_t begin, std::int64_t end) {
          for (std::int64_t i = begin; i < end; ++i) converted[i] = to_float(weight[i]);
        });
      });
}

}  // namespace

void run_cpu(const ConvArgs& args, Runtime& runtime) {
  dispatch_dtype(args.problem.dtype, [&](auto zero) { convolve<decltype(zero)>(args, runtime); });
}

}  // namespace fastconv::algos::im2col_gemm
