#include "winograd/limits.h"

#include <string>

namespace fastconv {

Support supports_winograd(const ConvProblem& problem, const char* name) {
  const auto no = [name](const char* code, const std::string& what, const char* needs) {
    return Support::no(code, what, "; ", name, " needs ", needs);
  };
  const auto pair = [](std::int64_t a, std::int64_t b) { return text_of(a, "x", b); };
  if (problem.r != 3 || problem.s != 3) return no("kernel_size", "the kernel is " + pair(problem.r, problem.s), "3x3");
  if (problem.stride_h != 1 || problem.stride_w != 1) {
    return no("stride", "stride is " + pair(problem.stride_h, problem.stride_w), "1x1");
  }
  if (problem.dilation_h != 1 || problem.dilation_w != 1) {
    return no("dilation", "dilation is " + pair(problem.dilation_h, problem.dilation_w), "1x1");
  }
  if (problem.groups != 1) return no("groups", text_of("groups is ", problem.groups), "1");
  if (problem.pad_h > 2 || problem.pad_w > 2) {
    return no("padding", "padding is " + pair(problem.pad_h, problem.pad_w), "0 to 2");
  }
  return Support::yes();
}

}  // namespace fastconv
