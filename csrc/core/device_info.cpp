#include "core/device_info.h"

#include <algorithm>
#include <cstdlib>
#include <sstream>

namespace fastconv {

void limit_to_build(DeviceInfo& device, const std::string& architectures) {
  const int own = device.compute_capability;
  bool loads = false, hopper = false;
  std::string list = architectures, entry;
  std::replace(list.begin(), list.end(), ',', ';');
  for (std::istringstream entries(list); std::getline(entries, entry, ';');) {
    char* suffix = nullptr;
    const int built = static_cast<int>(std::strtol(entry.c_str(), &suffix, 10));
    const bool one = *suffix == 'a', family = *suffix == 'f', ptx = entry.find("+PTX") != std::string::npos;
    // Machine code runs on its major version from its minor version on; PTX on all that came later.
    const bool same_major = own / 10 == built / 10;
    const bool runs = one ? own == built : own >= built && (same_major || (ptx && !family));
    loads = loads || runs;
    hopper = hopper || (runs && one && built == 90);
  }
  device.has_kernels = device.has_kernels && loads;
  if (own == 90 && !hopper) device.compute_capability = 80;
}

DeviceInfo cpu_device(int threads) {
  DeviceInfo device;
  device.processors = threads > 0 ? threads : 1;
  device.fp32_flops_per_s = 50e9 * device.processors;
  return device;
}

DeviceInfo h200_device() {
  DeviceInfo device;
  device.type = DeviceType::cuda;
  device.index = 0;
  device.name = "NVIDIA H200";
  device.compute_capability = 90;
  device.processors = 132;
  device.shared_memory_bytes = 227 * 1024;
  device.l2_bytes = std::size_t{60} << 20;
  device.bandwidth_bytes_per_s = 4.3e12;
  device.fp32_flops_per_s = 47e12;
  device.fp16_tensor_flops_per_s = 700e12;
  return device;
}

}  // namespace fastconv
