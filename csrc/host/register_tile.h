// The inner loop of the blocked CPU kernels: 8 filters (or 1) times 8 neighbouring outputs, kept in registers over the
// whole reduction. Compiled for AVX2 + FMA and for the baseline; the loader picks what the machine has.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FASTCONV_CPU_CLONES __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define FASTCONV_CPU_CLONES
#endif

namespace fastconv::register_tile {

inline constexpr int filters = 8, pixels = 8;

namespace detail {

using Vector = float __attribute__((vector_size(pixels * sizeof(float)), may_alias));

template <int F>
inline __attribute__((always_inline)) void multiply_add(std::int64_t taps, const float* weight, std::int64_t pitch,
                                                        const float* x, const std::int32_t* offsets, float* sum) {
  Vector local[F] = {};  // added to sum once per call: sums of sums round less than one long chain
  for (std::int64_t t = 0; t < taps; ++t) {
    Vector row;
    std::memcpy(&row, x + offsets[t], sizeof row);
    for (int f = 0; f < F; ++f) local[f] += row * weight[t * pitch + f];
  }
  for (int f = 0; f < F; ++f) {
    Vector total;
    std::memcpy(&total, sum + f * pixels, sizeof total);
    total += local[f];
    std::memcpy(sum + f * pixels, &total, sizeof total);
  }
}

}  // namespace detail

// sum[f][j] += sum_t weight[t * pitch + f] * x[offsets[t] + j]
// weight: [taps, pitch], its first 8 columns; offsets: [taps]; sum: [8, 8]
FASTCONV_CPU_CLONES static void multiply_add_8(std::int64_t taps, const float* weight, std::int64_t pitch,
                                               const float* x, const std::int32_t* offsets, float* sum) {
  detail::multiply_add<8>(taps, weight, pitch, x, offsets, sum);
}

// The same for a single filter, as in depthwise convolution; sum: [1, 8]
FASTCONV_CPU_CLONES static void multiply_add_1(std::int64_t taps, const float* weight, std::int64_t pitch,
                                               const float* x, const std::int32_t* offsets, float* sum) {
  detail::multiply_add<1>(taps, weight, pitch, x, offsets, sum);
}

// Filters per register tile when a group has `k_per_group` of them, and the kernel that goes with it.
constexpr int filters_for(std::int64_t k_per_group) { return k_per_group == 1 ? 1 : filters; }
inline auto kernel_for(int filter_count) { return filter_count == 1 ? multiply_add_1 : multiply_add_8; }

}  // namespace fastconv::register_tile
