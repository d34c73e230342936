// cuBLAS's products, on torch's handle: GemmArgs in CUDA.
#pragma once

#include <cuda_runtime_api.h>

#include "core/gemm.h"

namespace fastconv::ops {

// On the handle's stream, torch's current one.
void cublas_gemm(const GemmArgs& args);
// Runtime::gemm_with_end.
EndLeft cublas_gemm_with_end(const GemmArgs& args, const GemmEnd& end, int device, cudaStream_t stream);

}  // namespace fastconv::ops
