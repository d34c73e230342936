// How sums become values of y: bias and activation, 16 bytes of filters at a time.
#pragma once

#include "algos/implicit_gemm/persistent/tile.cuh"
#include "device/activation.cuh"
#include "device/fast_gates.cuh"
#include "device/fast_silu.cuh"
#include "device/power_of_two.h"

namespace fastconv::algos::implicit_gemm::persistent {

template <typename T, int size>
struct alignas(size * sizeof(T) < 16 ? size * sizeof(T) : 16) Vector {
  T e[size];
};
template <typename T, int count>
__device__ __forceinline__ uint4 pack_vec(const float (&values)[count]) {
  static_assert(count * sizeof(T) == 16);
  if constexpr (std::is_same_v<T, float>) {
    return {__float_as_uint(values[0]), __float_as_uint(values[1]), __float_as_uint(values[2]),
            __float_as_uint(values[3])};
  } else {
    const auto pair = [&](int e) {
      if constexpr (std::is_same_v<T, bfloat16_t>) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(values[e], values[e + 1]);
        return *reinterpret_cast<const unsigned*>(&pair);
      } else {
        const __half2 pair = __floats2half2_rn(values[e], values[e + 1]);
        return *reinterpret_cast<const unsigned*>(&pair);
      }
    };
    return {pair(0), pair(2), pair(4), pair(6)};
  }
}
template <typename T, int count>
__device__ __forceinline__ void store_vec(T* target, const float (&values)[count]) {
  if constexpr (std::is_same_v<T, float>) {  // partial sums of half types are more than 16 bytes
#pragma unroll
    for (int e = 0; e < count; e += 4) {
      *reinterpret_cast<float4*>(target + e) = {values[e], values[e + 1], values[e + 2], values[e + 3]};
    }
  } else {
    *reinterpret_cast<uint4*>(target) = pack_vec<T>(values);
  }
}

// How an output is finished, here and in the single-tile kernel.
enum class Finish {
  partial,   // not at all: it goes to the partial sums
  plain,     // bias
  clamped,   // bias, ReLU or ReLU6
  leaky,     // bias, leaky_relu with a slope in (0, 1)
  silu,      // bias, SiLU: of half types and TF32
  residual,  // bias, the residual, and ReLU, ReLU6 or nothing
  general,   // the rest: by finish_in_place()
  gelu,      // bias, and one of these: S::gated has no others, but partial and nchw
  gelu_tanh,
  hardswish,
  sigmoid,
  nchw,  // any, element by element: of the single-tile kernel
};
template <Finish finish>
constexpr std::integral_constant<Finish, finish> is{};
// Whether a residual comes through the ring of stages behind the input's: to be added when a box of y is made
// (Finish::residual), or where the sums lie (finish_in_place), which has registers for tiles of 256 pixels.
template <typename S>
constexpr bool has_residual_finish = S::split && !S::transforms && !S::affine;
template <typename S>
constexpr bool has_residual_in_place = S::scaled && !S::split && !S::transforms && !S::affine && !S::gated;
template <typename S>
constexpr bool has_residual_last = has_residual_finish<S> || has_residual_in_place<S>;
constexpr bool is_gate(Finish finish) { return finish >= Finish::gelu && finish <= Finish::sigmoid; }
template <typename S, Finish finish>
constexpr bool has_finish = S::gated                     ? is_gate(finish) || finish == Finish::partial
                            : finish == Finish::residual ? has_residual_finish<S>
                                                         : !is_gate(finish) && (finish != Finish::silu || !S::split);

template <typename S>
__device__ __forceinline__ Finish finish_of(const Params<typename S::T>& params) {
  const ActivationFunction& activate = params.epilogue.activate;
  if (params.partial != nullptr) return Finish::partial;
  if constexpr (S::gated) {  // in the order of Activation
    return static_cast<Finish>(static_cast<int>(Finish::gelu) + static_cast<int>(activate.gated) -
                               static_cast<int>(Activation::gelu));
  }
  const Finish finish = activate.clamps                                        ? Finish::clamped
                        : activate.negative_slope == 1.0f && !activate.is_silu ? Finish::plain
                        : leaks(activate)                                      ? Finish::leaky
                        : activate.is_silu && !S::split                        ? Finish::silu
                                                                               : Finish::general;
  if (params.epilogue.residual == nullptr) return finish;
  return has_residual_finish<S> && params.residual_stages > 0 ? Finish::residual : Finish::general;
}

// A value with its bias, for any order of y.
template <typename S>
__device__ __forceinline__ typename S::T finish_one(const Epilogue<typename S::T>& epilogue, float value,
                                                    std::int64_t index) {
  if constexpr (S::gated) return from_float<typename S::T>(fast_gated(epilogue.activate.gated, value));
  return epilogue.finish(value, index);
}

// 16 bytes of y with their residual (Finish::residual).
template <typename T>
__device__ __forceinline__ void add_residual(const ActivationFunction& activate, const uint4& residual,
                                             float (&values)[vec_of<T>]) {
  constexpr int vec = vec_of<T>, per_word = 4 / sizeof(T);
  const std::uint32_t words[4] = {residual.x, residual.y, residual.z, residual.w};
  const float floor = activate.clamps ? 0.0f : -INFINITY;
#pragma unroll
  for (int e = 0; e < vec; ++e) {
    const float other = to_float(reinterpret_cast<const T*>(&words[e / per_word])[e % per_word]);
    values[e] = min_keeping_nan(max_keeping_nan(values[e] + other, floor), activate.cap);
  }
}

// 16 bytes of filters of a lane, finished, for all of its pixels: store(row, values). residual_of(row): its 16 bytes.
template <typename S, Finish finish, int rows, typename ResidualOf, typename Store>
__device__ __forceinline__ void finish_vec(const Params<typename S::T>& params, const FilterData<S>& filters,
                                           const float (&sums)[S::row_blocks][S::sums], const float (&factor)[rows],
                                           int column, int first_row, int last_row, const ResidualOf& residual_of,
                                           Store&& store) {
  using T = typename S::T;
  constexpr int vec = vec_of<T>;
  const int of_lane = static_cast<int>(threadIdx.x) % 4 * vec;
  float scale[vec], bias[vec];
  if constexpr (S::scaled) {
    const float4 scales = *reinterpret_cast<const float4*>(filters.exponent + column + of_lane);
    scale[0] = scales.x, scale[1] = scales.y, scale[2] = scales.z, scale[3] = scales.w;
  }
  if constexpr (finish != Finish::partial) {
    const auto of_filters = *reinterpret_cast<const Vector<T, vec>*>(filters.bias + column + of_lane);
#pragma unroll
    for (int e = 0; e < vec; ++e) bias[e] = to_float(of_filters.e[e]);
  }
#pragma unroll
  for (int i = first_row; i < last_row; ++i) {
    float values[vec];
#pragma unroll
    for (int e = 0; e < vec; ++e) {
      float value = sums[i / 2][(column / 8 + e / 2) * 4 + i % 2 * 2 + e % 2];
      if constexpr (S::scaled && !S::transforms) value *= factor[i];
      if constexpr (S::scaled && finish == Finish::partial) value *= scale[e];
      if constexpr (S::scaled && finish != Finish::partial) value = fmaf(value, scale[e], bias[e]);
      if constexpr (!S::scaled && finish != Finish::partial) value += bias[e];
      if constexpr (finish == Finish::clamped) value = clamp(value, params.epilogue.activate.cap);
      if constexpr (finish == Finish::leaky) value = leak(value, params.epilogue.activate.negative_slope);
      if constexpr (finish == Finish::silu) value = fast_silu(value);
      if constexpr (finish == Finish::gelu) value = fast_gelu(value);
      if constexpr (finish == Finish::gelu_tanh) value = fast_gelu_tanh(value);
      if constexpr (finish == Finish::hardswish) value = fast_hardswish(value);
      if constexpr (finish == Finish::sigmoid) value = fast_sigmoid(value);
      values[e] = value;
    }
    if constexpr (finish == Finish::residual) add_residual<T>(params.epilogue.activate, residual_of(i), values);
    store(i, values);
  }
}

// Whatever the others do not know (any slope), with a residual or without, in place: the sums become values of y,
// and what belongs to pixels and filters becomes neutral, so that Finish::plain can follow. Registers cannot be
// indexed: a loop takes 16 sums (8), and turns all of them around. The residual comes through the ring, where
// has_residual_in_place (with_residual: as store_straight() has it), and then all pixels have their turn at once, since
// a box holds all; else from memory, a turn ahead. index_of(row): in y, of a pixel its first filter; -1 if it is not
// there.
template <typename S, int rows, typename IndexOf, typename WithResidual>
__device__ __forceinline__ void finish_in_place(const Params<typename S::T>& params, int first_filter,
                                                const IndexOf& index_of, FilterData<S>& filters,
                                                float (&sums)[S::row_blocks][S::sums], float (&factor)[rows],
                                                const WithResidual& with_residual) {
  using T = typename S::T;
  constexpr bool has_registers = S::row_blocks * S::sums < 128 || !S::scaled, by_ring = has_residual_in_place<S>;
  constexpr int vec = vec_of<T>, width = S::filter_tile % 32 == 0 && has_registers ? 32 : 16;  // filters of a turn
  constexpr int blocks = by_ring ? S::row_blocks : 1, lane_rows = 2 * blocks;                  // of a turn
  constexpr int vectors = lane_rows * width / (4 * vec), values = width / 2;  // of a turn; of a block of it
  constexpr int box = by_ring ? box_filters<T> : S::filter_tile;
  static_assert(S::filter_tile % box == 0 && box % width == 0);
  const Epilogue<T>& epilogue = params.epilogue;
  const int lane = static_cast<int>(threadIdx.x) % 32, of_lane = lane % 4 * vec;
#pragma unroll 1
  for (int m = 0; m < S::row_blocks; m += blocks) {
    const T* of_row[lane_rows] = {};
    uint4 next[by_ring ? 1 : vectors] = {};  // of the residual: vector v is row v % lane_rows's
    const auto load = [&](int column) {
#pragma unroll
      for (int v = 0; v < vectors; ++v) {  // of filters that are not in y any
        const int filter = min(first_filter + column + v / lane_rows * 4 * vec + of_lane, params.k - vec);
        next[by_ring ? 0 : v] = __ldg(reinterpret_cast<const uint4*>(of_row[v % lane_rows] + filter));
      }
    };
    if (!by_ring && epilogue.residual != nullptr) {
#pragma unroll
      for (int i = 0; i < lane_rows; ++i) {
        const std::int64_t index = index_of(2 * m + i);
        of_row[i] = epilogue.residual + (index >= 0 ? index : 0);
      }
      load(0);
    }
    const auto take_turn = [&](int first, std::uint32_t stage) {
      uint4 residual[by_ring ? 1 : vectors];
      if constexpr (!by_ring) {
#pragma unroll
        for (int v = 0; v < vectors; ++v) residual[v] = next[v];
        if (epilogue.residual != nullptr && first + width < S::filter_tile) load(first + width);
      }
      float value[vectors][vec];
#pragma unroll
      for (int v = 0; v < vectors; ++v) {
        const int group = v / lane_rows, row = v % lane_rows, column = first + group * 4 * vec + of_lane;
        const auto bias = *reinterpret_cast<const Vector<T, vec>*>(filters.bias + column);
        float4 scales{};
        if constexpr (S::scaled) scales = *reinterpret_cast<const float4*>(filters.exponent + column);
        const float scale[4] = {scales.x, scales.y, scales.z, scales.w};
#pragma unroll
        for (int e = 0; e < vec; ++e) {
          float one = sums[row / 2][4 * (group * vec / 2 + e / 2) + row % 2 * 2 + e % 2];
          if constexpr (S::scaled && !S::transforms) one *= m == 0 ? factor[row] : factor[rows - 2 + row % 2];
          if constexpr (S::scaled) {
            value[v][e] = fmaf(one, scale[e % 4], to_float(bias.e[e]));
          } else {
            value[v][e] = one + to_float(bias.e[e]);
          }
        }
      }
      const auto for_each_value = [&](const auto& apply) {
#pragma unroll
        for (int v = 0; v < vectors; ++v) {
#pragma unroll
          for (int e = 0; e < vec; ++e) value[v][e] = apply(value[v][e]);
        }
      };
      const auto add_residual = [&] {
        constexpr int per_word = 4 / sizeof(T);
#pragma unroll
        for (int v = 0; v < vectors; ++v) {
          uint4 other;
          if constexpr (by_ring) {
            other = load_shared(place_in_box<S>(stage, lane, first + v / lane_rows * 4 * vec, v % lane_rows));
          } else {
            other = residual[v];
          }
          const std::uint32_t words[4] = {other.x, other.y, other.z, other.w};
#pragma unroll
          for (int e = 0; e < vec; ++e) {
            value[v][e] += to_float(reinterpret_cast<const T*>(&words[e / per_word])[e % per_word]);
          }
        }
      };
      epilogue.in_order(add_residual, [&] {
        if (!epilogue.activate.is_linear()) apply_activation(epilogue.activate, for_each_value);
      });
      // The blocks of a turn each turn around by themselves.
      constexpr int total = S::row_blocks * S::sums / blocks;
#pragma unroll
      for (int block = 0; block < blocks; ++block) {
#pragma unroll
        for (int i = values; i < total; ++i) {
          sums[block + (i - values) / S::sums][(i - values) % S::sums] = sums[block + i / S::sums][i % S::sums];
        }
      }
#pragma unroll
      for (int v = 0; v < vectors; ++v) {
        const int group = v / lane_rows, row = v % lane_rows;
#pragma unroll
        for (int e = 0; e < vec; ++e) {
          sums[S::row_blocks - blocks + row / 2]
              [S::sums - values + 4 * (group * vec / 2 + e / 2) + row % 2 * 2 + e % 2] = value[v][e];
        }
      }
    };
#pragma unroll 1
    for (int first = 0; first < S::filter_tile; first += box) {
      const auto take_box = [&](std::uint32_t stage) {
#pragma unroll 1
        for (int column = 0; column < box; column += width) take_turn(first + column, stage);
      };
      if constexpr (by_ring) {
        with_residual(take_box, epilogue.residual != nullptr);
      } else {
        take_box(0);
      }
    }
  }
  __syncwarp();  // all lanes have read what follows
#pragma unroll 1
  for (int k = lane; k < S::filter_tile; k += 32) {
    filters.bias[k] = from_float<T>(-0.0f);  // added to -0, too, it changes nothing
    if constexpr (S::scaled) filters.exponent[k] = __float_as_int(1.0f);
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < rows; ++i) factor[i] = 1.0f;
}

}  // namespace fastconv::algos::implicit_gemm::persistent
