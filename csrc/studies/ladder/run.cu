#include "studies/ladder/shared.cuh"

namespace fastconv::studies::ladder {

void run(const ConvProblem& problem, const Rung& rung, const void* x, const void* weight, void* y, void* workspace,
         std::size_t workspace_bytes, Runtime& runtime) {
  const Sizes sizes = sizes_of(problem);
  const auto with_type = [&](auto zero) {
    using T = decltype(zero);
    const auto *input = static_cast<const T*>(x), *filters = static_cast<const T*>(weight);
    if constexpr (std::is_same_v<T, float>) {
      if (rung.form == Form::direct)
        return run_direct(sizes, rung, input, filters, static_cast<T*>(y), stream_of(runtime));
    }
    if (rung.form == Form::direct) throw Unsupported("direct in half; expected float32");
    run_product<T>(sizes, rung, input, filters, static_cast<T*>(y), static_cast<T*>(workspace), workspace_bytes,
                   stream_of(runtime));
  };
  if (problem.dtype == DType::f32) return with_type(float{});
  if (problem.dtype == DType::f16) return with_type(half_t{});
  throw Unsupported("dtype is neither float32 nor float16");
}

}  // namespace fastconv::studies::ladder
