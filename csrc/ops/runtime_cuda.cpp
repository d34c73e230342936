// The CUDA runtime: torch's current stream, torch's cuBLAS. Both are reached so that the library still loads where
// they are missing (a CPU-only torch): weak symbols for torch's, dlopen of what is already loaded for cuBLAS.
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <new>
#include <string>

#include "core/error.h"
#include "core/text.h"
#include "hopper/wait_report.h"
#include "ops/runtime.h"
#include "ops/stable.h"

extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);
#pragma weak aoti_torch_get_current_cuda_stream
#pragma weak torch_get_current_cuda_blas_handle

namespace fastconv::ops {
namespace {

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw DeviceError(std::string(what) + ": " + cudaGetErrorString(status));
}

// The part of cuBLAS's ABI that is used (cublas_api.h), declared here because its headers need not be installed.
struct Cublas {
  using GemmStridedBatchedEx = int (*)(void* handle, int op_a, int op_b, std::int64_t m, std::int64_t n, std::int64_t k,
                                       const void* alpha, const void* a, int a_type, std::int64_t lda,
                                       long long stride_a, const void* b, int b_type, std::int64_t ldb,
                                       long long stride_b, const void* beta, void* c, int c_type, std::int64_t ldc,
                                       long long stride_c, std::int64_t batch, int compute_type, int algorithm);
  using GetMathMode = int (*)(void* handle, int* mode);
  using SetMathMode = int (*)(void* handle, int mode);
  static constexpr int no_transpose = 0, transpose = 1;
  // CUBLAS_DEFAULT_MATH (no TF32) | CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION: split sums stay in FP32, so that
  // FP16 and BF16 results are rounded once.
  static constexpr int default_math = 0 | 16;
  static constexpr int compute_32f = 68, default_algorithm = -1;

  GemmStridedBatchedEx gemm_strided_batched = nullptr;
  GetMathMode get_math_mode = nullptr;
  SetMathMode set_math_mode = nullptr;

  static const Cublas& get() {
    static const Cublas cublas = load();
    return cublas;
  }

 private:
  static Cublas load() {
    void* library = nullptr;
    for (const char* name : {"libcublas.so.13", "libcublas.so.12", "libcublas.so.14"}) {
      library = dlopen(name, RTLD_NOW | RTLD_NOLOAD);  // the one that torch has loaded, never another
      if (library != nullptr) break;
    }
    if (library == nullptr) throw DeviceError("cuBLAS is not loaded: torch was built without it");
    Cublas cublas;
    cublas.gemm_strided_batched =
        reinterpret_cast<GemmStridedBatchedEx>(dlsym(library, "cublasGemmStridedBatchedEx_64"));
    cublas.get_math_mode = reinterpret_cast<GetMathMode>(dlsym(library, "cublasGetMathMode"));
    cublas.set_math_mode = reinterpret_cast<SetMathMode>(dlsym(library, "cublasSetMathMode"));
    if (cublas.gemm_strided_batched == nullptr || cublas.get_math_mode == nullptr || cublas.set_math_mode == nullptr) {
      throw DeviceError(
          "cuBLAS lacks cublasGemmStridedBatchedEx_64 or cublas{Get,Set}MathMode: 12.0 or later expected");
    }
    return cublas;
  }
};

int cublas_type(DType dtype) {
  switch (dtype) {
    case DType::f16: return 2;    // CUDA_R_16F
    case DType::bf16: return 14;  // CUDA_R_16BF
    default: return 0;            // CUDA_R_32F
  }
}

void check_cublas(int status, const char* what) {
  if (status != 0) throw DeviceError(text_of(what, ": cuBLAS status ", status));
}

// Pinned, so that it outlives the kernel and its context. One per process: only the first expired wait matters.
WaitReport* waits() {
  static WaitReport* const report = [] {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;  // an allocation must not break a capture under way
    check(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
    void* memory = nullptr;
    const cudaError_t status = cudaHostAlloc(&memory, sizeof(WaitReport), cudaHostAllocPortable | cudaHostAllocMapped);
    check(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
    check(status, "cudaHostAlloc");
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
    check(has_context, "cudaSetDevice");
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device.index, &stream_));
  }

  const DeviceInfo& device() const override { return device_; }
  void* stream() const override { return stream_; }
  bool is_capturing() const override {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream_), &status), "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
  }
  WaitReport* wait_report() const override { return waits(); }

  void parallel_for(std::int64_t, std::int64_t, std::int64_t, RangeFunction) const override {
    throw DeviceError("parallel_for on a CUDA device");  // host loops belong to the CPU functions
  }

  // Row-major D = A B^T is column-major D^T = B A^T: the operands change places.
  void gemm(const GemmArgs& args) override {
    const Cublas& cublas = Cublas::get();
    void* handle = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(torch_get_current_cuda_blas_handle(&handle));
    const float alpha = 1.0f, beta = 0.0f;
    // torch sets the handle's math mode from allow_tf32; class `ieee` must not depend on that switch.
    int math_mode = Cublas::default_math;
    check_cublas(cublas.get_math_mode(handle, &math_mode), "cublasGetMathMode");
    check_cublas(cublas.set_math_mode(handle, Cublas::default_math), "cublasSetMathMode");
    const int status = cublas.gemm_strided_batched(
        handle, args.b_is_kn ? Cublas::no_transpose : Cublas::transpose, Cublas::no_transpose, args.n, args.m, args.k,
        &alpha, args.b, cublas_type(args.in), args.ldb, args.stride_b, args.a, cublas_type(args.in), args.lda,
        args.stride_a, &beta, args.d, cublas_type(args.out), args.ldd, args.stride_d, args.batch, Cublas::compute_32f,
        Cublas::default_algorithm);
    check_cublas(cublas.set_math_mode(handle, math_mode), "cublasSetMathMode");
    check_cublas(status, "cublasGemmStridedBatchedEx");
  }

 private:
  const DeviceInfo& device_;
  void* stream_ = nullptr;
};

}  // namespace

DeviceInfo query_cuda_device(int index) {
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties");
  int memory_clock_khz = 0, clock_khz = 0;
  check(cudaDeviceGetAttribute(&memory_clock_khz, cudaDevAttrMemoryClockRate, index), "cudaDevAttrMemoryClockRate");
  check(cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, index), "cudaDevAttrClockRate");
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
