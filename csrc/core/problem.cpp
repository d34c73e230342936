#include "core/problem.h"

#include <array>
#include <cstdio>
#include <functional>
#include <utility>

#include "core/error.h"
#include "core/integers.h"

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
constexpr NameTable<Activation, 5> activation_names{{{Activation::none, "none"},
                                                     {Activation::relu, "relu"},
                                                     {Activation::relu6, "relu6"},
                                                     {Activation::silu, "silu"},
                                                     {Activation::leaky_relu, "leaky_relu"}}};

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

DType dtype_from_name(const std::string& name) { return find_value(dtype_names, "dtype", name); }
AccuracyClass accuracy_from_name(const std::string& name) { return find_value(accuracy_names, "precision", name); }
Layout layout_from_name(const std::string& name) { return find_value(layout_names, "layout", name); }
Activation activation_from_name(const std::string& name) { return find_value(activation_names, "activation", name); }

ConvProblem without_pool(const ConvProblem& problem) {
  ConvProblem bare = problem;
  bare.max_pool = false;
  return bare;
}

ConvProblem without_affine(const ConvProblem& problem) {
  ConvProblem bare = problem;
  bare.input_affine = false, bare.input_activation = Activation::none;
  return bare;
}

ConvProblem without_ranges(const ConvProblem& problem) {
  ConvProblem bare = problem;
  bare.x_channels = bare.y_channels = 0;
  return bare;
}

std::size_t nhwc_input_bytes(const ConvProblem& problem) {
  if (problem.c == 1 || problem.h * problem.w == 1) return 0;  // dense in both orders
  return align_bytes(static_cast<std::size_t>(problem.n * problem.c * problem.h * problem.w) * size_of(problem.dtype));
}

std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::f32: return 4;
    case DType::f16:
    case DType::bf16: return 2;
    case DType::other: return 0;
  }
  return 0;
}

AccuracyClass effective_accuracy(DType dtype, AccuracyClass precision) {
  switch (dtype) {
    case DType::f32: return precision;
    case DType::f16: return AccuracyClass::fp16;
    case DType::bf16: return AccuracyClass::bf16;
    case DType::other: return AccuracyClass::other;
  }
  return AccuracyClass::other;
}

double ConvProblem::compulsory_bytes() const {
  const double elements = static_cast<double>(n) * c * h * w + static_cast<double>(k) * c_per_group() * r * s +
                          static_cast<double>(y_numel()) * (has_residual() ? 2.0 : 1.0);
  return elements * static_cast<double>(size_of(dtype));
}

std::size_t hash_value(const ConvProblem& problem) {
  std::size_t seed = 0;
  const auto mix = [&seed](std::int64_t value) {
    seed ^= std::hash<std::int64_t>{}(value) + 0x9e3779b97f4a7c15ull + (seed << 6) + (seed >> 2);
  };
  for (std::int64_t value : {problem.n, problem.c, problem.h, problem.w, problem.k, problem.r, problem.s,
                             problem.stride_h, problem.stride_w, problem.pad_h, problem.pad_w, problem.dilation_h,
                             problem.dilation_w, problem.groups, problem.x_channels, problem.y_channels}) {
    mix(value);
  }
  mix(static_cast<std::int64_t>(problem.dtype) | static_cast<std::int64_t>(problem.accuracy) << 8 |
      static_cast<std::int64_t>(problem.layout) << 16 | static_cast<std::int64_t>(problem.activation) << 24 |
      static_cast<std::int64_t>(problem.has_bias) << 32 | static_cast<std::int64_t>(problem.residual) << 33 |
      static_cast<std::int64_t>(problem.max_pool) << 35 | static_cast<std::int64_t>(problem.input_affine) << 36 |
      static_cast<std::int64_t>(problem.input_activation) << 37);
  mix(static_cast<std::int64_t>(std::hash<double>{}(problem.limits.max_error)));
  mix(problem.limits.max_workspace);
  return seed;
}

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
  if (problem.x_channels != 0) whole += " of " + std::to_string(problem.x_channels) + " channels";
  if (problem.y_channels != 0) whole += " into " + std::to_string(problem.y_channels) + " channels";
  if (problem.input_affine) whole += std::string(" affine input, ") + name_of(problem.input_activation) + ";";
  if (problem.residual == Residual::before) whole += " + residual";
  if (problem.activation != Activation::none) whole += std::string(" + ") + name_of(problem.activation);
  if (problem.residual == Residual::after) whole += " + residual";
  if (problem.max_pool) whole += " + max_pool";
  if (problem.limits.max_error > 0.0) {
    std::snprintf(text, sizeof text, " max_error %.6g", problem.limits.max_error);
    whole += text;
  }
  if (problem.limits.max_workspace >= 0) whole += " max_workspace " + std::to_string(problem.limits.max_workspace);
  return whole;
}

}  // namespace fastconv
