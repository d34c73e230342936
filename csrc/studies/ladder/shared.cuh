// What the rungs share: sizes, pointers with and without __restrict__, filters in constant memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <type_traits>

#include "core/error.h"
#include "core/integers.h"
#include "core/problem.h"
#include "device/cuda_check.h"
#include "device/indexing.h"
#include "device/launch.h"
#include "device/numeric.h"
#include "studies/ladder/ladder.h"

namespace fastconv::studies::ladder {

struct Sizes {
  int n, c, h, w, k, r, p, q;
  int stride, pad;
  int y_channels;  // of y, of which this launch computes k

  __host__ __device__ int depth() const { return c * r * r; }
};

inline Sizes sizes_of(const ConvProblem& problem) {
  return {as_int(problem.n),        as_int(problem.c),     as_int(problem.h),   as_int(problem.w),
          as_int(problem.k),        as_int(problem.r),     as_int(problem.p()), as_int(problem.q()),
          as_int(problem.stride_h), as_int(problem.pad_h), as_int(problem.k)};
}

template <typename T, bool Restricted>
struct PointerTo {
  using Type = T*;
};
template <typename T>
struct PointerTo<T, true> {
  using Type = T* __restrict__;
};
template <typename T, bool Restricted>
using Pointer = typename PointerTo<T, Restricted>::Type;

// The flags of a kernel. Size 0: known at run time only.
template <bool Restricted_, int Size_, bool ConstantFilters_>
struct Flags {
  static constexpr bool restricted = Restricted_, constant_filters = ConstantFilters_;
  static constexpr int size = Size_;
};

constexpr std::size_t constant_bytes = 64 << 10;
static __constant__ __align__(16) unsigned char constant_memory[constant_bytes];

// The filters that a kernel reads.
template <typename T, typename Kernel>
__device__ __forceinline__ const T* filters_of(const T* weight) {
  if constexpr (Kernel::constant_filters) {
    return reinterpret_cast<const T*>(constant_memory);
  } else {
    return weight;
  }
}

// launch(sizes, weight, y) for all filters at once, or slice by slice of constant memory.
template <typename T, typename Launch>
void in_slices(bool constant_filters, const Sizes& sizes, const T* weight, T* y, cudaStream_t stream, Launch&& launch) {
  if (!constant_filters) return launch(sizes, weight, y);
  const std::size_t filter = static_cast<std::size_t>(sizes.depth()), bytes = filter * sizeof(T);
  const int most = static_cast<int>(constant_bytes / bytes);
  if (most == 0) throw Unsupported("one filter has " + std::to_string(bytes) + " bytes; expected 64 KiB");
  for (int k0 = 0; k0 < sizes.k; k0 += most) {
    Sizes slice = sizes;
    slice.k = std::min(most, sizes.k - k0);
    const T* source = weight + k0 * filter;
    check_cuda(cudaMemcpyToSymbolAsync(constant_memory, source, slice.k * bytes, 0, cudaMemcpyDeviceToDevice, stream),
               "cudaMemcpyToSymbolAsync");
    launch(slice, source, y + static_cast<std::int64_t>(k0) * sizes.p * sizes.q);
  }
}

// body(Flags) of a rung, if there is a kernel of these flags.
template <typename Body>
void with_flags(const Rung& rung, int size, Body&& body) {
  const auto with_size = [&](auto restricted, auto constant_filters) {
    constexpr bool is_restricted = decltype(restricted)::value, is_constant = decltype(constant_filters)::value;
    if (rung.constant_size) {
      switch (size) {
        case 3: return body(Flags<is_restricted, 3, is_constant>{});
        case 5: return body(Flags<is_restricted, 5, is_constant>{});
        case 7: return body(Flags<is_restricted, 7, is_constant>{});
      }
      throw Unsupported("size is " + std::to_string(size) + "; expected 3, 5 or 7 of a template constant");
    }
    if constexpr (!is_constant) return body(Flags<is_restricted, 0, false>{});
    throw Unsupported("constant_filters without constant_size; expected both");
  };
  if (rung.constant_filters && !rung.restricted)
    throw Unsupported("constant_filters without restricted; expected both");
  if (rung.constant_filters) return with_size(std::true_type{}, std::true_type{});
  if (rung.restricted) return with_size(std::true_type{}, std::false_type{});
  return with_size(std::false_type{}, std::false_type{});
}

constexpr int max_blocks = 65535;  // of a grid in y and z; images beyond are the blocks' second ones

void run_direct(const Sizes& sizes, const Rung& rung, const float* x, const float* weight, float* y,
                cudaStream_t stream);
template <typename T>
void run_product(const Sizes& sizes, const Rung& rung, const T* x, const T* weight, T* y, T* workspace,
                 std::size_t workspace_bytes, cudaStream_t stream);

}  // namespace fastconv::studies::ladder
