// The operator behind fastconv.trace, the mapping sweeps and the soak test: winograd_megakernel with another map, grid,
// delays, or records of its tasks. Nothing of it is kept between calls, and no other operator can ask for it.
#include <memory>
#include <optional>
#include <string>

#include "ops/arguments.h"
#include "ops/debug.h"
#include "ops/kernel_table.h"
#include "plan/registry.h"
#include "winograd/instruments.h"
#include "winograd/task_trace.cuh"

namespace fastconv::ops {
namespace {

// input [N, C, H, W] and output [N, K, P, Q], both dense in the layout that channels_last names; packed: of
// pack_weight; weight: contiguous [K, C, 3, 3], if U is to be made by tasks of the kernel in place of it. -1 for d_ig
// and d_go, 0 for m and blocks: as an ordinary call has them. records [tasks, task_record_fields], int64.
void instrumented_megakernel(Tensor input, Tensor packed, std::optional<Tensor> weight, IntList weight_shape,
                             IntList padding, bool channels_last, std::string precision, std::int64_t d_ig,
                             std::int64_t d_go, std::int64_t m, std::int64_t blocks, std::int64_t delay, bool series,
                             Tensor output, std::optional<Tensor> records) {
  const auto narrow = [](std::int64_t value, std::int64_t least, const char* name) {
    constexpr std::int64_t most = (1 << 28) - 1;
    FASTCONV_REQUIRE(value >= least && value <= most, name, " is ", value, "; expected ", least, " to ", most);
    return static_cast<std::int32_t>(value);
  };
  Instruments instruments{.d_ig = narrow(d_ig, -1, "d_ig"),
                          .d_go = narrow(d_go, -1, "d_go"),
                          .m = narrow(m, 0, "m"),
                          .blocks = narrow(blocks, 0, "blocks"),
                          .delay = static_cast<std::uint32_t>(narrow(delay, 0, "delay")),
                          .series = series};
  const std::string name = "winograd_megakernel", none = "none";
  const Arguments arguments{std::nullopt, std::nullopt, {1, 1}, padding, {1, 1}, 1, name, precision, none, 0.0, 0, {}};
  const ConvProblem problem = make_problem(input, weight_shape, channels_last ? Layout::nhwc : Layout::nchw, arguments);
  FASTCONV_REQUIRE(input.is_cuda(), "input is on the CPU; instruments are the CUDA kernel's");
  const IntList expected{problem.n, problem.k, problem.p(), problem.q()};
  FASTCONV_REQUIRE(shape_of(output) == expected && output.scalar_type() == input.scalar_type(), "output has shape ",
                   to_text(shape_of(output)), "; expected ", to_text(expected), " of input's dtype");
  require_same_device(input, packed, "packed"), require_same_device(input, output, "output");
  for (const Tensor& tensor : {input, output}) {
    FASTCONV_REQUIRE(in_layout(tensor, problem.layout).const_data_ptr() == tensor.const_data_ptr(),
                     "input and output are not both dense in ", (channels_last ? "NHWC" : "NCHW"));
  }
  const auto guard = device_guard(input);
  const DeviceInfo& device = device_of(input);
  const Candidate ordinary = choose(name, problem, device);  // throws if it cannot serve the problem
  FASTCONV_REQUIRE(
      packed.numel() == static_cast<std::int64_t>(ordinary.algorithm->packed_weight(problem, device).bytes),
      "packed has ", packed.numel(), " bytes; expected those of pack_weight");
  if (weight) {
    require_same_device(input, *weight, "weight");
    FASTCONV_REQUIRE(
        shape_of(*weight) == weight_shape && weight->is_contiguous() && weight->scalar_type() == input.scalar_type(),
        "weight has shape ", to_text(shape_of(*weight)), "; expected contiguous ", to_text(weight_shape),
        " of input's dtype");
    instruments.filter = weight->const_data_ptr();
  }
  if (problem.output_numel() == 0) return;
  if (records) {
    require_same_device(input, *records, "records");
    const ConvPlan unrecorded = plan_instrumented_megakernel(problem, device, instruments);
    const IntList rows{task_map_of(unrecorded).size(), task_record_fields};
    FASTCONV_REQUIRE(
        shape_of(*records) == rows && records->is_contiguous() && records->scalar_type() == ScalarType::Long,
        "records has shape ", to_text(shape_of(*records)), "; expected contiguous int64 ", to_text(rows));
    instruments.records = records->mutable_data_ptr();
  }
  const ConvPlan plan = with_layout(plan_instrumented_megakernel(problem, device, instruments), problem, device);
  const Tensor x = aligned(input);
  const GuardedBytes workspace(plan.workspace_bytes, input);
  const std::unique_ptr<Runtime> runtime = make_runtime(device);
  const PlannedInput planned = bring_into_layout(plan, problem, x.const_data_ptr(), workspace.data(), *runtime);
  const ConvArgs args{problem,
                      planned.x,
                      packed.const_data_ptr(),
                      nullptr,
                      nullptr,
                      output.mutable_data_ptr(),
                      workspace.data(),
                      plan.kernel_plan.get(),
                      planned.layout};
  find_kernels(*ordinary.algorithm, device.type).run(args, *runtime);
  workspace.check("workspace", name.c_str());
}

}  // namespace
}  // namespace fastconv::ops

STABLE_TORCH_LIBRARY_FRAGMENT(fastconv, library) {
  library.def(
      "instrumented_megakernel(Tensor input, Tensor packed, Tensor? weight, SymInt[] weight_shape, SymInt[] padding, "
      "bool channels_last, str precision, int d_ig, int d_go, int m, int blocks, int delay, bool series, "
      "Tensor(a!) output, Tensor(b!)? records) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(fastconv, CompositeExplicitAutograd, library) {
  library.impl("instrumented_megakernel", TORCH_BOX(&fastconv::ops::instrumented_megakernel));
}
