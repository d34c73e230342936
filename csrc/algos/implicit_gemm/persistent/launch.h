// The persistent kernel's entry points, a .cu file for each class.
#pragma once

#include "algos/implicit_gemm/persistent/plan.h"
#include "core/kernels.h"

namespace fastconv::algos::implicit_gemm::persistent {

#define FASTCONV_DECLARE(name)                                               \
  void run_##name(const ConvArgs& args, const Plan& plan, Runtime& runtime); \
  void pack_##name(const PackArgs& args, Runtime& runtime);
FASTCONV_DECLARE(fp32)
FASTCONV_DECLARE(tf32)
FASTCONV_DECLARE(fp16)
FASTCONV_DECLARE(bf16)
#undef FASTCONV_DECLARE

inline void run(const ConvArgs& args, const Plan& plan, Runtime& runtime) {
  switch (plan.weights.mode) {
    case Mode::split: return run_fp32(args, plan, runtime);
    case Mode::single: return run_tf32(args, plan, runtime);
    case Mode::fp16: return run_fp16(args, plan, runtime);
    case Mode::bf16: return run_bf16(args, plan, runtime);
  }
}

inline void pack(const PackArgs& args, Runtime& runtime) {
  switch (make_weights(args.problem).mode) {
    case Mode::split: return pack_fp32(args, runtime);
    case Mode::single: return pack_tf32(args, runtime);
    case Mode::fp16: return pack_fp16(args, runtime);
    case Mode::bf16: return pack_bf16(args, runtime);
  }
}

}  // namespace fastconv::algos::implicit_gemm::persistent
