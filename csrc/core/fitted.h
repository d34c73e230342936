// The constants of cost models that are fitted to measured times by a program: `python -m benchmarks fit` reads result
// files and writes core/fitted.def. What a constant means stands where it is used, in its algorithm's cost model.
#pragma once

#include "core/cost.h"

// Read by models as fitted::ALGORITHM::NAME. They are variables for the planner's module, where the fit moves them;
// kernels and operators read what the file says.
#define FASTCONV_CPU(ALGORITHM, NAME, LOWER, UPPER, AVX2, AVX512) \
  namespace fastconv::fitted::ALGORITHM {                         \
  inline constinit CpuRates<double> NAME{AVX2, AVX512};           \
  }
#define FASTCONV_CUDA(ALGORITHM, NAME, LOWER, UPPER, VALUE) \
  namespace fastconv::fitted::ALGORITHM {                   \
  inline constinit double NAME = VALUE;                     \
  }
#include "core/fitted.def"
#undef FASTCONV_CPU
#undef FASTCONV_CUDA
