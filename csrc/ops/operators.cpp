// The operators: schemas, argument checks, memory, dispatch to an algorithm. With the rest of csrc/ops the only code
// that knows torch, and it knows it through the stable ABI alone.
#include <array>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "core/error.h"
#include "core/integers.h"
#include "core/names.h"
#include "ops/arguments.h"
#include "ops/aten.h"
#include "ops/compiled_settings.h"
#include "ops/convolution.h"
#include "ops/debug.h"
#include "ops/kernel_table.h"
#include "plan/measured.h"
#include "plan/registry.h"

namespace fastconv::ops {
namespace {

// What the most recent call on this thread ran: fastconv.last_call(). The choice outlives the table it comes from.
struct LastCall {
  std::shared_ptr<const Candidate> choice;
  AccuracyClass accuracy{};
};
thread_local LastCall last;

}  // namespace

void remember(std::shared_ptr<const Candidate> choice, AccuracyClass accuracy) { last = {std::move(choice), accuracy}; }

void remember_torch(AccuracyClass accuracy) {
  static const auto torch = std::make_shared<const Candidate>(Candidate{&find_algorithm("torch"), Support::yes(), {}});
  remember(torch, accuracy);
}

const Algorithm* remembered_algorithm() { return last.choice == nullptr ? nullptr : last.choice->algorithm; }

namespace {

// Chooses, records the choice for last_call(), and runs it.
Tensor run(const Tensor& input, const Tensor* weight, const Tensor* packed, ConvProblem problem,
           const Arguments& arguments, const Around& around = {}) {
  const DeviceInfo& device = device_of(input);
  if (problem.layout == Layout::nhwc) problem.x_channels = channels_around(input);
  problem.packs = weight != nullptr;
  const std::shared_ptr<const Candidate> chosen = choose_cached<choose>(arguments.algorithm, problem, device);
  remember(chosen, problem.accuracy);
  const Candidate& choice = *chosen;
  if (weight != nullptr && (problem.output_numel() == 0 || !is_own(*choice.algorithm))) {
    return run_torch(input, *weight, problem, arguments);
  }
  if (problem.output_numel() == 0) {
    return around.out ? *around.out : GuardedOutput(input, problem).finish(choice.algorithm->name);
  }
  return run_own(input, weight, packed, choice, problem, arguments.bias, arguments.residual, *make_runtime(device),
                 around);
}

Tensor conv2d(const Tensor& input, const Tensor& weight, std::optional<Tensor> bias, std::optional<Tensor> residual,
              IntList stride, IntList padding, IntList dilation, std::int64_t groups, std::string algorithm,
              std::string precision, std::string activation, double negative_slope, std::int64_t backend_flags,
              std::optional<double> max_error, std::optional<std::int64_t> max_workspace, bool residual_after,
              bool max_pool) {
  const Arguments arguments{bias,           residual,       stride,        padding,
                            dilation,       groups,         algorithm,     precision,
                            activation,     negative_slope, backend_flags, limits_of(max_error, max_workspace),
                            residual_after, max_pool};
  const Layout layout = suggests_channels_last(input) || suggests_channels_last(weight) ? Layout::nhwc : Layout::nchw;
  const ConvProblem problem = make_problem(input, shape_of(weight), layout, arguments);
  require_same_kind(input, weight, "weight");
  const auto guard = device_guard(input);
  return run(input, &weight, nullptr, problem, arguments);
}

}  // namespace

Tensor general_convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                           const ConvProblem& p, const std::string& algorithm) {
  return conv2d(input, weight, bias, std::nullopt, {p.stride_h, p.stride_w}, {p.pad_h, p.pad_w},
                {p.dilation_h, p.dilation_w}, p.groups, algorithm, name_of(p.accuracy), "none", 0.0,
                integer_of_python("fastconv::backend_flags"),
                p.limits.max_error > 0.0 ? std::optional(p.limits.max_error) : std::nullopt,
                p.limits.max_workspace >= 0 ? std::optional(p.limits.max_workspace) : std::nullopt, false, false);
}

namespace {

// How one named algorithm packs a weight: depends on the weight's part of a problem alone.
struct Packing {
  const Algorithm* algorithm;
  std::size_t bytes;
};

Packing plan_packing(const std::string& name, const ConvProblem& problem, const DeviceInfo& device) {
  const Algorithm& algorithm = find_algorithm(name);
  FASTCONV_REQUIRE(is_own(algorithm), "algorithm is '", name, "'; it has no packed weight");
  const Candidate candidate = evaluate(algorithm, problem, device);
  if (!candidate.support.ok) {
    const IntList shape{problem.k, problem.c_per_group(), problem.r, problem.s};
    throw Unsupported("algorithm '" + name + "' cannot pack weight " + to_text(shape) + ": " +
                      candidate.support.reason);
  }
  const std::size_t plain = static_cast<std::size_t>(problem.k * problem.c_per_group() * problem.r * problem.s);
  const bool packs = find_kernels(algorithm, device.type).pack != nullptr;
  return {&algorithm, packs ? algorithm.packed_weight(problem, device).bytes : plain * size_of(problem.dtype)};
}

struct WeightProblem {
  ConvProblem problem;
  std::shared_ptr<const Packing> packing;
  PackFunction pack;  // null: the algorithm reads the plain weight
};

WeightProblem weight_problem(DType dtype, const DeviceInfo& device, const IntList& shape, std::int64_t groups,
                             const std::string& algorithm, const std::string& precision) {
  require_weight_shape(shape);
  FASTCONV_REQUIRE(groups > 0 && shape[0] % groups == 0, "groups is ", groups,
                   "; expected a positive divisor of K = ", shape[0]);
  FASTCONV_REQUIRE(algorithm != "auto", "algorithm is 'auto'; pack_weight expects the name of one algorithm");
  ConvProblem problem;
  problem.k = shape[0], problem.c = shape[1] * groups, problem.r = shape[2], problem.s = shape[3];
  problem.n = 1, problem.h = problem.r, problem.w = problem.s;
  problem.groups = groups;
  problem.dtype = dtype;
  problem.accuracy = effective_accuracy(dtype, accuracy_from_name(precision));
  std::shared_ptr<const Packing> packing = choose_cached<plan_packing>(algorithm, problem, device);
  return {problem, packing, find_kernels(*packing->algorithm, device.type).pack};
}

Tensor view_as_weight(const Tensor& packed, const IntList& shape, ScalarType dtype) {
  return torch::stable::from_blob(packed.mutable_data_ptr(), shape,
                                  IntList{shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3], 1},
                                  packed.device(), dtype);
}

// The kernels copy 16 bytes at a time, as a fresh allocation allows and a view into a larger buffer may not.
void require_packed(const Tensor& packed, const Tensor& other) {
  require_same_device(other, packed, "packed weight");
  FASTCONV_REQUIRE(packed.scalar_type() == ScalarType::Byte && packed.is_contiguous() &&
                       reinterpret_cast<std::uintptr_t>(packed.const_data_ptr()) % 16 == 0,
                   "packed weight is not contiguous uint8, aligned to 16 bytes, as pack_weight makes it");
}

// Throws unless `packed` has the size that pack_weight returns for the problem.
void require_packing(const Tensor& packed, const ConvProblem& problem, const DeviceInfo& device,
                     const IntList& weight_shape, const std::string& algorithm, const std::string& precision) {
  const WeightProblem target =
      weight_problem(problem.dtype, device, weight_shape, problem.groups, algorithm, precision);
  FASTCONV_REQUIRE(packed.numel() == static_cast<std::int64_t>(target.packing->bytes), "packed weight has ",
                   packed.numel(), " bytes; expected ", target.packing->bytes, " from pack_weight(..., '", algorithm,
                   "', '", precision, "')");
}

Tensor pack_weight(const Tensor& weight, std::int64_t groups, std::string algorithm, std::string precision) {
  const auto guard = device_guard(weight);
  const DeviceInfo& device = device_of(weight);
  const WeightProblem target = weight_problem(dtype_of(weight), device, shape_of(weight), groups, algorithm, precision);
  const std::int64_t bytes = static_cast<std::int64_t>(target.packing->bytes);
  // Zero-initialised, so that equal weights give equal bytes: a packing kernel may leave gaps.
  Tensor packed = torch::stable::new_zeros(weight, {&bytes, 1}, ScalarType::Byte);
  if (target.pack == nullptr) {
    Tensor view = view_as_weight(packed, shape_of(weight), weight.scalar_type());
    torch::stable::copy_(view, weight);
  } else if (weight.numel() > 0) {
    const std::unique_ptr<Runtime> runtime = make_runtime(device);
    pack(*target.packing->algorithm, target.problem, dense(weight), packed.mutable_data_ptr(), nullptr, *runtime);
  }
  return packed;
}

// Brings `packed` up to date with `weight`, using the snapshot of the weight that it was packed from: decided on the
// device, filter by filter, so that no host-visible sign of a change is needed (there is none for weight.data).
void refresh_packed(Tensor packed, Tensor snapshot, Tensor weight, std::int64_t groups, std::string algorithm,
                    std::string precision) {
  const auto guard = device_guard(weight);
  const DeviceInfo& device = device_of(weight);
  const WeightProblem target = weight_problem(dtype_of(weight), device, shape_of(weight), groups, algorithm, precision);
  FASTCONV_REQUIRE(packed.numel() == static_cast<std::int64_t>(target.packing->bytes), "packed has ", packed.numel(),
                   " bytes; expected ", target.packing->bytes);
  require_packed(packed, weight);
  if (target.pack == nullptr) {
    Tensor view = view_as_weight(packed, shape_of(weight), weight.scalar_type());
    torch::stable::copy_(view, weight);
    return;
  }
  require_same_device(weight, snapshot, "snapshot");
  FASTCONV_REQUIRE(shape_of(snapshot) == shape_of(weight) && (snapshot.is_contiguous() || is_channels_last(snapshot)) &&
                       snapshot.scalar_type() == weight.scalar_type(),
                   "snapshot has shape ", to_text(shape_of(snapshot)),
                   "; expected a contiguous or channels_last tensor like weight, ", to_text(shape_of(weight)));
  if (weight.numel() == 0) return;
  // Otherwise one of two threads that share a layer could see the new snapshot with the old packing.
  static std::mutex refreshing;
  const std::lock_guard lock(refreshing);
  const std::unique_ptr<Runtime> runtime = make_runtime(device);
  pack(*target.packing->algorithm, target.problem, in_layout(weight, layout_of(snapshot)), packed.mutable_data_ptr(),
       snapshot.mutable_data_ptr(), *runtime);
}

Tensor conv2d_packed(const Tensor& input, const Tensor& packed, IntList weight_shape, std::optional<Tensor> bias,
                     std::optional<Tensor> residual, IntList stride, IntList padding, IntList dilation,
                     std::int64_t groups, bool channels_last, std::string algorithm, std::string precision,
                     std::string activation, double negative_slope, bool residual_after, bool max_pool) {
  const Arguments arguments{bias,      residual,   stride,         padding, dilation, groups,         algorithm,
                            precision, activation, negative_slope, 0,       Limits{}, residual_after, max_pool};
  const Layout layout = suggests_channels_last(input) || channels_last ? Layout::nhwc : Layout::nchw;
  const ConvProblem problem = make_problem(input, weight_shape, layout, arguments);
  require_packed(packed, input);
  const auto guard = device_guard(input);
  require_packing(packed, problem, device_of(input), weight_shape, algorithm, precision);
  return run(input, nullptr, &packed, problem, arguments);
}

// What Inductor's code calls in place of the two operators: below autograd, whose formula is Python's, and with few
// arguments. What is no problem, or a mistake, is the operators' to compute, or to say what is wrong with it.
Tensor conv2d_compiled(const Tensor& input, const Tensor& weight, std::optional<Tensor> bias,
                       std::optional<Tensor> residual, std::string settings) {
  const CompiledSettings& s = settings_of_text(settings, 7);
  if (const auto problem = problem_of(s.problem, input, weight, bias, residual, s.accuracy)) {
    const auto guard = device_guard(input);
    return run(input, &weight, nullptr, *problem, s.arguments(bias, residual));
  }
  const auto g = s.sizes.begin();
  return conv2d(input, weight, bias, residual, {g, g + 2}, {g + 2, g + 4}, {g + 4, g + 6}, g[6], s.algorithm,
                s.precision, s.activation, s.negative_slope, s.backend_flags, s.max_error, s.max_workspace,
                s.residual_after, s.max_pool);
}

Tensor conv2d_packed_compiled(const Tensor& input, const Tensor& packed, std::optional<Tensor> bias,
                              std::optional<Tensor> residual, bool channels_last, std::string settings) {
  const CompiledSettings& s = settings_of_text(settings, 11);
  const auto g = s.sizes.begin();
  const Sizes4 weight{g[0], g[1], g[2], g[3]};
  if (const auto problem = problem_of(s.problem, input, weight, channels_last, bias, residual, s.accuracy)) {
    require_packed(packed, input);
    const auto guard = device_guard(input);
    require_packing(packed, *problem, device_of(input), {g, g + 4}, s.algorithm, s.precision);
    return run(input, nullptr, &packed, *problem, s.arguments(bias, residual));
  }
  return conv2d_packed(input, packed, {g, g + 4}, bias, residual, {g + 4, g + 6}, {g + 6, g + 8}, {g + 8, g + 10},
                       g[10], channels_last, s.algorithm, s.precision, s.activation, s.negative_slope, s.residual_after,
                       s.max_pool);
}

void require_shuffle(const ConvProblem& p) {
  if (!p.shuffles()) return;
  const std::string asked = std::string("shuffle is '") + name_of(p.shuffle) + "' of ";
  FASTCONV_REQUIRE(p.layout == Layout::nhwc, asked, "a contiguous input; expected channels_last");
  FASTCONV_REQUIRE(p.groups == 1 && p.k % 4 == 0, asked, p.k, " filters in ", p.groups,
                   " groups; expected a multiple of 4 in one");
  FASTCONV_REQUIRE(!p.has_residual(), asked, "a convolution with a residual; expected none");
  FASTCONV_REQUIRE(p.p() > 0 && p.q() > 0, asked, p.p(), "x", p.q(), " outputs; expected at least one");
}

// conv2d_packed_compiled into `out`, which may be a range of channels of a larger tensor, of an input that is read as
// input_activation(input * scale + shift). shuffle: as ConvProblem has it.
void conv2d_packed_into(Tensor out, const Tensor& input, const Tensor& packed, std::optional<Tensor> bias,
                        std::optional<Tensor> residual, std::optional<Tensor> scale, std::optional<Tensor> shift,
                        IntList geometry, bool channels_last, std::string algorithm, std::string precision,
                        std::string activation, double negative_slope, std::string input_activation,
                        bool residual_after, std::string shuffle) {
  FASTCONV_REQUIRE(geometry.size() == 11, "geometry is ", to_text(geometry), "; expected 11 integers");
  const auto g = geometry.begin();
  const IntList weight_shape{g, g + 4}, stride{g + 4, g + 6}, padding{g + 6, g + 8}, dilation{g + 8, g + 10};
  const Arguments arguments{bias,      residual,   stride,         padding, dilation, g[10],         algorithm,
                            precision, activation, negative_slope, 0,       Limits{}, residual_after};
  const Layout layout = suggests_channels_last(input) || channels_last ? Layout::nhwc : Layout::nchw;
  ConvProblem problem = make_problem(input, weight_shape, layout, arguments);
  problem.shuffle = shuffle_from_name(shuffle);
  require_shuffle(problem);
  require_packed(packed, input);
  const Around around{out, scale, shift, input_activation};
  const std::string mistake = set_around(problem, around, residual, input);
  FASTCONV_REQUIRE(mistake.empty(), mistake);
  const auto guard = device_guard(input);
  require_packing(packed, problem, device_of(input), weight_shape, algorithm, precision);
  run(input, nullptr, &packed, problem, arguments, around);
}

// JSON by hand: four fields, none of which needs escaping. Empty before the first call.
std::string last_call() {
  if (last.choice == nullptr) return "{}";
  return text_of("{\"algorithm\": \"", last.choice->algorithm->name, "\", \"config\": \"", last.choice->plan.config,
                 "\", \"class\": \"", name_of(last.accuracy),
                 "\", \"workspace_bytes\": ", last.choice->plan.workspace_bytes, "}");
}

// Records for last_call() a convolution that Python left to PyTorch.
void record_torch(std::string accuracy) { remember_torch(accuracy_from_name(accuracy)); }

// Does nothing: what PyTorch's dispatcher and the stable ABI take of a call, for the benchmarks of the host's time. The
// arguments of a convolution with a handle, as `layer_forward` has them.
std::optional<Tensor> empty_operator(Tensor, Tensor, std::optional<Tensor>, std::int64_t) { return std::nullopt; }

std::string device_json(std::int64_t index) {
  const DeviceInfo& device = query_device(index < 0 ? DeviceType::cpu : DeviceType::cuda, static_cast<int>(index));
  return text_of("{\"type\": \"", device.type == DeviceType::cuda ? "cuda" : "cpu", "\", \"index\": ", device.index,
                 ", \"name\": \"", device.name, "\", \"compute_capability\": ", device.compute_capability,
                 ", \"instruction_set\": \"", name_of(device.instruction_set),
                 "\", \"processors\": ", device.processors, ", \"shared_memory_bytes\": ", device.shared_memory_bytes,
                 ", \"l2_bytes\": ", device.l2_bytes, ", \"bandwidth_bytes_per_s\": ", device.bandwidth_bytes_per_s,
                 ", \"fp32_flops_per_s\": ", device.fp32_flops_per_s,
                 ", \"fp16_tensor_flops_per_s\": ", device.fp16_tensor_flops_per_s, ", \"clock_hz\": ", device.clock_hz,
                 ", \"has_kernels\": ", (device.has_kernels ? "true" : "false"), "}");
}

void set_measured(std::string lines) { fastconv::set_measured(lines); }

}  // namespace
}  // namespace fastconv::ops

// No keyword-only arguments: torch's autograd and autocast helpers reject them.
STABLE_TORCH_LIBRARY(fastconv, library) {
  library.def("empty_operator(Tensor input, Tensor weight, Tensor? bias, int layer) -> Tensor?");
  library.def(
      "conv2d(Tensor input, Tensor weight, Tensor? bias, Tensor? residual, SymInt[] stride, SymInt[] padding, "
      "SymInt[] dilation, SymInt groups, str algorithm, str precision, str activation, float negative_slope, "
      "int backend_flags, float? max_error=None, int? max_workspace=None, bool residual_after=False, "
      "bool max_pool=False) -> Tensor");
  library.def("pack_weight(Tensor weight, SymInt groups, str algorithm, str precision) -> Tensor");
  library.def(
      "conv2d_packed(Tensor input, Tensor packed, SymInt[] weight_shape, Tensor? bias, Tensor? residual, "
      "SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups, bool channels_last, str algorithm, "
      "str precision, str activation, float negative_slope, bool residual_after=False, bool max_pool=False) -> Tensor");
  library.def("conv2d_compiled(Tensor input, Tensor weight, Tensor? bias, Tensor? residual, str settings) -> Tensor");
  library.def(
      "conv2d_packed_compiled(Tensor input, Tensor packed, Tensor? bias, Tensor? residual, bool channels_last, "
      "str settings) -> Tensor");
  library.def(
      "conv2d_packed_into(Tensor(a!) out, Tensor input, Tensor packed, Tensor? bias, Tensor? residual, Tensor? scale, "
      "Tensor? shift, SymInt[] geometry, bool channels_last, str algorithm, str precision, str activation, "
      "float negative_slope, str input_activation, bool residual_after, str shuffle='none') -> ()");
  library.def(
      "refresh_packed(Tensor(a!) packed, Tensor(b!) snapshot, Tensor weight, SymInt groups, str algorithm, "
      "str precision) -> ()");
  library.def("last_call() -> str");
  library.def("record_torch(str accuracy) -> ()");
  library.def("device_info(int index) -> str");
  library.def("set_debug(bool enabled) -> ()");
  library.def("set_measured(str lines) -> ()");
}

FASTCONV_IMPLEMENT({
  library.impl("conv2d", TORCH_BOX(&fastconv::ops::conv2d));
  library.impl("pack_weight", TORCH_BOX(&fastconv::ops::pack_weight));
  library.impl("conv2d_packed", TORCH_BOX(&fastconv::ops::conv2d_packed));
  library.impl("conv2d_compiled", TORCH_BOX(&fastconv::ops::conv2d_compiled));
  library.impl("conv2d_packed_compiled", TORCH_BOX(&fastconv::ops::conv2d_packed_compiled));
  library.impl("conv2d_packed_into", TORCH_BOX(&fastconv::ops::conv2d_packed_into));
  library.impl("refresh_packed", TORCH_BOX(&fastconv::ops::refresh_packed));
})

STABLE_TORCH_LIBRARY_IMPL(fastconv, CompositeExplicitAutograd, library) {
  library.impl("empty_operator", TORCH_BOX(&fastconv::ops::empty_operator));
  library.impl("last_call", TORCH_BOX(&fastconv::ops::last_call));
  library.impl("record_torch", TORCH_BOX(&fastconv::ops::record_torch));
  library.impl("device_info", TORCH_BOX(&fastconv::ops::device_json));
  library.impl("set_debug", TORCH_BOX(&fastconv::ops::set_debug));
  library.impl("set_measured", TORCH_BOX(&fastconv::ops::set_measured));
}
