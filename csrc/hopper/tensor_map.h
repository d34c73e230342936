// Descriptors of tensor copies (TMA). Host code; the driver's function is found at run time, so nothing links to it.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdio>

#include "core/device_error.h"
#include "core/problem.h"
#include "device/cuda_check.h"

namespace fastconv {

struct Box4 {
  int c, w, h, n;                  // elements that a copy brings
  int stride_w = 1, stride_h = 1;  // every so many columns and rows are taken
  // Of c, 128 bytes: piece p (16 bytes) of pixel r lies at p ^ (r & 7). Else pixels lie one behind the other.
  bool swizzled = true;
};

// Sizes (elements, innermost first), strides (bytes, of dimensions 1 to 3) and box of a 4-dimensional map.
struct TensorMap4 {
  cuuint64_t sizes[4], strides[3];
  cuuint32_t box[4], steps[4] = {1, 1, 1, 1};
  bool swizzled = true;  // as in Box4
};

inline CUtensorMapDataType map_type(DType dtype) {
  return dtype == DType::f32   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
         : dtype == DType::f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                               : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

inline CUtensorMap make_tensor_map(const void* x, CUtensorMapDataType type, const TensorMap4& shape) {
  using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                              const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                              CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
               "cuTensorMapEncodeTiled");
    if (function == nullptr) {
      throw_device_error("cuTensorMapEncodeTiled", "the driver does not have it; CUDA 12.0 or later expected");
    }
    return reinterpret_cast<Encode>(function);
  }();
  CUtensorMap map;
  const CUresult status =
      encode(&map, type, 4, const_cast<void*>(x), shape.sizes, shape.strides, shape.box, shape.steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, shape.swizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
             shape.swizzled ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    char reason[32];
    std::snprintf(reason, sizeof reason, "CUDA error %d", static_cast<int>(status));
    throw_device_error("cuTensorMapEncodeTiled", reason);
  }
  return map;
}
inline CUtensorMap make_tensor_map(const void* x, DType dtype, const TensorMap4& shape) {
  return make_tensor_map(x, map_type(dtype), shape);
}

// Of x [N, H, W, C], pixels `pitch` elements apart (0: C, dense), 16-byte aligned, the pitch a multiple of 16 bytes.
// Outside of the tensor are zeros. type, bytes: of an element; TFLOAT32 rounds float32 on the way.
inline CUtensorMap make_tensor_map(const void* x, CUtensorMapDataType type, std::size_t bytes, std::int64_t n,
                                   std::int64_t h, std::int64_t w, std::int64_t c, const Box4& box,
                                   std::int64_t pitch = 0) {
  const auto size = static_cast<cuuint64_t>(bytes);
  if (pitch == 0) pitch = c;
  const auto at = [](std::int64_t value) { return static_cast<cuuint64_t>(value); };
  const auto span = [](int elements, int stride) { return static_cast<cuuint32_t>((elements - 1) * stride + 1); };
  return make_tensor_map(x, type,
                         {.sizes = {at(c), at(w), at(h), at(n)},
                          .strides = {at(pitch) * size, at(w * pitch) * size, at(h * w * pitch) * size},
                          .box = {span(box.c, 1), span(box.w, box.stride_w), span(box.h, box.stride_h), span(box.n, 1)},
                          .steps = {1, static_cast<cuuint32_t>(box.stride_w), static_cast<cuuint32_t>(box.stride_h), 1},
                          .swizzled = box.swizzled});
}
inline CUtensorMap make_tensor_map(const void* x, DType dtype, std::int64_t n, std::int64_t h, std::int64_t w,
                                   std::int64_t c, const Box4& box, std::int64_t pitch = 0) {
  return make_tensor_map(x, map_type(dtype), size_of(dtype), n, h, w, c, box, pitch);
}

}  // namespace fastconv
