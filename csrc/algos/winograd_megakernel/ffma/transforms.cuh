// ITrans and OTrans, by the same threads that multiply: a lane has a tile and two neighbouring channels or filters.
#pragma once

#include <type_traits>

#include "algos/winograd_megakernel/ffma/params.cuh"
#include "winograd/matrices.h"

namespace fastconv::algos::winograd_megakernel::ffma {

constexpr bool is_nhwc(Access access) { return access == Access::nhwc_pairs || access == Access::nhwc; }

struct TilePosition {
  int n, p, q;  // of the output pixel
};
__device__ __forceinline__ TilePosition tile_position(const Params& params, int tile) {
  unsigned rest = static_cast<unsigned>(tile);
  const int q = static_cast<int>(params.by_tiles_q.divmod(rest)) * 4,
            p = static_cast<int>(params.by_tiles_p.divmod(rest)) * 4;
  return {static_cast<int>(rest), p, q};
}

__device__ __forceinline__ void store(float* target, const Values& values) {
  target[0] = values.e[0], target[4 * 8] = values.e[1];  // the next channel is four places further
}
__device__ __forceinline__ void store(float* target, float value) { *target = value; }

// A warp takes 8 tiles x 8 channels at a time: it reads whole sectors of x in NHWC and writes whole lines of V. A lane
// has two channels of a tile, at once or one after the other.
template <Access access>
__device__ __forceinline__ void transform_input(const Params& params, const WorkTile& work_tile) {
  constexpr bool pairs = access == Access::nhwc_pairs;
  using Value = std::conditional_t<pairs, Values, float>;
  const int warp = team_warp(), lane = threadIdx.x % 32;
  const int columns = (work_tile.count + stage_channels - 1) / stage_channels * 2,
            pieces = (work_tile.tiles + 7) / 8 * columns;
#pragma unroll 1
  for (int piece = warp; piece < pieces; piece += team_warps) {
    const int row = piece / columns, in_work_tile = row * 8 + lane / 4, in_group = work_tile.tile + in_work_tile;
    const int channel = work_tile.channel + (piece - row * columns) * 8 + lane % 4 * 2;
    if (in_work_tile >= work_tile.tiles) continue;
    const TilePosition position = tile_position(params, work_tile.group * tile_m + in_group);
    const int h0 = position.p - params.pad_h, w0 = position.q - params.pad_w, octet = in_group / 8;
    const float* corner =
        params.x + position.n * params.x_image + channel * params.x_channel + h0 * params.x_row + w0 * params.x_pixel;
    float* v = params.v + work_tile.place * params.v_place() + std::int64_t{channel / stage_channels} * (36 * stage_v) +
               octet * (stage_channels * 8) + (place_of(channel % stage_channels) ^ (octet & 1)) * 8 + in_group % 8;
#pragma unroll 1
    for (int e = 0; e < (pairs ? 1 : 2); ++e, corner += params.x_channel, v += 4 * 8) {
      const float* source = corner;
      Value d[6][6];
#pragma unroll
      for (int i = 0; i < 6; ++i, source += params.x_row) {
        const bool row_inside =
            channel + e < params.c && static_cast<unsigned>(h0 + i) < static_cast<unsigned>(params.h);
#pragma unroll
        for (int j = 0; j < 6; ++j) {
          const bool inside = row_inside && static_cast<unsigned>(w0 + j) < static_cast<unsigned>(params.w);
          const float* const pixel = source + (is_nhwc(access) ? j * params.x_step : j);
          d[i][j] = Value{};
          if constexpr (pairs) {
            if (inside) {
              const float2 pair = __ldg(reinterpret_cast<const float2*>(pixel));
              d[i][j] = {pair.x, pair.y};
            }
          } else {
            if (inside) d[i][j] = __ldg(pixel);
          }
        }
      }
#pragma unroll
      for (int j = 0; j < 6; ++j) {
        const Value column[6] = {d[0][j], d[1][j], d[2][j], d[3][j], d[4][j], d[5][j]};
        Value result[6];
        winograd::Transform<4>::input(column, result);
#pragma unroll
        for (int i = 0; i < 6; ++i) d[i][j] = result[i];
      }
#pragma unroll
      for (int i = 0; i < 6; ++i) {
        Value result[6];
        winograd::Transform<4>::input(d[i], result);
#pragma unroll
        for (int j = 0; j < 6; ++j) store(v + (i * 6 + j) * stage_v, result[j]);
      }
    }
  }
}

// NHWC: a warp takes a tile and 64 filters; NCHW: 8 tiles and 8 filters.
template <Access access, bool plain>
__device__ __forceinline__ void transform_output(const Params& params, const WorkTile& work_tile) {
  constexpr int piece_tiles = is_nhwc(access) ? 1 : 8, tile_lanes = 32 / piece_tiles, piece_filters = 2 * tile_lanes;
  const int warp = team_warp(), lane = threadIdx.x % 32;
  const int columns = (work_tile.count + piece_filters - 1) / piece_filters;
  const int pieces = (work_tile.tiles + piece_tiles - 1) / piece_tiles * columns;
  const ActivationFunction& activate = params.epilogue.activate;
  const bool identity = activate.negative_slope == 1.0f && activate.cap == INFINITY;
#pragma unroll 1
  for (int piece = warp; piece < pieces; piece += team_warps) {
    const int row = piece / columns, in_work_tile = row * piece_tiles + lane / tile_lanes;
    const int k = work_tile.channel + (piece - row * columns) * piece_filters + lane % tile_lanes * 2;
    const bool second = k + 1 < params.k;
    if (in_work_tile >= work_tile.tiles || k >= params.k) continue;
    const int in_group = work_tile.tile + in_work_tile;
    const float* const m = params.products + work_tile.place * params.m_place() +
                           (std::int64_t{k / block_filters * 36} * tile_m + in_group) * block_filters +
                           k % block_filters;
    Values d[6][6];
#pragma unroll
    for (int i = 0; i < 6; ++i) {
#pragma unroll
      for (int j = 0; j < 6; ++j) {
        // Past the L1 cache: others have written it in this kernel.
        const float2 pair = __ldcg(reinterpret_cast<const float2*>(m + (i * 6 + j) * tile_m * block_filters));
        d[i][j] = {pair.x, pair.y};
      }
    }
    const float bias[2] = {params.epilogue.bias_of(k), second ? params.epilogue.bias_of(k + 1) : 0.0f};
    const TilePosition position = tile_position(params, work_tile.group * tile_m + in_group);
#pragma unroll
    for (int j = 0; j < 6; ++j) {
      const Values column[6] = {d[0][j], d[1][j], d[2][j], d[3][j], d[4][j], d[5][j]};
      Values result[4];
      winograd::Transform<4>::output(column, result);
#pragma unroll
      for (int i = 0; i < 4; ++i) d[i][j] = result[i];
    }
    std::int64_t index =
        position.n * params.y_image + k * params.y_filter + position.p * params.y_row + position.q * params.y_pixel;
    const int rows = params.p - position.p, width = params.q - position.q;
#pragma unroll
    for (int i = 0; i < 4; ++i, index += params.y_row) {
      if (i >= rows) break;
      Values result[4];
      winograd::Transform<4>::output(d[i], result);
      const auto offset = [&](int j) { return is_nhwc(access) ? j * params.y_step : j; };
      const auto add_residual = [&] {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (j < width) {
            const float* const residual = params.epilogue.residual + index + offset(j);
            result[j].e[0] += residual[0];
            if (second) result[j].e[1] += residual[params.y_filter];
          }
        }
      };
#pragma unroll
      for (int j = 0; j < 4; ++j) result[j].e[0] += bias[0], result[j].e[1] += bias[1];
      const auto apply_activation = [&] { apply<plain>(activate, identity, result); };
      if constexpr (plain) {
        apply_activation();
      } else {
        params.epilogue.in_order(add_residual, apply_activation);
      }
      float* const y = params.y + index;
      if constexpr (access == Access::nchw_quads) {
        __stcs(reinterpret_cast<float4*>(y),
               make_float4(result[0].e[0], result[1].e[0], result[2].e[0], result[3].e[0]));
        if (second) {
          __stcs(reinterpret_cast<float4*>(y + params.y_filter),
                 make_float4(result[0].e[1], result[1].e[1], result[2].e[1], result[3].e[1]));
        }
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (j >= width) break;
          if constexpr (access == Access::nhwc_pairs) {
            __stcs(reinterpret_cast<float2*>(y + offset(j)), make_float2(result[j].e[0], result[j].e[1]));
          } else {
            y[offset(j)] = result[j].e[0];
            if (second) y[offset(j) + params.y_filter] = result[j].e[1];
          }
        }
      }
    }
  }
}

}  // namespace fastconv::algos::winograd_megakernel::ffma
