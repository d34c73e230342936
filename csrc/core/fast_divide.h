// Division of 31-bit indices by a divisor known at launch: a multiplication and a shift instead of some 20
// instructions. (Granlund and Montgomery, "Division by invariant integers using multiplication", 1994, figure 4.1.)
#pragma once

#include <cstdint>

namespace fastconv {

// A divisor, 1 <= divisor < 2^31. It stands wherever an integer does; dividing by it is what it does faster.
class FastDivide {
 public:
  constexpr FastDivide(std::int64_t divisor = 1) : divisor_(static_cast<std::uint32_t>(divisor)) {
    if (divisor <= 0) return;  // nobody divides by it
    while ((std::int64_t{1} << shift_) < divisor) ++shift_;
    factor_ = static_cast<std::uint32_t>((((std::int64_t{1} << shift_) - divisor) << 32) / divisor + 1);
  }

  // value < 2^31, which keeps the sum below 2^32
  constexpr std::uint32_t quotient(std::uint32_t value) const {
    const auto high = static_cast<std::uint32_t>((static_cast<std::uint64_t>(value) * factor_) >> 32);
    return (high + value) >> shift_;
  }

  constexpr std::uint32_t divisor() const { return divisor_; }

  // Divides `value` in place and returns the remainder: the fastest index of a linear one.
  constexpr std::uint32_t divmod(std::uint32_t& value) const {
    const std::uint32_t result = quotient(value), remainder = value - result * divisor_;
    value = result;
    return remainder;
  }

  constexpr operator std::int32_t() const { return static_cast<std::int32_t>(divisor_); }
  // number >= 0
  friend constexpr std::int32_t operator/(std::int32_t number, const FastDivide& divisor) {
    return static_cast<std::int32_t>(divisor.quotient(static_cast<std::uint32_t>(number)));
  }
  friend constexpr std::int32_t operator%(std::int32_t number, const FastDivide& divisor) {
    return number - number / divisor * divisor;
  }

 private:
  std::uint32_t divisor_, factor_ = 0, shift_ = 0;
};

}  // namespace fastconv
