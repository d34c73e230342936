#pragma once

#include "core/kernels.h"

namespace fastconv::algos::implicit_gemm::portable {

// x: args.x, or the same in another layout.
void run(const ConvArgs& args, const void* x, Layout layout, Runtime& runtime);
void pack(const PackArgs& args, Runtime& runtime);

}  // namespace fastconv::algos::implicit_gemm::portable
