// One kernel, for images of which clusters of blocks keep slices in their shared memory: x is read once and y written
// once. Three launches one after the other take some 15 us, however small the image (docs/log/112-group-norm.md).
#include <type_traits>

#include "core/fast_divide.h"
#include "device/cuda_check.h"
#include "device/dependent_launch.cuh"
#include "device/fast_silu.cuh"
#include "device/group_norm.h"
#include "device/launch.h"
#include "device/moments.cuh"
#include "device/numeric.h"
#include "device/shared_memory.h"

namespace fastconv {
namespace {

constexpr int max_threads = GroupNormClusters::max_threads, warp_threads = 32;

// Grids of more blocks neither wait for a predecessor nor launch dependents early: either takes the device about 1 ns a
// block, one after the other, where the launch that is hidden takes 1 us.
constexpr std::int64_t few_blocks = 2048;

struct Parameters {
  std::int64_t image;                 // accesses of x
  int pixels, pitch;                  // of an image; accesses from one pixel to the next
  int share, log2_blocks;             // pixels of a block, at most; blocks of a cluster
  int groups, channels, units;        // of the slice; a unit: `unit` channels that a thread takes together
  int unit, log2_group_lanes;         // group_lanes take a group of a block together
  FastDivide lanes, rows;             // of a block
  FastDivide per_group, group_units;  // of a group: channels, units
  float epsilon;
  bool early;
  ActivationFunction activate;
};

// The pixels that block `rank` of a cluster has: of each nearly as many, of some none where an image has so few.
struct Share {
  int begin, pixels;

  __device__ Share(const Parameters& a, int rank)
      : begin(a.pixels * rank >> a.log2_blocks), pixels((a.pixels * (rank + 1) >> a.log2_blocks) - begin) {}
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

constexpr int copies_ahead = 8;  // of a thread: with 512 of them 64 KB are under way, twice what hides the latency

// 16 bytes from global to shared memory, past the registers. Copies come in groups, here of one or none; a thread that
// has waited sees those of its own behind which it has ended fewer than copies_ahead groups.
__device__ __forceinline__ void start_copy(void* target, const void* source) {
  const auto address = static_cast<unsigned>(__cvta_generic_to_shared(target));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(source) : "memory");
}
__device__ __forceinline__ void end_group_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(copies_ahead - 1) : "memory");
}

#endif

// x, y [N][pixels][pitch]. A cluster has a slice of an image, each of its blocks a share of the pixels, a thread an
// access of every rows-th pixel: what it has copied itself it reads itself, twice. Grid: blocks of a cluster, slices,
// images.
template <typename T>
__global__ void __launch_bounds__(max_threads, 2)
    normalise_in_clusters(const Access<T>* x, const T* weight, const T* bias, Access<T>* y, const Parameters a) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  constexpr int count = Access<T>::count;
  extern __shared__ uint4 shared[];
  auto* const kept = reinterpret_cast<Access<T>*>(shared);                                     // [share][lanes]
  auto* const of_threads = reinterpret_cast<Moments*>(kept + a.share * a.lanes);               // [rows][units]
  auto* const of_blocks = of_threads + a.rows * a.units;                                       // [blocks][groups]
  auto* const of_groups = reinterpret_cast<float2*>(of_blocks + (a.groups << a.log2_blocks));  // mean, factor
  auto* const factors = reinterpret_cast<float*>(of_groups + a.groups);                        // [channels]
  float* const added = factors + a.channels;                                                   // [channels]

  __cluster_barrier_arrive_relaxed();  // waited for before anything is stored in another block
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int row = thread / a.lanes, lane = thread - row * a.lanes;
  const int rank = static_cast<int>(blockIdx.x), slice = static_cast<int>(blockIdx.y), blocks = 1 << a.log2_blocks;
  const Share share(a, rank);
  const int least = share.pixels / a.rows, longer_rows = share.pixels - least * a.rows;
  const auto pixels_of = [&](int which) { return least + (which < longer_rows ? 1 : 0); };  // of that row
  const int pixels = row < a.rows ? pixels_of(row) : 0;
  const std::int64_t first =
      blockIdx.z * a.image + (share.begin + row) * static_cast<std::int64_t>(a.pitch) + slice * a.lanes + lane;
  const Access<T>* const source = x + first;
  const int step = a.rows * a.pitch, kept_step = a.rows * a.lanes;
  Access<T>* const mine = kept + row * a.lanes + lane;

  if (a.early) wait_for_predecessor();
  const auto start = [&](int i) {
    if (i < pixels) start_copy(mine + i * kept_step, source + i * step);
    end_group_of_copies();  // an empty one, too, is counted
  };
#pragma unroll 1
  for (int i = 0; i < copies_ahead; ++i) start(i);
#pragma unroll 1
  for (int i = thread; i < a.channels; i += threads) {
    const int channel = slice * a.channels + i;
    factors[i] = weight != nullptr ? to_float(weight[channel]) : 1.0f;
    added[i] = bias != nullptr ? to_float(bias[channel]) : 0.0f;
  }
  if (a.early) launch_dependents();

  {
    // Sums of deviations from the thread's first value, which is as far from the mean as any.
    float pivot[count], sum[count], squares[count];
    wait_for_copies();
    Access<T> first_values{};
    if (pixels > 0) first_values = *mine;
#pragma unroll
    for (int i = 0; i < count; ++i) pivot[i] = to_float(first_values.e[i]), sum[i] = squares[i] = 0.0f;
#pragma unroll 1
    for (int i = 0; i < pixels; ++i) {
      wait_for_copies();
      const Access<T> values = mine[i * kept_step];
      start(i + copies_ahead);
#pragma unroll
      for (int j = 0; j < count; ++j) {
        const float deviation = to_float(values.e[j]) - pivot[j];
        sum[j] += deviation;
        squares[j] = fmaf(deviation, deviation, squares[j]);
      }
    }
    const float part = pixels > 0 ? 1.0f / static_cast<float>(pixels) : 0.0f;
    Moments moments[count];
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const float mean = sum[i] * part;
      moments[i] = {pivot[i] + mean, squares[i] - sum[i] * mean};
    }
    join_neighbours(moments, a.unit, static_cast<float>(pixels));
    Moments* units = of_threads + row * a.units + lane * (a.units / a.lanes);
#pragma unroll
    for (int i = 0; i < count; ++i) {
      if (row < a.rows && (i & (a.unit - 1)) == 0) *units++ = moments[i];
    }
  }
  __syncthreads();

  // All lanes of a warp stay in these loops: shuffles.
  __cluster_barrier_wait();  // all of its blocks have begun, and have shared memory
  const float per_group = static_cast<float>(a.per_group);
  const int group_lanes = 1 << a.log2_group_lanes;
#pragma unroll 1
  for (int begin = 0; begin < a.groups; begin += threads >> a.log2_group_lanes) {
    const int group = begin + (thread >> a.log2_group_lanes), group_lane = thread & (group_lanes - 1);
    const Moments* const units = of_threads + min(group, a.groups - 1) * a.group_units;
    const float unit = static_cast<float>(a.unit);
    const Moments all = taken_together(  // zeros of a block without pixels
        a.group_units * a.rows, static_cast<float>(max(share.pixels, 1)) * per_group, group_lane, group_lanes,
        [&](int i) { return units[i / a.group_units * (a.units - a.group_units) + i]; },
        [&](int i) { return static_cast<float>(pixels_of(i / a.group_units)) * unit; });
    for (int i = group_lane; i < blocks && group < a.groups; i += group_lanes) {
      auto* const theirs = static_cast<Moments*>(__cluster_map_shared_rank(of_blocks, static_cast<unsigned>(i)));
      theirs[rank * a.groups + group] = all;
    }
  }
  __cluster_barrier_arrive();
  __cluster_barrier_wait();  // from here on no block touches another's shared memory, so that it may end
  const float total = static_cast<float>(a.pixels) * per_group;
#pragma unroll 1
  for (int begin = 0; begin < a.groups; begin += threads >> a.log2_blocks) {
    // As taken_together(), of one part for each lane.
    const int group = begin + (thread >> a.log2_blocks), block = thread & (blocks - 1);
    const Moments part = of_blocks[block * a.groups + min(group, a.groups - 1)];
    const float values = static_cast<float>(Share(a, block).pixels) * per_group;
    const float mean = sum_over(blocks, values * part.mean) / total, deviation = part.mean - mean;
    const float sum = sum_over(blocks, fmaf(values * deviation, deviation, part.squares));
    if (block == 0 && group < a.groups) of_groups[group] = {mean, rsqrtf(sum / total + a.epsilon)};
  }
  __syncthreads();

  float mean[count], scale[count], shift[count];
#pragma unroll
  for (int i = 0; i < count; ++i) {
    const int channel = lane * count + i;
    const float2 group = of_groups[channel / a.per_group];
    mean[i] = group.x, scale[i] = group.y * factors[channel], shift[i] = added[channel];
  }
  Access<T>* const target = y + first;
  apply_quickly<T>(a.activate, [&](const auto& apply) {
#pragma unroll 1
    for (int i = 0; i < pixels; ++i) {
      const Access<T> values = mine[i * kept_step];
      Access<T> result;
#pragma unroll
      for (int j = 0; j < count; ++j) {
        result.e[j] = from_float<T>(apply(fmaf(to_float(values.e[j]) - mean[j], scale[j], shift[j])));
      }
      target[i * step] = result;
    }
  });
#endif
}

}  // namespace

void group_norm_in_clusters(const GroupNorm& norm, const GroupNormClusters& clusters, const void* x, const void* weight,
                            const void* bias, void* y, Runtime& runtime) {
  Parameters a{};
  const std::int64_t per_group = norm.c / norm.groups;
  a.pixels = static_cast<int>(norm.pixels), a.share = static_cast<int>(clusters.pixels);
  a.pitch = static_cast<int>(norm.c / norm.channels_per_access()), a.image = norm.pixels * a.pitch;
  while (1 << a.log2_blocks < clusters.blocks) ++a.log2_blocks;
  a.groups = clusters.groups, a.channels = static_cast<int>(clusters.groups * per_group);
  a.unit = clusters.unit, a.units = a.channels / a.unit;
  a.per_group = per_group, a.group_units = per_group / a.unit;
  a.lanes = clusters.lanes, a.rows = clusters.rows;
  while (2 << a.log2_group_lanes <= warp_threads && a.groups << (a.log2_group_lanes + 1) <= clusters.threads()) {
    ++a.log2_group_lanes;
  }
  a.epsilon = static_cast<float>(norm.epsilon);
  a.activate = ActivationFunction(norm.activation, 0.0f);
  a.early = norm.n * clusters.slices * clusters.blocks <= few_blocks;
  const LaunchPlan launch{
      .grid = dim3(static_cast<unsigned>(clusters.blocks), static_cast<unsigned>(clusters.slices),
                   static_cast<unsigned>(norm.n)),
      .block = dim3(static_cast<unsigned>(clusters.threads())),
      .shared_bytes = static_cast<std::size_t>(clusters.shared_bytes(norm)),
      .cluster = clusters.blocks,
      .early = a.early,
  };
  dispatch_dtype(norm.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr auto name = "group norm, clusters";
    allow_shared_memory<normalise_in_clusters<T>>(static_cast<int>(GroupNormClusters::max_shared_bytes), name);
    launch.launch(normalise_in_clusters<T>, stream_of(runtime), name, static_cast<const Access<T>*>(x),
                  static_cast<const T*>(weight), static_cast<const T*>(bias), static_cast<Access<T>*>(y), a);
  });
}

}  // namespace fastconv
