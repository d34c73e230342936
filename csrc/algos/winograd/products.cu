// The staged algorithms' product: persistent blocks of the roles of products.cuh, one per multiprocessor.
#include "algos/winograd/products.cuh"

#include <algorithm>

#include "algos/winograd/products.h"
#include "device/dependent_launch.cuh"
#include "device/fast_divide.h"
#include "device/power_of_two.h"
#include "device/shared_memory.h"
#include "device/tensor_map.h"

namespace fastconv::winograd::products {
namespace {

struct Task {
  int row, filter, frequency;
  int columns;  // of M, from that filter on
};

struct Grid {
  int padded_tiles, k_pad, stages;  // a stage for each group of channels
  unsigned tasks;
  FastDivide by_filters, by_tiles;  // blocks of filters, blocks of tiles
  const int* group_exponents;       // [stages][padded_tiles]
  int* tile_exponents;              // [padded_tiles]
  WaitReport* report;
};

// Filters turn fastest, then tiles: blocks that run at the same time share a frequency's U and read V once from memory.
template <typename S>
class TaskSource {
 public:
  __device__ __forceinline__ TaskSource(const Grid& grid, const CUtensorMap& v, const CUtensorMap& u)
      : grid_(grid), v_(v), u_(u), index_(blockIdx.x) {}

  __device__ __forceinline__ bool next(Task& task) {
    if (index_ >= grid_.tasks) return false;
    unsigned index = index_;
    index_ += gridDim.x;
    task.filter = static_cast<int>(grid_.by_filters.peel(index)) * tile_filters;
    task.row = static_cast<int>(grid_.by_tiles.peel(index)) * tile_rows;
    task.frequency = static_cast<int>(index);
    task.columns = min(tile_filters, grid_.k_pad - task.filter);
    return true;
  }
  __device__ __forceinline__ void load(const Task& task, int index, const Stage& stage) const {
    load_stage<S>(stage, index, v_, task.row, task.frequency, u_, task.filter, task.frequency);
  }

 private:
  const Grid& grid_;
  const CUtensorMap& v_;
  const CUtensorMap& u_;
  unsigned index_;
};

// A tile's sums are brought to the scale of its largest group of channels before they are added up: exact, and neither
// too large nor, relative to the result, too small for FP32. What lies below that by more than FP32 can say becomes 0.
class GroupScales {
 public:
  __device__ __forceinline__ GroupScales(const Grid& grid, const Task& task)
      : pitch_(grid.padded_tiles / 4), least_(make_int4(127, 127, 127, 127)) {
    const int row = task.row + 4 * static_cast<int>(threadIdx.x % 32);
    exponents_ = reinterpret_cast<const int4*>(grid.group_exponents) + min(row / 4, pitch_ - 1);
#pragma unroll 4
    for (int index = 0; index < grid.stages; ++index) {
      const int4 other = exponents(index);
      least_.x = min(least_.x, other.x), least_.y = min(least_.y, other.y);
      least_.z = min(least_.z, other.z), least_.w = min(least_.w, other.w);
    }
    if (task.frequency == 0 && task.filter == 0 && row < grid.padded_tiles) {
      reinterpret_cast<int4*>(grid.tile_exponents)[row / 4] = least_;
    }
  }
  __device__ __forceinline__ float4 factors(int index) const {
    const int4 own = exponents(index);
    return make_float4(factor(least_.x, own.x), factor(least_.y, own.y), factor(least_.z, own.z),
                       factor(least_.w, own.w));
  }

 private:
  static __device__ __forceinline__ float factor(int least, int own) {
    return power_of_two(max(least - own, -127));  // of -127: zero
  }
  __device__ __forceinline__ int4 exponents(int index) const { return __ldg(exponents_ + index * pitch_); }

  const int4* exponents_;  // of the lane's tiles and the first group
  int pitch_;              // between groups
  int4 least_;
};

struct BoxSink {
  const CUtensorMap& m;
  std::uint32_t stage;  // a WriteStage
  int barrier;

  __device__ __forceinline__ void write(const Task& task, int warpgroup, float (&totals)[64]) const {
    write_boxes(totals, stage, barrier, m, task.filter, task.row + 64 * warpgroup, task.frequency, task.columns);
  }
};

template <typename S>
struct SharedMemory {
  Storage<S, Task> products;
  WriteStage writes[multiply_warpgroups];
};

constexpr int threads = 128 * (multiply_warpgroups + 1);
template <typename S>
constexpr int shared_bytes = sizeof(SharedMemory<S>) + 1024;  // room to align

template <typename S>
__global__ void __launch_bounds__(threads, 1)
    multiply(const Grid grid, const __grid_constant__ CUtensorMap v, const __grid_constant__ CUtensorMap u,
             const __grid_constant__ CUtensorMap m) {
#if defined(FASTCONV_HAS_WGMMA)
  static_assert(shared_bytes<S> <= 227 * 1024);
  extern __shared__ unsigned char memory[];
  auto& shared = *reinterpret_cast<SharedMemory<S>*>(memory + (-shared_address(memory) & 1023));
  admit_successor();
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  if (threadIdx.x == 0) shared.products.initialise();
  __syncthreads();
  if (warpgroup < multiply_warpgroups) {
    hopper::grow_registers<S::multiply_registers>();
    const BoxSink sink{m, shared_address(&shared.writes[warpgroup]), 1 + warpgroup};
    multiply_products<S, 1>(shared.products, grid.stages, warpgroup, sink, grid.report);
    if (threadIdx.x % 128 == 0) hopper::wait_for_reading<0>();
  } else {
    hopper::shrink_registers<S::load_registers>();
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32 % 4, 0);
    if (warp == 1) {
      wait_for_predecessor();  // V and its exponents are what the product reads of the input transform's
      const auto make_scales = [&grid](const Task& task) { return GroupScales(grid, task); };
      scale_products(shared.products, grid.stages, TaskSource<S>(grid, v, u), make_scales, grid.report);
    } else if (threadIdx.x % 128 == 0) {
      hopper::prefetch_map(v), hopper::prefetch_map(u), hopper::prefetch_map(m);
      wait_for_predecessor();
      load_products(shared.products, grid.stages, TaskSource<S>(grid, v, u), grid.report);
    }
  }
#endif
}

cuuint64_t at(std::int64_t value) { return static_cast<cuuint64_t>(value); }

// V or U [frequencies][rows][groups][2][group_channels], in boxes of both parts of a group of a block's rows.
template <typename S>
CUtensorMap make_operand_map(const Arguments& args, const void* x, std::int64_t rows) {
  static_assert(S::split);
  const std::int64_t parts = 2 * args.groups, part = 2 * args.group_channels, row = parts * part;
  return make_tensor_map(x, DType::f16,
                         {.sizes = {at(args.group_channels), at(rows), at(args.frequencies), at(parts)},
                          .strides = {at(row), at(rows * row), at(part)},
                          .box = {64, tile_rows, 1, box_parts<S>}});
}

// M [frequencies][tiles][k_pad], in boxes of 32 filters of a warpgroup's rows.
CUtensorMap make_product_map(const Arguments& args) {
  const std::int64_t row = 4 * args.k_pad, all = args.tiles * row;
  return make_tensor_map(args.m, DType::f32,
                         {.sizes = {at(args.k_pad), at(args.tiles), at(args.frequencies), 1},
                          .strides = {at(row), at(all), at(all)},
                          .box = {turn_columns, tile_rows / multiply_warpgroups, 1, 1}});
}

template <typename S>
void launch(const Arguments& args) {
  const auto blocks = [](std::int64_t size, int block) { return (size + block - 1) / block; };
  const std::int64_t filter_blocks = blocks(args.k_pad, tile_filters), tile_blocks = blocks(args.tiles, tile_rows);
  const std::int64_t tasks = args.frequencies * tile_blocks * filter_blocks;
  const Grid grid{static_cast<int>(exponent_pitch(args.tiles)),
                  static_cast<int>(args.k_pad),
                  static_cast<int>(args.groups),
                  static_cast<unsigned>(tasks),
                  FastDivide(static_cast<std::uint32_t>(filter_blocks)),
                  FastDivide(static_cast<std::uint32_t>(tile_blocks)),
                  args.group_exponents,
                  args.tile_exponents,
                  args.report};
  allow_shared_memory<multiply<S>>(shared_bytes<S>, "winograd products: shared memory");
  launch_in_series(args.early, multiply<S>, static_cast<unsigned>(std::min<std::int64_t>(args.processors, tasks)),
                   threads, shared_bytes<S>, static_cast<cudaStream_t>(args.stream), "winograd products", grid,
                   make_operand_map<S>(args, args.v, args.tiles), make_operand_map<S>(args, args.u, args.filters),
                   make_product_map(args));
}

}  // namespace

// One set of sums: two would hide more of each warpgroup's own pauses, but what limits the kernel is shared memory's
// bandwidth, and the shorter loop stays in the instruction cache.
void run(const Arguments& args) { launch<Shape<Mode::split, 1>>(args); }

}  // namespace fastconv::winograd::products
