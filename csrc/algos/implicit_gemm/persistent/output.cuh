// The epilogue of the Hopper kernel: sums from registers, unscaled, to y; or to partial sums, which a second kernel
// adds (reduce.cuh).
#pragma once

#include "algos/implicit_gemm/persistent/elements.cuh"
#include "algos/implicit_gemm/persistent/finish.cuh"
#include "algos/implicit_gemm/persistent/operand.cuh"

namespace fastconv::algos::implicit_gemm::persistent {

// Of a pixel of a tile, where its filter 0 would be; -1 if it is not in y.
template <typename T>
__device__ __forceinline__ std::int64_t output_index(const Params<T>& params, const WorkTile& work_tile,
                                                     unsigned pixel) {
  const int q = work_tile.q + static_cast<int>(params.by_tile_q.divmod(pixel));
  const int p = work_tile.p + static_cast<int>(params.by_tile_p.divmod(pixel));
  const int n = work_tile.n + static_cast<int>(pixel);
  if (static_cast<int>(pixel) >= params.tile_n || n >= params.n || p >= params.p || q >= params.q) return -1;
  if (params.flat_nchw) {  // q counts the pixels of all images, and NCHW wants them apart
    unsigned image = static_cast<unsigned>(q);
    const unsigned within = params.by_image.divmod(image);
    return image * params.y_image + within;
  }
  return n * params.y_image + p * params.y_row + q * params.y_pixel + params.shuffled.offset(work_tile.filter_tile);
}

// One factor can hold the scales of a pixel and a filter if both exponents are smaller, as they almost always are.
constexpr int moderate_exponent = 64;

// Some vectors, each of `size` neighbours in y (or in the partial sums), with bias; index -1: not in y. Each step is
// done for all vectors at once: there are too few warps to hide the latency of one vector after the other.
template <typename S, int count, int size>
__device__ __forceinline__ void store_vectors(const Params<typename S::T>& params, int split,
                                              const std::int64_t (&index)[count], float (&value)[count][size],
                                              const float (&bias)[count][size]) {
  using T = typename S::T;
  if (params.partial != nullptr) {
    float* partial = params.partial + split * params.y_numel;
#pragma unroll
    for (int i = 0; i < count; ++i) {
#pragma unroll
      for (int e = 0; e < size; e += 4) {
        const float4 quad{value[i][e], value[i][e + 1], value[i][e + 2], value[i][e + 3]};
        if (index[i] >= 0) *reinterpret_cast<float4*>(partial + index[i] + e) = quad;
      }
    }
    return;
  }
  const auto for_each = [&](auto&& apply) {
#pragma unroll
    for (int i = 0; i < count; ++i) {
#pragma unroll
      for (int e = 0; e < size; ++e) value[i][e] = apply(value[i][e], i, e);
    }
  };
  const Epilogue<T>& epilogue = params.epilogue;
  const ActivationFunction& activate = epilogue.activate;
  for_each([&](float v, int i, int e) { return v + bias[i][e]; });
  if constexpr (S::gated) {
    apply_gated(activate.gated, [&](auto&& apply) { for_each([&](float v, int, int) { return apply(v); }); });
  }
  const auto add_residual = [&] {
    Vector<T, size> residual[count];
#pragma unroll
    for (int i = 0; i < count; ++i) {
      residual[i] = *reinterpret_cast<const Vector<T, size>*>(epilogue.residual + (index[i] >= 0 ? index[i] : 0));
    }
    for_each([&](float v, int i, int e) { return v + to_float(residual[i].e[e]); });
  };
  if constexpr (!S::gated) {
    if (epilogue.adds_before()) add_residual();
    if (activate.is_silu) {
      for_each([](float v, int, int) { return ActivationFunction::silu(v); });
    } else if (activate.negative_slope != 1.0f || activate.cap != INFINITY) {
      for_each([&](float v, int, int) { return activate.piecewise(v); });
    }
    if (epilogue.adds_after()) add_residual();
  }
#pragma unroll
  for (int i = 0; i < count; ++i) {
    Vector<T, size> result;
#pragma unroll
    for (int e = 0; e < size; ++e) result.e[e] = from_float<T>(value[i][e]);
    if (index[i] >= 0) *reinterpret_cast<Vector<T, size>*>(params.y + index[i]) = result;
  }
}

// The stage's rows, filters [first_k, first_k + width), by quads of pixels: NCHW. Four pixels exist and are neighbours,
// or none of them exists.
template <typename S, int width>
__device__ __forceinline__ void store_pixel_quads(const Params<typename S::T>& params, int split,
                                                  const FilterData<S>& filters, const OutputStage& stage, int first,
                                                  int first_k) {
  constexpr int count = width / 8;
  const int lane = threadIdx.x % 32, row = lane % 4 * 4;
  float factor[4], bias[count][4], value[count][4];
  std::int64_t index[count];
#pragma unroll
  for (int e = 0; e < 4; ++e) factor[e] = S::scaled ? power_of_two(-stage.exponent[row + e]) : 1.0f;
#pragma unroll
  for (int i = 0; i < count; ++i) {
    const int column = lane / 4 + 8 * i, k = first_k + column;
    index[i] = k < params.k && stage.index[row] >= 0 ? stage.index[row] + k * params.y_filter : -1;
    const float of_filter = S::scaled ? power_of_two(-filters.exponent[first + column]) : 1.0f;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      bias[i][e] = to_float(filters.bias[first + column]);
      value[i][e] = stage.values[row + e][column];
      if constexpr (S::scaled) value[i][e] *= factor[e] * of_filter;
    }
  }
  store_vectors<S>(params, split, index, value, bias);
}

// Whether every filter's exponent is moderate, for the whole warp.
template <typename S>
__device__ __forceinline__ bool are_moderate(const FilterData<S>& filters) {
  int largest = 0;  // a number, of which there is room; predicates are few, and were spilled
  if constexpr (S::scaled) {
#pragma unroll
    for (int k = 0; k < S::filter_tile; k += 32) {
      largest = max(largest, abs(filters.exponent[min(k + static_cast<int>(threadIdx.x) % 32, S::filter_tile - 1)]));
    }
  }
  return __all_sync(0xffffffffu, largest < moderate_exponent);
}

// The lane's pixels, all filters of the tile, straight from registers to NHWC: a lane has 16 bytes of neighbouring
// filters, four lanes 64 (column_of). Registers cannot be indexed, so the next ones move up after each turn of the
// loop: unrolled instead, the code would run once a tile and never from the instruction cache.
template <typename S, int rows>
__device__ __forceinline__ void store_rows(const Params<typename S::T>& params, const WorkTile& work_tile,
                                           const FilterData<S>& filters, float (&sums)[S::row_blocks][S::sums],
                                           const float (&factors)[rows]) {
  using T = typename S::T;
  constexpr int vec = vec_of<T>, width = S::filter_tile % 32 == 0 ? 32 : 16;  // filters of a turn
  constexpr int groups = width / (4 * vec), values = width / 2, turns = S::filter_tile / width;
  const int of_lane = static_cast<int>(threadIdx.x) % 4 * vec,
            first_k = work_tile.filter_tile * S::filter_tile + of_lane;
#pragma unroll 1
  for (int m = 0; m < S::row_blocks; ++m) {
    std::int64_t of_row[2];
    float factor[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      of_row[i] = output_index(params, work_tile, pixel_of_lane<S>(2 * m + i));
      factor[i] = m == 0 ? factors[i] : factors[rows - 2 + i];
    }
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
      std::int64_t index[2 * groups];
      float value[2 * groups][vec], bias[2 * groups][vec];
#pragma unroll
      for (int g = 0; g < groups; ++g) {
        const int column = turn * width + g * 4 * vec;
        const auto of_filters = *reinterpret_cast<const Vector<T, vec>*>(filters.bias + column + of_lane);
        int4 scales{};
        if constexpr (S::scaled) scales = *reinterpret_cast<const int4*>(filters.exponent + column + of_lane);
        const int scale[4] = {scales.x, scales.y, scales.z, scales.w};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          index[2 * g + i] = first_k + column < params.k && of_row[i] >= 0 ? of_row[i] + first_k + column : -1;
#pragma unroll
          for (int e = 0; e < vec; ++e) {
            value[2 * g + i][e] = sums[0][4 * (g * vec / 2 + e / 2) + 2 * i + e % 2];
            if constexpr (S::scaled) value[2 * g + i][e] *= factor[i] * __int_as_float(scale[e % 4]);
            bias[2 * g + i][e] = to_float(of_filters.e[e]);
          }
        }
      }
      store_vectors<S>(params, work_tile.split, index, value, bias);
#pragma unroll
      for (int i = values; i < S::row_blocks * S::sums; ++i) {
        sums[(i - values) / S::sums][(i - values) % S::sums] = sums[i / S::sums][i % S::sums];
      }
    }
  }
}

// The lane's pixels, all filters of the tile, which all exist: straight from registers to NHWC, where a lane has 16
// bytes of neighbouring filters and four lanes have 64 (column_of). Unrolled, since registers cannot be indexed, and so
// with as few instructions as can be: each runs once a tile, and never from the nearest instruction cache.
// with_residual(use, comes): use() with the stage of the next box's residual, if it comes.
template <typename S, Finish finish, int rows, typename WithResidual>
__device__ __forceinline__ void store_straight(const Params<typename S::T>& params, const WorkTile& work_tile,
                                               const FilterData<S>& filters,
                                               const float (&sums)[S::row_blocks][S::sums], const float (&factor)[rows],
                                               const WithResidual& with_residual) {
  using T = typename S::T;
  using Out = std::conditional_t<finish == Finish::partial, float, T>;
  constexpr int vec = vec_of<T>;
  constexpr int together = finish == Finish::residual ? rows : 2;  // rows: a box of the residual has those of the tile
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int first_row = 0; first_row < rows; first_row += together) {
    Out* target[together];
    bool exists[together];
#pragma unroll
    for (int i = 0; i < together; ++i) {
      int row = first_row + i;
      asm volatile("" : "+r"(row));  // so that it is not computed for all rows beforehand, in registers
      const std::int64_t index = output_index(params, work_tile, pixel_of_lane<S>(row));
      exists[i] = index >= 0;
      if constexpr (finish == Finish::partial) {
        target[i] = params.partial + work_tile.split * params.y_numel;
      } else {
        target[i] = params.y;
      }
      target[i] += index + work_tile.filter_tile * S::filter_tile + lane % 4 * vec;
    }
#pragma unroll
    for (int first = 0; first < S::filter_tile; first += box_filters<T>) {
      const auto finish_box = [&](std::uint32_t residual) {
#pragma unroll
        for (int column = first; column < min(first + box_filters<T>, S::filter_tile); column += 4 * vec) {
          finish_vec<S, finish>(
              params, filters, sums, factor, column, first_row, first_row + together,
              [&](int row) { return load_shared(place_in_box<S>(residual, lane, column, row)); },
              [&](int row, const float (&values)[vec]) {
                if (exists[row - first_row]) store_vec(target[row - first_row] + column, values);
              });
        }
      };
      if constexpr (finish == Finish::residual) {
        with_residual(finish_box);
      } else {
        finish_box(0);
      }
    }
  }
}

// All warps of both multiplying warpgroups.
__device__ __forceinline__ void synchronise_multipliers() {
  asm volatile("bar.sync 1, %0;" ::"n"(128 * multiply_warpgroups) : "memory");
}
// The same; returns whether any thread says so.
__device__ __forceinline__ bool any_of_multipliers(bool condition) {
  unsigned any;
  asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, 1, %2, p;\nselp.u32 %0, 1, 0, q;\n}"
               : "=r"(any)
               : "r"(static_cast<unsigned>(condition)), "n"(128 * multiply_warpgroups)
               : "memory");
  return any != 0;
}

// Both warpgroups' tile, through shared memory and by copies, which go on while the next tile is multiplied. What was
// copied before must have left shared memory. with_residual: as store_straight() has it.
template <typename S, Finish finish, int rows, typename WithResidual>
__device__ __forceinline__ void store_by_tma(const Params<typename S::T>& params, const CUtensorMap& map,
                                             const WorkTile& work_tile, const FilterData<S>& filters,
                                             std::uint32_t staging, const float (&sums)[S::row_blocks][S::sums],
                                             const float (&factor)[rows], const WithResidual& with_residual) {
  using T = typename S::T;
  constexpr int vec = vec_of<T>, bytes = S::pixel_tile * box_bytes;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int first = 0; first < S::filter_tile; first += box_filters<T>) {
    const std::uint32_t target = staging + first / box_filters<T> * bytes;
    const auto finish_box = [&](std::uint32_t residual) {
#pragma unroll
      for (int column = first; column < first + box_filters<T>; column += 4 * vec) {
        finish_vec<S, finish>(
            params, filters, sums, factor, column, 0, rows,
            [&](int row) { return load_shared(place_in_box<S>(residual, lane, column, row)); },
            [&](int row, const float (&values)[vec]) {
              store_shared(place_in_box<S>(target, lane, column, row), pack_vec<T>(values));
            });
      }
    };
    if constexpr (finish == Finish::residual) {
      with_residual(finish_box);
    } else {
      finish_box(0);
    }
  }
  hopper::fence_copies();
  synchronise_multipliers();
  if (threadIdx.x == 0) {
    const ShuffledPlaces& shuffled = params.shuffled;
    const int first = work_tile.filter_tile * S::filter_tile + shuffled.channel_offset(work_tile.filter_tile);
    const int column = work_tile.q + shuffled.column_offset(work_tile.filter_tile);
#pragma unroll 1
    for (int box = 0; box < S::filter_tile / box_filters<T>; ++box) {
      hopper::tma_store(map, first + box * box_filters<T>, column, work_tile.p, work_tile.n, staging + box * bytes);
    }
    hopper::commit_stores();
  }
}

// The same in any order of y and for any scales: the values pass through the warp's stage of shared memory, some
// filters of 16 pixels at a time.
template <typename S, int rows>
__device__ __forceinline__ void store_staged(const Params<typename S::T>& params, const WorkTile& work_tile,
                                             const FilterData<S>& filters, OutputStage& stage,
                                             float (&sums)[S::row_blocks][S::sums], const int (&exponents)[rows],
                                             bool moderate) {
  constexpr int vec = vec_of<typename S::T>, width = S::filter_tile % 32 == 0 ? 32 : 16;  // filters of a turn
  constexpr int values = width / 2, turns = S::filter_tile / width;
  const int lane = threadIdx.x % 32, row = lane / 4;
#pragma unroll 1
  for (int m = 0; m < S::row_blocks; ++m) {
    if (lane % 4 == 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        stage.index[row + 8 * i] = output_index(params, work_tile, pixel_of_lane<S>(2 * m + i));
        stage.exponent[row + 8 * i] = m == 0 ? exponents[i] : exponents[rows - 2 + i];
      }
    }
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
#pragma unroll
      for (int j = 0; j < width / 8; j += 2) {  // two columns of each of two groups of 8: four filters
        const int column = 2 * j / vec * 4 * vec + lane % 4 * vec + 2 * j % vec;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          *reinterpret_cast<float4*>(&stage.values[row + 8 * i][column]) =
              make_float4(sums[0][4 * j + 2 * i], sums[0][4 * j + 2 * i + 1], sums[0][4 * j + 4 + 2 * i],
                          sums[0][4 * j + 4 + 2 * i + 1]);
        }
      }
      __syncwarp();
      const int first = turn * width, first_k = work_tile.filter_tile * S::filter_tile + first;
      if (params.quads && moderate) {
        store_pixel_quads<S, width>(params, work_tile.split, filters, stage, first, first_k);
      } else if (params.along_filters && moderate && params.k <= few_filters) {
        if (turn == 0) store_few<S>(params, work_tile.split, filters, stage);
      } else if (params.along_filters && moderate) {
        store_columns<S, width>(params, work_tile.split, filters, stage, first, first_k);
      } else {
        store_single<S, width>(params, work_tile.split, filters, stage, first, first_k);
      }
      __syncwarp();
#pragma unroll
      for (int i = values; i < S::row_blocks * S::sums; ++i) {
        sums[(i - values) / S::sums][(i - values) % S::sums] = sums[i / S::sums][i % S::sums];
      }
    }
  }
}

// uniform: the pixels' exponents are all the same. with_residual: as store_straight() has it.
template <typename S, int rows, typename WithResidual>
__device__ __forceinline__ void store_tile(const Params<typename S::T>& params, const CUtensorMap& map,
                                           const WorkTile& work_tile, FilterData<S>& filters, const Shared<S>& shared,
                                           float (&sums)[S::row_blocks][S::sums], const int (&exponents)[rows],
                                           bool uniform, const WithResidual& with_residual) {
  __syncwarp();  // what the lanes have copied is there
  bool moderate = are_moderate(filters);
  if constexpr (S::scaled) {
#pragma unroll
    for (int i = 0; i < rows; ++i)
      moderate = moderate && __all_sync(0xffffffffu, abs(exponents[i]) < moderate_exponent);
  }
  // Rare, and so by the way that is for all.
  const bool misses_residual =
      has_residual_in_place<S> && params.epilogue.residual != nullptr && work_tile.residual_stages == 0;
  const bool in_rows = (S::transforms && !uniform) || misses_residual;
  auto finish = static_cast<unsigned>(finish_of<S>(params));
  const bool use_tma = S::stores_by_tma && params.stores_by_tma && !misses_residual;
  if (use_tma) {
    if (threadIdx.x == 0) hopper::wait_for_reading<0>();
    moderate = !any_of_multipliers(!moderate);  // either all copy, or none
  }
  unsigned is_moderate = moderate, with_tma = use_tma;
  asm volatile("" : "+r"(is_moderate), "+r"(with_tma), "+r"(finish));  // so that no predicate is spilled
  // It is not wanted, but has come.
  const auto skip_residual = [&] {
    if constexpr (has_residual_in_place<S>) {
#pragma unroll 1
      for (int i = 0; i < work_tile.residual_stages; ++i) with_residual([](std::uint32_t) {});
    }
  };
  if (!params.vectors || is_moderate == 0) [[unlikely]] {
    skip_residual();
    store_staged<S>(params, work_tile, filters, shared.output[threadIdx.x / 32], sums, exponents, is_moderate != 0);
    return;
  }
  float factor[rows];
  if constexpr (S::scaled) {
    const int of_tile = uniform ? exponents[0] : 0;
#pragma unroll
    for (int i = 0; i < rows; ++i) factor[i] = power_of_two(of_tile - exponents[i]);
    for (int k = static_cast<int>(threadIdx.x) % 32; k < S::filter_tile; k += 32) {
      filters.exponent[k] = __float_as_int(power_of_two(-of_tile - filters.exponent[k]));
    }
    __syncwarp();
  }
  const bool whole = (work_tile.filter_tile + 1) * S::filter_tile <= params.k && !in_rows;
  if constexpr (!S::gated) {
    if (finish == static_cast<unsigned>(Finish::general) && (whole || with_tma != 0)) {
      const auto index_of = [&](int row) { return output_index(params, work_tile, pixel_of_lane<S>(row)); };
      finish_in_place<S>(params, work_tile.filter_tile * S::filter_tile, index_of, filters, sums, factor,
                         with_residual);
      finish = static_cast<unsigned>(Finish::plain);
    } else {
      skip_residual();
    }
  }
  const auto with_finish = [&](auto&& store, auto... finishes) {  // the one of them that it is
    const auto is_done = [&](auto one) {
      if constexpr (has_finish<S, one()>) {
        if (finish == static_cast<unsigned>(one())) return store(one), true;
      }
      return false;
    };
    return (is_done(finishes) || ...);
  };
  if constexpr (S::stores_by_tma) {
    if (with_tma != 0) {
      with_finish(
          [&](auto finish) {
            store_by_tma<S, finish()>(params, map, work_tile, filters, shared.staging, sums, factor, with_residual);
          },
          is<Finish::plain>, is<Finish::clamped>, is<Finish::leaky>, is<Finish::silu>, is<Finish::residual>,
          is<Finish::gelu>, is<Finish::gelu_tanh>, is<Finish::hardswish>, is<Finish::sigmoid>);
      return;
    }
  }
  if (!whole ||
      !with_finish(
          [&](auto finish) { store_straight<S, finish()>(params, work_tile, filters, sums, factor, with_residual); },
          is<Finish::partial>, is<Finish::plain>, is<Finish::clamped>, is<Finish::leaky>, is<Finish::silu>,
          is<Finish::residual>, is<Finish::gelu>, is<Finish::gelu_tanh>, is<Finish::hardswish>, is<Finish::sigmoid>)) {
    store_rows<S>(params, work_tile, filters, sums, factor);
  }
}

}  // namespace fastconv::algos::implicit_gemm::persistent
