// The lean Hopper kernel's entry points, one for each class.
#pragma once

#include "algos/implicit_gemm/single_tile/plan.h"
#include "core/kernels.h"

namespace fastconv::algos::implicit_gemm::single_tile {

// x: args.x, NHWC, 16-byte aligned. weight: packed [filter tile][step][packed rows][128 bytes]. exponents: class fp32:
// of the filters' scales.
#define FASTCONV_DECLARE(name)                                                                                     \
  void run_##name(const ConvArgs& args, const Plan& plan, const void* x, const void* weight, const int* exponents, \
                  Runtime& runtime);
FASTCONV_DECLARE(fp32)
FASTCONV_DECLARE(fp16)
FASTCONV_DECLARE(bf16)
FASTCONV_DECLARE(tf32)
#undef FASTCONV_DECLARE

}  // namespace fastconv::algos::implicit_gemm::single_tile
