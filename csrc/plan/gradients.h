// The gradients of a convolution: what computes them, and why. `problem` is the forward convolution's, whose epilogue
// is not meaningful; its layout is that of the gradient's tensors.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "core/algorithm.h"
#include "plan/measured.h"
#include "plan/registry.h"

namespace fastconv {

// An algorithm's answer for a weight gradient. PyTorch's has a cost, and runs outside.
struct WeightGradientChoice {
  const WeightGradient* algorithm = nullptr;  // of a choice: null if PyTorch computes it, for the reason in `support`
  Support support;
  ConvPlan plan;                // meaningful if support.ok
  double expected_error = 1.0;  // over PyTorch's
  bool auto_eligible = false;   // support.ok, and accurate enough for `auto`
  bool measured = false;        // chosen because it was measured to be the fastest
  double gain_us = 0.0;         // of a choice of ours: estimated, over PyTorch's
};

// Why PyTorch computes a gradient that was measured.
Support measured_support();

// Of every algorithm that has one, PyTorch's last.
const std::vector<const WeightGradient*>& weight_gradient_algorithms();
WeightGradientChoice evaluate(const WeightGradient& algorithm, const ConvProblem& problem, const DeviceInfo& device);
std::vector<WeightGradientChoice> weight_gradients(const ConvProblem& problem, const DeviceInfo& device);

// `name` is what the forward convolution was asked for: "torch" asks for PyTorch's gradient, an algorithm that has one
// for its own where that fits; anything else takes what is estimated to be faster, "auto" first what was measured.
WeightGradientChoice choose_weight_gradient(const std::string& name, const ConvProblem& problem,
                                            const DeviceInfo& device);

// What `auto` is where nothing was measured.
WeightGradientChoice choose_weight_gradient_by_cost(const ConvProblem& problem, const DeviceInfo& device);

// Where PyTorch's own would be computed in another class than the problem's: it can do that one, too, far slower.
WeightGradientChoice choose_own_weight_gradient(const std::string& name, const ConvProblem& problem,
                                                const DeviceInfo& device);

// The input gradient is made of forward convolutions of stride 1 with the filter flipped and its channels
// exchanged. With a stride the rows and columns of the gradient fall into phases, stride_h * stride_w in all, each of
// which sees taps of its own.
enum class InputGradientMethod : std::uint8_t {
  torch,     // PyTorch's, for the reason in `support`
  phases,    // a convolution for each phase; with stride 1 there is one
  together,  // one convolution, whose filters are the phases by the channels
};
const char* name_of(InputGradientMethod method);
bool may_be_together(const ConvProblem& problem);

struct InputGradientChoice {
  InputGradientMethod method = InputGradientMethod::torch;
  Support support;
  // The convolution as it runs; of phases the one with the most taps. Its input is the gradient, its layout the
  // problem's.
  ConvProblem convolution;
  int convolutions = 1;
  std::string algorithm = "auto";  // of the convolutions; "auto": of each its own choice
  bool measured = false;
  double gain_us = 0.0;  // of convolutions of ours: estimated, over PyTorch's
};

// As measured choices have it: "torch", PyTorch's gradient, or method and algorithm: "phases winograd_fused",
// "together torch" (PyTorch's convolution, of the flipped filter).
std::string name_of(const InputGradientChoice& choice);

// `name` as above: a name of ours asks for our convolutions, of whatever algorithm is the fastest. `auto` takes what
// was measured, else our convolutions where they are estimated to be faster (docs/log/115-gradient-choices.md), on the
// CPU of stride 1 alone.
InputGradientChoice choose_input_gradient(const std::string& name, const ConvProblem& problem,
                                          const DeviceInfo& device);

// What `auto` is where nothing was measured; where one algorithm is the choice of every convolution, with its name.
InputGradientChoice choose_input_gradient_by_cost(const ConvProblem& problem, const DeviceInfo& device);

// Where PyTorch's own would be computed in another class than the problem's: in this one it is far slower than ours, so
// that it cannot be taken as the faster one.
InputGradientChoice choose_own_input_gradient(const std::string& name, const ConvProblem& problem,
                                              const DeviceInfo& device);

// What may be chosen. An algorithm serves a gradient if it serves all of its convolutions.
struct InputGradientCandidate {
  InputGradientChoice choice;   // why not, if it does not fit
  std::string config;           // of the convolution with the most taps
  std::size_t workspace_bytes;  // of the convolution that needs the most
  double expected_error;        // likewise, over PyTorch's
  bool auto_eligible;
  double cost_us;
};

// By each method and algorithm; "auto" among these where the convolutions differ in their choice. PyTorch's last.
std::vector<InputGradientCandidate> input_gradients(const ConvProblem& problem, const DeviceInfo& device);

// What PyTorch's takes; 0 where ours serve nothing that it could be compared with.
double torch_input_gradient_us(const ConvProblem& problem, const DeviceInfo& device);

// Whether a layer that is trained, call by call, is left to PyTorch altogether, the record of its gradients included:
// where nothing is ours, or our kernels gain less time than the host needs for our way to them, or the host takes
// longer than the GPU in any case. PyTorch's convolution must compute in the problem's class. name: what the forward
// convolution was asked for. without: the pass that nobody wants, backward_input of images, forward where these are a
// transposed layer's.
bool is_left_to_torch(const std::string& name, const ConvProblem& problem, const DeviceInfo& device,
                      std::optional<Pass> without);

}  // namespace fastconv
