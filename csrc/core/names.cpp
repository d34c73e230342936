#include "core/names.h"

#include <array>
#include <cstdio>
#include <utility>

#include "core/error.h"
#include "core/text.h"

namespace fastconv {
namespace {

template <typename Enum, std::size_t Count>
using NameTable = std::array<std::pair<Enum, const char*>, Count>;

constexpr NameTable<DType, 4> dtype_names{
    {{DType::f32, "float32"}, {DType::f16, "float16"}, {DType::bf16, "bfloat16"}, {DType::other, "other"}}};
constexpr NameTable<AccuracyClass, 6> accuracy_names{{{AccuracyClass::ieee, "ieee"},
                                                      {AccuracyClass::fp32, "fp32"},
                                                      {AccuracyClass::tf32, "tf32"},
                                                      {AccuracyClass::fp16, "fp16"},
                                                      {AccuracyClass::bf16, "bf16"},
                                                      {AccuracyClass::other, "other"}}};
constexpr NameTable<Layout, 2> layout_names{{{Layout::nchw, "nchw"}, {Layout::nhwc, "nhwc"}}};
constexpr NameTable<Shuffle, 3> shuffle_names{
    {{Shuffle::none, "none"}, {Shuffle::pixels, "pixels"}, {Shuffle::windows, "windows"}}};
constexpr NameTable<Activation, 9> activation_names{{{Activation::none, "none"},
                                                     {Activation::relu, "relu"},
                                                     {Activation::relu6, "relu6"},
                                                     {Activation::silu, "silu"},
                                                     {Activation::leaky_relu, "leaky_relu"},
                                                     {Activation::gelu, "gelu"},
                                                     {Activation::gelu_tanh, "gelu_tanh"},
                                                     {Activation::hardswish, "hardswish"},
                                                     {Activation::sigmoid, "sigmoid"}}};

template <typename Table, typename Enum>
const char* find_name(const Table& table, Enum value) {
  for (const auto& [entry, name] : table) {
    if (entry == value) return name;
  }
  return "?";
}

template <typename Table>
auto find_value(const Table& table, const char* argument, const std::string& name) {
  std::string expected;
  for (const auto& [entry, entry_name] : table) {
    if (name == entry_name) return entry;
    expected += (expected.empty() ? "" : ", ") + std::string(entry_name);
  }
  throw InvalidArgument(std::string(argument) + " is '" + name + "'; expected one of " + expected);
}

}  // namespace

const char* name_of(DType dtype) { return find_name(dtype_names, dtype); }
const char* name_of(AccuracyClass accuracy) { return find_name(accuracy_names, accuracy); }
const char* name_of(Layout layout) { return find_name(layout_names, layout); }
const char* name_of(Activation activation) { return find_name(activation_names, activation); }
const char* name_of(Shuffle shuffle) { return find_name(shuffle_names, shuffle); }

DType dtype_from_name(const std::string& name) { return find_value(dtype_names, "dtype", name); }
AccuracyClass accuracy_from_name(const std::string& name) { return find_value(accuracy_names, "precision", name); }
Layout layout_from_name(const std::string& name) { return find_value(layout_names, "layout", name); }
Shuffle shuffle_from_name(const std::string& name) { return find_value(shuffle_names, "shuffle", name); }
Activation activation_from_name(const std::string& name) { return find_value(activation_names, "activation", name); }

std::string to_string(const ConvProblem& problem) {
  char text[256];
  std::snprintf(text, sizeof text,
                "N%lld C%lld H%lld W%lld K%lld R%lld S%lld stride %lldx%lld padding %lldx%lld dilation %lldx%lld "
                "groups %lld %s %s %s",
                static_cast<long long>(problem.n), static_cast<long long>(problem.c), static_cast<long long>(problem.h),
                static_cast<long long>(problem.w), static_cast<long long>(problem.k), static_cast<long long>(problem.r),
                static_cast<long long>(problem.s), static_cast<long long>(problem.stride_h),
                static_cast<long long>(problem.stride_w), static_cast<long long>(problem.pad_h),
                static_cast<long long>(problem.pad_w), static_cast<long long>(problem.dilation_h),
                static_cast<long long>(problem.dilation_w), static_cast<long long>(problem.groups),
                name_of(problem.layout), name_of(problem.dtype), name_of(problem.accuracy));
  std::string whole = text;
  if (problem.x_channels != 0) whole += text_of(" of ", problem.x_channels, " channels");
  if (problem.y_channels != 0) whole += text_of(" into ", problem.y_channels, " channels");
  if (problem.input_affine) whole += std::string(" affine input, ") + name_of(problem.input_activation) + ";";
  if (problem.residual == Residual::before) whole += " + residual";
  if (problem.activation != Activation::none) whole += std::string(" + ") + name_of(problem.activation);
  if (problem.residual == Residual::after) whole += " + residual";
  if (problem.max_pool) whole += " + max_pool";
  if (problem.shuffles()) whole += std::string(" + shuffle of ") + name_of(problem.shuffle);
  if (problem.packs) whole += " packed in the call";
  if (problem.limits.max_error > 0.0) {
    std::snprintf(text, sizeof text, " max_error %.6g", problem.limits.max_error);
    whole += text;
  }
  if (problem.limits.max_workspace >= 0) whole += text_of(" max_workspace ", problem.limits.max_workspace);
  return whole;
}

}  // namespace fastconv
