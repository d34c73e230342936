// A block asks for its slices of both operands at once, in two parts, multiplies the first while the second is on its
// way, and adds what warps and blocks have.
#pragma once

#include "algos/direct_tiled/pointwise/plan.h"
#include "core/fast_divide.h"
#include "device/epilogue.h"
#include "device/mma.cuh"
#include "hopper/ptx/cluster.cuh"
#include "hopper/ptx/mbarrier.cuh"

namespace fastconv::algos::direct_tiled::pointwise {

struct Params {
  const float* x;       // [N, C, H, W]
  const float* weight;  // [K, C]
  float* y;             // [N, K, P, Q]
  Epilogue<float> epilogue;
  Config config;
  FastDivide by_map, by_q;                      // P * Q, Q
  int c, k, pixels;                             // pixels: N * P * Q
  int in_image, in_channel, in_row, in_column;  // elements of x from an output's pixel to the next
  bool dense;                                   // the outputs' pixels are the input's
  int out_pixel;                                // NHWC: elements of y from a pixel to the next
  bool vector_y;                                // four neighbours of y lie in one aligned vector
  WaitReport* report;
};

// A block's tile, its slice of the channels, and its shared memory.
template <bool nhwc>
struct Block {
  const Params& params;
  float* const weights;  // then the input; later the warps' sums

  const Config& config = params.config;
  const int split_log2 = config.split_log2, split = 1 << split_log2;
  const int pixels = config.pixels(), filters = config.filters(), pitch = config.pitch_quads() * quad;
  const int rank = static_cast<int>(blockIdx.x) & (split - 1);
  const int first_filter = static_cast<int>(blockIdx.x >> split_log2) * filters;
  const int first_pixel = static_cast<int>(blockIdx.y) * pixels, first_channel = rank * config.quads * quad;
  const int owned_log2 = 8 + 3 - config.groups_log2() - split_log2, owned = 1 << owned_log2;  // vectors to be stored

  float* const input = weights + filters * pitch;
  float* const received = weights + config.operand_floats;  // [split][owned] vectors
  float* const bias = received + (split > 1 ? config.tile() : 0);
  float* const residual = bias + filters;  // of the vectors to be stored
  const std::uint32_t barrier =            // of what is received
      shared_address(residual + (params.epilogue.residual != nullptr ? owned * quad : 0));

  // Of the sums: from a line to the next, from a group of warps to the next.
  __device__ __forceinline__ int sums_pitch() const { return nhwc ? filters : pixels + quad; }
  __device__ __forceinline__ int group_floats() const { return sums_pitch() * (nhwc ? pixels : filters); }
};

// A block's tile as vectors, four neighbours of y each.
template <bool nhwc>
struct Vectors {
  const Block<nhwc>& block;
  const int line_log2 = nhwc ? 3 + block.config.filter_warps_log2 : 3 + block.config.pixel_warps_log2;  // of a line

  __device__ __forceinline__ int line_of(int vector) const { return vector >> line_log2; }
  __device__ __forceinline__ int column_of(int vector) const { return (vector & ((1 << line_log2) - 1)) * quad; }
  __device__ __forceinline__ int pixel_of(int vector) const {
    return block.first_pixel + (nhwc ? line_of(vector) : column_of(vector));
  }
  __device__ __forceinline__ int filter_of(int vector) const {
    return block.first_filter + (nhwc ? column_of(vector) : line_of(vector));
  }
};

// Where a warp's 32 pixels x 32 filters are in the block's tile, and what a lane's numbers mean within them. Four
// neighbours of the layout's fastest index lie in four registers; rows of shared memory that a warp reads together are
// neighbours, too.
template <bool nhwc>
struct Lane {
  const Config& config;
  const int pixel = static_cast<int>(threadIdx.x) % 32 / 8, filter = static_cast<int>(threadIdx.x) % 8;
  const int warp = static_cast<int>(threadIdx.x) / 32, warp_tiles_log2 = 3 - config.groups_log2();
  const int group = warp >> warp_tiles_log2, warp_tile = warp & ((1 << warp_tiles_log2) - 1);
  const int warp_pixel = (warp_tile & ((1 << config.pixel_warps_log2) - 1)) * warp_pixels;
  const int warp_filter = (warp_tile >> config.pixel_warps_log2) * warp_filters;

  __device__ int first_pixel(int half) const { return half * 16 + pixel * 4; }
  __device__ int filter_of(int j) const { return nhwc ? filter * 4 + j : j * 8 + filter; }
};
// Where a filter's or (NHWC) a pixel's row is staged.
template <bool nhwc>
__device__ __forceinline__ int filter_row(int filter) {
  return nhwc ? (filter & ~31) | (filter & 3) << 3 | (filter >> 2 & 7) : filter;
}
__device__ __forceinline__ int pixel_row(int pixel) {
  return (pixel & ~31) | (pixel >> 4 & 1) << 4 | (pixel & 3) << 2 | (pixel >> 2 & 3);
}

template <bool vector>
__device__ __forceinline__ void copy(std::uint32_t target, const float* base, int offset, bool valid) {
  const float* source = base + (valid ? offset : 0);
  if constexpr (vector) {
    copy_async(target, source, valid);
  } else {
    copy_async<4>(target, source, valid ? 4 : 0);
  }
}

__device__ __forceinline__ int input_offset(const Params& params, int pixel) {
  const int image = pixel / params.by_map, within = pixel - image * params.by_map;
  const int p = within / params.by_q, q = within - p * params.by_q;
  return image * params.in_image + p * params.in_row + q * params.in_column;
}
template <bool nhwc>
__device__ __forceinline__ int output_index(const Params& params, int pixel, int k) {
  if constexpr (nhwc) return pixel * params.out_pixel + k;
  const int image = pixel / params.by_map;
  return (image * params.k + k) * params.by_map + pixel - image * params.by_map;
}

__device__ __forceinline__ float4 load(const float* source) { return *reinterpret_cast<const float4*>(source); }
__device__ __forceinline__ void add(float4& sum, const float4& more) {
  sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
}

// The barrier of what the other blocks will send; they are told that it is there.
template <bool nhwc>
__device__ __forceinline__ void expect_sums(const Block<nhwc>& block) {
  if (threadIdx.x == 0) {
    hopper::barrier_init(block.barrier, 1);
    hopper::barrier_init_fence();
    hopper::arrive_expecting(block.barrier, static_cast<unsigned>(block.split * block.owned * 16));
  }
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;");
}

// Rows of channels, side by side: the filters, and in NHWC the pixels. row_of(i): where row i is staged; offset_of(i):
// where it begins in memory; it exists below `existing`. Lanes lie along the channels, so that addresses advance by
// sums.
template <bool vector, typename RowOf, typename OffsetOf>
__device__ __forceinline__ void copy_rows(const Params& params, std::uint32_t target, const float* source, int rows,
                                          int existing, int first_channel, int begin, int end, const RowOf& row_of,
                                          const OffsetOf& offset_of) {
  constexpr int step = vector ? quad : 1;
  const int pitch = params.config.pitch_quads() * quad, lanes_log2 = params.config.copy_lanes_log2;
  const int lane = (static_cast<int>(threadIdx.x) & ((1 << lanes_log2) - 1)) * step;
  for (int column = begin + lane; column < end; column += step << lanes_log2) {
    const bool inside = first_channel + column < params.c;
#pragma unroll 4
    for (int row = static_cast<int>(threadIdx.x) >> lanes_log2; row < rows; row += threads >> lanes_log2) {
      copy<vector>(target + (row_of(row) * pitch + column) * 4, source, offset_of(row) + first_channel + column,
                   inside && row < existing);
    }
  }
}

// Both operands' channels from `begin` to `end` of the block's slice.
template <bool vector_x, bool vector_weight, bool nhwc>
__device__ __forceinline__ void copy_operands(const Block<nhwc>& block, int begin, int end) {
  const Params& params = block.params;
  const int first_filter = block.first_filter, first_pixel = block.first_pixel, first_channel = block.first_channel;
  copy_rows<vector_weight>(
      params, shared_address(block.weights), params.weight, block.filters, params.k - first_filter, first_channel,
      begin, end, [](int row) { return filter_row<nhwc>(row); },
      [&](int row) { return (first_filter + row) * params.c; });
  if constexpr (nhwc) {
    const auto copy_pixels = [&](const auto& offset_of) {
      copy_rows<vector_x>(
          params, shared_address(block.input), params.x, block.pixels, params.pixels - first_pixel, first_channel,
          begin, end, [](int row) { return pixel_row(row); }, [&](int row) { return offset_of(first_pixel + row); });
    };
    if (params.dense) {
      copy_pixels([&](int pixel) { return pixel * params.in_column; });
    } else {
      copy_pixels([&](int pixel) { return input_offset(params, pixel); });
    }
  } else {  // [channels][pixels]
    constexpr int step = vector_x ? quad : 1;
    const int lanes_log2 = 5 + params.config.pixel_warps_log2 - (vector_x ? 2 : 0);
    const int pixel = (static_cast<int>(threadIdx.x) & ((1 << lanes_log2) - 1)) * step;
    const bool exists = first_pixel + pixel < params.pixels;
    const int offset = exists ? input_offset(params, first_pixel + pixel) : 0;
#pragma unroll 4
    for (int channel = begin + (static_cast<int>(threadIdx.x) >> lanes_log2); channel < end;
         channel += threads >> lanes_log2) {
      const int all = first_channel + channel;
      copy<vector_x>(shared_address(block.input + channel * block.pixels + pixel), params.x,
                     offset + all * params.in_channel, exists && all < params.c);
    }
  }
}

template <bool nhwc>
__device__ __forceinline__ void copy_bias(const Block<nhwc>& block) {
  const Params& params = block.params;
  const int filters = block.filters, first_filter = block.first_filter;
  if (params.epilogue.bias != nullptr) {
    for (int i = threadIdx.x; i < filters; i += threads) {
      copy<false>(shared_address(block.bias + i), params.epilogue.bias, first_filter + i, first_filter + i < params.k);
    }
  } else {
    for (int i = threadIdx.x; i < filters; i += threads) block.bias[i] = 0.0f;
  }
}

template <bool nhwc>
__device__ __forceinline__ void copy_residual(const Vectors<nhwc>& vectors) {
  const Block<nhwc>& block = vectors.block;
  const Params& params = block.params;
#pragma unroll 1
  for (int i = threadIdx.x; i < block.owned; i += threads) {
    const int vector = block.rank * block.owned + i, pixel = vectors.pixel_of(vector), k = vectors.filter_of(vector);
    const std::uint32_t target = shared_address(block.residual + i * quad);
    if (params.vector_y) {
      copy<true>(target, params.epilogue.residual, output_index<nhwc>(params, pixel, k),
                 pixel < params.pixels && k < params.k);
    } else {
#pragma unroll 1
      for (int j = 0; j < quad; ++j) {
        const int own_pixel = nhwc ? pixel : pixel + j, own_k = nhwc ? k + j : k;
        copy<false>(target + 4 * j, params.epilogue.residual, output_index<nhwc>(params, own_pixel, own_k),
                    own_pixel < params.pixels && own_k < params.k);
      }
    }
  }
}

// The warps' sums, where the operands were, in the order of the output's memory.
template <bool nhwc>
__device__ __forceinline__ void stage_sums(const Block<nhwc>& block, const Lane<nhwc>& lane,
                                           const float (&sums)[8][4]) {
  const int pitch = block.sums_pitch(), group_floats = block.group_floats();
  __syncthreads();  // the operands have been read
  float* const own = block.weights + lane.group * group_floats;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int pixel = lane.warp_pixel + lane.first_pixel(half);
    if constexpr (nhwc) {
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const float* const of = sums[half * 4 + m];
        *reinterpret_cast<float4*>(own + (pixel + m) * pitch + lane.warp_filter + lane.filter_of(0)) =
            make_float4(of[0], of[1], of[2], of[3]);
      }
    } else {
      const auto* const of = &sums[half * 4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        *reinterpret_cast<float4*>(own + (lane.warp_filter + lane.filter_of(j)) * pitch + pixel) =
            make_float4(of[0][j], of[1][j], of[2][j], of[3][j]);
      }
    }
  }
}

template <bool nhwc>
__device__ __forceinline__ float4 sum_of_groups(const Vectors<nhwc>& vectors, int vector) {
  const Block<nhwc>& block = vectors.block;
  const int line = vectors.line_of(vector), column = vectors.column_of(vector);
  const float* source = block.weights + line * block.sums_pitch() + column;
  float4 sum = load(source);
  for (int i = 1; i < 1 << block.config.groups_log2(); ++i) add(sum, load(source += block.group_floats()));
  return sum;
}

// The block's sums to the blocks that store them, and theirs to this one.
template <bool nhwc>
__device__ __forceinline__ void exchange(const Vectors<nhwc>& vectors) {
  const Block<nhwc>& block = vectors.block;
  hopper::wait_for_cluster_arrival();  // the other blocks' barriers are there
#pragma unroll 1
  for (int i = threadIdx.x; i < block.owned << block.split_log2; i += threads) {
    const float4 sum = sum_of_groups(vectors, i);
    const int owner = i >> block.owned_log2, place = block.rank * block.owned + (i & (block.owned - 1));
    const float four[4] = {sum.x, sum.y, sum.z, sum.w};
    hopper::store_in_block(hopper::address_in_block(shared_address(block.received + place * quad), owner), four,
                           hopper::address_in_block(block.barrier, owner));
  }
  hopper::wait_for_cluster(block.barrier, 0, WaitSite{block.params.report, kernel_direct_tiled, role_multiply});
}

template <bool nhwc>
__device__ __forceinline__ void store(const Vectors<nhwc>& vectors, int vector, const float4& four) {
  const Block<nhwc>& block = vectors.block;
  const Params& params = block.params;
  const int pixel = vectors.pixel_of(vector), k = vectors.filter_of(vector);
  if (pixel >= params.pixels || k >= params.k) return;
  const Epilogue<float>& epilogue = params.epilogue;
  float values[4] = {four.x, four.y, four.z, four.w};
  const float* const others = block.residual + (vector - block.rank * block.owned) * quad;
#pragma unroll
  for (int j = 0; j < 4; ++j) values[j] += block.bias[nhwc ? k - block.first_filter + j : k - block.first_filter];
  epilogue.in_order(
      [&] {
#pragma unroll
        for (int j = 0; j < 4; ++j) values[j] += others[j];
      },
      [&] {
#pragma unroll
        for (int j = 0; j < 4; ++j) values[j] = epilogue.activate(values[j]);
      });
  if (params.vector_y) {
    *reinterpret_cast<float4*>(params.y + output_index<nhwc>(params, pixel, k)) =
        make_float4(values[0], values[1], values[2], values[3]);
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int own_pixel = nhwc ? pixel : pixel + j, own_k = nhwc ? k + j : k;
    if (own_pixel < params.pixels && own_k < params.k) {
      params.y[output_index<nhwc>(params, own_pixel, own_k)] = values[j];
    }
  }
}

template <bool nhwc, bool vector_x, bool vector_weight>
__global__ void __launch_bounds__(threads, 2) convolve(const __grid_constant__ Params params) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ __align__(16) float shared[];
  const Block<nhwc> block{params, shared};
  const Config& config = params.config;
  if (block.split > 1) expect_sums(block);
#pragma unroll 1
  for (int part = 0; part < 2; ++part) {
    if (part == 1) commit_copies();
    copy_operands<vector_x, vector_weight>(block, part == 0 ? 0 : config.first_part * quad,
                                           (part == 0 ? config.first_part : config.quads) * quad);
  }
  const Vectors<nhwc> vectors{block};
  copy_bias(block);
  if (params.epilogue.residual != nullptr) copy_residual(vectors);
  commit_copies();

  const Lane<nhwc> lane{config};
  // Products of the group's channels, part by part. Not a function: sums that are passed to one get other registers.
  float sums[8][4] = {};
  const int pitch = block.pitch;
  const float* const weights = block.weights + (lane.warp_filter + lane.filter) * pitch;
  const float* const input =
      block.input + (nhwc ? (lane.warp_pixel + lane.pixel) * pitch : lane.warp_pixel + lane.first_pixel(0));
  int i = lane.group;
#pragma unroll 1
  for (int part = 0; part < 2; ++part) {
    part == 0 ? wait_for_copies<1>() : wait_for_copies<0>();
    __syncthreads();
    const int end = part == 0 ? config.first_part : config.quads;
#pragma unroll 1
    for (; i < end; i += 1 << block.config.groups_log2()) {
      float4 w[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) w[j] = load(weights + j * 8 * pitch + i * quad);
      const auto multiply = [&](auto& row, float value, auto channel) {
#pragma unroll
        for (int j = 0; j < 4; ++j) row[j] = fmaf(value, channel(w[j]), row[j]);
      };
      const auto first = [](const float4& four) { return four.x; };
      const auto second = [](const float4& four) { return four.y; };
      const auto third = [](const float4& four) { return four.z; };
      const auto fourth = [](const float4& four) { return four.w; };
      if constexpr (nhwc) {
#pragma unroll
        for (int m = 0; m < 8; ++m) {
          const float4 v = load(input + m * 4 * pitch + i * quad);
          multiply(sums[m], v.x, first), multiply(sums[m], v.y, second);
          multiply(sums[m], v.z, third), multiply(sums[m], v.w, fourth);
        }
      } else {
        const auto channel = [&](int offset, auto of) {
          const float* const source = input + (i * quad + offset) * block.pixels;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float4 v = load(source + half * 16);
            multiply(sums[half * 4], v.x, of), multiply(sums[half * 4 + 1], v.y, of);
            multiply(sums[half * 4 + 2], v.z, of), multiply(sums[half * 4 + 3], v.w, of);
          }
        };
        channel(0, first), channel(1, second), channel(2, third), channel(3, fourth);
      }
    }
  }

  stage_sums(block, lane, sums);
  __syncthreads();
  if (block.split > 1) exchange(vectors);
#pragma unroll 1
  for (int i = threadIdx.x; i < block.owned; i += threads) {
    float4 sum;
    if (block.split == 1) {
      sum = sum_of_groups(vectors, i);
    } else {
      sum = load(block.received + i * quad);
      for (int j = 1; j < block.split; ++j) add(sum, load(block.received + (j * block.owned + i) * quad));
    }
    store(vectors, block.rank * block.owned + i, sum);
  }
#endif
}

}  // namespace fastconv::algos::direct_tiled::pointwise
