// Messages made of parts.
#pragma once

#include <string>

namespace fastconv {

// The parts one after the other, numbers as std::to_string() writes them.
template <typename... Parts>
std::string text_of(const Parts&... parts) {
  std::string text;
  const auto add = [&](const auto& part) {
    if constexpr (requires { std::to_string(part); }) {
      text += std::to_string(part);
    } else {
      text += part;
    }
  };
  (add(parts), ...);
  return text;
}

}  // namespace fastconv
