// The optimisation ladders of two sources as they stand there (docs/papers/lenet5.md, textbook.md): NCHW, one group,
// square filters, one output per thread. They are measured beside the library's algorithms; no planner knows them.
#pragma once

#include <cstddef>

#include "core/kernels.h"

namespace fastconv::studies::ladder {

enum class Form {
  direct,  // a thread per output, blocks of 16 x 16 pixels; FP32
  unroll,  // the unrolled input to memory, then an own tiled matrix product
  fused,   // the same product, whose tiles are unrolled inside
};

struct Rung {
  Form form;
  bool restricted;        // pointers are __restrict__
  bool constant_size;     // the filter's size is a template constant: 3, 5 or 7
  bool constant_filters;  // in constant memory, 64 KiB at a time, which every call copies there
  int rows, columns;      // output channels and pixels of a block of a product
};

// y [N, K, P, Q] of x [N, C, H, W] and weight [K, C, R, R], all dense; float, or half with products and sums in half.
// workspace: of `unroll`, for one image or more. Constant memory is one for all streams: one such call at a time.
// Throws Unsupported for what has no kernel.
void run(const ConvProblem& problem, const Rung& rung, const void* x, const void* weight, void* y, void* workspace,
         std::size_t workspace_bytes, Runtime& runtime);

}  // namespace fastconv::studies::ladder
