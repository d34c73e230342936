#include "algos/direct_tiled/wgrad/plan.h"
#include "core/fast_divide.h"
#include "core/kernels.h"
#include "device/cuda_check.h"
#include "device/indexing.h"
#include "device/launch.h"
#include "device/numeric.h"

namespace fastconv::algos::direct_tiled {
namespace wgrad {
namespace {

template <typename T>
struct Params {
  const T* x;     // [N, C, H, W] in the layout of the kernel
  const T* grad;  // [N, C, P, Q], as x
  float* sums;    // [split][tap][C]
  std::int64_t x_image, grad_image;
  int c, h, w, p, q, pad_h, pad_w;
  unsigned tasks;  // of a channel
  unsigned split_k;
  FastDivide by_channel_tiles, by_columns, by_strips;
};

template <int r_, int stride_>
struct Shape {
  static constexpr int r = r_, stride = stride_, rows = strip_rows(r, stride);
  static constexpr int inputs = (rows - 1) * stride + r;  // rows of x under a strip
};

// Sums of a channel's taps.
template <typename S>
using Sums = float[S::r][S::r];

// Sums of all warps, in order, to this split. `sum`: whether this lane's sums are those of channel
// first_channel + lane; else lane 0's are those of first_channel.
template <typename S, bool by_lane>
__device__ __forceinline__ void store_partial(const Sums<S>& sum, float* sums, unsigned split, int channels,
                                              int first_channel) {
  constexpr int lanes = by_lane ? 32 : 1;
  __shared__ float shared[warps][S::r][lanes];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
  for (int i = 0; i < S::r; ++i) {
    __syncthreads();
#pragma unroll
    for (int j = 0; j < S::r; ++j) {
      if (lane < lanes) shared[warp][j][lane] = sum[i][j];
    }
    __syncthreads();
    for (int index = static_cast<int>(threadIdx.x); index < S::r * lanes; index += warps * 32) {
      const int channel = first_channel + index % lanes;
      float total = 0.0f;
#pragma unroll
      for (int w = 0; w < warps; ++w) total += shared[w][index / lanes][index % lanes];
      const std::int64_t tap = static_cast<std::int64_t>(split) * (S::r * S::r) + i * S::r + index / lanes;
      if (channel < channels) sums[tap * channels + channel] = total;
    }
  }
}

// NHWC: a warp has 32 neighbouring channels, a lane one of them. It walks along a strip of output rows with the window
// of the input under them in registers, whose columns take turns; what the next column needs is on its way.
template <typename S, typename T>
__device__ __forceinline__ void run_strip(const Params<T>& params, const T* x, const T* grad, int p0, Sums<S>& sum) {
  const int h0 = p0 * S::stride - params.pad_h, rows = params.p - p0;
  unsigned inside = 0;  // a bit for each input row
#pragma unroll
  for (int i = 0; i < S::inputs; ++i) {
    inside |= static_cast<unsigned>(static_cast<unsigned>(h0 + i) < static_cast<unsigned>(params.h)) << i;
  }
  const auto load = [&](int i, int w) {
    const bool valid = (inside >> i & 1) != 0 && static_cast<unsigned>(w) < static_cast<unsigned>(params.w);
    return valid ? to_float(x[((h0 + i) * params.w + w) * params.c]) : 0.0f;
  };
  float window[S::inputs][S::r], next[S::inputs][S::stride], next_grad[S::rows];
  constexpr int kept = S::r - S::stride;  // columns of a window that the one before has as well
#pragma unroll
  for (int i = 0; i < S::inputs; ++i) {
#pragma unroll
    for (int s = 0; s < kept; ++s) window[i][s] = load(i, s - params.pad_w);
  }
  const auto fetch = [&](int q) {
#pragma unroll
    for (int i = 0; i < S::inputs; ++i) {
#pragma unroll
      for (int t = 0; t < S::stride; ++t) next[i][t] = load(i, q * S::stride - params.pad_w + kept + t);
    }
#pragma unroll
    for (int i = 0; i < S::rows; ++i) {
      next_grad[i] = i < rows ? to_float(grad[((p0 + i) * params.q + q) * params.c]) : 0.0f;
    }
  };
  fetch(0);
#pragma unroll 1
  for (int first = 0; first < params.q; first += S::r) {
#pragma unroll
    for (int j = 0; j < S::r; ++j) {
      const int q = first + j;
      if (q >= params.q) break;
      float g[S::rows];
#pragma unroll
      for (int i = 0; i < S::inputs; ++i) {
#pragma unroll
        for (int t = 0; t < S::stride; ++t) window[i][(j * S::stride + kept + t) % S::r] = next[i][t];
      }
#pragma unroll
      for (int i = 0; i < S::rows; ++i) g[i] = next_grad[i];
      if (q + 1 < params.q) fetch(q + 1);
#pragma unroll
      for (int i = 0; i < S::rows; ++i) {
        if (i >= rows) break;  // no such output: nothing may come of what is not finite
#pragma unroll
        for (int a = 0; a < S::r; ++a) {
#pragma unroll
          for (int s = 0; s < S::r; ++s) {
            sum[a][s] = fmaf(g[i], window[i * S::stride + a][(j * S::stride + s) % S::r], sum[a][s]);
          }
        }
      }
    }
  }
}

template <typename S, typename T>
__global__ void __launch_bounds__(warps * 32, blocks_per_processor(S::r, S::stride))
    sum_nhwc(const __grid_constant__ Params<T> params) {
  unsigned split = blockIdx.x;
  const int first_channel = static_cast<int>(params.by_channel_tiles.divmod(split)) * block_channels;
  // Lanes behind the last channel repeat it; nobody stores their sums.
  const int channel = min(first_channel + static_cast<int>(threadIdx.x) % 32, params.c - 1);
  Sums<S> sum = {};
#pragma unroll 1
  for (unsigned task = split * warps + threadIdx.x / 32; task < params.tasks; task += params.split_k * warps) {
    unsigned image = task;
    const int p0 = static_cast<int>(params.by_strips.divmod(image)) * S::rows;
    run_strip<S>(params, params.x + image * params.x_image + channel, params.grad + image * params.grad_image + channel,
                 p0, sum);
  }
  store_partial<S, true>(sum, params.sums, split, params.c, first_channel);
}

// NCHW: a block has one channel; neighbouring lanes have neighbouring columns of a strip, of one strip or of two.
template <typename S, typename T>
__global__ void __launch_bounds__(warps * 32) sum_nchw(const __grid_constant__ Params<T> params) {
  unsigned split = blockIdx.x;
  const int channel = static_cast<int>(params.by_channel_tiles.divmod(split));
  const T* x_plane = params.x + static_cast<std::int64_t>(channel) * params.h * params.w;
  const T* grad_plane = params.grad + static_cast<std::int64_t>(channel) * params.p * params.q;
  Sums<S> sum = {};
  const unsigned step = params.split_k * (warps * 32);
#pragma unroll 1
  for (unsigned task = split * (warps * 32) + threadIdx.x; task < params.tasks; task += step) {
    unsigned image = task;
    const int q = static_cast<int>(params.by_columns.divmod(image));
    const int p0 = static_cast<int>(params.by_strips.divmod(image)) * S::rows;
    const int h0 = p0 * S::stride - params.pad_h, w0 = q * S::stride - params.pad_w;
    const T* x = x_plane + image * params.x_image;
    const T* grad = grad_plane + image * params.grad_image;
    float g[S::rows];
#pragma unroll
    for (int i = 0; i < S::rows; ++i) g[i] = p0 + i < params.p ? to_float(grad[(p0 + i) * params.q + q]) : 0.0f;
#pragma unroll
    for (int s = 0; s < S::r; ++s) {
      float column[S::inputs];
#pragma unroll
      for (int i = 0; i < S::inputs; ++i) {
        const bool valid = static_cast<unsigned>(h0 + i) < static_cast<unsigned>(params.h) &&
                           static_cast<unsigned>(w0 + s) < static_cast<unsigned>(params.w);
        column[i] = valid ? to_float(x[(h0 + i) * params.w + w0 + s]) : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < S::rows; ++i) {
        if (p0 + i >= params.p) break;  // no such output: nothing may come of what is not finite
#pragma unroll
        for (int a = 0; a < S::r; ++a) sum[a][s] = fmaf(g[i], column[i * S::stride + a], sum[a][s]);
      }
    }
  }
#pragma unroll
  for (int a = 0; a < S::r; ++a) {
#pragma unroll
    for (int s = 0; s < S::r; ++s) {
#pragma unroll
      for (int lanes = 16; lanes > 0; lanes /= 2) sum[a][s] += __shfl_xor_sync(~0u, sum[a][s], lanes);
    }
  }
  store_partial<S, false>(sum, params.sums, split, params.c, channel);
}

// dw[c][tap] from the sums [split][tap][C], in order.
template <typename T>
__global__ void reduce_split_k(const float* sums, T* dw, int taps, int channels, unsigned split_k) {
  const unsigned index = blockIdx.x * blockDim.x + threadIdx.x, size = static_cast<unsigned>(taps * channels);
  if (index >= size) return;
  float total = 0.0f;
#pragma unroll 8
  for (unsigned split = 0; split < split_k; ++split) total += sums[static_cast<std::int64_t>(split) * size + index];
  dw[static_cast<std::int64_t>(index % channels) * taps + index / channels] = from_float<T>(total);
}

template <typename T, int r, int stride>
void launch(const WeightGradientArgs& args, Runtime& runtime) {
  const ConvProblem& problem = args.problem;
  const auto& plan = plan_as<Plan>(args.kernel_plan);
  const bool nhwc = problem.layout == Layout::nhwc;
  auto* sums = static_cast<float*>(args.workspace);
  Params<T> params{.x = static_cast<const T*>(args.x),
                   .grad = static_cast<const T*>(args.grad),
                   .sums = sums,
                   .x_image = problem.c * problem.h * problem.w,
                   .grad_image = problem.k * problem.p() * problem.q(),
                   .tasks = static_cast<unsigned>(problem.n * plan.strips * (nhwc ? 1 : problem.q())),
                   .split_k = static_cast<unsigned>(plan.split_k),
                   .by_channel_tiles = plan.channel_tiles,
                   .by_columns = problem.q(),
                   .by_strips = plan.strips};
  set_sizes(params, problem);
  const auto stream = stream_of(runtime);
  const auto blocks = static_cast<unsigned>(plan.channel_tiles * plan.split_k);
  constexpr int threads = warps * 32;
  if (nhwc) {
    sum_nhwc<Shape<r, stride>><<<blocks, threads, 0, stream>>>(params);
  } else {
    sum_nchw<Shape<r, stride>><<<blocks, threads, 0, stream>>>(params);
  }
  check_launch("direct_tiled: weight gradient");
  constexpr int few = 128;
  const auto sizes = static_cast<unsigned>(ceil_div<std::int64_t>(problem.c * r * r, few));
  reduce_split_k<<<sizes, few, 0, stream>>>(sums, static_cast<T*>(args.dw), r * r, params.c, params.split_k);
  check_launch("direct_tiled: weight gradient, splits");
}

}  // namespace
}  // namespace wgrad

void weight_gradient_cuda(const WeightGradientArgs& args, Runtime& runtime) {
  dispatch_dtype(args.problem.dtype, [&](auto zero) {
    dispatch_value<3, 5, 7>(args.problem.r, [&](auto r) {
      dispatch_value<1, 2>(args.problem.stride_h,
                           [&](auto stride) { wgrad::launch<decltype(zero), r(), stride()>(args, runtime); });
    });
  });
}

}  // namespace fastconv::algos::direct_tiled
