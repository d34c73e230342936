// Division of 31-bit indices by a divisor known at launch: a multiplication and a shift instead of some 20
// instructions. (Granlund and Montgomery, "Division by invariant integers using multiplication", 1994, figure 4.1.)
#pragma once

#include <cstdint>

#include "device/numeric.h"

namespace fastconv {

class FastDivide {
 public:
  // 1 <= divisor < 2^31
  explicit FastDivide(std::uint32_t divisor) : divisor_(divisor) {
    while ((std::uint64_t{1} << shift_) < divisor) ++shift_;
    const std::uint64_t excess = (std::uint64_t{1} << shift_) - divisor;
    factor_ = static_cast<std::uint32_t>((excess << 32) / divisor + 1);
  }

  // value < 2^31, which keeps the sum below 2^32
  FASTCONV_HOST_DEVICE std::uint32_t quotient(std::uint32_t value) const {
    const auto high = static_cast<std::uint32_t>((static_cast<std::uint64_t>(value) * factor_) >> 32);
    return (high + value) >> shift_;
  }

  FASTCONV_HOST_DEVICE std::uint32_t divisor() const { return divisor_; }

  // Divides `value` in place and returns the remainder: peels the fastest index off a linear one.
  FASTCONV_HOST_DEVICE std::uint32_t peel(std::uint32_t& value) const {
    const std::uint32_t result = quotient(value), remainder = value - result * divisor_;
    value = result;
    return remainder;
  }

 private:
  std::uint32_t divisor_, factor_ = 0, shift_ = 0;
};

}  // namespace fastconv
