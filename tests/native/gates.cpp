// The formulas of device/fast_gates.cuh on the host, against double precision: all halves, and floats of every size.
#include "device/fast_gates.cuh"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <initializer_list>
#include <limits>

using namespace fastconv;

namespace {

double exact(Activation gated, double x) {
  const double inner = std::sqrt(2.0 / std::acos(-1.0)) * (x + 0.044715 * x * x * x);
  switch (gated) {
    case Activation::gelu: return x * (0.5 * std::erfc(-x * std::sqrt(0.5)));
    case Activation::gelu_tanh: return x * (1.0 / (1.0 + std::exp(-2.0 * inner)));
    case Activation::hardswish: return x * (std::fmin(std::fmax(x + 3.0, 0.0), 6.0) / 6.0);
    default: return 1.0 / (1.0 + std::exp(-x));
  }
}

// What the header promises.
double bound(Activation gated, double x, double y) {
  switch (gated) {
    case Activation::gelu: {
      const double tail = std::fabs(x) * 0.5 * std::erfc(std::fabs(x) * std::sqrt(0.5));
      return std::exp2(-13.5) * (tail + std::exp2(-14.0)) + std::exp2(-23.0) * std::fabs(y);
    }
    case Activation::hardswish: return std::exp2(-23.0) * std::fabs(x) + std::exp2(-149.0);
    default: return std::exp2(-15.0) * std::fabs(y) + std::exp2(-120.0);  // what is less the GPU may flush to zero
  }
}

int wrong = 0;

void check(float x) {
  for (Activation gated : {Activation::gelu, Activation::gelu_tanh, Activation::hardswish, Activation::sigmoid}) {
    const double y = fast_gated(gated, x);
    const bool infinite = std::isinf(x), negative = x < 0.0f, sigmoid = gated == Activation::sigmoid;
    // PyTorch's: a gate of 0 times -inf.
    const double expected = !infinite  ? exact(gated, x)
                            : sigmoid  ? (negative ? 0.0 : 1.0)
                            : negative ? std::numeric_limits<double>::quiet_NaN()
                                       : x;
    const bool right = std::isnan(expected)   ? std::isnan(y)
                       : std::isinf(expected) ? y == expected
                                              : std::fabs(y - expected) <= bound(gated, x, expected);
    if (!right && ++wrong < 20) std::printf("%d of %.9g is %.9g, not %.9g\n", int(gated), x, y, expected);
  }
}

float of_bits(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace

int main() {
  for (std::uint32_t bits = 0; bits < 1u << 16; ++bits) check(to_float(half_t{static_cast<std::uint16_t>(bits)}));
  for (std::uint64_t bits = 0; bits < std::uint64_t{1} << 32; bits += 4093)
    check(of_bits(static_cast<std::uint32_t>(bits)));
  for (float x = -12.0f; x < 12.0f; x += 0.00037f) check(x);
  return wrong != 0;
}
