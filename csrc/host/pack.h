// Packing on the CPU: a filter is packed only if it differs from its snapshot (PackArgs::snapshot), bit for bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/kernels.h"

namespace fastconv {

// Calls pack(k, filter) for the filters [C/G, R, S] that have changed, grain of them at a time, and renews their
// snapshots.
template <typename T, typename Pack>
void pack_changed_filters(const PackArgs& args, Runtime& runtime, std::int64_t grain, const Pack& pack) {
  const ConvProblem& problem = args.problem;
  const std::int64_t size = problem.c_per_group() * problem.r * problem.s;
  const std::size_t bytes = static_cast<std::size_t>(size) * sizeof(T);
  const auto* weight = static_cast<const T*>(args.weight);  // [K, C/G, R, S]
  auto* snapshot = static_cast<T*>(args.snapshot);          // the same, or null
  runtime.parallel_for(0, problem.k, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t k = begin; k < end; ++k) {
      const T* filter = weight + k * size;
      if (snapshot != nullptr && std::memcmp(filter, snapshot + k * size, bytes) == 0) continue;
      pack(k, filter);
      if (snapshot != nullptr) std::memcpy(snapshot + k * size, filter, bytes);
    }
  });
}

}  // namespace fastconv
