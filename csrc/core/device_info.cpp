#include "core/device_info.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>

namespace fastconv {

void set_name(DeviceInfo& device, const char* name) { std::snprintf(device.name, sizeof device.name, "%s", name); }

void limit_to_build(DeviceInfo& device, const char* architectures) {
  const int own = device.compute_capability;
  bool loads = false, hopper = false;
  std::string list = architectures, entry;
  std::replace(list.begin(), list.end(), ',', ';');
  for (std::istringstream entries(list); std::getline(entries, entry, ';');) {
    const std::size_t digit = entry.find_first_of("0123456789");
    const bool ptx_alone = entry.find("compute_") != std::string::npos;
    char* suffix = nullptr;
    const int built = static_cast<int>(std::strtol(entry.c_str() + std::min(digit, entry.size()), &suffix, 10));
    const bool one = *suffix == 'a', family = *suffix == 'f';
    const bool ptx = ptx_alone || entry.find("+PTX") != std::string::npos;
    // Machine code runs on its major version from its minor version on; PTX on all that came later.
    const bool same_major = own / 10 == built / 10;
    const bool runs = one ? own == built : own >= built && (same_major || (ptx && !family));
    loads = loads || runs;
    hopper = hopper || (runs && one && built == 90);
  }
  device.has_kernels = device.has_kernels && loads;
  if (own == 90 && !hopper) device.compute_capability = 80;
}

InstructionSet instruction_set_here() {
#if defined(__x86_64__) && defined(__GNUC__)
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl");
  return v4 ? InstructionSet::avx512 : v3 ? InstructionSet::avx2 : InstructionSet::generic;
#else
  return InstructionSet::generic;
#endif
}

const char* name_of(InstructionSet set) {
  switch (set) {
    case InstructionSet::generic: return "generic";
    case InstructionSet::avx2: return "avx2";
    case InstructionSet::avx512: return "avx512";
  }
  return "?";
}

namespace {

// The units of a CPU's cost models: memory bandwidth of all threads, and the FLOP rate of one thread in loops that the
// compiler vectorises; matrix products reach about twice that. The models were fitted with AVX-512's units, AVX2's were
// chosen to match (docs/log/65-cpu-choice.md). With neither: a quarter of AVX2's arithmetic (vector width, no FMA), not
// measured.
struct Cpu {
  double bandwidth_bytes_per_s, fp32_flops_per_s;
};
constexpr Cpu cpus[] = {{20e9, 10e9}, {20e9, 40e9}, {20e9, 50e9}};  // in the order of InstructionSet

}  // namespace

DeviceInfo cpu_device(int threads, InstructionSet set) {
  DeviceInfo device;
  const Cpu& cpu = cpus[static_cast<int>(set)];
  device.processors = threads > 0 ? threads : 1;
  device.instruction_set = set;
  device.bandwidth_bytes_per_s = cpu.bandwidth_bytes_per_s;
  device.fp32_flops_per_s = cpu.fp32_flops_per_s * device.processors;
  return device;
}

namespace {

// Sustained rates of whole devices. H200: measured (docs/performance.md). H100: the H200's, except for memory
// bandwidth (docs/log/90-choices.md). A100: the H200's shares of the data sheets' peaks, not measured.
struct Gpu {
  const char* name;  // as the driver gives it
  double bandwidth_bytes_per_s, fp32_flops_per_s, fp16_tensor_flops_per_s, clock_hz;
};
constexpr Gpu gpus[] = {
    {"NVIDIA H200", h200_bytes_per_s, 47e12, 700e12, 1.5536e9},
    {"NVIDIA H100 80GB HBM3", 3.3e12, 47e12, 700e12, 1.5536e9},
    {"NVIDIA A100-SXM4-80GB", 1.79e12, 13.6e12, 203e12, 1.10e9},
    {"NVIDIA A100-SXM4-40GB", 1.37e12, 13.6e12, 203e12, 1.10e9},
};

// FLOP per clock and multiprocessor (CUDA C++ Programming Guide, "Arithmetic Instructions"; architecture white papers).
struct Architecture {
  int compute_capability;  // from this one on
  double fp32, fp16_tensor;
};
constexpr Architecture architectures[] = {
    {120, 256, 1024}, {100, 256, 8192}, {90, 256, 4096}, {86, 256, 1024}, {80, 128, 2048}};

}  // namespace

void set_rates(DeviceInfo& device, double boost_hz, double memory_bytes_per_s) {
  for (const Gpu& gpu : gpus) {
    if (std::strcmp(device.name, gpu.name) != 0) continue;
    device.bandwidth_bytes_per_s = gpu.bandwidth_bytes_per_s;
    device.fp32_flops_per_s = gpu.fp32_flops_per_s;
    device.fp16_tensor_flops_per_s = gpu.fp16_tensor_flops_per_s;
    device.clock_hz = gpu.clock_hz;
    return;
  }
  Architecture found{0, 128, 1024};
  for (const Architecture& known : architectures) {
    if (device.compute_capability >= known.compute_capability) {
      found = known;
      break;
    }
  }
  // The H200's shares.
  const double clocks = boost_hz * device.processors;
  device.bandwidth_bytes_per_s = 0.88 * memory_bytes_per_s;
  device.fp32_flops_per_s = 0.70 * clocks * found.fp32;
  device.fp16_tensor_flops_per_s = 0.65 * clocks * found.fp16_tensor;
  device.clock_hz = 0.78 * boost_hz;
}

DeviceInfo h200_device() {
  DeviceInfo device;
  device.type = DeviceType::cuda;
  device.index = 0;
  set_name(device, "NVIDIA H200");
  device.compute_capability = 90;
  device.processors = h200_processors;
  device.shared_memory_bytes = 227 * 1024;
  device.l2_bytes = std::size_t{60} << 20;
  set_rates(device, 0.0, 0.0);
  return device;
}

}  // namespace fastconv
