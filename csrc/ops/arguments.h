// Converts the operators' arguments to a ConvProblem, and tensors to the form that kernels require.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/problem.h"
#include "core/text.h"
#include "ops/runtime.h"
#include "ops/stable.h"
#include "plan/measured.h"

namespace fastconv::ops {

using IntList = std::vector<std::int64_t>;

// A macro, so that the message is built only if the condition fails. A std::runtime_error, Python's RuntimeError as of
// PyTorch's own operators: before torch 2.15 std::invalid_argument arrives there as a ValueError.
#define FASTCONV_REQUIRE(condition, ...) \
  if (!(condition)) throw std::runtime_error(text_of("fastconv: ", __VA_ARGS__))

std::string to_text(const std::vector<std::int64_t>& values);
DType dtype_of(const Tensor& tensor);
std::vector<std::int64_t> shape_of(const Tensor& tensor);
MemoryFormat memory_format(Layout layout);

// PyTorch's definition: whether the tensor's strides ask for channels_last.
bool suggests_channels_last(const Tensor& tensor);

// Whether it is dense in that format. Of 4 dimensions.
bool is_channels_last(const Tensor& tensor);

// contiguous(), but without a call through the dispatcher if the tensor already is. nhwc: of 4 dimensions.
Tensor in_layout(const Tensor& tensor, Layout layout);

// The channels of the larger tensor in NHWC of which this is a range, in the format that its strides suggest; 0 where
// it is none, or where the GPU's kernels, which copy 16 bytes at a time, could not read it as one.
std::int64_t channels_around(const Tensor& tensor);

// The channels of a pixel in memory, of a tensor in NHWC that the GPU's kernels can read, or write, as it is: its own
// or those of the larger one; else 0.
std::int64_t channels_in_memory(const Tensor& tensor);

// Whether two tensors of as many channels may have elements in common; ranges side by side of one tensor have none.
bool may_overlap(const Tensor& a, const Tensor& b);

// The GPU's kernels may load 16 bytes at a time; a view may begin at any element.
Tensor aligned(const Tensor& tensor);

struct Arguments {
  std::optional<Tensor> bias, residual;
  IntList stride, padding, dilation;
  std::int64_t groups;
  const std::string& algorithm;
  const std::string& precision;
  const std::string& activation;
  double negative_slope;
  std::int64_t backend_flags;
  Limits limits;
  bool residual_after = false;  // of the activation
  bool max_pool = false;
};

// A missing max_error is the planner's default, a missing max_workspace no limit. Throws as make_problem.
Limits limits_of(std::optional<double> max_error, std::optional<std::int64_t> max_workspace);

// Of pairs: what all calls of a convolution share.
ConvProblem settings_of(const IntList& stride, const IntList& padding, const IntList& dilation, std::int64_t groups,
                        const Limits& limits);

// Throws unless it is [K, C/groups, R, S], each of them 0 or more.
void require_weight_shape(const IntList& shape);

// Throws std::runtime_error naming the argument, its value and what was expected.
ConvProblem make_problem(const Tensor& input, const IntList& weight_shape, Layout layout, const Arguments& arguments);

const DeviceInfo& device_of(const Tensor& tensor);

// Why `other` is not of the dtype and on the device of `input`, or on its device alone; empty if it is. input_name: of
// operators that call it otherwise.
std::string mistaken_device(const Tensor& input, const Tensor& other, const std::string& name,
                            const std::string& input_name = "input");
std::string mistaken_kind(const Tensor& input, const Tensor& other, const std::string& name,
                          const std::string& input_name = "input");
// These throw.
void require_same_device(const Tensor& input, const Tensor& other, const char* name);
void require_same_kind(const Tensor& input, const Tensor& other, const char* name, const char* input_name = "input");

// Makes the tensor's device current for the scope, so that launches and allocations go there.
std::optional<torch::stable::accelerator::DeviceGuard> device_guard(const Tensor& tensor);

// A choice for a problem seen before is a table lookup; the table is per thread, so no lock.
template <auto choose>
auto choose_cached(const std::string& name, const ConvProblem& problem, const DeviceInfo& device) {
  using Choice = std::shared_ptr<const decltype(choose(name, problem, device))>;
  struct Key {
    ConvProblem problem;
    const DeviceInfo* device;
    std::string name;
    bool operator==(const Key&) const = default;
  };
  struct Hash {
    std::size_t operator()(const Key& key) const {
      return hash_value(key.problem) ^ std::hash<std::string>{}(key.name) ^ std::hash<const void*>{}(key.device);
    }
  };
  thread_local std::unordered_map<Key, Choice, Hash> table;
  thread_local std::uint64_t generation = 0;
  if (const std::uint64_t current = measured_generation(); generation != current) {
    table.clear();
    generation = current;
  }
  Key key{problem, &device, name};
  auto found = table.find(key);
  if (found == table.end()) {
    if (table.size() >= 4096) table.clear();  // bounded: programs may see ever new shapes
    auto choice = std::make_shared<typename Choice::element_type>(choose(name, problem, device));
    found = table.emplace(std::move(key), std::move(choice)).first;
  }
  return found->second;
}

}  // namespace fastconv::ops
