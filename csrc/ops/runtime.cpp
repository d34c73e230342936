#include "ops/runtime.h"

#include <deque>
#include <fstream>
#include <mutex>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/gemm.h"
#include "ops/stable.h"

namespace fastconv::ops {
namespace {

class CpuRuntime final : public Runtime {
 public:
  explicit CpuRuntime(const DeviceInfo& device) : device_(device) {}

  const DeviceInfo& device() const override { return device_; }
  void* stream() const override { return nullptr; }

  void parallel_for(std::int64_t begin, std::int64_t end, std::int64_t grain, RangeFunction body) const override {
    torch::stable::parallel_for(begin, end, grain, body);
  }

  void gemm(const GemmArgs& args) override {
    const torch::stable::Device cpu(torch::headeronly::DeviceType::CPU);
    const auto dtype = ScalarType::Float;
    const Tensor a = args.a_is_km
                         ? borrow(args.a, {args.batch, args.m, args.k}, {args.stride_a, 1, args.lda}, cpu, dtype)
                         : borrow(args.a, {args.batch, args.m, args.k}, {args.stride_a, args.lda, 1}, cpu, dtype);
    const Tensor b = args.b_is_kn
                         ? borrow(args.b, {args.batch, args.k, args.n}, {args.stride_b, args.ldb, 1}, cpu, dtype)
                         : borrow(args.b, {args.batch, args.k, args.n}, {args.stride_b, 1, args.ldb}, cpu, dtype);
    const Tensor d = borrow(args.d, {args.batch, args.m, args.n}, {args.stride_d, args.ldd, 1}, cpu, dtype);
    call_dispatcher("aten::bmm", "out", a, b, d);
  }
  EndLeft gemm_with_end(const GemmArgs&, const GemmEnd&) override {
    throw DeviceError("gemm_with_end on a CPU");  // whose passes over what is in its caches cost little
  }

 private:
  const DeviceInfo& device_;
};

// "AMD EPYC 7B13", or "cpu" where Linux does not say: choices measured on one CPU are not taken for another's.
std::string cpu_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    const std::size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "cpu";
}

}  // namespace

const DeviceInfo& query_device(DeviceType type, int index) {
  const int threads = type == DeviceType::cpu ? static_cast<int>(torch::stable::get_num_threads()) : 0;
  const auto is_it = [&](const DeviceInfo& device) {
    return device.type == type && (type == DeviceType::cpu ? device.processors == threads : device.index == index);
  };
  thread_local std::vector<const DeviceInfo*> met;  // by this thread: every call comes here, and takes no lock
  for (const DeviceInfo* device : met) {
    if (is_it(*device)) return *device;
  }
  static std::mutex mutex;
  static std::deque<DeviceInfo> known;  // a deque keeps references valid
  const std::lock_guard lock(mutex);
  for (const DeviceInfo& device : known) {
    if (is_it(device)) return *met.emplace_back(&device);
  }
  DeviceInfo device;
  if (type == DeviceType::cpu) {
    device = cpu_device(threads, instruction_set_here());
    set_name(device, cpu_name().c_str());
  } else {
#ifdef FASTCONV_WITH_CUDA
    device = query_cuda_device(index);
#else
    device.type = DeviceType::cuda;
    device.index = index;
    device.has_kernels = false;
#endif
  }
  known.push_back(device);
  return *met.emplace_back(&known.back());
}

std::unique_ptr<Runtime> make_runtime(const DeviceInfo& device) {
#ifdef FASTCONV_WITH_CUDA
  if (device.type == DeviceType::cuda) return make_cuda_runtime(device);
#endif
  return std::make_unique<CpuRuntime>(device);
}

}  // namespace fastconv::ops
