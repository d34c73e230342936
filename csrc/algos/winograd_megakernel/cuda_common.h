// What the planning of both CUDA kernels shares.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fastconv::algos::winograd_megakernel {

constexpr int ticket_stride = 32;  // ints: a ticket has a cache line of its own

inline std::size_t align_bytes(std::int64_t bytes) { return static_cast<std::size_t>((bytes + 255) / 256 * 256); }

}  // namespace fastconv::algos::winograd_megakernel
