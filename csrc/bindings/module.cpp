// fastconv._C: the planner as a Python module. No torch inside; never on the path of a call.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "core/cost.h"
#include "core/error.h"
#include "core/group_norm.h"
#include "core/integers.h"
#include "core/names.h"
#include "plan/measured.h"
#include "plan/registry.h"
#include "winograd/instruments.h"

namespace py = pybind11;
using namespace fastconv;

void bind_fit(py::module_& module);        // fit.cpp
void bind_gradients(py::module_& module);  // gradients.cpp

namespace {

ConvProblem make_problem(std::int64_t n, std::int64_t c, std::int64_t h, std::int64_t w, std::int64_t k, std::int64_t r,
                         std::int64_t s, std::pair<std::int64_t, std::int64_t> stride,
                         std::pair<std::int64_t, std::int64_t> padding, std::pair<std::int64_t, std::int64_t> dilation,
                         std::int64_t groups, const std::string& dtype, const std::string& precision,
                         const std::string& layout, bool bias, bool residual, const std::string& activation,
                         std::optional<double> max_error, std::optional<std::int64_t> max_workspace,
                         bool residual_after, bool max_pool, const std::optional<std::string>& input_activation,
                         std::int64_t x_channels, std::int64_t y_channels, bool packs, const std::string& shuffle) {
  ConvProblem problem;
  problem.n = n, problem.c = c, problem.h = h, problem.w = w, problem.k = k, problem.r = r, problem.s = s;
  problem.stride_h = stride.first, problem.stride_w = stride.second;
  problem.pad_h = padding.first, problem.pad_w = padding.second;
  problem.dilation_h = dilation.first, problem.dilation_w = dilation.second;
  problem.groups = groups;
  problem.dtype = dtype_from_name(dtype);
  problem.accuracy = effective_accuracy(problem.dtype, accuracy_from_name(precision));
  problem.layout = layout_from_name(layout);
  problem.has_bias = bias;
  problem.activation = activation_from_name(activation);
  problem.residual = residual_of(residual, residual_after, problem.activation);
  problem.max_pool = max_pool;
  problem.x_channels = x_channels, problem.y_channels = y_channels;
  problem.packs = packs;
  problem.shuffle = shuffle_from_name(shuffle);
  const auto require = [](bool condition, const std::string& message) {
    if (!condition) throw InvalidArgument(message);
  };
  const std::string before = input_activation.value_or("none");
  require(before == "none" || before == "relu" || before == "relu6" || before == "silu",
          "input_activation is '" + before + "'; expected none, relu, relu6 or silu");
  problem.input_affine = input_activation.has_value();
  problem.input_activation = activation_from_name(before);
  require(!max_error || *max_error >= 1.0,
          text_of("max_error is ", max_error.value_or(0.0), "; expected a number of at least 1"));
  require(!max_workspace || *max_workspace >= 0,
          text_of("max_workspace is ", max_workspace.value_or(0), "; expected bytes of at least 0"));
  problem.limits = {max_error.value_or(0.0), max_workspace.value_or(-1)};
  const auto pair = [](std::int64_t first, std::int64_t second) { return text_of("(", first, ", ", second, ")"); };
  for (const auto& [name, size] : {std::pair{"n", n}, {"c", c}, {"h", h}, {"w", w}, {"k", k}, {"r", r}, {"s", s}}) {
    require(size >= 0, text_of(name, " is ", size, "; expected a size of at least 0"));
  }
  require(problem.stride_h > 0 && problem.stride_w > 0,
          "stride is " + pair(problem.stride_h, problem.stride_w) + "; expected two positive integers");
  require(problem.pad_h >= 0 && problem.pad_w >= 0,
          "padding is " + pair(problem.pad_h, problem.pad_w) + "; expected two integers of at least 0");
  require(problem.dilation_h > 0 && problem.dilation_w > 0,
          "dilation is " + pair(problem.dilation_h, problem.dilation_w) + "; expected two positive integers");
  require(groups > 0 && c % groups == 0 && k % groups == 0,
          text_of("groups is ", groups, "; expected a positive divisor of C = ", c, " and K = ", k));
  require(h < max_extent && w < max_extent, "the input is " + pair(h, w) + "; expected below 2^62");
  require(problem.pad_h < max_extent / 2 && problem.pad_w < max_extent / 2,
          "padding is " + pair(problem.pad_h, problem.pad_w) + "; expected below 2^61");
  const std::int64_t extent_h = kernel_extent(r, problem.dilation_h), extent_w = kernel_extent(s, problem.dilation_w);
  require(h + 2 * problem.pad_h >= extent_h && w + 2 * problem.pad_w >= extent_w,
          "the padded input is " + pair(h + 2 * problem.pad_h, w + 2 * problem.pad_w) +
              ", smaller than the kernel's extent " + pair(extent_h, extent_w));
  for (const auto& [name, channels, least] :
       {std::tuple{"x_channels", x_channels, c}, std::tuple{"y_channels", y_channels, problem.y_k()}}) {
    require(channels == 0 || (channels >= least && problem.layout == Layout::nhwc),
            text_of(name, " is ", channels, "; expected 0, or at least ", least, " in layout nhwc"));
  }
  require(y_channels == 0 || !max_pool, text_of("y_channels is ", y_channels, "; expected 0 with a max-pool"));
  require(!max_pool || !residual, "max_pool is True; expected no residual beside it");
  require(!problem.shuffles() || (problem.layout == Layout::nhwc && groups == 1 && k % 4 == 0),
          text_of("shuffle is '", shuffle, "' of ", k, " filters in ", groups, " groups in layout ", layout,
                  "; expected a multiple of 4, 1 and nhwc"));
  require(!problem.shuffles() || !(residual || max_pool),
          "shuffle is '" + shuffle + "'; expected no residual and pool");
  require(
      !problem.shifts() || (problem.p() >= 1 && problem.q() >= 1),
      "shuffle is '" + shuffle + "' of an output of " + pair(problem.p(), problem.q()) + "; expected at least (1, 1)");
  require(!max_pool || (problem.p() >= 2 && problem.q() >= 2),
          "max_pool is True of an output of " + pair(problem.p(), problem.q()) + "; expected at least (2, 2)");
  return problem;
}

py::dict describe(const Algorithm& algorithm) {
  // Of 3x3 kernels with 64 channels, on the device where it is largest.
  py::dict accuracy;
  ConvProblem typical;
  typical.n = 1, typical.c = typical.k = 64, typical.h = typical.w = 56, typical.r = typical.s = 3;
  for (DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (AccuracyClass precision : {AccuracyClass::ieee, AccuracyClass::fp32, AccuracyClass::tf32}) {
      typical.dtype = dtype;
      typical.accuracy = effective_accuracy(dtype, precision);
      double largest = 0.0;
      for (const DeviceInfo& device : {cpu_device(1, InstructionSet::avx2), h200_device()}) {
        if (device.type == DeviceType::cuda ? !algorithm.on_cuda : !algorithm.on_cpu) continue;
        if (algorithm.roundoffs(typical, device) <= 0.0) continue;
        largest = std::max(largest, expected_error(algorithm, typical, device));
      }
      if (largest > 0.0) accuracy[name_of(typical.accuracy)] = largest;
    }
  }
  py::list devices;
  if (algorithm.on_cpu) devices.append("cpu");
  if (algorithm.on_cuda) devices.append("cuda");
  py::dict row;
  row["name"] = algorithm.name;
  row["family"] = algorithm.family;
  row["summary"] = algorithm.summary;
  row["source"] = algorithm.source;
  row["devices"] = devices;
  row["accuracy"] = accuracy;
  row["tile"] = py::make_tuple(algorithm.arithmetic.tile_rows, algorithm.arithmetic.tile_columns);
  row["noise_gain"] = algorithm.arithmetic.noise.gain;
  row["noisiest_output"] = algorithm.arithmetic.noise.noisiest_output;
  row["noisiest_pixel"] = algorithm.arithmetic.noise.noisiest_pixel;
  row["exact"] = algorithm.arithmetic.exact;
  return row;
}

py::dict describe(const Candidate& candidate, const ConvProblem& problem, const DeviceInfo& device) {
  py::dict row;
  row["algorithm"] = candidate.algorithm->name;
  row["ok"] = candidate.support.ok;
  row["code"] = candidate.support.code;
  row["reason"] = candidate.support.reason;
  row["expected_error"] = candidate.expected_error;
  row["auto_eligible"] = candidate.auto_eligible;
  row["measured"] = candidate.measured;
  row["unsure"] = candidate.unsure;
  row["config"] = candidate.plan.config;
  row["workspace_bytes"] = candidate.plan.workspace_bytes;
  row["reads_nhwc"] = candidate.plan.reads_nhwc;
  row["pools_apart"] = candidate.plan.pools_apart;
  row["shuffles_apart"] = candidate.plan.shuffles_apart;
  row["norms_apart"] = candidate.plan.norms_apart;
  row["activates_apart"] = candidate.plan.activates_apart;
  row["copies_x"] = candidate.plan.copies_x;
  row["copies_y"] = candidate.plan.copies_y;
  row["cost_us"] = candidate.plan.cost_us;
  row["packing_us"] = candidate.plan.packing_us;
  // 0: it reads the plain weight.
  row["packed_bytes"] = candidate.support.ok ? candidate.algorithm->packed_weight(problem, device).bytes : 0;
  return row;
}

using Pair = std::pair<std::int32_t, std::int32_t>;

TaskMap make_map(std::int64_t tiles, std::int64_t c, std::int64_t k, std::int32_t group_tiles, Pair input, Pair gemm,
                 Pair output, std::optional<Pair> filter, std::int32_t d_ig, std::int32_t d_go, std::int32_t m,
                 bool bounded, std::int64_t points) {
  const Pair filters = filter.value_or(Pair{0, 0});
  const TaskShapes shapes{group_tiles, filters.first, filters.second, input.first,  input.second,
                          gemm.first,  gemm.second,   output.first,   output.second};
  return make_task_map(tiles, c, k, shapes, {d_ig, d_go, m, bounded}, points);
}

py::dict arguments_of(const TaskMap& map) {
  const TaskShapes& s = map.shapes;
  py::dict row;
  row["tiles"] = map.tiles, row["c"] = map.c, row["k"] = map.k, row["group_tiles"] = s.group_tiles;
  row["input"] = Pair{s.input_tiles, s.input_channels}, row["gemm"] = Pair{s.gemm_points, s.gemm_filters};
  row["output"] = Pair{s.output_tiles, s.output_filters};
  row["filter"] = s.filter_filters == 0 ? std::nullopt : std::optional(Pair{s.filter_filters, s.filter_channels});
  row["d_ig"] = map.mapping.d_ig, row["d_go"] = map.mapping.d_go, row["m"] = map.mapping.m;
  row["bounded"] = map.mapping.bounded, row["points"] = map.points;
  return row;
}

// A row of integers per task, in the order of the map.
template <typename Fill>
py::array_t<std::int32_t> table_of(const TaskMap& map, std::vector<py::ssize_t> row_shape, Fill&& fill) {
  const std::vector<Task> tasks = list_tasks(map);
  py::ssize_t width = 1;
  for (py::ssize_t size : row_shape) width *= size;
  row_shape.insert(row_shape.begin(), static_cast<py::ssize_t>(tasks.size()));
  py::array_t<std::int32_t> table(row_shape);
  std::int32_t* row = table.mutable_data();
  for (std::size_t i = 0; i < tasks.size(); ++i, row += width) fill(tasks[i], row);
  return table;
}

template <typename TaskOf>
py::array_t<std::int32_t> sequence_of(std::int32_t count, TaskOf&& task_of) {
  py::array_t<std::int32_t> table(std::vector<py::ssize_t>{count, 3});
  std::int32_t* row = table.mutable_data();
  for (std::int32_t i = 0; i < count; ++i, row += 3) {
    const Task task = task_of(i);
    row[0] = static_cast<std::int32_t>(task.kind), row[1] = task.group, row[2] = task.index;
  }
  return table;
}

template <FastDivide TaskMap::* member>
std::int32_t number(const TaskMap& map) {
  return map.*member;
}

void bind_task_map(py::module_& module) {
  py::class_<TaskMap>(module, "TaskMap")
      .def(py::init(&make_map), py::arg("tiles"), py::arg("c"), py::arg("k"), py::arg("group_tiles"), py::arg("input"),
           py::arg("gemm"), py::arg("output"), py::arg("filter") = py::none(), py::arg("d_ig") = 0, py::arg("d_go") = 0,
           py::arg("m") = 1, py::arg("bounded") = true, py::arg("points") = 36)
      .def_readonly("tiles", &TaskMap::tiles)
      .def_readonly("c", &TaskMap::c)
      .def_readonly("k", &TaskMap::k)
      .def_readonly("groups", &TaskMap::groups)
      .def_readonly("n_f", &TaskMap::n_f)
      .def_property_readonly("s_i", number<&TaskMap::s_i>)
      .def_property_readonly("s_g", number<&TaskMap::s_g>)
      .def_property_readonly("s_o", number<&TaskMap::s_o>)
      .def_readonly("last_s_i", &TaskMap::last_s_i)
      .def_readonly("last_s_o", &TaskMap::last_s_o)
      .def_property_readonly("m", number<&TaskMap::m>)
      .def_readonly("lead", &TaskMap::lead)
      .def_readonly("delay", &TaskMap::delay)
      .def_property_readonly("v_groups", number<&TaskMap::v_groups>)
      .def_property_readonly("m_groups", number<&TaskMap::m_groups>)
      .def("__len__", &TaskMap::size)
      .def("arguments", &arguments_of, "What the map was made from, to make a similar one.")
      .def("targets",
           [](const TaskMap& map) {
             std::vector<std::int32_t> targets;
             for (std::int32_t i = 0; i < map.counters(); ++i) targets.push_back(map.target(i));
             return targets;
           })
      .def("task_at",
           [](const TaskMap& map, std::int32_t position) {
             if (position < 0 || position >= map.size()) {
               throw InvalidArgument(text_of("position is ", position, "; expected 0 to ", map.size() - 1));
             }
             const Task task = map.task_at(position);
             return std::make_tuple(static_cast<std::int32_t>(task.kind), task.group, task.index);
           })
      .def(
          "gemm_tasks",
          [](const TaskMap& map) {
            return sequence_of(map.gemms(), [&map](std::int32_t i) { return map.gemm_task(i); });
          },
          "The GEMM tasks alone, in the order of the map: [tasks, (kind, group, index)].")
      .def(
          "stream_tasks",
          [](const TaskMap& map) {
            return sequence_of(map.streams(), [&map](std::int32_t i) { return map.stream_task(i); });
          },
          "All other tasks, in the order of the map.")
      .def("tasks",
           [](const TaskMap& map) {
             return table_of(map, {3}, [](const Task& task, std::int32_t* row) {
               row[0] = static_cast<std::int32_t>(task.kind), row[1] = task.group, row[2] = task.index;
             });
           })
      .def("waits",
           [](const TaskMap& map) {
             return table_of(map, {3, 2}, [&map](const Task& task, std::int32_t* row) {
               const Signals signals = map.signals(task);
               for (std::int32_t i = 0; i < 3; ++i) {
                 row[2 * i] = i < signals.waits ? signals.wait[i].counter : -1;
                 row[2 * i + 1] = i < signals.waits ? signals.wait[i].value : 0;
               }
             });
           })
      .def("raises",
           [](const TaskMap& map) {
             return table_of(map, {}, [&map](const Task& task, std::int32_t* row) { *row = map.signals(task).raises; });
           })
      .def("extents", [](const TaskMap& map) {
        return table_of(map, {6}, [&map](const Task& task, std::int32_t* row) {
          const Extent extent = map.extent(task);
          row[0] = extent.first_tile, row[1] = extent.tiles, row[2] = extent.first_channel;
          row[3] = extent.channels, row[4] = extent.first_point, row[5] = extent.points;
        });
      });
  module.def(
      "task_map",
      [](const ConvProblem& problem, const DeviceInfo& device) {
        const Candidate candidate = choose("winograd_megakernel", problem, device);
        if (!candidate.plan.kernel_plan) throw InvalidArgument("the problem is empty; expected outputs to compute");
        return task_map_of(candidate.plan);
      },
      py::arg("problem"), py::arg("device"), "The task map with which winograd_megakernel would run.");
  module.def(
      "instrumented_task_map",
      [](const ConvProblem& problem, const DeviceInfo& device, std::optional<std::int32_t> d_ig,
         std::optional<std::int32_t> d_go, std::optional<std::int32_t> m, bool filters) {
        Instruments instruments{.d_ig = d_ig.value_or(-1), .d_go = d_go.value_or(-1), .m = m.value_or(0)};
        if (filters) instruments.filter = &problem;  // any but null: it is not read
        return task_map_of(plan_instrumented_megakernel(problem, device, instruments));
      },
      py::arg("problem"), py::arg("device"), py::arg("d_ig") = py::none(), py::arg("d_go") = py::none(),
      py::arg("m") = py::none(), py::arg("filters") = false,
      "The task map with which fastconv::instrumented_megakernel would run on a CUDA device.");
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "The planner: which algorithms exist, which fit a problem, which one runs.";

  py::enum_<DeviceType>(module, "DeviceType").value("cpu", DeviceType::cpu).value("cuda", DeviceType::cuda);
  py::enum_<InstructionSet>(module, "InstructionSet")
      .value("generic", InstructionSet::generic)
      .value("avx2", InstructionSet::avx2)
      .value("avx512", InstructionSet::avx512);
  py::class_<DeviceInfo>(module, "DeviceInfo")
      .def(py::init<>())
      .def_readwrite("type", &DeviceInfo::type)
      .def_readwrite("index", &DeviceInfo::index)
      .def_property(
          "name", [](const DeviceInfo& device) { return std::string(device.name); }, &set_name)
      .def_readwrite("compute_capability", &DeviceInfo::compute_capability)
      .def_readwrite("instruction_set", &DeviceInfo::instruction_set)
      .def_readwrite("processors", &DeviceInfo::processors)
      .def_readwrite("shared_memory_bytes", &DeviceInfo::shared_memory_bytes)
      .def_readwrite("l2_bytes", &DeviceInfo::l2_bytes)
      .def_readwrite("bandwidth_bytes_per_s", &DeviceInfo::bandwidth_bytes_per_s)
      .def_readwrite("fp32_flops_per_s", &DeviceInfo::fp32_flops_per_s)
      .def_readwrite("fp16_tensor_flops_per_s", &DeviceInfo::fp16_tensor_flops_per_s)
      .def_readwrite("clock_hz", &DeviceInfo::clock_hz)
      .def_readwrite("has_kernels", &DeviceInfo::has_kernels);
  module.def("cpu_device", &cpu_device, py::arg("threads"), py::arg("instruction_set") = InstructionSet::avx512);
  module.def("h200_device", &h200_device);
  module.def("pass_us", &pass_us, py::arg("read_bytes"), py::arg("written_bytes"), py::arg("device"));
  module.def("limit_to_build", &limit_to_build, py::arg("device"), py::arg("architectures"));
  module.def("set_rates", &set_rates, py::arg("device"), py::arg("boost_hz"), py::arg("memory_bytes_per_s"));

  py::class_<ConvProblem>(module, "ConvProblem")
      .def(py::init(&make_problem), py::arg("n"), py::arg("c"), py::arg("h"), py::arg("w"), py::arg("k"), py::arg("r"),
           py::arg("s"), py::arg("stride") = std::pair<std::int64_t, std::int64_t>{1, 1},
           py::arg("padding") = std::pair<std::int64_t, std::int64_t>{0, 0},
           py::arg("dilation") = std::pair<std::int64_t, std::int64_t>{1, 1}, py::arg("groups") = 1,
           py::arg("dtype") = "float32", py::arg("precision") = "fp32", py::arg("layout") = "nchw",
           py::arg("bias") = false, py::arg("residual") = false, py::arg("activation") = "none",
           py::arg("max_error") = py::none(), py::arg("max_workspace") = py::none(), py::arg("residual_after") = false,
           py::arg("max_pool") = false, py::arg("input_activation") = py::none(), py::arg("x_channels") = 0,
           py::arg("y_channels") = 0, py::arg("packs") = false, py::arg("shuffle") = "none")
      .def_readonly("n", &ConvProblem::n)
      .def_readonly("c", &ConvProblem::c)
      .def_readonly("h", &ConvProblem::h)
      .def_readonly("w", &ConvProblem::w)
      .def_readonly("k", &ConvProblem::k)
      .def_readonly("r", &ConvProblem::r)
      .def_readonly("s", &ConvProblem::s)
      .def_readonly("groups", &ConvProblem::groups)
      .def_property_readonly("stride",
                             [](const ConvProblem& problem) { return std::pair(problem.stride_h, problem.stride_w); })
      .def_property_readonly("padding",
                             [](const ConvProblem& problem) { return std::pair(problem.pad_h, problem.pad_w); })
      .def_property_readonly(
          "dilation", [](const ConvProblem& problem) { return std::pair(problem.dilation_h, problem.dilation_w); })
      .def_property_readonly("p", &ConvProblem::p)
      .def_property_readonly("q", &ConvProblem::q)
      .def_readonly("max_pool", &ConvProblem::max_pool)
      .def_property_readonly("has_plain_epilogue", &ConvProblem::has_plain_epilogue)
      .def_property_readonly("direct_flops", &ConvProblem::direct_flops)
      .def_property_readonly("compulsory_bytes", &ConvProblem::compulsory_bytes)
      .def_property_readonly("accuracy", [](const ConvProblem& problem) { return name_of(problem.accuracy); })
      .def("__eq__", [](const ConvProblem& a, const ConvProblem& b) { return a == b; })
      .def("__hash__", [](const ConvProblem& problem) { return hash_value(problem); })
      .def("__repr__", [](const ConvProblem& problem) { return to_string(problem); });

  module.def("algorithms", [] {
    py::list rows;
    for (const Algorithm* algorithm : algorithms()) rows.append(describe(*algorithm));
    return rows;
  });
  module.def(
      "candidates",
      [](const ConvProblem& problem, const DeviceInfo& device) {
        py::list rows;
        for (const Candidate& candidate : candidates(problem, device)) {
          rows.append(describe(candidate, problem, device));
        }
        return rows;
      },
      py::arg("problem"), py::arg("device"), "A row per algorithm: fits or why not, config, workspace, cost.");
  module.def(
      "choose",
      [](const std::string& name, const ConvProblem& problem, const DeviceInfo& device) {
        return describe(choose(name, problem, device), problem, device);
      },
      py::arg("algorithm"), py::arg("problem"), py::arg("device"));
  module.def("error_limit", &error_limit, py::arg("problem"), py::arg("device"),
             "The multiple of PyTorch's own error up to which `auto` goes.");
  module.def(
      "has_group_norm",
      [](std::int64_t n, std::int64_t c, std::int64_t h, std::int64_t w, const std::string& dtype,
         const DeviceInfo& device) {
        GroupNorm norm;
        norm.n = n, norm.c = c, norm.pixels = h * w, norm.dtype = dtype_from_name(dtype);
        return norm.has_kernels(device);
      },
      py::arg("n"), py::arg("c"), py::arg("h"), py::arg("w"), py::arg("dtype"), py::arg("device"),
      "Whether the operator group_norm has kernels for an NHWC input of these sizes.");
  module.def(
      "is_gated", [](const std::string& activation) { return is_gated(activation_from_name(activation)); },
      py::arg("activation"), "Whether kernels on a GPU need ends of their own for it: not all have them.");
  module.def(
      "packed_weight_bytes",
      [](const std::string& name, const ConvProblem& problem, const DeviceInfo& device) {
        const std::size_t bytes = find_algorithm(name).packed_weight(problem, device).bytes;
        const std::size_t plain = problem.k * problem.c_per_group() * problem.r * problem.s * size_of(problem.dtype);
        return bytes != 0 ? bytes : plain;
      },
      py::arg("algorithm"), py::arg("problem"), py::arg("device"));
  module.def("set_measured", &set_measured, py::arg("lines"),
             "Replaces the measured choices: lines \"device\\tpass\\tproblem\\tchoice\".");
  module.def("measured_device", &measured_device, py::arg("device"), "The device as the measured choices name it.");
  bind_task_map(module);
  bind_fit(module);
  bind_gradients(module);
#ifdef FASTCONV_WITH_CUDA
  module.attr("built_with_cuda") = true;
#else
  module.attr("built_with_cuda") = false;
#endif
  module.attr("cuda_architectures") = FASTCONV_CUDA_ARCHITECTURES;
  module.attr("cuda_compiler") = FASTCONV_CUDA_COMPILER;
  module.attr("close_costs") = close_costs;
}
