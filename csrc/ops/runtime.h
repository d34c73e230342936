// Device queries and the Runtime of each device: what stands between the kernels and torch.
#pragma once

#include <memory>

#include "core/device_info.h"
#include "core/kernels.h"

namespace fastconv::ops {

// The device of a tensor, as the planner sees it. Queried once per device and kept.
const DeviceInfo& query_device(DeviceType type, int index);

std::unique_ptr<Runtime> make_runtime(const DeviceInfo& device);

#ifdef FASTCONV_WITH_CUDA
DeviceInfo query_cuda_device(int index);
std::unique_ptr<Runtime> make_cuda_runtime(const DeviceInfo& device);
#endif

}  // namespace fastconv::ops
