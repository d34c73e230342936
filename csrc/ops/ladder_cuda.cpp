// The operator behind the ladders of benchmarks/papers: one rung, chosen by its flags and not by the planner.
#include <optional>
#include <string>

#include "ops/arguments.h"
#include "studies/ladder/ladder.h"

namespace fastconv::ops {
namespace {

using studies::ladder::Form;

Form form_of(const std::string& name) {
  if (name == "direct") return Form::direct;
  if (name == "unroll") return Form::unroll;
  FASTCONV_REQUIRE(name == "fused", "form is '", name, "'; expected direct, unroll or fused");
  return Form::fused;
}

// input [N, C, H, W], weight [K, C, R, R], output [N, K, P, Q]: CUDA, contiguous, float32 or float16.
void ladder(Tensor input, Tensor weight, std::int64_t stride, std::int64_t padding, std::string form, bool restricted,
            bool constant_size, bool constant_filters, std::int64_t rows, std::int64_t columns, Tensor output,
            std::optional<Tensor> workspace) {
  const std::string name = "torch", precision = "ieee", none = "none";
  const Arguments arguments{
      std::nullopt, std::nullopt, {stride, stride}, {padding, padding}, {1, 1}, 1, name, precision, none, 0.0, 0, {}};
  FASTCONV_REQUIRE(input.is_cuda(), "input is on the CPU; the ladder's kernels are CUDA's");
  require_same_device(input, weight, "weight"), require_same_device(input, output, "output");
  const ConvProblem problem = make_problem(input, shape_of(weight), Layout::nchw, arguments);
  FASTCONV_REQUIRE(problem.r == problem.s, "weight has filters of ", problem.r, "x", problem.s,
                   "; expected square ones");
  const IntList expected{problem.n, problem.k, problem.p(), problem.q()};
  FASTCONV_REQUIRE(shape_of(output) == expected, "output has shape ", to_text(shape_of(output)), "; expected ",
                   to_text(expected));
  for (const Tensor& tensor : {input, weight, output}) {
    FASTCONV_REQUIRE(tensor.is_contiguous() && tensor.scalar_type() == input.scalar_type(),
                     "input, weight and output are not all contiguous and of one dtype");
  }
  constexpr std::int64_t limit = std::int64_t{1} << 31;
  FASTCONV_REQUIRE(problem.c * problem.h * problem.w < limit && problem.k * problem.p() * problem.q() < limit &&
                       problem.k * problem.c * problem.r * problem.s < limit && problem.n < limit,
                   "one image, or the weight, has 2^31 elements or more");
  std::size_t workspace_bytes = 0;
  if (workspace) {
    require_same_device(input, *workspace, "workspace");
    FASTCONV_REQUIRE(workspace->is_contiguous() && workspace->scalar_type() == ScalarType::Byte,
                     "workspace is not contiguous uint8");
    workspace_bytes = static_cast<std::size_t>(workspace->numel());
  }
  if (problem.output_numel() == 0) return;
  const auto guard = device_guard(input);
  const std::unique_ptr<Runtime> runtime = make_runtime(device_of(input));
  const studies::ladder::Rung rung{
      form_of(form), restricted, constant_size, constant_filters, static_cast<int>(rows), static_cast<int>(columns)};
  studies::ladder::run(problem, rung, input.const_data_ptr(), weight.const_data_ptr(), output.mutable_data_ptr(),
                       workspace ? workspace->mutable_data_ptr() : nullptr, workspace_bytes, *runtime);
}

}  // namespace
}  // namespace fastconv::ops

STABLE_TORCH_LIBRARY_FRAGMENT(fastconv, library) {
  library.def(
      "ladder(Tensor input, Tensor weight, int stride, int padding, str form, bool restricted, bool constant_size, "
      "bool constant_filters, int rows, int columns, Tensor(a!) output, Tensor(b!)? workspace) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(fastconv, CompositeExplicitAutograd, library) {
  library.impl("ladder", TORCH_BOX(&fastconv::ops::ladder));
}
