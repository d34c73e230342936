#include <algorithm>
#include <cmath>
#include <string>

#include "algos/im2col_gemm/plan.h"
#include "core/algorithm.h"
#include "core/cost.h"
#include "core/fitted.h"
#include "core/library_times.h"
#include "core/roundoffs.h"

namespace fastconv::algos::im2col_gemm {
namespace {

namespace own = fitted::im2col_gemm;

constexpr std::int64_t floats_per_vector = 8;  // of AVX2

Support supports(const ConvProblem& problem, const DeviceInfo&) {
  const std::int64_t elements = elements_per_row(problem);
  if (elements > chunk_elements) {
    return Support::no("size", "one output row needs " + std::to_string(elements) +
                                   " elements of unrolled input or output; im2col_gemm takes up to " +
                                   std::to_string(chunk_elements));
  }
  return Support::yes();
}

// The library's products on a CPU, of FP32: a share of the vectors' rate, half of it with so many pixels of an image;
// what is unrolled is written and read, which together takes so many passes. In NHWC rows are a pixel's filters: where
// they are no whole vectors (255) each begins and ends in the middle of one, which takes passes over the output.
double cpu_cost_us(const ConvProblem& problem, const Cut& chunk, std::int64_t launches, const DeviceInfo& device) {
  const double pixels = static_cast<double>(problem.p() * problem.q());
  double bytes = problem.compulsory_bytes();
  if (chunk.unrolls) {
    const double columns = static_cast<double>(problem.n * problem.c * problem.r * problem.s) * pixels;
    bytes += own::unrolling.of(device) * columns * sizeof(float);
  }
  if (problem.layout == Layout::nhwc && problem.k_per_group() % floats_per_vector != 0) {
    bytes += own::ragged.of(device) * static_cast<double>(problem.output_numel()) * sizeof(float);
  }
  if (chunk.finishes) {
    bytes +=
        2.0 * static_cast<double>(problem.output_numel()) * (chunk.staged ? sizeof(float) : size_of(problem.dtype));
  }
  const double share = (chunk.unrolls ? own::unrolled_product : own::product).of(device);
  return 8.0 * static_cast<double>(launches) + memory_us(bytes, 1.0, device) +
         fp32_us(problem.direct_flops(), share * pixels / (pixels + own::half_pixels.of(device)), device);
}

// cuBLAS alone, where the tensors are its matrices as they are. Fitted to an H200's times like PyTorch's own
// convolution (algos/torch), which is the same product in half types. Unaligned: rows that are no whole 16 bytes, for
// which its kernels are others.
double in_place_us(const ConvProblem& problem, const DeviceInfo& device) {
  constexpr LibraryTimes plain{9.7, 5.2, 1.05, 0.3, 1.1}, few_rows{9.7, 100.0, 1.05, 0.3, 1.1},
      one_row{6.6, 0.75, 1.05, 0.3, 1.1}, half{6.9, 1.0, 0.5, 0.45, 1.22};
  constexpr LibraryTimes unaligned{6.4, 7.5, 4.5, 0.0, 2.9}, unaligned_images{6.4, 6.6, 5.1, 0.0, 6.5};
  const bool tensor_cores = problem.dtype != DType::f32, nhwc = problem.layout == Layout::nhwc;
  const std::int64_t pixels = problem.h * problem.w;
  const bool aligned = problem.c % 8 == 0 && (nhwc || pixels % 8 == 0);
  // One is a matrix-vector kernel's; for 2 to 32 it may find no good FP32 kernel, where ours with such channels are.
  const std::int64_t rows = problem.n * pixels;
  const bool is_risk = rows <= 32 && problem.c % 8 == 0;
  const LibraryTimes& plain_times = rows == 1 ? one_row : is_risk ? few_rows : plain;
  const LibraryTimes& times = !tensor_cores ? plain_times : aligned ? half : nhwc ? unaligned : unaligned_images;
  const double filters = static_cast<double>(problem.k);
  const double flops = problem.direct_flops() * std::ceil(filters / 64.0) * 64.0 / filters;
  const double size = static_cast<double>(size_of(problem.dtype));
  const double products = tensor_cores ? tensor_us(flops, 1.0, device) : fp32_us(flops, 1.0, device);
  const double row = size * static_cast<double>(rows);  // bytes of a channel
  return times.us(static_cast<double>(problem.c), products, row * static_cast<double>(problem.c), row * filters,
                  device);
}

ConvPlan plan(const ConvProblem& problem, const DeviceInfo& device) {
  const Cut chunk = cut(problem, device.type);
  ConvPlan plan;
  plan.kernel_plan = keep_plan(chunk);
  plan.config = !chunk.unrolls ? "in place"
                : chunk.samples > 1 || chunk.rows == problem.p()
                    ? "unroll " + std::to_string(chunk.samples) + " samples"
                    : "unroll " + std::to_string(chunk.rows) + " rows";
  plan.workspace_bytes = chunk.workspace_bytes();

  // Launches: per chunk, an unrolling, an epilogue, and a GEMM for every group or every sample, whichever are fewer.
  const std::int64_t chunks = ceil_div(problem.n, chunk.samples) * ceil_div(problem.p(), chunk.rows);
  const std::int64_t gemms = problem.layout == Layout::nhwc ? 1 : std::min(problem.groups, chunk.samples);
  const std::int64_t launches = chunks * (gemms + chunk.unrolls + chunk.finishes);
  if (device.type == DeviceType::cpu) {
    plan.cost_us = cpu_cost_us(problem, chunk, launches, device);
    return plan;
  }

  const bool tensor_cores = problem.dtype != DType::f32;
  const double depth = static_cast<double>(problem.c * problem.r * problem.s);
  if (!chunk.unrolls && !chunk.finishes && problem.groups == 1) {
    plan.cost_us = in_place_us(problem, device);
    return plan;
  }

  // Roofline, one pass after the other: bytes of the unrolling (written, read by the GEMM) and of the epilogue at the
  // memory's rate, then the GEMM at the library's.
  const double pixels = static_cast<double>(problem.n * problem.p() * problem.q());
  const double outputs = static_cast<double>(problem.output_numel());
  double bytes = problem.compulsory_bytes();
  if (chunk.unrolls) {  // at a quarter of the memory's rate, or less where channels are few
    const double slowness = problem.c <= 4 ? own::unroll_few_channels : own::unroll;
    bytes += slowness * 2.0 * pixels * depth * static_cast<double>(size_of(chunk.gemm_type));
  }
  if (chunk.finishes) bytes += 2.0 * outputs * (chunk.staged ? sizeof(float) : size_of(problem.dtype));
  const double product_us = tensor_cores ? tensor_us(problem.direct_flops(), own::tensor, device)
                                         : fp32_us(problem.direct_flops(), own::ffma, device);
  // A block of the GEMM walks the whole reduction: what small problems wait for (measured on an H200).
  plan.cost_us = own::start + own::term * depth + own::kernel * static_cast<double>(launches) +
                 memory_us(bytes, 1.0, device) + product_us;
  return plan;
}

// MKL sums in blocks, cuBLAS may not.
double roundoffs(const ConvProblem& problem, const DeviceInfo& device) {
  const double terms = reduction_length(problem);
  return device.type == DeviceType::cpu ? blocked_sum(terms, 384.0) : serial_sum(terms);
}

}  // namespace

extern const Algorithm algorithm;
const Algorithm algorithm{"im2col_gemm",
                          "gemm",
                          "unroll to a bounded buffer, then the library's GEMM",
                          2,
                          true,
                          true,
                          roundoffs,
                          supports,
                          plan,
                          plain_weight};

}  // namespace fastconv::algos::im2col_gemm
