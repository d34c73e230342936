// Packing on the CPU: filters are packed only if they differ from their snapshot (PackArgs::snapshot), bit for bit.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/integers.h"
#include "core/kernels.h"

namespace fastconv {

// Calls pack(k, filters, count) for each block of `block` filters [C/G, R, S], the last one of fewer, in which one has
// changed, grain of them at a time, and renews their snapshots.
template <typename T, typename Pack>
void pack_changed_blocks(const PackArgs& args, Runtime& runtime, std::int64_t block, std::int64_t grain,
                         const Pack& pack) {
  const ConvProblem& problem = args.problem;
  const std::int64_t size = problem.c_per_group() * problem.r * problem.s;
  const auto* weight = static_cast<const T*>(args.weight);  // [K, C/G, R, S]
  auto* snapshot = static_cast<T*>(args.snapshot);          // the same, or null
  runtime.parallel_for(0, ceil_div(problem.k, block), grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t k = begin * block; k < std::min(end * block, problem.k); k += block) {
      const std::int64_t count = std::min(block, problem.k - k);
      const T* filters = weight + k * size;
      const std::size_t bytes = static_cast<std::size_t>(count * size) * sizeof(T);
      if (snapshot != nullptr && std::memcmp(filters, snapshot + k * size, bytes) == 0) continue;
      pack(k, filters, count);
      if (snapshot != nullptr) std::memcpy(snapshot + k * size, filters, bytes);
    }
  });
}

// The same filter by filter: pack(k, filter).
template <typename T, typename Pack>
void pack_changed_filters(const PackArgs& args, Runtime& runtime, std::int64_t grain, const Pack& pack) {
  pack_changed_blocks<T>(args, runtime, 1, grain,
                         [&](std::int64_t k, const T* filter, std::int64_t) { pack(k, filter); });
}

}  // namespace fastconv
