// How GroupNormClusters divides images: whole groups and accesses, within a block's threads and shared memory; none
// where three kernels are meant to run.
#include "core/group_norm.h"

#include <cstdio>
#include <initializer_list>

using namespace fastconv;

namespace {

constexpr DeviceInfo device_of(int compute_capability) {
  DeviceInfo device;
  device.type = DeviceType::cuda, device.compute_capability = compute_capability, device.processors = h200_processors;
  return device;
}
constexpr DeviceInfo h200 = device_of(90);

constexpr GroupNorm norm_of(std::int64_t n, std::int64_t c, std::int64_t pixels, std::int64_t groups, DType dtype) {
  GroupNorm norm;
  norm.n = n, norm.c = c, norm.pixels = pixels, norm.groups = groups, norm.dtype = dtype;
  return norm;
}

// Diffusion's, in FP16: nearly all processors have a block, and 64 or more bytes of a pixel.
constexpr bool fills(std::int64_t n, std::int64_t c, std::int64_t pixels) {
  const GroupNorm norm = norm_of(n, c, pixels, 32, DType::f16);
  const GroupNormClusters clusters(norm, h200);
  return n * clusters.slices * clusters.blocks > 120 && clusters.slice_bytes() >= 64;
}
static_assert(fills(1, 512, 64 * 64));
static_assert(fills(2, 1280, 16 * 16) && fills(2, 640, 32 * 32) && fills(2, 320, 64 * 64) && fills(8, 320, 64 * 64));

constexpr bool found(const GroupNorm& norm, const DeviceInfo& device = h200) {
  return GroupNormClusters(norm, device).found();
}
static_assert(!found(norm_of(1, 512, 64 * 64, 32, DType::f16), device_of(80)));
static_assert(!found(norm_of(1, 512, 64 * 64, 32, DType::f16), device_of(100)));
static_assert(!found(norm_of(1, 512, 128 * 128, 32, DType::f16)));  // three kernels are faster
static_assert(!found(norm_of(1, 512, 256 * 256, 32, DType::f16)));  // larger than all shared memory
static_assert(!found(norm_of(1, 4096, 6, 1, DType::f16)));          // a group of more accesses than lanes
static_assert(!found(norm_of(1, 64, 130 * 131, 1, DType::f32)));    // one group, of more than a cluster has

int wrong = 0;

void check(const GroupNorm& norm) {
  const GroupNormClusters clusters(norm, h200);
  const bool none = norm.workspace_bytes(h200) == 0;
  bool right = none == clusters.found();
  if (clusters.found()) {
    const std::int64_t per_group = norm.c / norm.groups;
    right = right && clusters.slices * clusters.groups == norm.groups;
    right = right && clusters.lanes * norm.channels_per_access() == clusters.groups * per_group;
    right = right && clusters.pixels * clusters.blocks >= norm.pixels && clusters.rows <= clusters.pixels;
    right = right && (clusters.pixels - 1) * clusters.blocks < norm.pixels;
    right = right && per_group % clusters.unit == 0 && norm.channels_per_access() % clusters.unit == 0;
    right = right && clusters.threads() <= GroupNormClusters::max_threads && clusters.threads() % 32 == 0;
    right = right && clusters.shared_bytes(norm) <= GroupNormClusters::max_shared_bytes;
  }
  if (!right && ++wrong < 20) {
    std::printf("N %d, C %d, %d pixels, %d groups, %d bytes\n", int(norm.n), int(norm.c), int(norm.pixels),
                int(norm.groups), int(norm.element_bytes()));
  }
}

}  // namespace

int main() {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (std::int64_t groups = 1; groups <= 64; ++groups) {
      for (std::int64_t per_group = 1; per_group <= 80; ++per_group) {
        for (const std::int64_t pixels : {1, 2, 7, 63, 64, 1000, 4096, 20880, 131072}) {
          for (const std::int64_t n : {1, 3, 400}) {
            const GroupNorm norm = norm_of(n, groups * per_group, pixels, groups, dtype);
            if (norm.c <= 4096 && norm.c % norm.channels_per_access() == 0) check(norm);
          }
        }
      }
    }
  }
  return wrong != 0;
}
