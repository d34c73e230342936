// A wait inside a kernel that never ends would hang the device. So every wait is bounded; one that times out records
// who waited where, in memory that the host can read afterwards, and stops the kernel.
#pragma once

namespace fastconv {

// In pinned host memory. Written by the first wait that expires; the host turns it into an exception.
struct WaitReport {
  int expired;  // not 0: the rest is valid
  int kernel;   // enum WaitKernel
  int role;     // enum WaitRole
  int block;
};

enum WaitKernel : int {
  kernel_implicit_gemm,
  kernel_winograd_fused,
  kernel_winograd_megakernel,
  kernel_winograd_products,
  kernel_direct_tiled
};
inline constexpr const char* wait_kernel_names[] = {"implicit_gemm", "winograd_fused", "winograd_megakernel",
                                                    "winograd products", "direct_tiled"};
enum WaitRole : int { role_load, role_transform, role_multiply, role_dispatch, role_stream, role_signal };
inline constexpr const char* wait_role_names[] = {"load", "transform", "multiply", "dispatch", "stream", "signal"};

#ifdef __CUDACC__
[[noreturn]] __device__ __noinline__ inline void expire_wait(WaitReport* report, int kernel, int role) {
  if (report != nullptr && atomicCAS_system(&report->expired, 0, 1) == 0) {
    report->kernel = kernel;
    report->role = role;
    report->block = static_cast<int>(blockIdx.x);
    __threadfence_system();
  }
  __trap();
  __builtin_unreachable();
}

struct WaitSite {
  static constexpr int limit = 1 << 21;  // polls: about a second, where a healthy wait takes microseconds
  WaitReport* report;                    // may be null
  int kernel, role;

  __device__ __forceinline__ void expire() const { expire_wait(report, kernel, role); }  // by value: nothing escapes
};
#endif

}  // namespace fastconv
