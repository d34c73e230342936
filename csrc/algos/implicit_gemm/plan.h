// What the kernels of the implicit GEMM share:
//
//   D[pixel][filter] = sum over j of A[pixel][j] * B[filter][j],   j = (r, s, c), c fastest
//
// of each group, with the C/G channels and K/G filters of that. Packed weight on the CPU: [R * S * C/G][K] float32.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/device_info.h"
#include "core/gemm.h"
#include "core/integers.h"
#include "core/problem.h"
#include "device/numeric.h"

namespace fastconv::algos::implicit_gemm {

constexpr std::int64_t max_groups = 65535;  // a dimension of the grid

// What the tensor cores multiply.
enum class Mode : std::uint8_t {
  split,   // float32 as pairs of float16, three products (class fp32; the portable kernel: tf32 too)
  single,  // float32 rounded to float16, one product (class tf32)
  fp16,
  bf16,
};

// Calls visit with the std::integral_constant that the mode is.
template <typename Visitor>
void dispatch_mode(Mode mode, const Visitor& visit) {
  dispatch_value<Mode::split, Mode::single, Mode::fp16, Mode::bf16>(mode, visit);
}

inline const char* describe(Mode mode) {
  switch (mode) {
    case Mode::split: return "3 x float16";
    case Mode::single: return "1 x float16";
    case Mode::fp16: return "float16";
    case Mode::bf16: return "bfloat16";
  }
  return "?";
}

inline Mode select_mode(AccuracyClass accuracy) {
  switch (accuracy) {
    case AccuracyClass::fp16: return Mode::fp16;
    case AccuracyClass::bf16: return Mode::bf16;
    default: return Mode::split;
  }
}

// Whether the kernel loads 16 bytes of channels at a time: from NHWC (ConvPlan::reads_nhwc).
// With any other C the portable one reads element by element, in either layout.
inline bool loads_vectors(const ConvProblem& problem) {
  return problem.c_per_group() % static_cast<std::int64_t>(16 / size_of(problem.dtype)) == 0;
}

// Hopper's kernels: the filters of a block are those of one pixel of a shuffle.
inline bool fits_shuffle(const ConvProblem& problem, std::int64_t filter_tile) {
  return !problem.shuffles() || problem.y_k() % filter_tile == 0;
}

}  // namespace fastconv::algos::implicit_gemm
