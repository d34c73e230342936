#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <limits>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/fitted.h"
#include "plan/gradients.h"
#include "plan/registry.h"

namespace py = pybind11;
using namespace fastconv;

namespace {

// A constant of a cost model on one kind of device, "avx2", "avx512" or "cuda", with its bounds.
struct Constant {
  const char *algorithm, *name, *kind;
  double lower, upper;
  double& value;
};
// Of a library's times: eight times more and less than where the fit begins.
Constant of_start(const char* algorithm, const char* name, double start, double& value) {
  return {algorithm, name, "cuda", start / 8.0, start > 0.0 ? 8.0 * start : 10.0, value};
}
const Constant constants[] = {
#define FASTCONV_CPU(ALGORITHM, NAME, LOWER, UPPER, AVX2, AVX512)          \
  {#ALGORITHM, #NAME, "avx2", LOWER, UPPER, fitted::ALGORITHM::NAME.avx2}, \
      {#ALGORITHM, #NAME, "avx512", LOWER, UPPER, fitted::ALGORITHM::NAME.avx512},
#define FASTCONV_CUDA(ALGORITHM, NAME, LOWER, UPPER, VALUE) \
  {#ALGORITHM, #NAME, "cuda", LOWER, UPPER, fitted::ALGORITHM::NAME},
#define FASTCONV_TIMES(ALGORITHM, KIND, LAUNCH_0, TERM_0, PRODUCTS_0, INPUT_0, OUTPUT_0, ...) \
  of_start(#ALGORITHM, #KIND "_launch", LAUNCH_0, fitted::ALGORITHM::KIND.launch),            \
      of_start(#ALGORITHM, #KIND "_term", TERM_0, fitted::ALGORITHM::KIND.term),              \
      of_start(#ALGORITHM, #KIND "_products", PRODUCTS_0, fitted::ALGORITHM::KIND.products),  \
      of_start(#ALGORITHM, #KIND "_input", INPUT_0, fitted::ALGORITHM::KIND.input),           \
      of_start(#ALGORITHM, #KIND "_output", OUTPUT_0, fitted::ALGORITHM::KIND.output),
#include "core/fitted.def"
#undef FASTCONV_CPU
#undef FASTCONV_CUDA
#undef FASTCONV_TIMES
};

double cost_us(const std::string& name, const ConvProblem& problem, const DeviceInfo& device, bool forward) {
  constexpr double never = std::numeric_limits<double>::infinity();
  if (forward) {
    const Candidate candidate = evaluate(find_algorithm(name), problem, device);
    return candidate.auto_eligible ? candidate.plan.cost_us : never;
  }
  for (const WeightGradient* algorithm : weight_gradient_algorithms()) {
    if (name != algorithm->name) continue;
    const WeightGradientChoice candidate = evaluate(*algorithm, problem, device);
    return candidate.auto_eligible ? candidate.plan.cost_us : never;
  }
  return never;
}

}  // namespace

void bind_fit(py::module_& module) {
  module.def(
      "fitted",
      [] {
        py::list rows;
        for (const Constant& constant : constants) {
          py::dict row;
          row["algorithm"] = constant.algorithm, row["name"] = constant.name, row["kind"] = constant.kind;
          row["lower"] = constant.lower, row["upper"] = constant.upper, row["value"] = constant.value;
          rows.append(row);
        }
        return rows;
      },
      "The constants of cost models that are fitted (csrc/core/fitted.def).");
  module.def(
      "set_fitted",
      [](const std::string& algorithm, const std::string& name, const std::string& kind, double value) {
        for (const Constant& constant : constants) {
          if (algorithm != constant.algorithm || name != constant.name || kind != constant.kind) continue;
          constant.value = value;
          return;
        }
        throw InvalidArgument("no model has a constant " + algorithm + "." + name + " of " + kind);
      },
      py::arg("algorithm"), py::arg("name"), py::arg("kind"), py::arg("value"),
      "Changes a constant for this planner alone, not for the operators'.");
  module.def(
      "preference",
      [](const std::string& algorithm, const DeviceInfo& device) {
        return preference(find_algorithm(algorithm), device);
      },
      py::arg("algorithm"), py::arg("device"),
      "What `auto` multiplies an algorithm's costs by before it compares them.");
  module.def(
      "costs_us",
      [](const std::string& algorithm, const std::vector<const ConvProblem*>& problems, const DeviceInfo& device,
         const std::string& pass) {
        if (pass != "forward" && pass != "backward_weight") {
          throw InvalidArgument("pass is '" + pass + "'; expected forward or backward_weight");
        }
        std::vector<double> found;
        for (const ConvProblem* problem : problems) {
          found.push_back(cost_us(algorithm, *problem, device, pass == "forward"));
        }
        return found;
      },
      py::arg("algorithm"), py::arg("problems"), py::arg("device"), py::arg("pass_") = "forward",
      "The costs of an algorithm, a number for each problem; infinite where the algorithm is no candidate.");
}
