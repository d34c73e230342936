// What a layer keeps between its calls: its settings, and its weight as algorithms read it. A call then passes tensors
// and one number: on small inputs the way to a kernel is most of a call.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <vector>

#include "core/algorithm.h"
#include "core/problem.h"
#include "ops/aten.h"
#include "ops/convolution.h"
#include "ops/stable.h"

namespace fastconv::ops {

// The outcome of a call. All but `ran` return to Python, which does the rest.
enum class CallStatus : std::int64_t {
  ran,
  torch,                // PyTorch's own convolution is the choice, its output contiguous, and there is more than it
  pack,                 // nothing is packed yet: adopt() it, and call again
  stream,               // the packed weight is new to this stream: tell the allocator, see_stream(), and call again
  torch_channels_last,  // the same, with an output in channels_last
  general,              // not for here: a mistake in the arguments, tensors of several dtypes
  norm,                 // what is to run has no affine input: call again with one that is normed
  measure               // costs do not tell what is fastest: measure it, and call again without being asked to
};

// How a layer's call is asked for, beside its tensors: a sum of an AccuracyClass and these.
struct CallMode {
  static constexpr std::int64_t frozen_bit = 4, torch_bit = 8, trained_bit = 16, measured_bit = 32;
  AccuracyClass accuracy;
  bool frozen;        // the weight will not change
  bool trained;       // it will before it is used again: a call packs it, which is a part of its time
  bool once;          // it is packed for this call alone: one that is trained, or cannot be kept yet
  bool admits_torch;  // PyTorch's own convolution computes in that class
  bool measured;      // what costs do not tell is to be measured first

  explicit CallMode(std::int64_t mode);
};

// What every call of a layer shares.
struct LayerSettings {
  std::string algorithm;  // as asked for
  // Stride, padding, dilation, groups, limits, activation and max-pool, and where a call that has a residual adds it.
  ConvProblem problem;
  // Of a transposed convolution, whose geometry is that of the convolution of which it is the input gradient.
  std::optional<OutputPadding> transposed;
  bool operator==(const LayerSettings&) const = default;
};

class Layer {
 public:
  explicit Layer(LayerSettings settings) : settings_(std::move(settings)) {}

  // activation(conv(input [N, C, H, W], weight [K, C/groups, R, S]) + bias [K] + residual [N, K, P, Q]), or the
  // residual behind the activation; no value if the status is not `ran`. The weight is compared with what was packed,
  // on the device; one that is frozen, once.
  // A transposed layer: conv_transpose(input [N, C, H, W], weight [C, K/groups, R, S]) + bias [K].
  // around: what stands beside these (`set_around`); input_activation(input * scale + shift) is read in the input's
  // place.
  std::optional<Tensor> forward(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                                const std::optional<Tensor>& residual, const CallMode& mode, CallStatus& status,
                                const Around& around = {});

  // Whether a call on these that trains the weight is PyTorch's altogether (plan/gradients.h), so that it need not come
  // here: nn.Conv2d's does the same.
  bool is_left_to_torch(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                        const CallMode& mode, bool wants_input_gradient) const;

  const LayerSettings& settings() const { return settings_; }

  // Keeps a packed weight, in place of all for weights of another shape, dtype or device.
  void adopt(const Tensor& packed, const Tensor& snapshot, const std::string& algorithm, AccuracyClass accuracy);

  // Packs all again that `weight` fits, in the same memory, which captured graphs may read.
  void refresh(const Tensor& weight);

  // Forgets the packed weights, save those that a captured CUDA graph reads; returns whether there are such.
  bool forget();

  std::size_t packed_count();
  Tensor packed(std::size_t index, bool snapshot);
  void see_stream();  // the current one may read all that is packed

  // Of the last call: the algorithm that ran or was chosen (null before), and its input.
  struct Last {
    const Algorithm* algorithm = nullptr;
    std::array<std::int64_t, 4> shape{};
    Layout layout = Layout::nchw;  // of the problem
    DType dtype = DType::f32;
    AccuracyClass accuracy = AccuracyClass::fp32;
  };
  const Last& last() const { return last_; }

 private:
  struct Packed {
    const Algorithm* algorithm;
    AccuracyClass accuracy;
    Tensor packed, snapshot;     // snapshot: the plain weight that it was made from
    std::vector<void*> streams;  // that may read it
    bool in_graph = false;
    // Where the weight lies that it is of. Another one's call packs it in its place if nobody else can be reading
    // (`in_use`), or for itself alone.
    std::atomic<const void*> owner = nullptr;
    std::shared_mutex in_use{};  // shared by calls until they have launched what reads it
    // The frozen weight that this was found to belong to, and on which streams. Kept, so that no other can come to lie
    // at its address.
    std::optional<Tensor> verified{};
    std::vector<void*> verified_on{};
    std::mutex refreshing{};  // else another thread could see the new snapshot with the old packing
    // Of a call that reads it.
    struct Hold {
      std::shared_lock<std::shared_mutex> shared;
      std::unique_lock<std::shared_mutex> alone;
    };
    bool fits(const Tensor& weight) const;
    bool admits(void* stream);
    // Whether a call with `weight` may read it, whose it is from then on; else it packs for itself.
    bool hold(const Tensor& weight, bool capturing, Hold& held);
    bool is_verified(const Tensor& weight) const;  // of some streams
    void forget_verified();
  };

  // Of a transposed layer, which keeps no packed weight: its filter is flipped in every call.
  std::optional<Tensor> forward_transposed(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                                           const CallMode& mode, CallStatus& status);

  void forget_verified();  // frozen weights are compared again
  std::shared_ptr<Packed> find(const Algorithm& algorithm, AccuracyClass accuracy, const Tensor& weight);

  const LayerSettings settings_;
  std::mutex mutex_;  // of the lists
  std::vector<std::shared_ptr<Packed>> packed_, held_by_graphs_;
  Last last_;
};

// Throws unless layer_new returned the number and layer_free has not released it.
Layer& layer_at(std::int64_t number);

extern thread_local CallStatus last_status;  // of the latest call on this thread

}  // namespace fastconv::ops
