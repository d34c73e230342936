#include <algorithm>
#include <cstring>

#include "algos/fused_unroll/plan.h"
#include "core/kernels.h"
#include "device/epilogue.h"
#include "device/indexing.h"

namespace fastconv::algos::fused_unroll {
namespace {

// 16 pixels; the compiler maps it to whatever registers the target has.
constexpr int lanes = 16;
using Vector [[gnu::vector_size(lanes * sizeof(float)), gnu::aligned(sizeof(float)), gnu::may_alias]] = float;

// sums [tile.k, tile.pixels] += weights [depth, tile.k]^T x inputs [depth, tile.pixels], 8 x 16 sums in registers.
__attribute__((target_clones("avx512f", "avx2,fma", "default"))) void multiply(int depth, TileShape tile,
                                                                               const float* weights,
                                                                               const float* inputs, float* sums) {
  constexpr int rows = 8;
  for (int pixel = 0; pixel < tile.pixels; pixel += lanes) {
    for (int k = 0; k < tile.k; k += rows) {
      Vector sum[rows] = {};
      for (int d = 0; d < depth; ++d) {
        const Vector input = *reinterpret_cast<const Vector*>(inputs + d * tile.pixels + pixel);
        for (int i = 0; i < rows; ++i) sum[i] += weights[d * tile.k + k + i] * input;
      }
      // Added to earlier blocks only now: a sum of block sums rounds like its longest part, not like the whole.
      for (int i = 0; i < rows; ++i) *reinterpret_cast<Vector*>(sums + (k + i) * tile.pixels + pixel) += sum[i];
    }
  }
}

// An output pixel: its sample in x, the input coordinates of its first tap, and its place in y.
struct Pixel {
  std::int64_t x, y;
  std::int64_t h0, w0;
};

template <typename T, int R, int TileK, int TilePixels>
class Tile {
 public:
  explicit Tile(const ConvArgs& args)
      : problem_(args.problem),
        x_(static_cast<const T*>(args.x)),
        weight_(static_cast<const T*>(args.weight)),
        y_(static_cast<T*>(args.y)),
        in_(input_strides(args.problem)),
        out_(output_strides(args.problem)),
        epilogue_(make_epilogue<T>(args)) {}

  void run(std::int64_t k_tile, std::int64_t group, std::int64_t pixel_tile) {
    const std::int64_t c_size = problem_.c_per_group(), k_size = problem_.k_per_group(), k0 = k_tile * TileK;
    const int valid_k = static_cast<int>(std::min<std::int64_t>(TileK, k_size - k0));
    const int valid_pixels = locate(pixel_tile * TilePixels);
    std::memset(sums_, 0, sizeof sums_);
    for (std::int64_t c0 = 0; c0 < c_size; c0 += channels) {
      const int c_count = static_cast<int>(std::min<std::int64_t>(channels, c_size - c0));
      load_inputs(group * c_size + c0, c_count, valid_pixels);
      load_weights(group * k_size + k0, valid_k, c0, c_count);
      multiply(c_count * R * R, {TileK, TilePixels}, weights_, inputs_, sums_);
    }
    for (int k = 0; k < valid_k; ++k) {
      for (int pixel = 0; pixel < valid_pixels; ++pixel) {
        const std::int64_t channel = group * k_size + k0 + k, index = pixels_[pixel].y + channel * out_.c;
        y_[index] = epilogue_(sums_[k * TilePixels + pixel], index, channel);
      }
    }
  }

 private:
  static constexpr int channels = chunk_channels(R), depth = channels * R * R;

  // Finds the pixels of the tile and returns how many there are.
  int locate(std::int64_t first) {
    const std::int64_t q_size = problem_.q(), map = problem_.p() * q_size;
    const int count = static_cast<int>(std::min<std::int64_t>(TilePixels, problem_.n * map - first));
    for (int i = 0; i < count; ++i) {
      const std::int64_t n = (first + i) / map, p = (first + i) % map / q_size, q = (first + i) % q_size;
      pixels_[i] = {n * in_.n, out_(n, 0, p, q), p * problem_.stride_h - problem_.pad_h,
                    q * problem_.stride_w - problem_.pad_w};
    }
    return count;
  }

  // inputs [count * R*R, TilePixels] from channels [c0, c0 + count); zero in the padding and beyond the last pixel.
  void load_inputs(std::int64_t c0, int count, int valid_pixels) {
    for (int c = 0; c < count; ++c) {
      for (int r = 0; r < R; ++r) {
        float* lines = inputs_ + (c * R + r) * R * TilePixels;
        for (int pixel = 0; pixel < TilePixels; ++pixel) {
          const Pixel at = pixel < valid_pixels ? pixels_[pixel] : Pixel{0, 0, -sample_limit, 0};
          const std::int64_t h = at.h0 + r * problem_.dilation_h;
          const bool row_inside = h >= 0 && h < problem_.h;
          const T* row = x_ + at.x + (c0 + c) * in_.c + (row_inside ? h : 0) * in_.h;
          for (int s = 0; s < R; ++s) {
            const std::int64_t w = at.w0 + s * problem_.dilation_w;
            const bool inside = row_inside && w >= 0 && w < problem_.w;
            lines[s * TilePixels + pixel] = inside ? to_float(row[w * in_.w]) : 0.0f;
          }
        }
      }
    }
  }

  // weights [count * R*R, TileK]; the reduction's index runs over C, R, S, as in memory. Zero beyond the last filter.
  void load_weights(std::int64_t k0, int valid_k, std::int64_t c0, int count) {
    const std::int64_t filter = problem_.c_per_group() * R * R;
    for (int k = 0; k < TileK; ++k) {
      const T* source = weight_ + (k0 + k) * filter + c0 * R * R;
      for (int d = 0; d < count * R * R; ++d) weights_[d * TileK + k] = k < valid_k ? to_float(source[d]) : 0.0f;
    }
  }

  const ConvProblem& problem_;
  const T* x_;       // [N, C, H, W] in problem.layout
  const T* weight_;  // [K, C/G, R, S]
  T* y_;             // [N, K, P, Q] in problem.layout
  Strides4 in_, out_;
  Epilogue<T> epilogue_;
  Pixel pixels_[TilePixels];
  alignas(64) float inputs_[depth * TilePixels];
  alignas(64) float weights_[depth * TileK];
  alignas(64) float sums_[TileK * TilePixels];
};

template <typename T, int R, int TileK, int TilePixels>
void convolve(const ConvArgs& args, Runtime& runtime) {
  const TileGrid grid = tile_grid(args.problem, {TileK, TilePixels});
  runtime.parallel_for(0, grid.count(), 1, [&](std::int64_t begin, std::int64_t end) {
    Tile<T, R, TileK, TilePixels> tile(args);  // 50 KiB at most
    for (std::int64_t i = begin; i < end; ++i) {
      tile.run(i % grid.k_tiles, i / grid.k_tiles % grid.groups, i / grid.k_tiles / grid.groups);
    }
  });
}

}  // namespace

void run_cpu(const ConvArgs& args, Runtime& runtime) {
  dispatch_dtype(args.problem.dtype, [&](auto zero) {
    dispatch_value<1, 2, 3, 4, 5, 7>(args.problem.r, [&](auto kernel) {
      using T = decltype(zero);
      constexpr int R = kernel();
      if (tile_shape(args.problem.k_per_group()).k == narrow_tile.k) {
        convolve<T, R, narrow_tile.k, narrow_tile.pixels>(args, runtime);
      } else {
        convolve<T, R, wide_tile.k, wide_tile.pixels>(args, runtime);
      }
    });
  });
}

}  // namespace fastconv::algos::fused_unroll
