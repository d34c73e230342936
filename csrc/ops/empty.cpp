// An operator that does nothing: what PyTorch's dispatcher and the stable ABI take of a call, for the benchmarks of the
// host's time. The arguments of a convolution with a handle, as `layer_forward` has them.
#include <optional>

#include "ops/arguments.h"

namespace fastconv::ops {
namespace {

std::optional<Tensor> empty_operator(Tensor, Tensor, std::optional<Tensor>, std::int64_t) { return std::nullopt; }

}  // namespace
}  // namespace fastconv::ops

STABLE_TORCH_LIBRARY_FRAGMENT(fastconv, library) {
  library.def("empty_operator(Tensor input, Tensor weight, Tensor? bias, int layer) -> Tensor?");
}
STABLE_TORCH_LIBRARY_IMPL(fastconv, CompositeExplicitAutograd, library) {
  library.impl("empty_operator", TORCH_BOX(&fastconv::ops::empty_operator));
}
