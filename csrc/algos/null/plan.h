// What the CPU and the CUDA function of `null` share: one element of y[n,c,h,w] = x[n,c,h,w] * weight[c].
#pragma once

#include "device/epilogue.h"
#include "device/indexing.h"

namespace fastconv::algos::null {

template <typename T>
struct Scale {
  const T* x;             // [N, C, H, W], dense, in either layout
  const T* weight;        // [C, 1, 1, 1]
  T* y;                   // like x: stride 1, padding 0, K = C
  std::int64_t c_stride;  // of x and y, in elements
  std::int64_t channels;  // C
  Epilogue<T> epilogue;

  FASTCONV_HOST_DEVICE void operator()(std::int64_t index) const {
    const std::int64_t c = index / c_stride % channels;
    y[index] = epilogue(to_float(x[index]) * to_float(weight[c]), index, c);
  }
};

template <typename T>
Scale<T> make_scale(const ConvArgs& args) {
  return {static_cast<const T*>(args.x),
          static_cast<const T*>(args.weight),
          static_cast<T*>(args.y),
          input_strides(args.problem).c,
          args.problem.c,
          make_epilogue<T>(args)};
}

}  // namespace fastconv::algos::null
