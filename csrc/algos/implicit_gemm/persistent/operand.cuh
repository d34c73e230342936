// The A operand, from a stage in shared memory into the registers that wgmma reads. The order of the reduction within a
// step is free: where wgmma's layout gives lane l the indices 2t, 2t+1, 2t+8, 2t+9 (t = l % 4) of each product, we mean
// neighbouring channels: the lane's 32 bytes of a pixel's 128 are its pieces 2t and 2t + 1, and each piece serves one
// product, or two. So fragments are read 16 bytes at a time, ready to use. Half types are the exception: they keep the
// natural order, which the single-tile kernel needs, and load 8 x 8 matrices into fragments.
#pragma once

#include "algos/implicit_gemm/persistent/affine.cuh"
#include "algos/implicit_gemm/persistent/tile.cuh"
#include "device/activation.cuh"
#include "device/power_of_two.h"

namespace fastconv::algos::implicit_gemm::persistent {

// The channel, within a step, that index `index` (0..15) of product `product` means.
template <bool is_float>
constexpr __host__ __device__ int channel_of(int product, int index) {
  const int t = index % 8 / 2, within = index / 8 * 2 + index % 2;
  return is_float ? 8 * t + 4 * product + within : 16 * product + index;
}

// Scales bring values into float16's range; both limits hold for the largest value of each output pixel's window. Below
// the lower, lo would lose bits to float16's subnormals. The first stage of a tile suggests one scale for the tile,
// which brings its largest value to [2^8, 2^9); an exact scale, of one pixel, to [2^12, 2^13).
// Without a splitting warpgroup there is a guess for each pixel, from the first values that are not zero: what follows
// can only be larger.
constexpr int guessed_target = 8, exact_target = 12, pixel_guess_target = 4;
constexpr float min_high = 0.5f, max_high = 65504.0f;

// A for 64 pixels of a warpgroup, all products of a step.
template <typename S>
struct Operand {
  std::uint32_t high[S::depth][4], low[S::depth][4];  // low: only in split mode
};

__device__ __forceinline__ uint4 load_shared(std::uint32_t address) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address));
  return value;
}
// Four matrices of 8 x 8 halves: the fragment of a product. Lane l has the address of row l % 16, k 8 (l / 16).
__device__ __forceinline__ void load_matrices(std::uint32_t address, std::uint32_t (&fragment)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(address));
}
__device__ __forceinline__ void store_shared(std::uint32_t address, uint4 value) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}

// Two pairs of scaled values as hi01, hi23, lo01, lo23.
__device__ __forceinline__ uint4 split_piece(uint4 raw, float scale) {
  const auto bits = [](__half2 value) { return *reinterpret_cast<const std::uint32_t*>(&value); };
  const float a = __uint_as_float(raw.x) * scale, b = __uint_as_float(raw.y) * scale;
  const float c = __uint_as_float(raw.z) * scale, d = __uint_as_float(raw.w) * scale;
  const __half2 ab = __floats2half2_rn(a, b), cd = __floats2half2_rn(c, d);
  return {bits(ab), bits(cd), bits(__floats2half2_rn(a - __low2float(ab), b - __high2float(ab))),
          bits(__floats2half2_rn(c - __low2float(cd), d - __high2float(cd)))};
}

__device__ __forceinline__ float larger(float largest, uint4 raw) {
  largest = fmaxf(fmaxf(largest, fabsf(__uint_as_float(raw.x))), fabsf(__uint_as_float(raw.y)));
  return fmaxf(fmaxf(largest, fabsf(__uint_as_float(raw.z))), fabsf(__uint_as_float(raw.w)));
}

// The lane's pixels: two of each 64. Of half types the one whose row of matrices it loads.
template <typename S>
class Input {
 public:
  using T = typename S::T;
  static constexpr int rows = 2 * S::row_blocks;
  static constexpr bool matrices = !S::scaled;
  static constexpr int addresses = matrices ? S::row_blocks : rows;

  // Where they are in a box, for the whole kernel.
  __device__ __forceinline__ explicit Input(const Params<T>& params) {
#pragma unroll
    for (int i = 0; i < addresses; ++i) {
      unsigned index = pixel_of(i);
      const unsigned q = params.by_tile_q.divmod(index), p = params.by_tile_p.divmod(index);
      // Pixels behind the tile's last exist if tile_n tile_p tile_q < pixel_tile: they read any row, and are not
      // stored.
      const bool exists = index < static_cast<unsigned>(params.tile_n);
      row_[i] = exists ? (index * params.box_h + p) * params.box_w + q : 0;
    }
  }

  // The same for a flat tile, which is different for each.
  __device__ __forceinline__ void place_flat(const Params<T>& params, const WorkTile& work_tile) {
    unsigned first_n = params.by_row.quotient(work_tile.q);
    const unsigned first_row = first_n;
    params.by_rows.divmod(first_n);
#pragma unroll
    for (int i = 0; i < addresses; ++i) {
      const unsigned pixel = min(work_tile.q + static_cast<int>(pixel_of(i)), params.q - 1);
      unsigned row = pixel;
      const unsigned q = params.by_row.divmod(row);
      const unsigned n = params.by_rows.quotient(row);
      row_[i] = (row - first_row + (n - first_n) * params.halo_rows) * params.box_w + q;
    }
  }

  // Row block m of a step: the stage at `stage`, the tap `shift` rows on. The stage is split, or of a half type.
  __device__ __forceinline__ void load(std::uint32_t stage, int shift, int m, Operand<S>& operand) const {
    if constexpr (matrices) {
      const unsigned row = row_[m] + shift;
      const std::uint32_t address = stage + row * input_row_bytes + ((threadIdx.x % 32 / 16 ^ (row & 7)) << 4);
#pragma unroll
      for (int i = 0; i < S::depth; ++i) load_matrices(address ^ 32 * i, operand.high[i]);
      return;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::uint32_t address = address_of(stage, shift, 2 * m + i);
      if constexpr (S::mode == Mode::single &&
                    !S::converted) {  // the splitting warpgroup has put both pieces into the first
        place(operand.high[0], operand.high[1], i, load_shared(address));
      } else if constexpr (S::split) {
        place(operand.high[0], operand.low[0], i, load_shared(address));
        place(operand.high[1], operand.low[1], i, load_shared(address ^ 16));
      } else {
        place(operand.high[0], operand.high[1], i, load_shared(address));
        place(operand.high[2], operand.high[3], i, load_shared(address ^ 16));
      }
    }
  }

  // An affine input of a half type: a step that is loaded.
  static __device__ __forceinline__ void norm(const StageChannels& channels, Operand<S> (&operand)[S::row_blocks]) {
    using Pair16 = HalfPair<T>;
    const auto floor = Pair16::rounded(channels.floor, channels.floor);
    const auto cap = Pair16::rounded(channels.cap, channels.cap);
    const std::uint32_t of_lane = channels.address + threadIdx.x % 4 * 16;
#pragma unroll
    for (int pair = 0; pair < 2 * S::depth; ++pair) {  // a lane has every fourth pair of a step's channels
      const uint4 affine = load_shared(of_lane + 64 * pair);
#pragma unroll
      for (int i = 0; i < rows; ++i) {
        std::uint32_t& word = operand[i / 2].high[pair / 2][pair % 2 * 2 + i % 2];
        word = Pair16::norm(word, affine, floor);
      }
    }
    if (!channels.has_cap()) return;
#pragma unroll
    for (int i = 0; i < S::row_blocks * S::depth * 4; ++i) {
      std::uint32_t& word = operand[i / (S::depth * 4)].high[i / 4 % S::depth][i % 4];
      word = Pair16::at_most(word, cap);
    }
  }
  // The same of float32: what a lane has of a step, of some pixels.
  template <int count>
  static __device__ __forceinline__ void norm(const StageChannels& channels, uint4 (&first)[count],
                                              uint4 (&second)[count]) {
    const auto for_each_pair = [&](auto&& visit) {
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
#pragma unroll
        for (int i = 0; i < count; ++i) {
          uint4& piece = pair < 2 ? first[i] : second[i];
          visit(pair, pair % 2 == 0 ? piece.x : piece.z, pair % 2 == 0 ? piece.y : piece.w);
        }
      }
    };
    uint4 affine[4];
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      affine[pair] = load_shared(channels.address + threadIdx.x % 4 * 64 + 16 * pair);
    }
    const auto set = [](std::uint32_t& word, float value) { word = __float_as_uint(value); };
    for_each_pair([&](int pair, std::uint32_t& x, std::uint32_t& y) {
      const uint4& of = affine[pair];
      set(x, max_keeping_nan(fmaf(__uint_as_float(x), __uint_as_float(of.x), __uint_as_float(of.z)), channels.floor));
      set(y, max_keeping_nan(fmaf(__uint_as_float(y), __uint_as_float(of.y), __uint_as_float(of.w)), channels.floor));
    });
    if (!channels.has_cap()) return;
    for_each_pair([&](int, std::uint32_t& x, std::uint32_t& y) {
      set(x, min_keeping_nan(__uint_as_float(x), channels.cap)),
          set(y, min_keeping_nan(__uint_as_float(y), channels.cap));
    });
  }

  // The same from float32, each pixel with its own scale.
  __device__ __forceinline__ void load_exact(std::uint32_t stage, const StageChannels& channels, int shift, int m,
                                             const int (&exponents)[rows], Operand<S>& operand) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::uint32_t address = address_of(stage, shift, 2 * m + i);
      if constexpr (S::affine) {
        uint4 first[1] = {load_shared(address)}, second[1] = {load_shared(address ^ 16)};
        norm(channels, first, second);
        place_scaled(operand, i, first[0], second[0], power_of_two(exponents[2 * m + i]));
      } else {
        place_scaled(operand, i, load_shared(address), load_shared(address ^ 16), power_of_two(exponents[2 * m + i]));
      }
    }
  }

  // The same with one guess for each pixel, made where there is none yet (0); and notes the largest of the lane's
  // values.
  __device__ __forceinline__ void load_raw(std::uint32_t stage, const StageChannels& channels, int m,
                                           float (&scale)[rows], float (&largest)[rows], Operand<S>& operand) const {
    uint4 first[2], second[2];
    float here[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::uint32_t address = address_of(stage, 0, 2 * m + i);
      first[i] = load_shared(address), second[i] = load_shared(address ^ 16);
      if constexpr (!S::affine) here[i] = larger(larger(0.0f, first[i]), second[i]);
    }
    if constexpr (S::affine) {
      norm(channels, first, second);
#pragma unroll
      for (int i = 0; i < 2; ++i) here[i] = larger(larger(0.0f, first[i]), second[i]);
    }
    if (__any_sync(0xffffffffu, scale[2 * m] == 0.0f || scale[2 * m + 1] == 0.0f)) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float most = of_pixel(here[i]);
        if (scale[2 * m + i] == 0.0f && most > 0.0f) {
          scale[2 * m + i] = power_of_two(scale_exponent(most, pixel_guess_target));
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      largest[2 * m + i] = fmaxf(largest[2 * m + i], here[i]);
      place_scaled(operand, i, first[i], second[i], scale[2 * m + i]);
    }
  }
  __device__ __forceinline__ void measure_raw(std::uint32_t stage, const StageChannels& channels,
                                              float (&largest)[rows]) const {
#pragma unroll
    for (int i = 0; i < rows; ++i) {
      const std::uint32_t address = address_of(stage, 0, i);
      if constexpr (S::affine) {
        uint4 first[1] = {load_shared(address)}, second[1] = {load_shared(address ^ 16)};
        norm(channels, first, second);
        largest[i] = larger(larger(largest[i], first[0]), second[0]);
      } else {
        largest[i] = larger(larger(largest[i], load_shared(address)), load_shared(address ^ 16));
      }
    }
  }
  // Four lanes share a pixel.
  static __device__ __forceinline__ float of_pixel(float largest) {
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    return fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
  }

  // The largest |x| of each pixel's window, given that of each pixel of the box.
  __device__ __forceinline__ void find_largest(const Params<T>& params, const float* of_box,
                                               float (&largest)[rows]) const {
#pragma unroll
    for (int i = 0; i < rows; ++i) largest[i] = 0.0f;
#pragma unroll 1
    for (int tap = static_cast<int>(threadIdx.x) % 4; tap < params.stage_taps; tap += 4) {
      unsigned r = tap;
      const unsigned s = params.by_s.divmod(r);
      const float* of_tap = of_box + r * params.dilation_h * params.box_w + s * params.dilation_w;
#pragma unroll
      for (int i = 0; i < rows; ++i) largest[i] = fmaxf(largest[i], of_tap[row_[i]]);
    }
#pragma unroll
    for (int i = 0; i < rows; ++i) largest[i] = of_pixel(largest[i]);
  }

 private:
  __device__ __forceinline__ std::uint32_t address_of(std::uint32_t stage, int shift, int i) const {
    const unsigned row = row_[i] + shift;
    return stage + row * input_row_bytes + ((threadIdx.x % 4 * 2 ^ (row & 7)) << 4);
  }

  static __device__ __forceinline__ void place_scaled(Operand<S>& operand, int i, uint4 first, uint4 second,
                                                      float scale) {
    if constexpr (S::split) {
      place(operand.high[0], operand.low[0], i, split_piece(first, scale));
      place(operand.high[1], operand.low[1], i, split_piece(second, scale));
    } else {
      const uint4 a = split_piece(first, scale), b = split_piece(second, scale);
      place(operand.high[0], operand.high[1], i, {a.x, a.y, b.x, b.y});
    }
  }

  // Registers of a product: row l/4, row l/4 + 8, then both at k + 8.
  static __device__ __forceinline__ void place(std::uint32_t (&first)[4], std::uint32_t (&second)[4], int i,
                                               uint4 piece) {
    first[i] = piece.x, first[2 + i] = piece.y, second[i] = piece.z, second[2 + i] = piece.w;
  }

  static __device__ __forceinline__ unsigned pixel_of(int i) {
    if constexpr (!matrices) return pixel_of_lane<S>(i);
    return threadIdx.x / 128 * 64 * S::row_blocks + i * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 16;
  }

  unsigned row_[addresses];
};

}  // namespace fastconv::algos::implicit_gemm::persistent
