// The Hopper kernel's entry points, one pair for each class.
#pragma once

#include "algos/implicit_gemm/persistent/plan.h"
#include "core/kernels.h"

namespace fastconv::algos::implicit_gemm::persistent {

// x: args.x in NHWC, 16-byte aligned. workspace: plan.workspace_bytes().
#define FASTCONV_DECLARE(name)                                                                               \
  void run_##name(const ConvArgs& args, const Plan& plan, const void* x, void* workspace, Runtime& runtime); \
  void pack_##name(const PackArgs& args, Runtime& runtime);
FASTCONV_DECLARE(split)
FASTCONV_DECLARE(single)
FASTCONV_DECLARE(fp16)
FASTCONV_DECLARE(bf16)
#undef FASTCONV_DECLARE

}  // namespace fastconv::algos::implicit_gemm::persistent
