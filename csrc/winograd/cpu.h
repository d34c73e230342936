// The inner loops of the Winograd transforms on the CPU. Every loop runs over channels that are contiguous in memory
// and is left to the compiler to vectorise, so that one source serves every instruction set.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/kernels.h"
#include "device/epilogue.h"
#include "device/indexing.h"
#include "device/max_pool.h"
#include "winograd/matrices.h"

// Compiles a function once per instruction set; the loader takes the best that the machine has. What it calls must be
// inlined to be compiled so, too. (Sanitizers instrument the resolvers, which run before they are set up.)
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define FASTCONV_CPU_VERSIONS  // where a function may have a body for each instruction set, too
#define FASTCONV_CPU_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FASTCONV_CPU_CLONES
#endif

namespace fastconv::winograd {

// Channels that are transformed together, and the input columns that they leave room for: a patch of alpha rows, and
// what the first transform makes of it, stay in the L1 cache.
constexpr int block_channels = 64;
constexpr int block_elements = 18 * block_channels;  // columns x channels

// The three transforms as types, for transform_lines.
template <int m>
struct InputStep {
  static constexpr int in = m + 2, out = m + 2;
  FASTCONV_HOST_DEVICE static void apply(const float (&d)[in], float (&v)[out]) { Transform<m>::input(d, v); }
};
template <int m>
struct FilterStep {
  static constexpr int in = 3, out = m + 2;
  FASTCONV_HOST_DEVICE static void apply(const float (&g)[in], float (&u)[out]) { Transform<m>::filter(g, u); }
};
template <int m>
struct OutputStep {
  static constexpr int in = m + 2, out = m;
  FASTCONV_HOST_DEVICE static void apply(const float (&p)[in], float (&y)[out]) { Transform<m>::output(p, y); }
};

// One-dimensional transform of `count` contiguous channels: source[i * source_stride + c] -> target[j * target_stride +
// c].
template <typename Step>
FASTCONV_HOST_DEVICE void transform_lines(const float* __restrict__ source, std::int64_t source_stride,
                                          float* __restrict__ target, std::int64_t target_stride, std::int64_t count) {
#pragma GCC ivdep
  for (std::int64_t c = 0; c < count; ++c) {
    float in[Step::in], out[Step::out];
#pragma GCC unroll 6
    for (int i = 0; i < Step::in; ++i) in[i] = source[i * source_stride + c];
    Step::apply(in, out);
#pragma GCC unroll 6
    for (int j = 0; j < Step::out; ++j) target[j * target_stride + c] = out[j];
  }
}

// B^T d B of `tiles` neighbouring tiles of one tile row.
template <int m>
FASTCONV_CPU_CLONES void transform_input(
    const float* source,  // [alpha rows][tiles * m + 2 columns][channels], channels contiguous
    std::int64_t row_stride, std::int64_t column_stride, int tiles, int channels,
    float* v,  // [alpha^2][tiles][channels]
    std::int64_t point_stride, std::int64_t tile_stride) {
  constexpr int alpha = m + 2;
  const int columns = tiles * m + 2;
  alignas(64) float half[alpha * block_elements];  // [alpha][columns][channels]: transformed along the columns
  const std::int64_t half_row = static_cast<std::int64_t>(columns) * channels;
  // Columns that follow one another without a gap are one long line.
  const bool dense = column_stride == channels;
  const int lines = dense ? 1 : columns;
  const std::int64_t length = dense ? half_row : channels;
  for (int line = 0; line < lines; ++line) {
    transform_lines<InputStep<m>>(source + line * column_stride, row_stride, half + line * channels, half_row, length);
  }
  for (int tile = 0; tile < tiles; ++tile) {
    for (int i = 0; i < alpha; ++i) {
      transform_lines<InputStep<m>>(half + i * half_row + tile * m * channels, channels,
                                    v + i * alpha * point_stride + tile * tile_stride, point_stride, channels);
    }
  }
}

// A^T M A of `tiles` neighbouring tiles of one tile row.
template <int m>
FASTCONV_CPU_CLONES void transform_output(const float* products,  // [alpha^2][tiles][channels]
                                          std::int64_t point_stride, std::int64_t tile_stride, int tiles, int channels,
                                          float* y) {  // [m rows][tiles * m columns][channels], dense
  constexpr int alpha = m + 2;
  alignas(64) float half[m * alpha * block_channels];  // [m][alpha][channels]
  const std::int64_t y_row = static_cast<std::int64_t>(tiles) * m * channels;
  for (int tile = 0; tile < tiles; ++tile) {
    for (int j = 0; j < alpha; ++j) {
      transform_lines<OutputStep<m>>(products + j * point_stride + tile * tile_stride, alpha * point_stride,
                                     half + j * channels, alpha * channels, channels);
    }
    for (int i = 0; i < m; ++i) {
      transform_lines<OutputStep<m>>(half + i * alpha * channels, channels, y + i * y_row + tile * m * channels,
                                     channels, channels);
    }
  }
}

// G g G^T of one filter.
template <int m, typename T>
FASTCONV_CPU_CLONES void transform_filter(const T* filter,  // [channels][3][3], where `strides` says
                                          FilterStrides strides, int channels, int padded_channels,
                                          float* u,  // [alpha^2][padded_channels], the last ones zero
                                          std::int64_t point_stride) {
  constexpr int alpha = m + 2;
  alignas(64) float taps[9 * block_channels];          // [3][3][padded_channels]
  alignas(64) float half[alpha * 3 * block_channels];  // [alpha][3][padded_channels]
  for (int tap = 0; tap < 9; ++tap) {
    for (int c = 0; c < padded_channels; ++c) {
      taps[tap * padded_channels + c] = c < channels ? to_float(filter[c * strides.channel + tap * strides.tap]) : 0.0f;
    }
  }
  transform_lines<FilterStep<m>>(taps, 3 * padded_channels, half, 3 * padded_channels, 3 * padded_channels);
  for (int i = 0; i < alpha; ++i) {
    transform_lines<FilterStep<m>>(half + i * 3 * padded_channels, padded_channels, u + i * alpha * point_stride,
                                   point_stride, padded_channels);
  }
}

// source [rows][columns] -> target [columns][rows], converted to float. Four by four with vectors of the baseline
// instruction set: element by element, this would cost as much as a transform.
template <typename T>
FASTCONV_HOST_DEVICE void transpose(const T* __restrict__ source, std::int64_t source_stride, int rows, int columns,
                                    float* __restrict__ target, std::int64_t target_stride) {
  int row = 0, whole_columns = 0;
#if defined(__GNUC__)
  if constexpr (std::is_same_v<T, float>) {
    using Quad = float __attribute__((vector_size(16)));
    whole_columns = columns / 4 * 4;
    for (; row + 4 <= rows; row += 4) {
      for (int column = 0; column < whole_columns; column += 4) {
        const float* from = source + row * source_stride + column;
        float* to = target + column * target_stride + row;
        Quad a, b, c, d;
        std::memcpy(&a, from, sizeof a), std::memcpy(&b, from + source_stride, sizeof b);
        std::memcpy(&c, from + 2 * source_stride, sizeof c), std::memcpy(&d, from + 3 * source_stride, sizeof d);
        const Quad ab_low = __builtin_shufflevector(a, b, 0, 4, 1, 5),
                   ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
        const Quad cd_low = __builtin_shufflevector(c, d, 0, 4, 1, 5),
                   cd_high = __builtin_shufflevector(c, d, 2, 6, 3, 7);
        a = __builtin_shufflevector(ab_low, cd_low, 0, 1, 4, 5),
        b = __builtin_shufflevector(ab_low, cd_low, 2, 3, 6, 7);
        c = __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5),
        d = __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7);
        std::memcpy(to, &a, sizeof a), std::memcpy(to + target_stride, &b, sizeof b);
        std::memcpy(to + 2 * target_stride, &c, sizeof c), std::memcpy(to + 3 * target_stride, &d, sizeof d);
      }
    }
  }
#endif
  const auto copy = [&](int first_row, int last_row, int first_column) {
    for (int i = first_row; i < last_row; ++i) {
      for (int j = first_column; j < columns; ++j)
        target[j * target_stride + i] = to_float(source[i * source_stride + j]);
    }
  };
  copy(0, row, whole_columns);
  copy(row, rows, 0);
}

// A window of one image: where it starts (outside the image where it hangs over the padding) and how large it is.
struct Window {
  std::int64_t h, w;
  int rows, columns;
};

// Copies a window of the input as float, zeros outside the image and beyond the last channel.
template <typename T>
FASTCONV_CPU_CLONES void gather(const T* x,  // one image from the first channel wanted, [C, H, W] with strides `in`
                                Strides4 in, std::int64_t h_size, std::int64_t w_size, Window window, int channels,
                                int padded_channels,
                                float* patch) {  // [rows][columns][padded_channels]
  const int first = static_cast<int>(std::clamp<std::int64_t>(-window.w, 0, window.columns));
  const int last = static_cast<int>(std::clamp<std::int64_t>(w_size - window.w, first, window.columns));
  const std::int64_t patch_row = static_cast<std::int64_t>(window.columns) * padded_channels;
  for (int row = 0; row < window.rows; ++row, patch += patch_row) {
    const std::int64_t h = window.h + row;
    const bool inside = h >= 0 && h < h_size && first < last;
    if (!inside || first > 0 || last < window.columns || channels < padded_channels)
      std::fill_n(patch, patch_row, 0.0f);
    if (!inside) continue;
    const T* source = x + h * in.h + (window.w + first) * in.w;
    float* target = patch + first * padded_channels;
    if (in.c == 1) {
      for (int column = 0; column < last - first; ++column) {
        for (int c = 0; c < channels; ++c) {
          target[column * padded_channels + c] = to_float(source[column * in.w + c]);
        }
      }
    } else {
      transpose(source, in.c, channels, last - first, target, padded_channels);
    }
  }
}

// The epilogue for outputs that are contiguous in memory.
template <typename T, typename Bias>
FASTCONV_HOST_DEVICE void finish_line(float* __restrict__ line, int count, Bias bias,  // bias(i): of output i, float
                                      const Epilogue<T>& epilogue, std::int64_t index, T* __restrict__ y) {
  const T* const residual = epilogue.residual != nullptr ? epilogue.residual + index : nullptr;
  const ActivationFunction activate = epilogue.activate;
  if (epilogue.adds_after()) {
    for (int i = 0; i < count; ++i) {
      y[index + i] = from_float<T>(activate(line[i] + bias(i)) + to_float(residual[i]));
    }
    return;
  }
  if (residual != nullptr) {
    for (int i = 0; i < count; ++i) line[i] += to_float(residual[i]);
  }
  for (int i = 0; i < count; ++i) y[index + i] = from_float<T>(activate(line[i] + bias(i)));
}

// act(patch + bias), and of that the largest of each 2 x 2.
template <typename T>
FASTCONV_CPU_CLONES void pool_patch(const float* patch,  // [2 rows][2 columns][padded_channels]
                                    int rows, int columns, int channels, int padded_channels, std::int64_t k,
                                    const Epilogue<T>& epilogue, float* pooled) {  // [rows][columns][padded_channels]
  const ActivationFunction activate = epilogue.activate;
  alignas(64) float bias[block_channels] = {};
  for (int c = 0; c < channels; ++c) bias[c] = epilogue.bias_of(k + c);
  const std::int64_t pitch = 2 * static_cast<std::int64_t>(columns) * padded_channels;
  for (int row = 0; row < rows; ++row) {
    for (int column = 0; column < columns; ++column, pooled += padded_channels) {
      const float* above = patch + 2 * row * pitch + 2 * static_cast<std::int64_t>(column) * padded_channels;
      const float* below = above + pitch;
      for (int c = 0; c < channels; ++c) {
        const auto value = [&](float sum) { return activate(sum + bias[c]); };
        pooled[c] = larger_of(larger_of(value(above[c]), value(above[c + padded_channels])),
                              larger_of(value(below[c]), value(below[c + padded_channels])));
      }
    }
  }
}

// Writes the part of a window of the output that lies inside the image.
template <typename T>
FASTCONV_CPU_CLONES void scatter(float* patch,  // [rows][columns][padded_channels]; overwritten
                                 Window window, int channels, int padded_channels, std::int64_t k, std::int64_t origin,
                                 std::int64_t p_size, std::int64_t q_size, Strides4 out, const Epilogue<T>& epilogue,
                                 T* y) {  // origin: of the image and channel k in y
  const int rows = static_cast<int>(std::min<std::int64_t>(window.rows, p_size - window.h));
  const int columns = static_cast<int>(std::min<std::int64_t>(window.columns, q_size - window.w));
  alignas(64) float bias[block_channels] = {};
  if (epilogue.bias != nullptr) {
    for (int c = 0; c < channels; ++c) bias[c] = to_float(epilogue.bias[k + c]);
  }
  for (int row = 0; row < rows; ++row) {
    float* source = patch + static_cast<std::int64_t>(row) * window.columns * padded_channels;
    const std::int64_t index = origin + (window.h + row) * out.h + window.w * out.w;
    if (out.c == 1) {
      for (int column = 0; column < columns; ++column) {
        finish_line(
            source + column * padded_channels, channels, [&bias](int i) { return bias[i]; }, epilogue,
            index + column * out.w, y);
      }
    } else {
      alignas(64) float lines[block_elements];  // [channels][columns]
      transpose(source, padded_channels, columns, channels, lines, columns);
      for (int c = 0; c < channels; ++c) {
        finish_line(
            lines + c * columns, columns, [value = bias[c]](int) { return value; }, epilogue, index + c * out.c, y);
      }
    }
  }
}

}  // namespace fastconv::winograd
