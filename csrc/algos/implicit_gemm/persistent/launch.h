// The persistent kernel's entry points, two or three .cu files for each class.
#pragma once

#include "algos/implicit_gemm/persistent/plan.h"
#include "core/kernels.h"

namespace fastconv::algos::implicit_gemm::persistent {

#define FASTCONV_DECLARE(name)                                                      \
  void run_##name(const ConvArgs& args, const Plan& plan, Runtime& runtime);        \
  void run_affine_##name(const ConvArgs& args, const Plan& plan, Runtime& runtime); \
  void run_gated_##name(const ConvArgs& args, const Plan& plan, Runtime& runtime);  \
  void pack_##name(const PackArgs& args, Runtime& runtime);
FASTCONV_DECLARE(fp32)
FASTCONV_DECLARE(tf32)
FASTCONV_DECLARE(fp16)
FASTCONV_DECLARE(bf16)
#undef FASTCONV_DECLARE

inline void run(const ConvArgs& args, const Plan& plan, Runtime& runtime) {
  const bool affine = plan.affine(), gated = is_gated(args.problem.activation);
  const auto run_class = [&] {
    switch (plan.weights.mode) {
      case Mode::split: return affine ? run_affine_fp32 : run_fp32;
      case Mode::single: return affine ? run_affine_tf32 : gated ? run_gated_tf32 : run_tf32;
      case Mode::fp16: return affine ? run_affine_fp16 : gated ? run_gated_fp16 : run_fp16;
      default: return affine ? run_affine_bf16 : gated ? run_gated_bf16 : run_bf16;
    }
  }();
  run_class(args, plan, runtime);
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
