// Tensors on their way into the L2 cache (PTX ISA, "cp.async.bulk.prefetch.tensor").
#pragma once

#include <cuda.h>

namespace fastconv::hopper {

// A box of a 4-dimensional tensor, where it lies within. A hint: nothing waits for it.
__device__ __forceinline__ void tma_prefetch(const CUtensorMap& map, int x0, int x1, int x2, int x3) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(&map), "r"(x0), "r"(x1),
               "r"(x2), "r"(x3)
               : "memory");
}

}  // namespace fastconv::hopper
