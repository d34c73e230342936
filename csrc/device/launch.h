// Launches of kernels with attributes: clusters, more than 48 KB of shared memory, an early start. Host code.
#pragma once

#include <cuda_runtime.h>

#include <utility>

#include "core/kernels.h"
#include "device/cuda_check.h"

namespace fastconv {

inline cudaStream_t stream_of(const Runtime& runtime) { return static_cast<cudaStream_t>(runtime.stream()); }

struct LaunchPlan {
  dim3 grid, block;
  std::size_t shared_bytes = 0;  // beyond 48 KB they have to be allowed (device/shared_memory.h)
  std::int64_t cluster = 1;      // blocks
  // May begin before the kernel before has ended (programmatic dependent launch). It must call wait_for_predecessor()
  // before it touches anything that an earlier kernel of the series touches.
  bool early = false;

  template <typename... Parameters, typename... Arguments>
  void launch(void (*kernel)(Parameters...), cudaStream_t stream, const char* name, Arguments&&... arguments) const {
    cudaLaunchAttribute attributes[2]{};
    unsigned count = 0;
    if (cluster > 1) {
      attributes[count].id = cudaLaunchAttributeClusterDimension;
      attributes[count++].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    }
    if (early) {
      attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attributes[count++].val.programmaticStreamSerializationAllowed = 1;
    }
    cudaLaunchConfig_t config{};
    config.gridDim = grid, config.blockDim = block, config.dynamicSmemBytes = shared_bytes, config.stream = stream;
    config.attrs = attributes, config.numAttrs = count;
    check_cuda(cudaLaunchKernelEx(&config, kernel, Parameters(std::forward<Arguments>(arguments))...), name);
  }
};

}  // namespace fastconv
