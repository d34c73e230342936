// The CUDA runtime: torch's current stream, and its cuBLAS (cublas_cuda.cpp). The stream is reached by a weak symbol,
// so that the library still loads where it is missing (a CPU-only torch).
#include <algorithm>
#include <cstdlib>
#include <new>
#include <string>

#include "core/error.h"
#include "core/text.h"
#include "device/cuda_check.h"
#include "hopper/wait_report.h"
#include "ops/cublas_cuda.h"
#include "ops/relaxed_capture.h"
#include "ops/runtime.h"
#include "ops/stable.h"

extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);
#pragma weak aoti_torch_get_current_cuda_stream

namespace fastconv::ops {
namespace {

// Pinned, so that it outlives the kernel and its context. One per process: only the first expired wait matters.
WaitReport* waits() {
  static WaitReport* const report = [] {
    const RelaxedCapture relaxed;
    void* memory = nullptr;
    check_cuda(cudaHostAlloc(&memory, sizeof(WaitReport), cudaHostAllocPortable | cudaHostAllocMapped),
               "cudaHostAlloc");
    return new (memory) WaitReport{};
  }();
  return report;
}

std::string describe(const WaitReport& report) {
  return text_of("fastconv: a wait has expired in kernel ", wait_kernel_names[report.kernel], ", role ",
                 wait_role_names[report.role], ", block ", report.block, "; the CUDA context is lost");
}

// A thread of autograd's may begin with a call of ours: it has no context yet, and the driver's functions make none.
cudaError_t make_context() {
  int device = 0;  // the current one, which stays that
  const cudaError_t error = cudaGetDevice(&device);
  return error == cudaSuccess ? cudaSetDevice(device) : error;
}

class CudaRuntime final : public Runtime {
 public:
  explicit CudaRuntime(const DeviceInfo& device) : device_(device) {
    const WaitReport& report = *waits();
    if (report.expired != 0) throw DeviceError(describe(report));
    thread_local const cudaError_t has_context = make_context();
    check_cuda(has_context, "cudaSetDevice");
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device.index, &stream_));
  }

  const DeviceInfo& device() const override { return device_; }
  void* stream() const override { return stream_; }
  bool is_capturing() const override {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check_cuda(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream_), &status), "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
  }
  WaitReport* wait_report() const override { return waits(); }

  void parallel_for(std::int64_t, std::int64_t, std::int64_t, RangeFunction) const override {
    throw DeviceError("parallel_for on a CUDA device");  // host loops belong to the CPU functions
  }

  void gemm(const GemmArgs& args) override { cublas_gemm(args); }
  EndLeft gemm_with_end(const GemmArgs& args, const GemmEnd& end) override {
    return cublas_gemm_with_end(args, end, device_.index, static_cast<cudaStream_t>(stream_));
  }

 private:
  const DeviceInfo& device_;
  void* stream_ = nullptr;
};

}  // namespace

DeviceInfo query_cuda_device(int index) {
  cudaDeviceProp properties{};
  check_cuda(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties");
  int memory_clock_khz = 0, clock_khz = 0;
  check_cuda(cudaDeviceGetAttribute(&memory_clock_khz, cudaDevAttrMemoryClockRate, index),
             "cudaDevAttrMemoryClockRate");
  check_cuda(cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, index), "cudaDevAttrClockRate");
  // For tests: lets a newer GPU run the kernels of older ones.
  const char* limit = std::getenv("FASTCONV_MAX_COMPUTE_CAPABILITY");
  const int cap = limit != nullptr ? std::atoi(limit) : 0;
  DeviceInfo device;
  device.type = DeviceType::cuda;
  device.index = index;
  set_name(device, properties.name);
  device.compute_capability = 10 * properties.major + properties.minor;
  limit_to_build(device, FASTCONV_CUDA_ARCHITECTURES);
  if (cap > 0) device.compute_capability = std::min(device.compute_capability, cap);
  device.processors = properties.multiProcessorCount;
  device.shared_memory_bytes = properties.sharedMemPerBlockOptin;
  device.l2_bytes = static_cast<std::size_t>(properties.l2CacheSize);
  set_rates(device, 1e3 * clock_khz, 2e3 * memory_clock_khz * properties.memoryBusWidth / 8);
  return device;
}

std::unique_ptr<Runtime> make_cuda_runtime(const DeviceInfo& device) { return std::make_unique<CudaRuntime>(device); }

}  // namespace fastconv::ops
