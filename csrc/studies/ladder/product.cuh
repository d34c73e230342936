// The textbook's tiled matrix product, [K, C*R*R] x [C*R*R, P*Q] for each image: a block computes Rows x Columns of it,
// and brings a step of both operands into shared memory at a time. The second operand is read from the unrolled input,
// or gathered from the input itself.
#pragma once

#include "studies/ladder/shared.cuh"

namespace fastconv::studies::ladder {

// How products and sums are formed: a lane is what a thread sums, one output in FP32, two side by side in half.
template <typename T>
struct Arithmetic;
template <>
struct Arithmetic<float> {
  using Lane = float;
  static constexpr int width = 1;
  static __device__ Lane zero() { return 0.0f; }
  static __device__ Lane add_product(float weight, Lane value, Lane sum) { return fmaf(weight, value, sum); }
  static __device__ float output(Lane sum, int) { return sum; }
};
template <>
struct Arithmetic<half_t> {
  using Lane = __half2;
  static constexpr int width = 2;
  static __device__ Lane zero() { return __float2half2_rn(0.0f); }
  static __device__ Lane add_product(half_t weight, Lane value, Lane sum) {
    return __hfma2(__half2half2(weight), value, sum);
  }
  static __device__ half_t output(Lane sum, int i) { return i == 0 ? __low2half(sum) : __high2half(sum); }
};

template <typename T, int Rows_, int Columns_>
struct Block {
  static constexpr int rows = Rows_, columns = Columns_, step = 16;
  static constexpr int lanes = columns / Arithmetic<T>::width, threads = rows * lanes;
  static_assert(threads % columns == 0, "each thread loads one column of the second operand");
};

// The unrolled input [images, C*R*R, P*Q], a thread per (image, channel, pixel).
template <typename T, bool Restricted>
__global__ void unroll(Sizes sizes, int images, Pointer<const T, Restricted> x, Pointer<T, Restricted> columns) {
  const std::int64_t pixels = static_cast<std::int64_t>(sizes.p) * sizes.q;
  const std::int64_t index = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x;
  if (index >= images * sizes.c * pixels) return;
  const std::int64_t map = index / pixels, pixel = index % pixels;
  const int h0 = static_cast<int>(pixel / sizes.q) * sizes.stride - sizes.pad;
  const int w0 = static_cast<int>(pixel % sizes.q) * sizes.stride - sizes.pad;
  for (int r = 0; r < sizes.r; ++r) {
    for (int s = 0; s < sizes.r; ++s) {
      const int h = h0 + r, w = w0 + s;
      const bool inside = h >= 0 && h < sizes.h && w >= 0 && w < sizes.w;
      const T value = inside ? x[(map * sizes.h + h) * sizes.w + w] : from_float<T>(0.0f);
      columns[((map * sizes.r + r) * sizes.r + s) * pixels + pixel] = value;
    }
  }
}

// Grid: tiles of pixels, tiles of channels, images. Gathered: x is the input [N, C, H, W], else the unrolled input.
template <typename T, typename Block, typename Kernel, bool Gathered>
__global__ void __launch_bounds__(Block::threads) multiply(Sizes sizes, Pointer<const T, Kernel::restricted> x,
                                                           Pointer<const T, Kernel::restricted> weight,  // [K, C, R, R]
                                                           Pointer<T, Kernel::restricted> y) {  // [N, y_channels, P, Q]
  using Sums = Arithmetic<T>;
  __shared__ T a[Block::rows][Block::step];
  __shared__ __align__(8) T b[Block::step][Block::columns];
  const unsigned size = Kernel::size > 0 ? Kernel::size : sizes.r;
  const int depth = sizes.c * static_cast<int>(size * size), pixels = sizes.p * sizes.q;
  const int thread = static_cast<int>(threadIdx.x), row = thread / Block::lanes, lane = thread % Block::lanes;
  const int k0 = static_cast<int>(blockIdx.y) * Block::rows, pixel0 = static_cast<int>(blockIdx.x) * Block::columns;
  const int loaded = pixel0 + thread % Block::columns;  // the pixel that this thread loads
  const int h0 = loaded / sizes.q * sizes.stride - sizes.pad, w0 = loaded % sizes.q * sizes.stride - sizes.pad;
  const T nothing = from_float<T>(0.0f);
  for (std::int64_t n = blockIdx.z; n < sizes.n; n += gridDim.z) {
    typename Sums::Lane sum = Sums::zero();
    for (int d0 = 0; d0 < depth; d0 += Block::step) {
      if constexpr (!Kernel::constant_filters) {
        for (int i = thread; i < Block::rows * Block::step; i += Block::threads) {
          const int k = k0 + i / Block::step, d = d0 + i % Block::step;
          a[i / Block::step][i % Block::step] = k < sizes.k && d < depth ? weight[k * depth + d] : nothing;
        }
      }
#pragma unroll
      for (int i = 0; i < Block::step; i += Block::threads / Block::columns) {
        const int line = i + thread / Block::columns, d = d0 + line;
        if (line >= Block::step) continue;
        T value = nothing;
        if (d < depth && loaded < pixels) {
          if constexpr (Gathered) {
            const unsigned tap = d % (size * size);
            const int c = static_cast<int>(d / (size * size));
            const int h = h0 + static_cast<int>(tap / size), w = w0 + static_cast<int>(tap % size);
            if (h >= 0 && h < sizes.h && w >= 0 && w < sizes.w)
              value = x[((n * sizes.c + c) * sizes.h + h) * sizes.w + w];
          } else {
            value = x[(n * depth + d) * pixels + loaded];
          }
        }
        b[line][thread % Block::columns] = value;
      }
      __syncthreads();
#pragma unroll
      for (int d = 0; d < Block::step; ++d) {
        T factor;
        if constexpr (Kernel::constant_filters) {  // the last step may end beyond a filter, the last rows beyond all
          const int k = min(k0 + row, sizes.k - 1);
          factor = d0 + d < depth ? filters_of<T, Kernel>(weight)[k * depth + d0 + d] : nothing;
        } else {
          factor = a[row][d];
        }
        const auto value = *reinterpret_cast<const typename Sums::Lane*>(&b[d][lane * Sums::width]);
        sum = Sums::add_product(factor, value, sum);
      }
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < Sums::width; ++i) {
      const int k = k0 + row, pixel = pixel0 + lane * Sums::width + i;
      if (k < sizes.k && pixel < pixels) y[(n * sizes.y_channels + k) * pixels + pixel] = Sums::output(sum, i);
    }
  }
}

template <typename T, typename Block, typename Kernel, bool Gathered>
void launch_product(const Sizes& sizes, const T* x, const T* weight, T* y, cudaStream_t stream) {
  const dim3 grid(ceil_div(sizes.p * sizes.q, Block::columns), ceil_div(sizes.k, Block::rows),
                  std::min(sizes.n, max_blocks));
  multiply<T, Block, Kernel, Gathered><<<grid, Block::threads, 0, stream>>>(sizes, x, weight, y);
  check_launch("ladder product");
}

// As many images at a time as the workspace holds.
template <typename T, bool Restricted>
void launch_unrolled(const Sizes& sizes, const T* x, const T* weight, T* y, T* workspace, std::size_t workspace_bytes,
                     cudaStream_t stream) {
  const std::int64_t pixels = static_cast<std::int64_t>(sizes.p) * sizes.q, image = sizes.depth() * pixels;
  const std::int64_t most = static_cast<std::int64_t>(workspace_bytes / sizeof(T)) / std::max<std::int64_t>(image, 1);
  if (most == 0) throw Unsupported("workspace does not hold the unrolled input of one image");
  constexpr int threads = 256;
  for (std::int64_t n0 = 0; n0 < sizes.n; n0 += most) {
    Sizes chunk = sizes;
    chunk.n = static_cast<int>(std::min<std::int64_t>(most, sizes.n - n0));
    const auto blocks = static_cast<unsigned>(ceil_div<std::int64_t>(chunk.n * sizes.c * pixels, threads));
    const T* source = x + n0 * sizes.c * sizes.h * sizes.w;
    unroll<T, Restricted><<<blocks, threads, 0, stream>>>(chunk, chunk.n, source, workspace);
    check_launch("ladder unroll");
    launch_product<T, Block<T, 16, 16>, Flags<Restricted, 0, false>, false>(chunk, workspace, weight,
                                                                            y + n0 * sizes.y_channels * pixels, stream);
  }
}

// body(Block) of a rung. 16 x 16 has all flags; the other tiles are for the sweep, of LeNet-5's 7x7 filters.
template <typename T, typename Body>
void with_block(const Rung& rung, Body&& body) {
  if (rung.rows == 8 && rung.columns == 8) return body(Block<T, 8, 8>{});
  if (rung.rows == 32 && rung.columns == 32) return body(Block<T, 32, 32>{});
  if (rung.rows == 4 && rung.columns == 64) return body(Block<T, 4, 64>{});
  if (rung.rows == 16 && rung.columns == 64) return body(Block<T, 16, 64>{});
  throw Unsupported("tile is " + std::to_string(rung.rows) + "x" + std::to_string(rung.columns) +
                    "; expected 16x16, 8x8, 32x32, 4x64 or 16x64");
}

template <typename T>
void run_product(const Sizes& sizes, const Rung& rung, const T* x, const T* weight, T* y, T* workspace,
                 std::size_t workspace_bytes, cudaStream_t stream) {
  using Usual = Block<T, 16, 16>;
  const bool is_usual = rung.rows == Usual::rows && rung.columns == Usual::columns;
  if (rung.form == Form::unroll) {
    if (!is_usual) throw Unsupported("unroll with a tile other than 16x16");
    const auto launch = rung.restricted ? launch_unrolled<T, true> : launch_unrolled<T, false>;
    return launch(sizes, x, weight, y, workspace, workspace_bytes, stream);
  }
  with_flags(rung, sizes.r, [&](auto flags) {
    using Kernel = decltype(flags);
    in_slices(rung.constant_filters, sizes, weight, y, stream, [&](const Sizes& slice, const T* filters, T* target) {
      if (is_usual) return launch_product<T, Usual, Kernel, true>(slice, x, filters, target, stream);
      if constexpr (Kernel::restricted && Kernel::size == 7 && !Kernel::constant_filters) {
        with_block<T>(rung, [&](auto block) {
          launch_product<T, decltype(block), Kernel, true>(slice, x, filters, target, stream);
        });
      } else {
        throw Unsupported("a tile other than 16x16; expected restricted and a constant size of 7");
      }
    });
  });
}

}  // namespace fastconv::studies::ladder
