// The constants of cost models that are fitted to measured times by a program: `python -m benchmarks fit` reads result
// files and writes core/fitted.def. Its algorithm's cost model says what a constant means.
#pragma once

#include "core/cost.h"
#include "core/library_times.h"

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
#define FASTCONV_TIMES(ALGORITHM, KIND, LAUNCH_0, TERM_0, PRODUCTS_0, INPUT_0, OUTPUT_0, LAUNCH, TERM, PRODUCTS, \
                       INPUT, OUTPUT)                                                                            \
  namespace fastconv::fitted::ALGORITHM {                                                                        \
  inline constinit LibraryTimes KIND{LAUNCH, TERM, PRODUCTS, INPUT, OUTPUT};                                     \
  }
#include "core/fitted.def"
#undef FASTCONV_CPU
#undef FASTCONV_CUDA
#undef FASTCONV_TIMES
