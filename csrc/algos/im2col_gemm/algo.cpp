#include <algorithm>
#include <cmath>
#include <string>

#include "algos/im2col_gemm/plan.h"
#include "algos/im2col_gemm/products.h"
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
    return Support::no("size", "one output row needs ", elements,
                       " elements of unrolled input or output; im2col_gemm takes up to ", chunk_elements);
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

// cuBLAS's times of a product of so many rows of outputs together (NHWC), or of those of each image. In half types,
// rows that are no whole pieces of 16 bytes have other kernels, and those of 8 bytes again others.
LibraryTimes cublas_times(const ConvProblem& problem) {
  const bool nhwc = problem.layout == Layout::nhwc;
  const std::int64_t pixels = problem.p() * problem.q(), rows = problem.n * pixels;
  if (problem.dtype == DType::f32 && is_single_pixel(problem)) return own::one_row;
  if (problem.accuracy == AccuracyClass::tf32) {
    const bool aligned = is_aligned_tf32(problem);
    if (nhwc) return aligned ? own::tf32 : fitted::torch::unaligned_1x1_nhwc;
    return aligned ? fitted::torch::tf32_1x1_nchw : fitted::torch::unaligned_1x1_nchw;
  }
  if (problem.dtype == DType::f32) {
    // For 2 to 32 it may find no good FP32 kernel, where ours with such channels are.
    return rows <= 32 && problem.c % 8 == 0 ? own::few_rows : own::plain;
  }
  const std::int64_t row = nhwc ? problem.k : pixels;
  if (problem.c_per_group() * problem.r * problem.s % 8 != 0) return nhwc ? own::unaligned : own::unaligned_images;
  if (row % 8 == 0) return nhwc ? own::half : own::half_images;
  if (nhwc) return own::unaligned_filters;
  return row % 4 == 0 ? own::half_pieces_images : own::unaligned_images;
}

// A single pixel's kernel is that of FP32 arithmetic.
bool has_tf32_kernel(const ConvProblem& problem) {
  return problem.accuracy == AccuracyClass::tf32 && !is_single_pixel(problem);
}

// Of its time what it multiplies: us of whole tiles at the device's sustained rate. In TF32 they are as wide as 256
// filters (192: 1.2 to 1.47 times cuDNN's times, 64, 128 and 256: 0.9 to 1.0).
double tiles_us(const ConvProblem& problem, const DeviceInfo& device) {
  const double filters = static_cast<double>(problem.k_per_group());
  const double width = problem.accuracy == AccuracyClass::tf32 && filters > 128.0 ? 256.0 : 64.0;
  const double flops =
      image_tiles_factor(problem) * problem.direct_flops() * std::ceil(filters / width) * width / filters;
  return on_tensor_cores(problem) ? tensor_us(flops, 1.0, device) : fp32_us(flops, 1.0, device);
}

// The product alone, fitted to an H200's times like PyTorch's own convolution (algos/torch), which is the same in half
// types where the tensors are its matrices as they are.
double product_us(const ConvProblem& problem, double input_bytes, const DeviceInfo& device) {
  const double size = static_cast<double>(size_of(problem.dtype));
  // A single row: all filters are read, by few blocks.
  const bool single = problem.dtype != DType::f32 && is_single_pixel(problem);
  const double weights = single ? own::one_row_weights * size * static_cast<double>(problem.k * problem.c) : 0.0;
  // Half types in NHWC: what PyTorch's convolution computes as well, by libraries of the same kernels. Where `auto`
  // prefers PyTorch's among equals (plan/registry.h), this one is no other.
  const bool same = problem.dtype != DType::f32 && problem.layout == Layout::nhwc;
  const double output_bytes = size * static_cast<double>(problem.output_numel());
  const bool ragged = has_tf32_kernel(problem) && problem.k > 128 && problem.k % 256 != 0;
  return (same     ? own::same_as_torch
          : ragged ? own::ragged_tf32
                   : 1.0) *
             cublas_times(problem).us(static_cast<double>(problem.c), tiles_us(problem, device), input_bytes,
                                      output_bytes, device) +
         memory_us(weights, 1.0, device);
}

// With the epilogue in its kernel, which in half types is another than that of the plain product, and slow where there
// is little to multiply. A residual is read.
double ended_product_us(const ConvProblem& problem, double product_us, const DeviceInfo& device) {
  const bool half = problem.dtype != DType::f32, short_sums = half && problem.c <= 64;
  const double passes = (problem.has_residual() ? 1.0 : 0.0) + (short_sums ? own::ended_short : 0.0);
  const double bytes = static_cast<double>(size_of(problem.dtype)) * static_cast<double>(problem.output_numel());
  return (half ? own::ended : 1.0) * product_us + memory_us(passes * bytes, 1.0, device);
}

// An FP32 product of what is unrolled: a block walks the whole reduction, what small problems wait for; or it is cut
// into parts, which a second kernel adds. Those of groups are not cut.
double plain_product_us(const ConvProblem& problem, double terms, const DeviceInfo& device) {
  const double ffma_us = fp32_us(problem.direct_flops(), own::ffma, device);
  const double whole_us = std::max(clocks_us(own::walk * terms, device), ffma_us);
  if (problem.groups > 1) return whole_us;
  return std::min(whole_us, own::parts + own::term * terms + ffma_us);
}

ConvPlan plan(const ConvProblem& problem, const DeviceInfo& device) {
  const Cut chunk = cut(problem, device.type);
  ConvPlan plan;
  plan.kernel_plan = keep_plan(chunk);
  plan.config = !chunk.unrolls                                   ? "in place"
                : chunk.samples > 1 || chunk.rows == problem.p() ? text_of("unroll ", chunk.samples, " samples")
                                                                 : text_of("unroll ", chunk.rows, " rows");
  if (chunk.ends) plan.config += ", epilogue in the product";
  plan.workspace_bytes = chunk.workspace_bytes();

  // Launches: per chunk, an unrolling, an epilogue, and a GEMM for every group or every sample, whichever are fewer.
  const std::int64_t chunks = ceil_div(problem.n, chunk.samples) * ceil_div(problem.p(), chunk.rows);
  const std::int64_t gemms = problem.layout == Layout::nhwc ? 1 : std::min(problem.groups, chunk.samples);
  const std::int64_t launches = chunks * (gemms + chunk.unrolls + chunk.finishes);
  if (device.type == DeviceType::cpu) {
    plan.cost_us = cpu_cost_us(problem, chunk, launches, device);
    return plan;
  }

  // Others in TF32 take what FP32 arithmetic does.
  const bool half = problem.dtype != DType::f32;
  const bool tensor_cores = half || (on_tensor_cores(problem) && problem.groups == 1 && is_aligned_tf32(problem));
  const double depth = static_cast<double>(problem.c * problem.r * problem.s);  // of all groups
  const double terms = static_cast<double>(problem.c_per_group() * problem.r * problem.s);
  if (!chunk.unrolls && !chunk.finishes && problem.groups == 1) {
    const double plain_us = product_us(problem,
                                       static_cast<double>(size_of(problem.dtype)) *
                                           static_cast<double>(problem.n * problem.c * problem.h * problem.w),
                                       device);
    const bool bare_tf32 = has_tf32_kernel(problem) && problem.layout == Layout::nhwc;
    plan.cost_us =
        chunk.ends ? ended_product_us(problem, plain_us, device) : (bare_tf32 ? own::bare_tf32 : 1.0) * plain_us;
    return plan;
  }

  // Roofline, one pass after the other: bytes of the unrolling (written, read by the GEMM) and of the epilogue at the
  // memory's rate, then the GEMM at the library's.
  const double pixels = static_cast<double>(problem.n * problem.p() * problem.q());
  const double outputs = static_cast<double>(problem.output_numel());
  double bytes = problem.compulsory_bytes();
  if (chunk.finishes) bytes += 2.0 * outputs * (chunk.staged ? sizeof(float) : size_of(problem.dtype));
  // The library's kernels for halves at such places store them one by one: known of one layer of 64 filters.
  if (half && in_parts_of_sectors(problem)) bytes += 4.0 * outputs * static_cast<double>(size_of(problem.dtype));
  const LibraryTimes times = cublas_times(problem);
  const double product_us = tensor_cores ? 1e-3 * times.term * terms + times.products * tiles_us(problem, device)
                                         : plain_product_us(problem, terms, device);
  // Instructions decide how long the unrolling takes: clocks of a multiprocessor for an element.
  double unroll_us = 0.0;
  if (chunk.unrolls) {
    const bool windows = problem.layout == Layout::nchw && problem.groups == 1 && problem.r * problem.s > 1;
    const double nchw = !windows ? 1.0 : half ? own::unroll_half_nchw : own::unroll_nchw;
    // Windows that share no pixel: each element is read once.
    const bool apart = problem.stride_h >= problem.r && problem.stride_w >= problem.s && problem.r * problem.s > 1;
    const double first = problem.c > 4 ? 1.0 : apart ? own::unroll_apart : own::unroll_few_channels;
    const double clocks = nchw * first * (half ? own::unroll_half : own::unroll);
    unroll_us = clocks_us(clocks * pixels * depth / device.processors, device);
  }
  plan.cost_us =
      own::start + own::kernel * static_cast<double>(launches) + memory_us(bytes, 1.0, device) + unroll_us + product_us;
  return plan;
}

// MKL sums in blocks, cuBLAS may not.
double roundoffs(const ConvProblem& problem, const DeviceInfo& device) {
  const double terms = reduction_length(problem);
  if (device.type == DeviceType::cuda && problem.accuracy == AccuracyClass::tf32) return tf32_products;
  return device.type == DeviceType::cpu ? blocked_sum(terms, 384.0) : serial_sum(terms);
}

}  // namespace

extern const Algorithm algorithm;
const Algorithm algorithm{
    .name = "im2col_gemm",
    .family = "gemm",
    .summary = "unroll to a bounded buffer, then the library's GEMM",
    .source = 2,
    .roundoffs = roundoffs,
    .supports = supports,
    .plan = plan,
};

}  // namespace fastconv::algos::im2col_gemm
