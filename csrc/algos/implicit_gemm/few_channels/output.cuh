// The finished tile: from registers to y; and outputs that do not fit its scale, recomputed one by one.
#pragma once

#include "algos/implicit_gemm/few_channels/multiply.cuh"
#include "device/activation.cuh"
#include "device/fast_silu.cuh"

namespace fastconv::algos::implicit_gemm::few_channels {

template <int count, typename T>
struct alignas(count * sizeof(T)) Vector {
  T of[count];
};

// The lane's outputs that exist: `columns` of its quad; from filter `k` on `filters`.
struct Extent {
  int columns, filters;
};

// Calls visit.template operator()<count>(at, offset, left, values) for neighbours in memory, in part `part` of `parts`:
// `at` values of the part come before them, whether they exist or not; `offset` of the first from the lane's first
// output and the tile's first filter, `left` of them exist; values: pointers' stand-ins, references to sums.
template <typename S, int parts = 1, typename Visit>
__device__ __forceinline__ void for_each_vector(const Params<typename S::T>& params, const Extent& extent, Sums<S>& sum,
                                                const Visit& visit, int part = 0) {
  const int lane = threadIdx.x % 32;
  if (params.nhwc) {
    constexpr int count = S::vector, pixels = quad / parts;
#pragma unroll
    for (int i = 0; i < pixels; ++i) {
      const int pixel = part * pixels + i;
      if (pixel >= extent.columns) break;
#pragma unroll
      for (int n = 0; n < S::column_tiles; n += count / 2) {
        const int filter = filter_of<count>(lane, n, 0);
        float* values[count];
#pragma unroll
        for (int e = 0; e < count; ++e) values[e] = &sum_of<S>(sum, pixel, n + e / 2, e % 2);
        visit(2 * (i * S::column_tiles + n), pixel * params.out_q + filter, extent.filters - filter, values);
      }
    }
  } else {
    constexpr int tiles = S::column_tiles / parts;
#pragma unroll
    for (int i = 0; i < tiles; ++i) {
      const int n = part * tiles + i;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int filter = filter_of<S::vector>(lane, n, j);
        if (filter >= extent.filters) continue;
        float* values[quad];
#pragma unroll
        for (int e = 0; e < quad; ++e) values[e] = &sum_of<S>(sum, e, n, j);
        visit((2 * i + j) * quad, filter * params.out_k, extent.columns, values);
      }
    }
  }
}

// Adds the residual, `residual` for the lane's first output and the tile's first filter: a part of it is in registers
// before any of that is needed, for a warp waits for memory once a part.
template <typename S>
__device__ __forceinline__ void add_residual(const Params<typename S::T>& params, const Extent& extent,
                                             const typename S::T* residual, Sums<S>& sum) {
  using T = typename S::T;
  asm volatile("" : "+l"(residual));  // or offsets from somewhere else are kept in registers
  __builtin_assume(__isGlobal(residual));
  if (!params.vector) {
    for_each_vector<S>(params, extent, sum, [&]<int count>(int, int offset, int left, float*(&values)[count]) {
#pragma unroll
      for (int i = 0; i < count; ++i) {
        if (i < left) *values[i] += to_float(residual[offset + i]);
      }
    });
    return;
  }
  constexpr int per_word = 4 / sizeof(T), words = S::row_tiles * S::column_tiles * 4 / per_word;
  constexpr int max_words = 16, parts = words > max_words ? 2 : 1;  // of registers
#pragma unroll
  for (int part = 0; part < parts; ++part) {
    std::uint32_t word[words / parts];
    for_each_vector<S, parts>(
        params, extent, sum,
        [&]<int count>(int at, int offset, int left, float*(&)[count]) {
          if (left <= 0) return;
          const auto from = *reinterpret_cast<const Vector<count / per_word, std::uint32_t>*>(residual + offset);
#pragma unroll
          for (int i = 0; i < count / per_word; ++i) word[at / per_word + i] = from.of[i];
        },
        part);
    for_each_vector<S, parts>(
        params, extent, sum,
        [&]<int count>(int at, int, int left, float*(&values)[count]) {
          if (left <= 0) return;
#pragma unroll
          for (int i = 0; i < count; ++i) {
            *values[i] += to_float(reinterpret_cast<const T*>(&word[(at + i) / per_word])[i % per_word]);
          }
        },
        part);
  }
}

// bias: of the block's filters; exponents: of their scales; wide: whether two exponents may exceed one float's. first:
// of the lane's first output and the tile's first filter.
template <typename S>
__device__ __forceinline__ void finish(const Params<typename S::T>& params, const Extent& extent, std::int64_t first,
                                       const float* bias, const int* exponents, int exponent, bool wide, Sums<S>& sum) {
  using T = typename S::T;
  const int lane = threadIdx.x % 32;
  const auto for_each_filter = [&](const auto& visit) {
#pragma unroll
    for (int n = 0; n < S::column_tiles; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int filter = filter_of<S::vector>(lane, n, j);
        const auto change = visit(filter, bias[filter]);
#pragma unroll
        for (int pixel = 0; pixel < quad; ++pixel) {
          float& value = sum_of<S>(sum, pixel, n, j);
          value = change(value);
        }
      }
    }
  };
  if constexpr (!S::scaled) {
    for_each_filter([&](int, float shift) { return [=](float value) { return value + shift; }; });
  } else if (!wide) {
    for_each_filter([&](int filter, float shift) {
      const float unscale = power_of_two(-exponent - exponents[filter]);
      return [=](float value) { return fmaf(value, unscale, shift); };
    });
  } else {
    for_each_filter([&](int filter, float shift) {
      const Unscale unscale(exponent, exponents[filter]);
      return [=](float value) { return fmaf(value * unscale.first, unscale.second, shift); };
    });
  }
  if (extent.columns <= 0) return;
  const auto for_each_sum = [&](const auto& apply) {
#pragma unroll
    for (int m = 0; m < S::row_tiles; ++m) {
#pragma unroll
      for (int n = 0; n < S::column_tiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[m][n][i] = apply(sum[m][n][i]);
      }
    }
  };
  params.epilogue.in_order([&] { add_residual<S>(params, extent, params.epilogue.residual + first, sum); },
                           [&] {
                             if (!params.has_activation) return;
                             if constexpr (!S::scaled) {
                               if (params.epilogue.activate.is_silu) return for_each_sum(&fast_silu);
                             }
                             apply_activation(params.epilogue.activate, for_each_sum);
                           });
  T* y = params.y + first;
  asm volatile("" : "+l"(y));  // or the compiler would rather add `first` to each of the offsets
  __builtin_assume(__isGlobal(y));
  for_each_vector<S>(params, extent, sum, [&]<int count>(int, int offset, int left, float*(&values)[count]) {
    if (params.vector) {
      if (left <= 0) return;
      Vector<count, T> to;
#pragma unroll
      for (int i = 0; i < count; ++i) to.of[i] = from_float<T>(*values[i]);
      *reinterpret_cast<Vector<count, T>*>(y + offset) = to;
    } else {
#pragma unroll
      for (int i = 0; i < count; ++i) {
        if (i < left) y[offset + i] = from_float<T>(*values[i]);
      }
    }
  });
}

// The weight of the block's `filter` at half `half` of pair `pair`, scaled.
template <typename S>
__device__ __forceinline__ float weight_at(const unsigned char* filters, int filter, int pair, int half) {
  using H = Half<typename S::T>;
  constexpr int limb_bytes = S::step_bytes / S::limbs;
  const PackedPlace place(S::vector, filter, pair);
  const auto* at = reinterpret_cast<const H*>(filters + pair / step_pairs * S::step_bytes + place.offset) + half;
  float weight = to_float(at[0]);
  if constexpr (S::limbs == 2) weight += to_float(at[limb_bytes / 2]);
  return weight;
}

// All filters of output (n, p, q) in FP32 arithmetic, by the whole warp: where the products' scale or an infinity
// beside the window does not let them be right.
template <typename S>
__device__ __noinline__ void repeat(const Params<typename S::T>& params, int n, int p, int q, int first_filter,
                                    const unsigned char* filters, const int* exponents) {
  using T = typename S::T;
  const int pitch = params.plan.pitch;
  for (int filter = static_cast<int>(threadIdx.x % 32); filter < S::filter_tile; filter += 32) {
    const int k = first_filter + filter;
    if (k >= params.k) break;
    float scale = 1.0f;
    if constexpr (S::scaled) scale = power_of_two(-exponents[filter]);
    float sum = 0.0f;
    for (int r = 0; r < params.r; ++r) {
      const int h = p * params.stride_h - params.pad_h + r * params.dilation_h;
      if (static_cast<unsigned>(h) >= static_cast<unsigned>(params.h)) continue;
      for (int s = 0; s < params.s; ++s) {
        const int w = q * params.stride_w - params.pad_w + s * params.dilation_w;
        if (static_cast<unsigned>(w) >= static_cast<unsigned>(params.w)) continue;
        const T* x = params.x + n * params.image_in + static_cast<std::int64_t>(h) * params.in_row +
                     static_cast<std::int64_t>(w) * params.in_pixel;
        for (int c = 0; c < params.c; ++c) {
          const int half = s * pitch + c;
          const float weight = weight_at<S>(filters, filter, r * params.by_row_pairs + half / 2, half % 2);
          sum = fmaf(to_float(x[static_cast<std::int64_t>(c) * params.in_channel]), weight * scale, sum);
        }
      }
    }
    const std::int64_t index = n * params.image_out + static_cast<std::int64_t>(p) * params.out_p +
                               static_cast<std::int64_t>(q) * params.out_q +
                               static_cast<std::int64_t>(k) * params.out_k;
    params.y[index] = params.epilogue(sum, index, k);
  }
}

// Those of the warp's outputs that are off: of each lane a bit for each of its quad's, of which `columns` exist. After
// finish(), whose values are overwritten.
template <typename S>
__device__ __forceinline__ void repeat_outputs(const Params<typename S::T>& params, const Origin& at, unsigned off,
                                               int columns, int first_filter, const unsigned char* filters,
                                               const int* exponents) {
#pragma unroll 1
  for (int pixel = 0; pixel < quad; ++pixel) {
    unsigned lanes = __ballot_sync(0xffffffffu, (off >> pixel & 1) != 0 && pixel < columns) & 0x11111111u;
    __syncwarp();
    for (; lanes != 0; lanes &= lanes - 1) {
      const int thread = static_cast<int>(threadIdx.x / 32 * 32) + __ffs(static_cast<int>(lanes)) - 1;
      const Place place(params.plan.tile_q, thread);
      repeat<S>(params, at.n, at.p + place.p, at.q + place.q + pixel, first_filter, filters, exponents);
    }
  }
}

}  // namespace fastconv::algos::implicit_gemm::few_channels
