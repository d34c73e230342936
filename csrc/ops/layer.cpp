#include "ops/layer.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "core/names.h"
#include "ops/arguments.h"
#include "ops/aten.h"
#include "ops/convolution.h"
#include "ops/kernel_table.h"
#include "ops/transposed.h"
#include "plan/gradients.h"

namespace fastconv::ops {

CallMode::CallMode(std::int64_t mode)
    : frozen((mode & frozen_bit) != 0),
      trained((mode & trained_bit) != 0),
      once(trained),
      admits_torch((mode & torch_bit) != 0),
      measured((mode & measured_bit) != 0) {
  constexpr std::array classes{AccuracyClass::ieee, AccuracyClass::fp32, AccuracyClass::tf32};
  accuracy = classes.at(static_cast<std::size_t>(mode & 3));
}

bool Layer::Packed::fits(const Tensor& weight) const {
  return is_alike(weight, snapshot) &&
         has_shape(weight, snapshot.size(0), snapshot.size(1), snapshot.size(2), snapshot.size(3));
}

bool Layer::Packed::admits(void* stream) {
  const std::lock_guard lock(refreshing);
  return std::ranges::find(streams, stream) != streams.end();
}

bool Layer::Packed::hold(const Tensor& weight, bool capturing, Hold& held) {
  held.shared = std::shared_lock(in_use);
  if (owner == weight.const_data_ptr()) return true;
  held.shared.unlock();
  held.alone = std::unique_lock(in_use, std::try_to_lock);
  if (!held.alone.owns_lock()) return false;
  const std::lock_guard lock(refreshing);
  if (owner != nullptr && (streams.size() > 1 || in_graph || capturing)) {
    held.alone.unlock();  // nobody has to wait for a call that packs for itself
    return false;
  }
  owner = weight.const_data_ptr();
  forget_verified();
  return true;
}

void Layer::Packed::forget_verified() {
  verified.reset();
  verified_on.clear();
}

bool Layer::Packed::is_verified(const Tensor& weight) const {
  if (!verified || weight.const_data_ptr() != verified->const_data_ptr()) return false;
  for (std::int64_t d = 0; d < 4; ++d) {
    if (weight.stride(d) != verified->stride(d)) return false;
  }
  return true;
}

std::shared_ptr<Layer::Packed> Layer::find(const Algorithm& algorithm, AccuracyClass accuracy, const Tensor& weight) {
  const std::lock_guard lock(mutex_);
  for (const std::shared_ptr<Packed>& entry : packed_) {
    if (entry->algorithm == &algorithm && entry->accuracy == accuracy && entry->fits(weight)) return entry;
  }
  return nullptr;
}

namespace {

// Whether what `fastconv.tune` measures is such a call, and now is a time to measure.
bool is_measurable(const ConvProblem& problem, const Tensor& input) {
  if (problem.x_channels != 0 || problem.y_channels != 0 || problem.input_affine) return false;
  const auto guard = device_guard(input);
  return !make_runtime(device_of(input))->is_capturing();
}

}  // namespace

std::optional<Tensor> Layer::forward(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                                     const std::optional<Tensor>& residual, const CallMode& mode, CallStatus& status,
                                     const Around& around) {
  status = CallStatus::general;
  if (settings_.transposed) return forward_transposed(input, weight, bias, mode, status);
  std::optional<ConvProblem> problem = problem_of(settings_.problem, input, weight, bias, residual, mode.accuracy);
  if (!problem || !set_around(*problem, around, residual, input).empty()) return std::nullopt;
  if (problem->layout == Layout::nhwc) problem->x_channels = channels_around(input);
  problem->packs = mode.trained;
  const DeviceInfo& device = device_of(input);
  const auto choice = choose_cached<choose>(settings_.algorithm, *problem, device);
  if (mode.measured && choice->unsure && is_measurable(*problem, input)) {
    status = CallStatus::measure;
    return std::nullopt;
  }
  const Algorithm& algorithm = *choice->algorithm;
  if (problem->input_affine && (choice->plan.norms_apart || !is_own(algorithm))) {
    status = CallStatus::norm;
    return std::nullopt;
  }
  remember(choice, problem->accuracy);
  last_ = {&algorithm, sizes_of(input), problem->layout, problem->dtype, problem->accuracy};
  if (!is_own(algorithm)) {
    status = problem->layout == Layout::nhwc ? CallStatus::torch_channels_last : CallStatus::torch;
    const bool is_bare = !residual && problem->activation == Activation::none && !problem->max_pool && !around.out;
    if (!mode.admits_torch || !is_bare) return std::nullopt;
    status = CallStatus::ran;
    return in_layout(aten_convolution(input, weight, bias, *problem), problem->layout);
  }
  const auto guard = device_guard(input);
  const std::unique_ptr<Runtime> runtime = make_runtime(device);
  std::shared_ptr<Packed> entry;
  Packed::Hold held;  // until all that reads the packed weight has been launched
  if (mode.once) {
    forget_verified();
  } else if (find_kernels(algorithm, device.type).pack != nullptr) {
    entry = find(algorithm, problem->accuracy, weight);
    const bool capturing = runtime->is_capturing();
    // During a capture nothing is kept: the packed weight would be empty until the first replay and lie in the graph's
    // memory, so the call packs its own.
    if (entry == nullptr && !capturing) {
      status = CallStatus::pack;
      return std::nullopt;
    }
    void* const stream = runtime->stream();
    if (entry != nullptr && !entry->admits(stream)) {
      status = CallStatus::stream;
      return std::nullopt;
    }
    if (entry != nullptr && !entry->hold(weight, capturing, held)) entry = nullptr;
    if (entry != nullptr) {
      const std::lock_guard lock(entry->refreshing);
      entry->in_graph |= capturing;
      const bool is_known = mode.frozen && entry->is_verified(weight);
      if (!is_known || std::ranges::find(entry->verified_on, stream) == entry->verified_on.end()) {
        pack(algorithm, *problem, in_layout(weight, layout_of(entry->snapshot)), entry->packed.mutable_data_ptr(),
             entry->snapshot.mutable_data_ptr(), *runtime);
        if (!is_known) entry->forget_verified();
        if (mode.frozen && !capturing) {  // what a capture records has not happened yet
          // Not the tensor itself, which `weight.data = ...` would change.
          if (!is_known) entry->verified = call_dispatcher("aten::detach", "", weight);
          entry->verified_on.push_back(stream);
        }
      }
    }
  }
  status = CallStatus::ran;
  return run_own(input, entry ? nullptr : &weight, entry ? &entry->packed : nullptr, *choice, *problem, bias, residual,
                 *runtime, around);
}

bool Layer::is_left_to_torch(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                             const CallMode& mode, bool wants_input_gradient) const {
  if (settings_.problem.activation != Activation::none || settings_.problem.max_pool) return false;
  const auto problem =
      settings_.transposed
          ? transposed_problem(settings_.problem, *settings_.transposed, input, weight, bias, mode.accuracy)
          : problem_of(settings_.problem, input, weight, bias, std::nullopt, mode.accuracy);
  if (!problem || !mode.admits_torch) return false;
  // PyTorch's gradients follow its switch as it is when they are computed: by then they could be of a lower class.
  if (input.is_cuda() && problem->dtype == DType::f32 && problem->accuracy != AccuracyClass::tf32) return false;
  // The gradient of a transposed layer's input is the convolution.
  const Pass of_input = settings_.transposed ? Pass::forward : Pass::backward_input;
  const auto without = wants_input_gradient ? std::nullopt : std::optional(of_input);
  return fastconv::is_left_to_torch(settings_.algorithm, *problem, device_of(input), without);
}

std::optional<Tensor> Layer::forward_transposed(const Tensor& input, const Tensor& weight,
                                                const std::optional<Tensor>& bias, const CallMode& mode,
                                                CallStatus& status) {
  const std::optional<ConvProblem> problem =
      transposed_problem(settings_.problem, *settings_.transposed, input, weight, bias, mode.accuracy);
  if (!problem) return std::nullopt;
  const auto choice = choose_cached<choose_input_gradient>(settings_.algorithm, *problem, device_of(input));
  std::optional<Tensor> y;
  if (choice->method != InputGradientMethod::torch) {
    y = input_gradient_by_convolutions(choice->method, algorithm_of(*choice, settings_.algorithm), *problem, input,
                                       weight, bias, mode.admits_torch);
  } else if (mode.admits_torch && may_be_torch(settings_.algorithm)) {
    remember_torch(problem->accuracy);
    y = in_layout(aten_convolution(input, weight, bias, *problem, settings_.transposed), problem->layout);
  } else {
    return std::nullopt;
  }
  last_ = {remembered_algorithm(), sizes_of(input), problem->layout, problem->dtype, problem->accuracy};
  status = CallStatus::ran;
  return y;
}

void Layer::adopt(const Tensor& packed, const Tensor& snapshot, const std::string& algorithm, AccuracyClass accuracy) {
  const auto guard = device_guard(packed);
  const std::unique_ptr<Runtime> runtime = make_runtime(device_of(packed));
  auto entry = std::make_shared<Packed>(&find_algorithm(algorithm), effective_accuracy(dtype_of(snapshot), accuracy),
                                        packed, snapshot, std::vector<void*>{runtime->stream()});
  const std::lock_guard lock(mutex_);
  std::erase_if(packed_, [&](const std::shared_ptr<Packed>& other) {
    const bool replaced =
        !other->fits(snapshot) || (other->algorithm == entry->algorithm && other->accuracy == entry->accuracy);
    if (replaced && other->in_graph) held_by_graphs_.push_back(other);
    return replaced;
  });
  packed_.push_back(std::move(entry));
}

void Layer::refresh(const Tensor& weight) {
  const std::lock_guard lock(mutex_);
  const auto guard = device_guard(weight);
  const std::unique_ptr<Runtime> runtime = make_runtime(device_of(weight));
  std::vector<std::shared_ptr<Packed>> entries = packed_;
  entries.insert(entries.end(), held_by_graphs_.begin(), held_by_graphs_.end());
  for (const std::shared_ptr<Packed>& entry : entries) {
    if (!entry->fits(weight)) continue;
    ConvProblem problem = settings_.problem;
    problem.k = weight.size(0), problem.c = weight.size(1) * problem.groups;
    problem.n = 1, problem.h = problem.r = weight.size(2), problem.w = problem.s = weight.size(3);
    problem.dtype = dtype_of(weight), problem.accuracy = entry->accuracy;
    // Without waiting for those who read it, of whom there may always be some: whoever changes a weight has done so.
    const std::lock_guard refreshing(entry->refreshing);
    entry->owner = weight.const_data_ptr();
    entry->forget_verified();
    pack(*entry->algorithm, problem, in_layout(weight, layout_of(entry->snapshot)), entry->packed.mutable_data_ptr(),
         entry->snapshot.mutable_data_ptr(), *runtime);
  }
}

bool Layer::forget() {
  const std::lock_guard lock(mutex_);
  for (std::shared_ptr<Packed>& entry : packed_) {
    if (entry->in_graph) held_by_graphs_.push_back(std::move(entry));
  }
  packed_.clear();
  return !held_by_graphs_.empty();
}

void Layer::forget_verified() {
  const std::lock_guard lock(mutex_);
  for (const std::shared_ptr<Packed>& entry : packed_) {
    const std::lock_guard refreshing(entry->refreshing);
    entry->forget_verified();
  }
}

std::size_t Layer::packed_count() {
  const std::lock_guard lock(mutex_);
  return packed_.size();
}

Tensor Layer::packed(std::size_t index, bool snapshot) {
  const std::lock_guard lock(mutex_);
  FASTCONV_REQUIRE(index < packed_.size(), "index is ", index, "; expected below the number of packed weights, ",
                   packed_.size());
  return snapshot ? packed_[index]->snapshot : packed_[index]->packed;
}

void Layer::see_stream() {
  const std::lock_guard lock(mutex_);
  for (const std::shared_ptr<Packed>& entry : packed_) {
    void* const stream = make_runtime(device_of(entry->packed))->stream();
    const std::lock_guard refreshing(entry->refreshing);
    if (std::ranges::find(entry->streams, stream) == entry->streams.end()) entry->streams.push_back(stream);
  }
}

namespace {

// Layers by number. A number is never used twice, so that one that is gone is an error instead of another layer.
class LayerTable {
 public:
  std::int64_t add(std::unique_ptr<Layer> layer) {
    const std::lock_guard lock(mutex_);
    std::size_t index = next_;
    if (free_.empty()) {
      FASTCONV_REQUIRE(next_ < slots_.size(), "more than ", slots_.size(), " layers at once");
      ++next_;
    } else {
      index = free_.back();
      free_.pop_back();
    }
    Slot& slot = slots_[index];
    slot.layer = std::move(layer);
    const std::int64_t number =
        ++generation_ * static_cast<std::int64_t>(slots_.size()) + static_cast<std::int64_t>(index);
    slot.number.store(number, std::memory_order_release);
    return number;
  }

  // No lock needed: the caller keeps the layer alive.
  Layer& at(std::int64_t number) {
    Slot& slot = slots_[static_cast<std::size_t>(number) % slots_.size()];
    FASTCONV_REQUIRE(number > 0 && slot.number.load(std::memory_order_acquire) == number, "layer is ", number,
                     "; expected what layer_new returned");
    return *slot.layer;
  }

  void remove(std::int64_t number) {
    at(number);
    const std::lock_guard lock(mutex_);
    const std::size_t index = static_cast<std::size_t>(number) % slots_.size();
    slots_[index].number.store(0, std::memory_order_release);
    slots_[index].layer.reset();
    free_.push_back(index);
  }

 private:
  struct Slot {
    std::atomic<std::int64_t> number{0};
    std::unique_ptr<Layer> layer;
  };
  std::array<Slot, 1 << 18> slots_;
  std::mutex mutex_;
  std::vector<std::size_t> free_;
  std::size_t next_ = 0;
  std::int64_t generation_ = 0;
};

LayerTable& layers() {
  static LayerTable* const table = new LayerTable;  // never destroyed: threads may outlive static objects
  return *table;
}

}  // namespace

thread_local CallStatus last_status = CallStatus::ran;

Layer& layer_at(std::int64_t number) { return layers().at(number); }

namespace {

std::int64_t layer_new(std::string algorithm, IntList geometry, std::string activation, double negative_slope,
                       std::optional<double> max_error, std::optional<std::int64_t> max_workspace, bool residual_after,
                       bool max_pool, std::optional<IntList> output_padding) {
  FASTCONV_REQUIRE(geometry.size() == 7, "geometry is ", to_text(geometry),
                   "; expected 7 integers: stride, padding, dilation (two each), groups");
  const auto g = geometry.begin();
  ConvProblem problem =
      settings_of({g, g + 2}, {g + 2, g + 4}, {g + 4, g + 6}, g[6], limits_of(max_error, max_workspace));
  problem.activation = activation_from_name(activation);
  problem.negative_slope = static_cast<float>(negative_slope);
  problem.residual = residual_after ? Residual::after : Residual::before;  // of calls that have one
  problem.max_pool = max_pool;
  LayerSettings settings{std::move(algorithm), problem, std::nullopt};
  if (output_padding) settings.transposed = {output_padding->at(0), output_padding->at(1)};
  return layers().add(std::make_unique<Layer>(std::move(settings)));
}

void layer_free(std::int64_t layer) { layers().remove(layer); }

std::optional<Tensor> layer_forward(const Tensor& input, const Tensor& weight, std::optional<Tensor> bias,
                                    std::optional<Tensor> residual, std::int64_t layer, std::int64_t mode) {
  return layer_at(layer).forward(input, weight, bias, residual, CallMode(mode), last_status);
}

// Into `out`, which may be a range of channels, where that is given; of input_activation(input * scale + shift) where
// these are.
std::optional<Tensor> layer_forward_around(const Tensor& input, const Tensor& weight, std::optional<Tensor> bias,
                                           std::optional<Tensor> residual, std::optional<Tensor> out,
                                           std::optional<Tensor> scale, std::optional<Tensor> shift,
                                           std::string input_activation, std::int64_t layer, std::int64_t mode) {
  const Around around{std::move(out), std::move(scale), std::move(shift), std::move(input_activation)};
  return layer_at(layer).forward(input, weight, bias, residual, CallMode(mode), last_status, around);
}

std::int64_t layer_status() { return static_cast<std::int64_t>(last_status); }

void layer_adopt(Tensor packed, Tensor snapshot, std::int64_t layer, std::string algorithm, std::int64_t precision) {
  layer_at(layer).adopt(packed, snapshot, algorithm, CallMode(precision).accuracy);
}

void layer_refresh(const Tensor& weight, std::int64_t layer) { layer_at(layer).refresh(weight); }

bool layer_forget(std::int64_t layer) { return layer_at(layer).forget(); }

std::int64_t layer_packed_count(std::int64_t layer) {
  return static_cast<std::int64_t>(layer_at(layer).packed_count());
}

Tensor layer_packed(std::int64_t layer, std::int64_t index, bool snapshot) {
  return layer_at(layer).packed(static_cast<std::size_t>(index), snapshot);
}

void layer_see_stream(std::int64_t layer) { layer_at(layer).see_stream(); }

bool layer_left_to_torch(const Tensor& input, const Tensor& weight, std::optional<Tensor> bias, std::int64_t layer,
                         std::int64_t mode, bool wants_input_gradient) {
  return layer_at(layer).is_left_to_torch(input, weight, bias, CallMode(mode), wants_input_gradient);
}

// "winograd_f4 nhwc float32 fp32 2 64 14 14", or empty before the first call.
std::string layer_last(std::int64_t number) {
  const Layer::Last& last = layer_at(number).last();
  if (last.algorithm == nullptr) return "";
  std::string text = last.algorithm->name;
  for (const char* name : {name_of(last.layout), name_of(last.dtype), name_of(last.accuracy)}) {
    text.append(" ").append(name);
  }
  for (const std::int64_t size : last.shape) text.append(" ").append(std::to_string(size));
  return text;
}

}  // namespace
}  // namespace fastconv::ops

STABLE_TORCH_LIBRARY_FRAGMENT(fastconv, library) {
  library.def(
      "layer_new(str algorithm, int[] geometry, str activation, float negative_slope, float? max_error, "
      "int? max_workspace=None, bool residual_after=False, bool max_pool=False, int[]? output_padding=None) -> int");
  library.def("layer_free(int layer) -> ()");
  library.def(
      "layer_forward(Tensor input, Tensor weight, Tensor? bias, Tensor? residual, int layer, int mode) -> "
      "Tensor?");
  library.def(
      "layer_forward_around(Tensor input, Tensor weight, Tensor? bias, Tensor? residual, Tensor(a!)? out, "
      "Tensor? scale, Tensor? shift, str input_activation, int layer, int mode) -> Tensor(a!)?");
  library.def(
      "layer_left_to_torch(Tensor input, Tensor weight, Tensor? bias, int layer, int mode, bool wants_input_gradient) "
      "-> "
      "bool");
  library.def("layer_status() -> int");
  library.def("layer_adopt(Tensor packed, Tensor snapshot, int layer, str algorithm, int precision) -> ()");
  library.def("layer_refresh(Tensor weight, int layer) -> ()");
  library.def("layer_forget(int layer) -> bool");
  library.def("layer_packed_count(int layer) -> int");
  library.def("layer_packed(int layer, int index, bool snapshot) -> Tensor");
  library.def("layer_see_stream(int layer) -> ()");
  library.def("layer_last(int layer) -> str");
}

FASTCONV_IMPLEMENT({
  library.impl("layer_forward", TORCH_BOX(&fastconv::ops::layer_forward));
  library.impl("layer_forward_around", TORCH_BOX(&fastconv::ops::layer_forward_around));
  library.impl("layer_left_to_torch", TORCH_BOX(&fastconv::ops::layer_left_to_torch));
  library.impl("layer_adopt", TORCH_BOX(&fastconv::ops::layer_adopt));
  library.impl("layer_refresh", TORCH_BOX(&fastconv::ops::layer_refresh));
})

STABLE_TORCH_LIBRARY_IMPL(fastconv, CompositeExplicitAutograd, library) {
  library.impl("layer_new", TORCH_BOX(&fastconv::ops::layer_new));
  library.impl("layer_free", TORCH_BOX(&fastconv::ops::layer_free));
  library.impl("layer_status", TORCH_BOX(&fastconv::ops::layer_status));
  library.impl("layer_forget", TORCH_BOX(&fastconv::ops::layer_forget));
  library.impl("layer_packed_count", TORCH_BOX(&fastconv::ops::layer_packed_count));
  library.impl("layer_packed", TORCH_BOX(&fastconv::ops::layer_packed));
  library.impl("layer_see_stream", TORCH_BOX(&fastconv::ops::layer_see_stream));
  library.impl("layer_last", TORCH_BOX(&fastconv::ops::layer_last));
}
