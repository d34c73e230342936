// Three kernels, for images that no cluster keeps (group_norm_cluster.cu): the moments of each block's chunk of an
// image, what they are of the image's groups, and the norm with its activation. x is read twice and y written once;
// Inductor's code for NHWC takes up to ten times as long on large maps (docs/log/112-group-norm.md).
#include <type_traits>

#include "core/fast_divide.h"
#include "device/cuda_check.h"
#include "device/dependent_launch.cuh"
#include "device/fast_silu.cuh"
#include "device/group_norm.h"
#include "device/launch.h"
#include "device/moments.cuh"
#include "device/numeric.h"

namespace fastconv {
namespace {

constexpr int max_threads = 1024, warp_threads = 32;

struct Parameters {
  std::int64_t image;  // accesses of x
  int pixels, c, groups, chunk_pixels, chunks;
  FastDivide per_group, lanes, rows;  // per_group: channels
  int group_lanes;                    // that take a group of a chunk together
  float epsilon;
  ActivationFunction activate;
};

// A block's pixels of an image, and a thread's accesses to them.
struct Chunk {
  int image, begin, end, row, lane;  // begin, end: pixels

  __device__ Chunk(const Parameters& a)
      : image(static_cast<int>(blockIdx.y)),
        begin(static_cast<int>(blockIdx.x) * a.chunk_pixels),
        end(min(begin + a.chunk_pixels, a.pixels)),
        row(static_cast<int>(threadIdx.x) / a.lanes),
        lane(static_cast<int>(threadIdx.x) - row * a.lanes) {}

  __device__ std::int64_t first_access(const Parameters& a) const { return image * a.image + begin * a.lanes + lane; }
  __device__ int pixels_of(const Parameters& a, int which) const {  // of that row
    return (end - begin - which + a.rows - 1) / a.rows;
  }

  // visit(access, values) of the thread's accesses, counted from first_access(): from the last one on if `backwards`.
  // So many loads at a time are under way.
  template <bool backwards, typename T, typename Visit>
  __device__ __forceinline__ void for_each(const Parameters& a, const Access<T>* source, const Visit& visit) const {
    constexpr int loads = 4;
    const int step = a.rows * a.lanes, count = pixels_of(a, row);
    for (int i = 0; i < count; i += loads) {
      Access<T> values[loads];
      int at[loads];
#pragma unroll
      for (int j = 0; j < loads; ++j) {
        const int which = min(i + j, count - 1);
        at[j] = row * a.lanes + (backwards ? count - 1 - which : which) * step;
        values[j] = source[at[j]];
      }
#pragma unroll
      for (int j = 0; j < loads; ++j) {
        if (i + j < count) visit(at[j], values[j]);
      }
    }
  }
};

// x [N][pixels][lanes] -> moments [N][chunks][groups]: mean and squares.
template <typename T>
__global__ void __launch_bounds__(max_threads)
    find_moments(const Access<T>* __restrict__ x, Moments* moments, const Parameters a) {
  extern __shared__ Moments shared[];  // [rows][C]
  constexpr int count = Access<T>::count;
  const Chunk chunk(a);
  launch_dependents();
  if (chunk.row < a.rows) {
    const Access<T>* const source = x + chunk.first_access(a);
    const int pixels = chunk.pixels_of(a, chunk.row);
    // Sums of deviations from the first value, which is as far from the mean as any.
    float pivot[count], sum[count], squares[count];
    const Access<T> first = source[pixels > 0 ? chunk.row * a.lanes : 0];
#pragma unroll
    for (int i = 0; i < count; ++i) pivot[i] = to_float(first.e[i]), sum[i] = squares[i] = 0.0f;
    chunk.for_each<false>(a, source, [&](int, const Access<T>& values) {
#pragma unroll
      for (int i = 0; i < count; ++i) {
        const float deviation = to_float(values.e[i]) - pivot[i];
        sum[i] += deviation;
        squares[i] = fmaf(deviation, deviation, squares[i]);
      }
    });
    const float share = pixels > 0 ? 1.0f / static_cast<float>(pixels) : 0.0f;
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const float mean = sum[i] * share;
      shared[chunk.row * a.c + chunk.lane * count + i] = {pivot[i] + mean, squares[i] - sum[i] * mean};
    }
  }
  __syncthreads();
  const int thread = static_cast<int>(threadIdx.x), lane = thread % a.group_lanes;
  const int at_once = static_cast<int>(blockDim.x) / a.group_lanes;
  for (int first = 0; first < a.groups; first += at_once) {  // all lanes of a warp stay in here: shuffles
    const int group = first + thread / a.group_lanes;
    const Moments* const channels = shared + min(group, a.groups - 1) * a.per_group;
    const Moments all = taken_together(
        a.per_group * a.rows, static_cast<float>((chunk.end - chunk.begin) * a.per_group), lane, a.group_lanes,
        [&](int i) { return channels[i / a.per_group * (a.c - a.per_group) + i]; },
        [&](int i) { return static_cast<float>(chunk.pixels_of(a, i / a.per_group)); });
    if (lane == 0 && group < a.groups) {
      moments[(static_cast<std::int64_t>(chunk.image) * a.chunks + blockIdx.x) * a.groups + group] = all;
    }
  }
}

// moments -> factors [N][3][C]: mean, what a deviation from it is multiplied by, what is added. A warp for each group
// of an image.
template <typename T>
__global__ void __launch_bounds__(warp_threads)
    find_factors(const Moments* moments, const T* weight, const T* bias, float* factors, const Parameters a) {
  launch_dependents();
  wait_for_predecessor();
  const int image = static_cast<int>(blockIdx.y), group = static_cast<int>(blockIdx.x);
  const Moments* const chunks = moments + static_cast<std::int64_t>(image) * a.chunks * a.groups + group;
  const float total = static_cast<float>(a.pixels) * static_cast<float>(a.per_group);
  const Moments all = taken_together(
      a.chunks, total, static_cast<int>(threadIdx.x), warp_threads, [&](int i) { return chunks[i * a.groups]; },
      [&](int i) {
        return static_cast<float>(min(a.chunk_pixels, a.pixels - i * a.chunk_pixels)) * static_cast<float>(a.per_group);
      });
  const float scale = rsqrtf(all.squares / total + a.epsilon);
  float* const of_image = factors + static_cast<std::int64_t>(image) * 3 * a.c;
  for (int i = static_cast<int>(threadIdx.x); i < a.per_group; i += warp_threads) {
    const int channel = group * a.per_group + i;
    of_image[channel] = all.mean;
    of_image[a.c + channel] = weight != nullptr ? scale * to_float(weight[channel]) : scale;
    of_image[2 * a.c + channel] = bias != nullptr ? to_float(bias[channel]) : 0.0f;
  }
}

// y = act((x - mean) * scale + shift). What find_moments has read last comes first: it may be in the L2 cache.
template <typename T>
__global__ void __launch_bounds__(max_threads)
    normalise(const Access<T>* __restrict__ x, const float* factors, Access<T>* __restrict__ y, const Parameters a) {
  constexpr int count = Access<T>::count;
  const Chunk chunk(a);
  if (chunk.row >= a.rows) return;
  wait_for_predecessor();
  float mean[count], scale[count], shift[count];
  const float* const of_image = factors + static_cast<std::int64_t>(chunk.image) * 3 * a.c + chunk.lane * count;
#pragma unroll
  for (int i = 0; i < count; ++i) mean[i] = of_image[i], scale[i] = of_image[a.c + i], shift[i] = of_image[2 * a.c + i];
  const std::int64_t first = chunk.first_access(a);
  apply_quickly<T>(a.activate, [&](const auto& apply) {
    chunk.for_each<true>(a, x + first, [&](int at, const Access<T>& values) {
      Access<T> result;
#pragma unroll
      for (int i = 0; i < count; ++i) {
        result.e[i] = from_float<T>(apply(fmaf(to_float(values.e[i]) - mean[i], scale[i], shift[i])));
      }
      y[first + at] = result;
    });
  });
}

}  // namespace

void group_norm(const GroupNorm& norm, const void* x, const void* weight, const void* bias, void* y, void* workspace,
                Runtime& runtime) {
  if (const GroupNormClusters clusters(norm, runtime.device()); clusters.found()) {
    return group_norm_in_clusters(norm, clusters, x, weight, bias, y, runtime);
  }
  const GroupNormPlan plan(norm, runtime.device().processors);
  Parameters a{};
  a.pixels = static_cast<int>(norm.pixels), a.c = static_cast<int>(norm.c);
  a.groups = static_cast<int>(norm.groups), a.per_group = norm.c / norm.groups;
  a.lanes = plan.lanes, a.rows = plan.rows, a.image = norm.pixels * plan.lanes;
  a.chunk_pixels = static_cast<int>(plan.chunk_pixels), a.chunks = static_cast<int>(plan.chunks);
  a.group_lanes = 1;
  while (a.group_lanes < warp_threads && 2 * a.group_lanes * a.groups <= plan.threads()) a.group_lanes *= 2;
  a.epsilon = static_cast<float>(norm.epsilon);
  a.activate = ActivationFunction(norm.activation, 0.0f);
  auto* const moments = static_cast<Moments*>(workspace);
  auto* const factors = reinterpret_cast<float*>(static_cast<char*>(workspace) + plan.moments_bytes(norm));
  const auto images = static_cast<unsigned>(norm.n);
  const bool early = runtime.device().compute_capability == 90;  // later ones run code that does not wait
  const std::size_t shared_bytes = static_cast<std::size_t>(a.rows * a.c) * sizeof(Moments);
  const dim3 grid(static_cast<unsigned>(a.chunks), images), block(static_cast<unsigned>(plan.threads()));
  dispatch_dtype(norm.dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto* const source = static_cast<const Access<T>*>(x);
    const cudaStream_t stream = stream_of(runtime);
    LaunchPlan{.grid = grid, .block = block, .shared_bytes = shared_bytes}.launch(
        find_moments<T>, stream, "group norm, moments", source, moments, a);
    LaunchPlan{.grid = dim3(static_cast<unsigned>(a.groups), images), .block = dim3(warp_threads), .early = early}
        .launch(find_factors<T>, stream, "group norm, factors", moments, static_cast<const T*>(weight),
                static_cast<const T*>(bias), factors, a);
    LaunchPlan{.grid = grid, .block = block, .early = early}.launch(normalise<T>, stream, "group norm", source, factors,
                                                                    static_cast<Access<T>*>(y), a);
  });
}

}  // namespace fastconv
