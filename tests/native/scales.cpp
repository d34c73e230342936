// The arithmetic of the power-of-two scales (device/power_of_two.h), on the host: what an infinity or a NaN in a tile
// does to the scale and to the split halves of the finite values beside it, which is nothing. Built by
// tests/test_native.py. Exit status 0, or 1 and a line per failure.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "device/power_of_two.h"

namespace {

using namespace fastconv;

constexpr float infinity = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();

int failures = 0;
void expect(bool condition, const char* what, double value) {
  if (condition) return;
  if (++failures < 20) std::printf("failed: %s (%g)\n", what, value);
}

std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
float float_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Every exponent, with the mantissas at both ends and some in between, both signs.
template <typename Visit>
void for_all_kinds(const Visit& visit) {
  for (std::uint32_t exponent = 0; exponent < 256; ++exponent) {
    for (std::uint32_t mantissa : {0u, 1u, 2u, 0x155555u, 0x400000u, 0x7ffffeu, 0x7fffffu}) {
      for (std::uint32_t sign : {0u, 1u}) visit(float_of(sign << 31 | exponent << 23 | mantissa));
    }
  }
}

void check_maximum() {
  for_all_kinds([](float value) {
    for (float largest : {0.0f, 0x1p-149f, 1.0f, 0x1.fffffep127f}) {
      const float wanted = std::isfinite(value) ? std::max(largest, std::fabs(value)) : largest;
      expect(bits_of(larger_finite(largest, value)) == bits_of(wanted), "larger_finite", value);
    }
  });
}

void check_exponents() {
  for_all_kinds([](float value) {
    if (!std::isfinite(value) || value <= 0.0f) return;
    for (int target : {4, 6, 8, 10, 12, 13}) {
      const int exponent = scale_exponent(value, target);
      const double scaled = std::ldexp(static_cast<double>(value), exponent);
      expect(exponent <= 126 && exponent >= -126, "an exponent whose powers are normal", exponent);
      expect(scaled < std::ldexp(1.0, target + 1), "not above its target", value);
      expect(exponent == 126 || scaled >= std::ldexp(1.0, target), "not below its target", value);
      expect(power_of_two(exponent) == std::ldexp(1.0f, exponent), "power_of_two", exponent);
    }
  });
  expect(power_of_two(-127) == 0.0f, "power_of_two(-127)", power_of_two(-127));
  for (int a = -126; a <= 126; ++a) {
    for (int b = -126; b <= 126; ++b) {
      const Unscale unscale(a, b);
      expect(static_cast<double>(unscale.first) * unscale.second == std::ldexp(1.0, -a - b), "Unscale", a);
    }
  }
}

// hi and lo of a value times its tile's scale: those of the tile without what is not finite.
void check_split() {
  std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  for (float magnitude : {1e-38f, 1e-20f, 1.0f, 1e20f, 1e36f}) {
    std::vector<float> tile(36 * 64);
    for (float& value : tile) value = normal(generator) * magnitude;
    float largest = 0.0f;
    for (float value : tile) largest = larger_finite(largest, value);
    for (float spoiler : {infinity, -infinity, nan}) {
      std::vector<float> spoilt = tile;
      spoilt[7] = spoilt[1000] = spoiler;
      float seen = 0.0f;
      for (float value : spoilt) seen = larger_finite(seen, value);
      expect(scale_exponent(seen, 10) == scale_exponent(largest, 10), "the scale of a spoilt tile", magnitude);
      const float scale = power_of_two(scale_exponent(seen, 10));
      for (float value : spoilt) {
        const float scaled = value * scale, high = to_float(from_float<half_t>(scaled));
        const float low = to_float(from_float<half_t>(scaled - high));
        if (std::isfinite(value)) {
          expect(std::isfinite(high) && std::fabs(scaled - high - low) <= std::fabs(scaled) * 0x1p-22f + 0x1p-25f,
                 "the halves of a finite value", value);
        } else {
          expect(!std::isfinite(high) && std::isnan(low), "the halves of one that is not", value);
        }
      }
    }
    float none = 0.0f;
    for (float spoiler : {infinity, nan, 0.0f}) none = larger_finite(none, spoiler);
    expect(none == 0.0f && scale_exponent(none, 10) == 0, "a tile of nothing finite but zeros", none);
  }
}

}  // namespace

int main() {
  check_maximum();
  check_exponents();
  check_split();
  return failures == 0 ? 0 : 1;
}
