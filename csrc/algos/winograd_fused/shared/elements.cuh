// Raw input without tensor copies.
#pragma once

#include "algos/winograd_fused/shared/layout.cuh"
#include "device/numeric.h"

namespace fastconv::algos::winograd_fused {

// `rows` x `columns` of a work tile's input, `channels` of each pixel from `first_channel`, one behind the other, by
// all producers, element by element, from any layout and alignment. Zeros outside.
template <int rows, int columns, int channels, typename T>
__device__ __forceinline__ void load_elements(const ParamsOf<T>& params, unsigned char* raw, const WorkTile& work_tile,
                                              int first_channel, int thread) {
  const T* image = params.x + work_tile.n * params.x_image;
#pragma unroll 1
  for (int i = thread; i < rows * columns * channels; i += producer_threads) {
    const int c = first_channel + i % channels, pixel = i / channels;
    const int h = work_tile.p0 - params.pad_h + pixel / columns, w = work_tile.q0 - params.pad_w + pixel % columns;
    const bool inside = c < params.c && static_cast<unsigned>(h) < static_cast<unsigned>(params.h) &&
                        static_cast<unsigned>(w) < static_cast<unsigned>(params.w);
    reinterpret_cast<T*>(raw)[i] =
        inside ? image[h * params.x_row + w * params.x_column + c * params.x_channel] : from_float<T>(0.0f);
  }
}

}  // namespace fastconv::algos::winograd_fused
