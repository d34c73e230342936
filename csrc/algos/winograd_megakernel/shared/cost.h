// What the planning of both CUDA kernels shares.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/integers.h"

namespace fastconv::algos::winograd_megakernel {

constexpr int ticket_stride = 32;  // ints: a ticket has a cache line of its own

}  // namespace fastconv::algos::winograd_megakernel
