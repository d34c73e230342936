// The splitting warpgroup: float32 stages into halves, in place, once for all taps and multiplying warps.
#pragma once

#include "algos/implicit_gemm/persistent/operand.cuh"

namespace fastconv::algos::implicit_gemm::persistent {

enum class Transform {
  split,    // with one scale for the tile
  measure,  // leave the input as it is, and note the largest value of each pixel
  nothing,
};

// A thread takes whole pixels: 128 bytes, whose swizzle lets the threads of a warp pass without bank conflicts.
template <typename S>
class Transformer {
 public:
  using T = typename S::T;

  __device__ __forceinline__ Transformer(const Params<T>& params, const Shared<S>& shared)
      : params_(params),
        shared_(shared),
        site_{params.report, kernel_implicit_gemm, role_transform},
        thread_(static_cast<int>(threadIdx.x) % 128),
        pixels_(params.box_bytes / input_row_bytes) {}

  // All stages of one work tile.
  __device__ __forceinline__ void run(const WorkTile& work_tile, Transform kind) {
    Control& control = *shared_.control;
    const int largest_pitch = params_.stage_bytes / input_row_bytes;
    const float* before = nullptr;  // the largest values up to the stage before
    int exponent = 0;
    for (int stage = work_tile.first_stage; stage < work_tile.last_stage; ++stage) {
      const std::uint32_t input = shared_.input + slot_.slot * params_.stage_bytes;
      hopper::wait(shared_address(&control.input_full[slot_.slot]), slot_.parity, site_);
      if (kind == Transform::split && stage == work_tile.first_stage) exponent = guess_exponent(input);
      if (kind != Transform::nothing) {
        const float scale = power_of_two(exponent);
        float* largest = shared_.largest + slot_.slot * largest_pitch;
#pragma unroll 1
        for (int pixel = thread_; pixel < pixels_; pixel += 128) {
          const float so_far = before != nullptr ? before[pixel] : 0.0f;
          largest[pixel] =
              kind == Transform::split ? split(input, pixel, scale, so_far) : largest_of(input, pixel, so_far);
        }
        before = largest;
        if (thread_ == 0) control.exponent[slot_.slot] = exponent;
      }
      __syncwarp();
      hopper::arrive_for_warp(control.input_ready[slot_.slot]);
      slot_.advance(params_.input_slots);
    }
  }

 private:
  static __device__ __forceinline__ std::uint32_t piece(std::uint32_t input, int pixel, int index) {
    return input + pixel * input_row_bytes + ((index ^ (pixel & 7)) << 4);
  }
  static __device__ __forceinline__ float split(std::uint32_t input, int pixel, float scale, float largest) {
    const std::uint32_t address = piece(input, pixel, 0);  // piece i is at ^ 16 i
    constexpr int group = 4;                               // pieces read before the first is written
#pragma unroll
    for (int first = 0; first < 8; first += group) {
      uint4 raw[group];
#pragma unroll
      for (int i = 0; i < group; ++i) raw[i] = load_shared(address ^ 16 * (first + i));
#pragma unroll
      for (int i = 0; i < group; i += 2) {
        largest = larger(larger(largest, raw[i]), raw[i + 1]);
        const uint4 a = split_piece(raw[i], scale), b = split_piece(raw[i + 1], scale);
        if constexpr (S::split) {
          store_shared(address ^ 16 * (first + i), a);
          store_shared(address ^ 16 * (first + i + 1), b);
        } else {
          store_shared(address ^ 16 * (first + i), {a.x, a.y, b.x, b.y});
        }
      }
    }
    return largest;
  }
  static __device__ __forceinline__ float largest_of(std::uint32_t input, int pixel, float largest) {
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = larger(largest, load_shared(piece(input, pixel, i)));
    return largest;
  }

  // Of the tile's scale, from its first stage. Zeros so far: the scale for values around 1.
  __device__ __forceinline__ int guess_exponent(std::uint32_t input) {
    float largest = 0.0f;
#pragma unroll 1
    for (int pixel = thread_; pixel < pixels_; pixel += 128) largest = largest_of(input, pixel, largest);
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, lanes));
    float (&of_warps)[4] = shared_.control->largest;
    if (thread_ % 32 == 0) of_warps[thread_ / 32] = largest;
    synchronise();
    largest = fmaxf(fmaxf(of_warps[0], of_warps[1]), fmaxf(of_warps[2], of_warps[3]));
    synchronise();  // before the next tile's values
    return largest > 0.0f ? scale_exponent(largest, guessed_target) : guessed_target;
  }
  static __device__ __forceinline__ void synchronise() { asm volatile("bar.sync 2, 128;" ::: "memory"); }

  const Params<T>& params_;
  const Shared<S>& shared_;
  WaitSite site_;
  hopper::RingPosition slot_;
  int thread_, pixels_;
};

}  // namespace fastconv::algos::implicit_gemm::persistent
