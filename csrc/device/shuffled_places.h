// Where the filters of a shuffle (ConvProblem::shuffle) read and write: a block's are those of one pixel (a, b) of 2
// x 2.
#pragma once

#include <cstdint>

#include "core/fast_divide.h"
#include "core/problem.h"
#include "device/numeric.h"

namespace fastconv {

// Without a shuffle all offsets are 0.
struct ShuffledPlaces {
  FastDivide by_pixel = 0x7fffffff;  // tiles of filters
  int next = 0;                      // elements from filter K/4 + k of pixel (a, 0) to k of (a, 1)
  int pair = 0;                      // of two pixels side by side
  int columns = 0;                   // Q
  int shifts = 0;                    // 1: windows begin with their pixel

  ShuffledPlaces() = default;
  ShuffledPlaces(const ConvProblem& problem, std::int64_t filter_tile) {
    if (!problem.shuffles()) return;
    by_pixel = problem.y_k() / filter_tile;
    next = static_cast<int>(problem.y_pitch() - problem.y_k()), pair = static_cast<int>(2 * problem.y_pitch());
    columns = static_cast<int>(problem.q()), shifts = problem.shifts();
  }

  // Where sums are written as the convolution has them.
  ShuffledPlaces of_sums() const {
    ShuffledPlaces places = *this;
    places.next = places.pair = 0;
    return places;
  }

  FASTCONV_HOST_DEVICE int row(int filter_tile) const { return static_cast<int>(pixel(filter_tile) >> 1); }     // a
  FASTCONV_HOST_DEVICE int column(int filter_tile) const { return static_cast<int>(pixel(filter_tile) & 1u); }  // b
  // In y, from where filter k of the convolution would be to where it is: 0 or more.
  FASTCONV_HOST_DEVICE int offset(int filter_tile) const {
    return channel_offset(filter_tile) + row(filter_tile) * columns * pair;
  }
  // The same where y is [N, P, (a, q), (b, k)], a dense tensor of rows of 2 Q pairs.
  FASTCONV_HOST_DEVICE int channel_offset(int filter_tile) const {
    return static_cast<int>(pixel(filter_tile)) * next - row(filter_tile) * pair;
  }
  FASTCONV_HOST_DEVICE int column_offset(int filter_tile) const { return row(filter_tile) * columns; }

 private:
  FASTCONV_HOST_DEVICE unsigned pixel(int filter_tile) const {
    return by_pixel.quotient(static_cast<unsigned>(filter_tile));
  }
};

}  // namespace fastconv
