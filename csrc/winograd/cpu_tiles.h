// The Winograd input and output transforms on the CPU for ranges of tiles of a convolution: what the staged algorithm
// and the tasks of the megakernel share.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "core/kernels.h"
#include "winograd/cpu.h"

namespace fastconv::winograd {

// Tiles of m x m outputs in an image, numbered row by row, image by image.
struct TileGrid {
  std::int64_t rows, columns;
};
inline TileGrid tile_grid(int m, const ConvProblem& problem) {
  return {ceil_div<std::int64_t>(problem.p(), m), ceil_div<std::int64_t>(problem.q(), m)};
}

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

  Runs(int m, TileGrid grid, std::int64_t first_tile, std::int64_t chunk, std::int64_t padded_channels)
      : m_(m), grid_(grid), first_tile_(first_tile), chunk_(chunk), padded_channels_(padded_channels) {}

  std::int64_t size() const { return ceil_div<std::int64_t>(padded_channels_, block_channels) * chunk_; }
  std::int64_t padded_channels() const { return padded_channels_; }
  std::int64_t chunk() const { return chunk_; }

  template <typename Visitor>
  void visit(std::int64_t begin, std::int64_t end, Visitor&& visitor) const {
    while (begin < end) {
      Run run;
      run.tile = begin % chunk_;
      run.channel = begin / chunk_ * block_channels;
      run.padded_channels = static_cast<int>(std::min<std::int64_t>(block_channels, padded_channels_ - run.channel));
      const std::int64_t tile = first_tile_ + run.tile;
      run.tile_q = tile % grid_.columns;
      run.tile_p = tile / grid_.columns % grid_.rows;
      run.n = tile / grid_.columns / grid_.rows;
      const std::int64_t most = (block_elements / run.padded_channels - 2) / m_;
      run.tiles = static_cast<int>(std::min({most, end - begin, chunk_ - run.tile, grid_.columns - run.tile_q}));
      visitor(run);
      begin += run.tiles;
    }
  }

 private:
  int m_;
  TileGrid grid_;
  std::int64_t first_tile_, chunk_, padded_channels_;
};

template <int m, typename T>
void transform_inputs(const ConvArgs& args, const Runs& runs, std::int64_t begin, std::int64_t end,
                      float* v) {  // [alpha^2][chunk][C_pad]
  const ConvProblem& problem = args.problem;
  const auto* x = static_cast<const T*>(args.x);  // [N, C, H, W]
  const Strides4 in = input_strides(problem);
  const std::int64_t c_pad = runs.padded_channels(), point_stride = runs.chunk() * c_pad;
  runs.visit(begin, end, [&](const Runs::Run& run) {
    const int channels = static_cast<int>(std::min<std::int64_t>(run.padded_channels, problem.c - run.channel));
    const Window window{run.tile_p * m - problem.pad_h, run.tile_q * m - problem.pad_w, m + 2, run.tiles * m + 2};
    const T* image = x + in(run.n, run.channel, 0, 0);
    float* target = v + run.tile * c_pad + run.channel;
    if constexpr (std::is_same_v<T, float>) {
      // Nothing to convert, transpose or pad: read the input where it is.
      if (in.c == 1 && channels == run.padded_channels && window.h >= 0 && window.h + window.rows <= problem.h &&
          window.w >= 0 && window.w + window.columns <= problem.w) {
        transform_input<m>(image + window.h * in.h + window.w * in.w, in.h, in.w, run.tiles, channels, target,
                           point_stride, c_pad);
        return;
      }
    }
    alignas(64) float patch[(m + 2) * block_elements];
    gather(image, in, problem.h, problem.w, window, channels, run.padded_channels, patch);
    transform_input<m>(patch, static_cast<std::int64_t>(window.columns) * run.padded_channels, run.padded_channels,
                       run.tiles, run.padded_channels, target, point_stride, c_pad);
  });
}

template <int m, typename T>
void transform_outputs(const ConvArgs& args, const Runs& runs, std::int64_t begin, std::int64_t end,
                       const float* products) {  // [alpha^2][chunk][K_pad]
  const ConvProblem& problem = args.problem;
  const Strides4 out = output_strides(problem);
  const auto epilogue = make_epilogue<T>(args);
  const std::int64_t k_pad = runs.padded_channels(), point_stride = runs.chunk() * k_pad;
  runs.visit(begin, end, [&](const Runs::Run& run) {
    const int channels = static_cast<int>(std::min<std::int64_t>(run.padded_channels, problem.k - run.channel));
    alignas(64) float patch[m * block_elements];
    transform_output<m>(products + run.tile * k_pad + run.channel, point_stride, k_pad, run.tiles, run.padded_channels,
                        patch);
    const auto write = [&](float* values, Window window, const Epilogue<T>& finish) {
      scatter(values, window, channels, run.padded_channels, run.channel, out(run.n, run.channel, 0, 0), problem.y_p(),
              problem.y_q(), out, finish, static_cast<T*>(args.y));
    };
    if (!problem.max_pool) return write(patch, {run.tile_p * m, run.tile_q * m, m, run.tiles * m}, epilogue);
    constexpr int step = m / 2;
    alignas(64) float pooled[step * block_elements / 2];
    pool_patch(patch, step, run.tiles * step, channels, run.padded_channels, run.channel, epilogue, pooled);
    write(pooled, {run.tile_p * step, run.tile_q * step, step, run.tiles * step}, Epilogue<T>{});
  });
}

}  // namespace fastconv::winograd
