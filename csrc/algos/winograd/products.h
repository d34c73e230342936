// Our own batched product for the staged algorithms, on Hopper (products.cuh has its roles).
#pragma once

#include <cstdint>

#include "algos/winograd/config.h"
#include "device/wait_report.h"

namespace fastconv::winograd::products {

struct Arguments {
  Mode mode;      // not fp32
  const void* v;  // [frequencies][tiles][parts][C_pad]
  const void* u;  // [frequencies][filters][parts][C_pad]
  float* m;       // [frequencies][tiles][K_pad]
  std::int64_t frequencies, tiles, filters, c_pad, k_pad;
  int processors;
  void* stream;  // cudaStream_t
  WaitReport* report;
};

void run(const Arguments& args);

}  // namespace fastconv::winograd::products
