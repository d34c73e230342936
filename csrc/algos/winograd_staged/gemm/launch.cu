// The staged algorithms' product: persistent blocks of the roles of gemm/kernel.cuh, one per multiprocessor.
#include "algos/winograd_staged/gemm/kernel.cuh"

#include <algorithm>

#include "algos/winograd_staged/gemm/launch.h"
#include "device/dependent_launch.cuh"
#include "device/launch.h"
#include "device/shared_memory.h"
#include "hopper/tensor_map.h"

namespace fastconv::algos::winograd_staged::gemm {
namespace {

template <typename H>
constexpr int threads = 128 * (H::warpgroups + 1);
// Of a thread, where there are four warpgroups: of those that multiply, and of the one that loads.
constexpr int multiply_registers = 152, load_registers = 56;
static_assert(128 * (3 * multiply_registers + load_registers) == 65536);
constexpr int shared_bytes = 227 * 1024;
// More than half of a multiprocessor's: one block on each. What is not needed is left to blocks of the input transform
// that still run when the product begins.
constexpr int min_shared_bytes = 116 * 1024;

// It launches its dependents where that gains (Config::overlaps_output).
template <typename H>
__global__ void __launch_bounds__(threads<H>, 1)
    multiply(const Grid grid, const __grid_constant__ CUtensorMap stationary,
             const __grid_constant__ CUtensorMap streaming) {
#if defined(FASTCONV_HAS_WGMMA)
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<Storage<H>*>(memory);
  if (shared_address(memory) % 1024 != 0) __trap();
  if (grid.overlaps_output) launch_dependents();
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  if (threadIdx.x == 0) shared.initialise();
  __syncthreads();
  if (warpgroup < H::warpgroups) {
    if constexpr (H::warpgroups == 3) hopper::setmaxnreg_inc<multiply_registers>();
    multiply_work_tiles<H>(grid, shared, warpgroup);
    return;
  }
  if constexpr (H::warpgroups == 3) hopper::setmaxnreg_dec<load_registers>();
  // V and its exponents are what the product reads of the input transform's; U is here since before.
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32 % 4, 0);
  if (warp < H::warpgroups) {
    if (threadIdx.x % 32 == 0) hopper::prefetch_map(streaming);
    if (H::filters) wait_for_predecessor();
    load_work_tiles(grid, shared, warp, streaming);
  } else if (warp == H::warpgroups) {
    if (threadIdx.x % 32 == 0) hopper::prefetch_map(stationary);
    if (!H::filters) wait_for_predecessor();
    load_stationary(grid, shared, stationary);
  }
#endif
}

cuuint64_t at(std::int64_t value) { return static_cast<cuuint64_t>(value); }

// V or U [points][rows][groups][2][group_channels], in boxes of both limbs of a group of so many rows.
CUtensorMap make_operand_map(const Arguments& args, const void* x, std::int64_t rows, int box_rows) {
  const std::int64_t all = limbs * args.groups, limb = 2 * args.group_channels, row = all * limb;
  return make_tensor_map(x, DType::f16,
                         {.sizes = {at(args.group_channels), at(rows), at(args.points), at(all)},
                          .strides = {at(row), at(rows * row), at(limb)},
                          .box = {product_channels, static_cast<cuuint32_t>(box_rows), 1, limbs}});
}

template <Stationary stationary, int streaming_rows = tile_m>
void launch(const Arguments& args) {
  using H = StationaryOperand<stationary, streaming_rows>;
  const ProductGrid shape(stationary, args.tile_n, args.points, args.tiles, args.filters, args.processors);
  const auto number = [](std::int64_t value) { return static_cast<int>(value); };
  const int stages = number(args.groups);
  const int room = shared_bytes - static_cast<int>(sizeof(Storage<H>)) - Storage<H>::stationary_bytes(stages);
  const int slots = std::min(max_slots, room / (H::warpgroups * H::streaming_tile_bytes));
  const int needed = shared_bytes - room + slots * H::warpgroups * H::streaming_tile_bytes;
  const Grid grid{.padded_tiles = number(exponent_pitch(args.tiles)),
                  .stages = stages,
                  .slots = slots,
                  .segment_rows = number(segment_rows(args.tiles)),
                  .row_segments = number(args.k_pad / segment_filters),
                  .stationary_blocks = number(shape.stationary_blocks),
                  .point_work_tiles = number(shape.point_work_tiles),
                  .by_stationary = shape.stationary_blocks,
                  .by_pairs = (shape.point_work_tiles + 1) / 2,
                  .share = number(shape.work_tiles / shape.groups),
                  .longer = number(shape.work_tiles % shape.groups),
                  .pairs = number(shape.work_tiles / 2 * shape.stationary_blocks),
                  .overlaps_output = args.overlaps_output,
                  .lag = stationary == Stationary::filters && shape.block_work_tiles < 8
                             ? 0
                             : std::min(stages, H::slots) / H::warpgroups,
                  .exponents = args.group_exponents,
                  .tile_exponents = args.tile_exponents,
                  .m = args.m,
                  .report = args.report};
  static_assert(sizeof(Storage<H>) + H::slots * H::bytes + H::warpgroups * 2 * H::streaming_tile_bytes <= shared_bytes);
  const CUtensorMap u = make_operand_map(args, args.u, args.filters, H::columns),
                    v = make_operand_map(args, args.v, args.tiles, tile_m);
  allow_shared_memory<multiply<H>>(shared_bytes, "winograd products: shared memory");
  LaunchPlan{.grid = static_cast<unsigned>(shape.blocks),
             .block = threads<H>,
             .shared_bytes = static_cast<std::size_t>(std::max(needed, min_shared_bytes)),
             .early = true}
      .launch(multiply<H>, static_cast<cudaStream_t>(args.stream), "winograd products", grid, H::filters ? u : v,
              H::filters ? v : u);
}

}  // namespace

void run(const Arguments& args) {
  switch (args.stationary) {
    case Stationary::filters: launch<Stationary::filters>(args); break;
    case Stationary::tiles:
      (args.tile_n == 48 ? launch<Stationary::tiles, 48> : launch<Stationary::tiles, 64>)(args);
      break;
    case Stationary::few_stages: launch<Stationary::few_stages>(args); break;
  }
}

}  // namespace fastconv::algos::winograd_staged::gemm
