// The single-tile kernel's entry points, a .cu file for each class.
#pragma once

#include "algos/implicit_gemm/single_tile/plan.h"
#include "core/kernels.h"

namespace fastconv::algos::implicit_gemm::single_tile {

void run_fp32(const ConvArgs& args, const Plan& plan, Runtime& runtime);
void run_tf32(const ConvArgs& args, const Plan& plan, Runtime& runtime);
void run_fp16(const ConvArgs& args, const Plan& plan, Runtime& runtime);
void run_bf16(const ConvArgs& args, const Plan& plan, Runtime& runtime);

inline void run(const ConvArgs& args, const Plan& plan, Runtime& runtime) {
  switch (args.problem.accuracy) {
    case AccuracyClass::tf32: return run_tf32(args, plan, runtime);
    case AccuracyClass::fp16: return run_fp16(args, plan, runtime);
    case AccuracyClass::bf16: return run_bf16(args, plan, runtime);
    default: return run_fp32(args, plan, runtime);
  }
}

}  // namespace fastconv::algos::implicit_gemm::single_tile
