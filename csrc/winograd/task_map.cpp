#include "winograd/task_map.h"

#include <algorithm>
#include <string>

#include "core/error.h"
#include "core/integers.h"
#include "core/text.h"

namespace fastconv {
namespace {

constexpr std::int64_t limit = std::int64_t{1} << 29;

void require(bool condition, const char* name, std::int64_t value, const char* expected) {
  if (!condition) throw InvalidArgument(text_of(name, " is ", value, "; expected ", expected));
}

}  // namespace

const char* name_of(TaskKind kind) {
  constexpr const char* names[] = {"filter", "input", "gemm", "output"};
  return names[static_cast<int>(kind)];
}

TaskMap make_task_map(std::int64_t tiles, std::int64_t c, std::int64_t k, const TaskShapes& shapes,
                      const Mapping& mapping, std::int64_t points) {
  const auto positive = [](const char* name, std::int64_t value) {
    require(value > 0 && value < limit, name, value, "1 to 2^29");
  };
  positive("tiles", tiles), positive("c", c), positive("k", k), positive("points", points);
  positive("group_tiles", shapes.group_tiles);
  positive("input_tiles", shapes.input_tiles), positive("input_channels", shapes.input_channels);
  positive("gemm_points", shapes.gemm_points), positive("gemm_filters", shapes.gemm_filters);
  positive("output_tiles", shapes.output_tiles), positive("output_filters", shapes.output_filters);
  require(shapes.filter_filters >= 0 && (shapes.filter_filters == 0 || shapes.filter_channels > 0), "filter_filters",
          shapes.filter_filters, "0 for no filter tasks, or a positive number of filters and of channels");
  require(mapping.d_ig >= 0, "d_ig", mapping.d_ig, "0 or more tasks");
  require(mapping.d_go >= 0, "d_go", mapping.d_go, "0 or more tasks");
  positive("m", mapping.m);

  const std::int64_t groups = ceil_div(tiles, shapes.group_tiles);
  const auto input_tasks = [&](std::int64_t count) {
    return ceil_div(count, shapes.input_tiles) * ceil_div(c, shapes.input_channels);
  };
  const auto output_tasks = [&](std::int64_t count) {
    return ceil_div(count, shapes.output_tiles) * ceil_div(k, shapes.output_filters);
  };
  const std::int64_t whole = std::min<std::int64_t>(shapes.group_tiles, tiles);
  const std::int64_t last = tiles - (groups - 1) * shapes.group_tiles;
  const std::int64_t n_f =
      shapes.filter_filters == 0 ? 0 : ceil_div(k, shapes.filter_filters) * ceil_div(c, shapes.filter_channels);
  const std::int64_t s_i = input_tasks(whole), s_o = output_tasks(whole);
  const std::int64_t s_g = ceil_div(points, shapes.gemm_points) * ceil_div(k, shapes.gemm_filters);
  const std::int64_t m = std::min<std::int64_t>(mapping.m, groups);
  const std::int64_t most = n_f + (groups + m) * (s_i + s_g + s_o);
  require(most < limit, "the number of tasks", most, "below 2^29; larger tasks or groups make fewer of them");
  require(m * std::max(s_i, s_o) * s_g < limit, "m", mapping.m, "m * S_I * S_G and m * S_O * S_G below 2^29");

  const std::int64_t inputs = (groups - 1) * s_i + input_tasks(last);
  // The first slot's GEMM tasks read all S_I tasks of M groups; D_IG come on top, so that the distance holds from the
  // last parent on.
  const std::int64_t lead = std::min(inputs, m * s_i + mapping.d_ig);
  // GEMM tasks of a batch end with the batch: OTrans of it one batch later, at the earliest, plus the distance.
  const auto batches_of = [&](std::int64_t distance) { return ceil_div(distance, m * (s_i + s_g)); };
  const std::int64_t delay = std::min(ceil_div(groups, m), 1 + batches_of(mapping.d_go));
  // ITrans of group g stand at most (lead - 1) / S_I + M groups ahead of the batch whose GEMM tasks are next, OTrans
  // `delay` batches behind. A place is taken again as far behind its last reader as children behind their parents.
  const std::int64_t v_groups =
      mapping.bounded ? std::min(groups, (lead - 1) / s_i + 1 + m * (1 + batches_of(mapping.d_ig))) : groups;
  const std::int64_t m_groups = mapping.bounded ? std::min(groups, m * (delay + 1 + batches_of(mapping.d_go))) : groups;

  const std::int64_t batches = ceil_div(groups, m);
  const auto narrow = [](std::int64_t value) { return static_cast<std::int32_t>(value); };
  return {.shapes = shapes,
          .mapping = mapping,
          .tiles = narrow(tiles),
          .c = narrow(c),
          .k = narrow(k),
          .points = narrow(points),
          .groups = narrow(groups),
          .n_f = narrow(n_f),
          .s_i = narrow(s_i),
          .s_g = narrow(s_g),
          .s_o = narrow(s_o),
          .last_s_i = narrow(input_tasks(last)),
          .last_s_o = narrow(output_tasks(last)),
          .m = narrow(m),
          .lead = narrow(lead),
          .delay = narrow(delay),
          .v_groups = narrow(v_groups),
          .m_groups = narrow(m_groups),
          .last_batch = narrow(batches - 1),
          .last_m = narrow(groups - (batches - 1) * m),
          .batch_gemms = narrow(m * s_g),
          .filter_blocks = narrow(ceil_div(k, shapes.gemm_filters)),
          .filter_rows = narrow(ceil_div(k, std::max(1, shapes.filter_filters))),
          .input_rows = narrow(ceil_div(whole, shapes.input_tiles)),
          .last_input_rows = narrow(ceil_div(last, shapes.input_tiles)),
          .output_rows = narrow(ceil_div(whole, shapes.output_tiles)),
          .last_output_rows = narrow(ceil_div(last, shapes.output_tiles))};
}

std::vector<Task> list_tasks(const TaskMap& map) {
  std::vector<Task> list;
  list.reserve(static_cast<std::size_t>(map.size()));
  std::int32_t inputs = 0, outputs = 0;  // emitted so far
  const auto emit_inputs = [&](std::int64_t until) {
    while (inputs < std::min<std::int64_t>(until, map.inputs())) list.push_back(map.input_task(inputs++));
  };
  const auto emit_outputs = [&](std::int64_t until) {
    while (outputs < std::min<std::int64_t>(until, map.outputs())) list.push_back(map.output_task(outputs++));
  };
  for (std::int32_t i = 0; i < map.n_f; ++i) list.push_back({TaskKind::filter, 0, i});
  emit_inputs(map.lead);
  const std::int64_t slots = map.s_g;  // of a batch
  // For `delay` batches ITrans and GEMM; then, while ITrans tasks remain, all three; then GEMM and OTrans.
  const std::int64_t batch_inputs = std::int64_t{map.m} * map.s_i, batch_outputs = std::int64_t{map.m} * map.s_o;
  for (std::int32_t batch = 0; batch < map.batches(); ++batch) {
    for (std::int32_t block = 0; block < slots; ++block) {
      emit_inputs(map.lead + batch * batch_inputs + batch_inputs * (block + 1) / slots);
      for (std::int32_t i = 0; i < map.groups_of(batch); ++i) {
        list.push_back({TaskKind::gemm, batch * map.m + i, block});
      }
      if (batch >= map.delay) {
        emit_outputs((batch - map.delay) * batch_outputs + batch_outputs * (block + 1) / slots);
      }
    }
  }
  emit_outputs(map.outputs());
  return list;
}

}  // namespace fastconv
