// The choices of gradients, and of all passes where nothing was measured.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "plan/gradient_parts.h"
#include "plan/gradients.h"
#include "plan/measured.h"
#include "plan/registry.h"

namespace py = pybind11;
using namespace fastconv;

namespace {

py::dict describe(const WeightGradientChoice& choice) {
  py::dict row;
  row["algorithm"] = choice.algorithm != nullptr ? choice.algorithm->name : "torch";
  row["ok"] = choice.support.ok;
  row["code"] = choice.support.code;
  row["reason"] = choice.support.reason;
  row["expected_error"] = choice.support.ok ? choice.expected_error : 0.0;
  row["auto_eligible"] = choice.auto_eligible;
  row["measured"] = choice.measured;
  row["config"] = choice.plan.config;
  row["workspace_bytes"] = choice.plan.workspace_bytes;
  row["reads_nhwc"] = choice.plan.reads_nhwc;
  row["cost_us"] = choice.plan.cost_us;
  return row;
}

py::dict describe(const InputGradientChoice& choice, const ConvProblem& problem, const DeviceInfo& device) {
  py::dict row;
  row["name"] = name_of(choice);
  row["method"] = name_of(choice.method);
  row["algorithm"] = choice.algorithm;
  row["code"] = choice.support.code;
  row["reason"] = choice.support.reason;
  row["convolution"] = choice.convolution;
  row["convolutions"] = choice.convolutions;
  const bool together = choice.method == InputGradientMethod::together;
  const bool is_ours = choice.method != InputGradientMethod::torch;
  row["flips"] =
      is_ours && !is_product_with_filter(choose(choice.algorithm, choice.convolution, device).algorithm->name, problem,
                                         device.type);
  row["different"] = gradient_convolutions(problem, together, device.type).different;
  row["measured"] = choice.measured;
  return row;
}

py::dict describe(const InputGradientCandidate& candidate) {
  py::dict row;
  row["algorithm"] = name_of(candidate.choice);
  row["ok"] = candidate.choice.support.ok;
  row["code"] = candidate.choice.support.code;
  row["reason"] = candidate.choice.support.reason;
  row["expected_error"] = candidate.expected_error;
  row["auto_eligible"] = candidate.auto_eligible;
  row["config"] = candidate.config;
  row["workspace_bytes"] = candidate.workspace_bytes;
  row["cost_us"] = candidate.cost_us;
  return row;
}

std::string choose_by_cost(const std::string& pass, const ConvProblem& problem, const DeviceInfo& device) {
  switch (pass_from_name(pass)) {
    case Pass::forward: return choose_by_cost(problem, device).algorithm->name;
    case Pass::backward_input: return name_of(choose_input_gradient_by_cost(problem, device));
    case Pass::backward_weight: break;
  }
  const WeightGradientChoice choice = choose_weight_gradient_by_cost(problem, device);
  return choice.algorithm != nullptr ? choice.algorithm->name : "torch";
}

}  // namespace

void bind_gradients(py::module_& module) {
  module.def(
      "choose_weight_gradient",
      [](const std::string& name, const ConvProblem& problem, const DeviceInfo& device) {
        return describe(choose_weight_gradient(name, problem, device));
      },
      py::arg("algorithm"), py::arg("problem"), py::arg("device"),
      "What computes the weight gradient of a convolution asked for as `algorithm`; code and reason if PyTorch does.");
  module.def(
      "weight_gradients",
      [](const ConvProblem& problem, const DeviceInfo& device) {
        py::list rows;
        for (const WeightGradientChoice& choice : weight_gradients(problem, device)) rows.append(describe(choice));
        return rows;
      },
      py::arg("problem"), py::arg("device"), "A row per algorithm that has a weight gradient, PyTorch's last.");
  module.def(
      "is_left_to_torch",
      [](const std::string& name, const ConvProblem& problem, const DeviceInfo& device, const std::string& without) {
        return is_left_to_torch(name, problem, device,
                                without.empty() ? std::nullopt : std::optional(pass_from_name(without)));
      },
      py::arg("algorithm"), py::arg("problem"), py::arg("device"), py::arg("without") = "",
      "Whether a layer that is trained call by call is PyTorch's altogether: nothing is ours, or too little is gained "
      "by it. without: the pass that nobody wants.");
  module.def(
      "choose_input_gradient",
      [](const std::string& name, const ConvProblem& problem, const DeviceInfo& device, bool own) {
        return describe(
            own ? choose_own_input_gradient(name, problem, device) : choose_input_gradient(name, problem, device),
            problem, device);
      },
      py::arg("algorithm"), py::arg("problem"), py::arg("device"), py::arg("own") = false,
      "How the input gradient of a convolution asked for as `algorithm` is computed; code and reason if by PyTorch. "
      "different: the convolutions that it is or would be made of, those that are the same once; flips: whether their "
      "filters are flipped, or one matrix product takes the filter as it lies. own: where PyTorch's "
      "would be one in another class.");
  module.def(
      "input_gradients",
      [](const ConvProblem& problem, const DeviceInfo& device) {
        py::list rows;
        for (const InputGradientCandidate& candidate : input_gradients(problem, device)) {
          rows.append(describe(candidate));
        }
        return rows;
      },
      py::arg("problem"), py::arg("device"),
      "A row per way to make an input gradient of forward convolutions, and PyTorch's gradient.");
  module.def(
      "choose_by_cost",
      [](const std::string& pass, const ConvProblem& problem, const DeviceInfo& device) {
        return choose_by_cost(pass, problem, device);
      },
      py::arg("pass_"), py::arg("problem"), py::arg("device"), "The choice of `auto` where nothing was measured.");
}
