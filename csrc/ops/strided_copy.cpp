#include "ops/strided_copy.h"

#include <algorithm>

#include "core/problem.h"
#include "ops/arguments.h"

namespace fastconv::ops {

void copy(const View& target, const View& source, IntList sizes) {
  const auto bytes = static_cast<std::int64_t>(size_of(dtype_of(target.tensor)));
  const std::int64_t count = 16 / bytes;
  const auto is_wide = [&](const View& view) {
    const auto begin = reinterpret_cast<std::uintptr_t>(view.tensor.const_data_ptr());
    return begin % 16 == 0 && view.offset % count == 0 && view.strides.back() == 1 && sizes.back() % count == 0 &&
           std::all_of(view.strides.begin(), view.strides.end() - 1, [&](auto stride) { return stride % count == 0; });
  };
  const bool wide = is_wide(target) && is_wide(source);
  const auto view_of = [&](const View& view) {
    IntList strides = view.strides;
    if (wide) {
      for (std::int64_t& stride : strides) stride /= count;
      strides.back() = 1;
    }
    return torch::stable::from_blob(static_cast<char*>(view.tensor.mutable_data_ptr()) + view.offset * bytes, sizes,
                                    strides, view.tensor.device(),
                                    wide ? ScalarType::ComplexDouble : view.tensor.scalar_type());
  };
  if (wide) sizes.back() /= count;
  Tensor to = view_of(target);
  torch::stable::copy_(to, view_of(source));
}

}  // namespace fastconv::ops
