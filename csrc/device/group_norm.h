// Group norms of images in NHWC on CUDA: of the operator group_norm.
#pragma once

#include "core/group_norm.h"
#include "core/kernels.h"

namespace fastconv {

// x [N, pixels, C] -> y, not empty, 16-byte aligned; weight and bias [C], or null. workspace: of
// GroupNorm::workspace_bytes().
void group_norm(const GroupNorm& norm, const void* x, const void* weight, const void* bias, void* y, void* workspace,
                Runtime& runtime);
// The same where clusters.found(), in one launch.
void group_norm_in_clusters(const GroupNorm& norm, const GroupNormClusters& clusters, const void* x, const void* weight,
                            const void* bias, void* y, Runtime& runtime);

}  // namespace fastconv
