#include "core/device_info.h"

namespace fastconv {

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
