// The staged algorithms' product: persistent blocks of the roles of products.cuh, one per multiprocessor.
#include "algos/winograd/products.cuh"

#include <algorithm>

#include "algos/winograd/products.h"
#include "device/cuda_check.h"
#include "device/fast_divide.h"
#include "device/tensor_map.h"

namespace fastconv::winograd::products {
namespace {

struct Task {
  float* m;  // the block's first element
  int row, filter, frequency;
  int rows, columns;
};

struct Grid {
  float* m;                         // [frequencies][tiles][k_pad]
  std::int64_t tiles, k_pad;
  int stages;
  unsigned tasks;                   // paired: of two blocks
  FastDivide by_filters, by_tiles;  // blocks of filters; blocks (paired: pairs) of tiles
  WaitReport* report;
};

// Filters turn fastest, then tiles: blocks that run at the same time share a frequency's U and read V once from memory.
template <typename S>
class TaskSource {
 public:
  __device__ __forceinline__ TaskSource(const Grid& grid, const CUtensorMap& v, const CUtensorMap& u)
      : grid_(grid), v_(v), u_(u), index_(S::paired ? blockIdx.x / 2 : blockIdx.x) {}

  __device__ __forceinline__ bool next(Task& task) {
    if (index_ >= grid_.tasks) return false;
    unsigned index = index_;
    index_ += S::paired ? gridDim.x / 2 : gridDim.x;
    task.filter = static_cast<int>(grid_.by_filters.peel(index)) * tile_filters;
    unsigned block = grid_.by_tiles.peel(index);
    if constexpr (S::paired) block = 2 * block + hopper::cluster_rank();
    task.row = static_cast<int>(block) * tile_rows;
    task.frequency = static_cast<int>(index);
    task.rows = static_cast<int>(min(static_cast<std::int64_t>(tile_rows), grid_.tiles - task.row));
    task.columns = static_cast<int>(min(static_cast<std::int64_t>(tile_filters), grid_.k_pad - task.filter));
    task.m = grid_.m + (task.frequency * grid_.tiles + task.row) * grid_.k_pad + task.filter;
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

struct RowSink : Unscaled {
  std::int64_t pitch;

  __device__ __forceinline__ void write(const Task& task, int warpgroup, const float (&totals)[64]) const {
    write_rows(totals, warpgroup, task.m, pitch, task.rows, task.columns);
  }
};

constexpr int threads = 128 * (multiply_warpgroups + 1);
template <typename S>
constexpr int shared_bytes = sizeof(Storage<S, Task>) + 1024;  // room to align

template <typename S>
__global__ void __launch_bounds__(threads, 1)
    multiply(const Grid grid, const __grid_constant__ CUtensorMap v, const __grid_constant__ CUtensorMap u) {
#if defined(FASTCONV_HAS_WGMMA)
  extern __shared__ unsigned char memory[];
  auto& shared = *reinterpret_cast<Storage<S, Task>*>(memory + (-shared_address(memory) & 1023));
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  if (threadIdx.x == 0) shared.initialise();
  if constexpr (S::paired) hopper::synchronise_cluster();
  __syncthreads();
  if (warpgroup < multiply_warpgroups) {
    hopper::grow_registers<S::multiply_registers>();
    RowSink sink;
    sink.pitch = grid.k_pad;
    multiply_products<S, 1>(shared, grid.stages, warpgroup, sink, grid.report);
  } else {
    hopper::shrink_registers<S::load_registers>();
    if (threadIdx.x % 128 == 0) {
      hopper::prefetch_map(v), hopper::prefetch_map(u);
      load_products(shared, grid.stages, TaskSource<S>(grid, v, u), grid.report);
    }
    __syncwarp();
  }
  if constexpr (S::paired) hopper::synchronise_cluster();  // the other block may still write here, or arrive
#endif
}

// [frequencies][rows][parts][c_pad] in boxes of 64 channels.
CUtensorMap make_map(const Arguments& args, const void* x, std::int64_t rows, int box_rows, int box_parts) {
  const auto at = [](std::int64_t value) { return static_cast<cuuint64_t>(value); };
  const std::int64_t parts = args.mode == Mode::split ? 2 : 1, part = 2 * args.c_pad, row = parts * part;
  return make_tensor_map(
      x, args.mode == Mode::bf16 ? DType::bf16 : DType::f16,
      {.sizes = {at(args.c_pad), at(rows), at(args.frequencies), at(parts)},
       .strides = {at(row), at(rows * row), at(part)},
       .box = {64, static_cast<cuuint32_t>(box_rows), 1, static_cast<cuuint32_t>(box_parts)}});
}

template <typename S>
void launch(const Arguments& args) {
  const auto blocks = [](std::int64_t size, int block) { return (size + block - 1) / block; };
  const std::int64_t filter_blocks = blocks(args.k_pad, tile_filters);
  const std::int64_t tile_blocks = blocks(args.tiles, (S::paired ? 2 : 1) * tile_rows);
  const std::int64_t tasks = args.frequencies * tile_blocks * filter_blocks;
  const Grid grid{args.m,
                  args.tiles,
                  args.k_pad,
                  static_cast<int>(blocks(args.c_pad, S::stage_channels)),
                  static_cast<unsigned>(tasks),
                  FastDivide(static_cast<std::uint32_t>(filter_blocks)),
                  FastDivide(static_cast<std::uint32_t>(tile_blocks)),
                  args.report};
  const CUtensorMap v = make_map(args, args.v, args.tiles, box_rows<S>(false), box_parts<S>(false));
  const CUtensorMap u = make_map(args, args.u, args.filters, box_rows<S>(true), box_parts<S>(true));
  check_cuda(cudaFuncSetAttribute(multiply<S>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes<S>),
             "winograd products: shared memory");
  cudaLaunchConfig_t config{};
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes<S>;
  config.stream = static_cast<cudaStream_t>(args.stream);
  cudaLaunchAttribute cluster{};
  if constexpr (S::paired) {
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = 2, cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    config.attrs = &cluster, config.numAttrs = 1;
    config.gridDim = static_cast<unsigned>(2 * std::min<std::int64_t>(args.processors / 2, tasks));
  } else {
    config.gridDim = static_cast<unsigned>(std::min<std::int64_t>(args.processors, tasks));
  }
  check_cuda(cudaLaunchKernelEx(&config, multiply<S>, grid, v, u), "winograd products");
}

}  // namespace

void run(const Arguments& args) {
  switch (args.mode) {
    case Mode::split: launch<Shape<Mode::split>>(args); break;
    case Mode::fp16: launch<Shape<Mode::fp16>>(args); break;
    case Mode::bf16: launch<Shape<Mode::bf16>>(args); break;
    case Mode::fp32: break;
  }
}

}  // namespace fastconv::winograd::products
