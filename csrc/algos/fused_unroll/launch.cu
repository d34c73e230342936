#include <algorithm>

#include "algos/fused_unroll/tile.cuh"
#include "core/kernels.h"
#include "device/cuda_check.h"

namespace fastconv::algos::fused_unroll {
namespace {

// 512 threads of a multiprocessor leave 128 registers each: with fewer promised, ptxas spills for more occupancy.
template <typename T, int R, int TileK, int TilePixels>
__global__ void __launch_bounds__(Tile<T, R, TileK, TilePixels>::threads, 512 / Tile<T, R, TileK, TilePixels>::threads)
    convolve(Params<T> params, const T* __restrict__ x,  // [N, C, H, W] in problem.layout
             const T* __restrict__ weight,               // [K, C/G, R, S]
             T* __restrict__ y) {                        // [N, K, P, Q] in problem.layout
  using Block = Tile<T, R, TileK, TilePixels>;
  __shared__ typename Block::Shared shared;
  const ConvProblem& problem = params.problem;
  const std::int64_t c_size = problem.c_per_group(), k_size = problem.k_per_group();
  const std::int64_t pixels = problem.n * problem.p() * problem.q();
  // A warp's outputs should be neighbours in y: 16 threads along the output channels in NHWC, along the pixels in NCHW.
  const int thread = static_cast<int>(threadIdx.x);
  const bool nhwc = problem.layout == Layout::nhwc;
  const int k = 4 * (nhwc ? thread % (TileK / 4) : thread / (TilePixels / 4));
  const int pixel = 4 * (nhwc ? thread / (TileK / 4) : thread % (TilePixels / 4));

  for (std::int64_t tile = blockIdx.x; tile < params.grid.count(); tile += gridDim.x) {
    const std::int64_t k_tile = tile % params.grid.k_tiles, group = tile / params.grid.k_tiles % params.grid.groups;
    const std::int64_t first_pixel = tile / params.grid.k_tiles / params.grid.groups * TilePixels;
    const std::int64_t k_in_group = k_tile * TileK, k0 = group * k_size + k_in_group;
    const int valid_k = static_cast<int>(min(static_cast<std::int64_t>(TileK), k_size - k_in_group));
    const int valid_pixels = static_cast<int>(min(static_cast<std::int64_t>(TilePixels), pixels - first_pixel));

    Block::locate(params, shared, first_pixel);
    float totals[4][4] = {};
    __syncthreads();
    for (std::int64_t c0 = 0; c0 < c_size; c0 += Block::channels) {
      const int count = static_cast<int>(min(static_cast<std::int64_t>(Block::channels), c_size - c0));
      Block::load_inputs(params, x, shared, group * c_size + c0, count);
      Block::load_weights(params, weight, shared, k0, valid_k, c0, count);
      __syncthreads();
      Block::multiply(shared, count, k, pixel, totals);
      __syncthreads();
    }
    Block::store(params, y, shared, k0, valid_k, valid_pixels, k, pixel, totals);
    __syncthreads();  // before the next tile overwrites shared.pixels
  }
}

template <typename T, int R, TileShape shape>
void launch(const ConvArgs& args, Runtime& runtime) {
  const ConvProblem& problem = args.problem;
  const Params<T> params{problem, tile_grid(problem, shape), input_strides(problem), output_strides(problem),
                         make_epilogue<T>(args)};
  // The loop over tiles takes what a grid cannot hold.
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(params.grid.count(), 1 << 30));
  convolve<T, R, shape.k, shape.pixels>
      <<<blocks, Tile<T, R, shape.k, shape.pixels>::threads, 0, static_cast<cudaStream_t>(runtime.stream())>>>(
          params, static_cast<const T*>(args.x), static_cast<const T*>(args.weight), static_cast<T*>(args.y));
  check_launch("fused_unroll");
}

}  // namespace

void run_cuda(const ConvArgs& args, Runtime& runtime) {
  dispatch_dtype(args.problem.dtype, [&](auto zero) {
    dispatch_value<1, 2, 3, 4, 5, 7>(args.problem.r, [&](auto kernel) {
      using T = decltype(zero);
      constexpr int R = kernel();
      if (plan_as<TileShape>(args.kernel_plan).k == narrow_tile.k) {
        launch<T, R, narrow_tile>(args, runtime);
      } else {
        launch<T, R, wide_tile>(args, runtime);
      }
    });
  });
}

}  // namespace fastconv::algos::fused_unroll
