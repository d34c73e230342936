// Our own batched product of split operands for the staged algorithms, on Hopper (products.cuh has its roles).
#pragma once

#include <cstdint>

#include "algos/winograd/config.h"
#include "device/wait_report.h"

namespace fastconv::winograd::products {

struct Arguments {
  const void* v;  // float16 [frequencies][tiles][2][C_pad]: lo, hi
  const void* u;  // float16 [frequencies][filters][2][C_pad]: lo, hi
  float* m;       // [frequencies][tiles][K_pad]
  std::int64_t frequencies, tiles, filters, c_pad, k_pad;
  int processors;
  void* stream;  // cudaStream_t
  WaitReport* report;
};

void run(const Arguments& args);

}  // namespace fastconv::winograd::products
