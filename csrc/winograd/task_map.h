// The task map of a Winograd convolution in one kernel: which piece of work comes at which position, after Jia, Liang,
// Li, Lu, Yan, "Enabling Efficient Fast Convolution Algorithms on GPUs via MegaKernels", IEEE Transactions on
// Computers 2020 (docs/concepts/megakernel.md). Integers only, and constexpr where a kernel needs it: a TaskMap is
// passed to a kernel by value, and no table.
//
// All T tiles are cut into N_G = ceil(T / t) groups of t tiles; the last one may be smaller. Tasks:
//   filter   FTrans   U = G g G^T        N_F of them, all in one group; 0 if U was computed beforehand
//   input    ITrans   V = B^T d B        S_I of a group: (tiles / input_tiles) x (C / input_channels)
//   gemm     GEMM     M = V U^T          S_G of a group: (points / gemm_points) x (K / gemm_filters), each
//                                        with all tiles of the group. Task j of every group uses filter block j of U.
//   output   OTrans   Y = A^T M A        S_O of a group: (tiles / output_tiles) x (K / output_filters)
//
// Workers take positions from one counter, in order, and wait for lower positions alone, so whatever their number one
// of them can go on: the worker of the lowest unfinished task.
#pragma once

#include <cstdint>
#include <vector>

#include "core/fast_divide.h"

namespace fastconv {

constexpr int ticket_stride = 32;  // ints: a ticket has a cache line of its own

enum class TaskKind : std::int32_t { filter, input, gemm, output };
const char* name_of(TaskKind kind);

struct Task {
  TaskKind kind;
  std::int32_t group;  // 0 for filter tasks
  std::int32_t index;  // within its group
  constexpr bool operator==(const Task&) const = default;
};

// What one task of each kind covers. filter_filters == 0: no filter tasks.
struct TaskShapes {
  std::int32_t group_tiles;                      // t
  std::int32_t filter_filters, filter_channels;  // FTrans
  std::int32_t input_tiles, input_channels;      // ITrans
  std::int32_t gemm_points, gemm_filters;        // GEMM
  std::int32_t output_tiles, output_filters;     // OTrans
};

// The paper's parameters: distances from parents to children, in tasks, and the GEMM tasks in a row that share a
// filter block. `bounded`: V and M are rings of just the groups that are under way, instead of whole arrays.
struct Mapping {
  std::int32_t d_ig, d_go, m;
  bool bounded;
};

// What a worker does about counters: waits until each of `wait` is at least its value, runs the task, raises one by 1.
struct Signals {
  struct Wait {
    std::int32_t counter, value;
  };
  std::int32_t waits;
  Wait wait[3];
  std::int32_t raises;
};

// The part of a group that a task covers: tiles of the group x channels (ITrans) or filters (OTrans, GEMM with all
// tiles), and for GEMM the points. FTrans: `tiles` are filters.
struct Extent {
  std::int32_t first_tile, tiles;
  std::int32_t first_channel, channels;
  std::int32_t first_point, points;
};

// Every count is below 2^29 (make_task_map checks), so that sums of a few fit 32 bits.
struct TaskMap {
  TaskShapes shapes;
  Mapping mapping;
  std::int32_t tiles, c, k, points;  // T, C, K, alpha^2
  std::int32_t groups;               // N_G
  std::int32_t n_f;
  FastDivide s_i, s_g, s_o;         // S_*: of a whole group
  std::int32_t last_s_i, last_s_o;  // of the last group; its S_G is that of any other
  FastDivide m;                     // groups of a batch: their GEMM tasks of one filter block stand in a row
  std::int32_t lead;                // ITrans tasks before the first GEMM task's: M S_I + D_IG
  std::int32_t delay;               // batches from GEMM to OTrans: 1 + ceil(D_GO / (M (S_I + S_G)))
  FastDivide v_groups, m_groups;    // groups that the buffers of V and M hold; group g uses place g % v_groups

  // What follows from those, so that nothing but the guess of stream_task() divides.
  std::int32_t last_batch;
  FastDivide last_m;                                                                   // groups of the last batch
  FastDivide batch_gemms;                                                              // M S_G
  FastDivide filter_blocks;                                                            // of GEMM tasks
  FastDivide filter_rows, input_rows, last_input_rows, output_rows, last_output_rows;  // blocks of rows: extent()

  constexpr std::int32_t batches() const { return last_batch + 1; }
  constexpr std::int32_t inputs() const { return (groups - 1) * s_i + last_s_i; }
  constexpr std::int32_t gemms() const { return groups * s_g; }
  constexpr std::int32_t outputs() const { return (groups - 1) * s_o + last_s_o; }
  constexpr std::int32_t size() const { return n_f + inputs() + gemms() + outputs(); }
  constexpr std::int32_t inputs_of(std::int32_t group) const {
    return group == groups - 1 ? last_s_i : std::int32_t{s_i};
  }
  constexpr std::int32_t outputs_of(std::int32_t group) const {
    return group == groups - 1 ? last_s_o : std::int32_t{s_o};
  }
  constexpr std::int32_t tiles_of(std::int32_t group) const {
    return least(shapes.group_tiles, tiles - group * shapes.group_tiles);
  }
  constexpr const FastDivide& groups_of(std::int32_t batch) const { return batch == last_batch ? last_m : m; }

  // The map is a row of slots (batch, block), batch by batch: some ITrans tasks, the M GEMM tasks of the filter block,
  // some OTrans tasks; each kind in the order of its groups. How many tasks of a kind stand before a slot says all:
  // M S_I / S_G ITrans and M S_O / S_G OTrans a slot, spread evenly where that is not an integer.
  constexpr std::int32_t inputs_before(std::int32_t batch, std::int32_t block) const {
    return least(inputs(), lead + batch * m * s_i + m * s_i * block / s_g);
  }
  constexpr std::int32_t gemms_before(std::int32_t batch, std::int32_t block) const {
    return batch >= batches() ? gemms() : batch * m * s_g + block * groups_of(batch);
  }
  constexpr std::int32_t outputs_before(std::int32_t batch, std::int32_t block) const {
    return batch < delay ? 0 : least(outputs(), (batch - delay) * m * s_o + m * s_o * block / s_g);
  }
  constexpr std::int32_t start(std::int32_t batch, std::int32_t block) const {
    return n_f + inputs_before(batch, block) + gemms_before(batch, block) + outputs_before(batch, block);
  }

  constexpr Task input_task(std::int32_t number) const {
    const std::int32_t group = least(number / s_i, groups - 1);
    return {TaskKind::input, group, number - group * s_i};
  }
  constexpr Task output_task(std::int32_t number) const {
    const std::int32_t group = least(number / s_o, groups - 1);
    return {TaskKind::output, group, number - group * s_o};
  }

  // The task at a position, 0 <= position < size(), by two binary searches for its slot: the map without a table.
  constexpr Task task_at(std::int32_t position) const {
    if (position < n_f) return {TaskKind::filter, 0, position};
    if (position < start(0, 0)) return input_task(position - n_f);
    if (const std::int32_t end = start(batches(), 0); position >= end) {
      return output_task(outputs_before(batches(), 0) + position - end);
    }
    const std::int32_t batch =
        last_before(batches(), [this, position](std::int32_t b) { return start(b, 0) <= position; });
    const std::int32_t block =
        last_before(s_g, [this, batch, position](std::int32_t j) { return start(batch, j) <= position; });
    std::int32_t rest = position - start(batch, block);
    const std::int32_t first_input = inputs_before(batch, block);
    const std::int32_t new_inputs = inputs_before(batch, block + 1) - first_input;
    if (rest < new_inputs) return input_task(first_input + rest);
    rest -= new_inputs;
    if (rest < groups_of(batch)) return {TaskKind::gemm, batch * m + rest, block};
    return output_task(outputs_before(batch, block) + rest - groups_of(batch));
  }

  // ---- The map as two sequences, for a kernel whose workers are of two kinds: the GEMM tasks, and all others, each in
  // the order of the map. Each sequence has a ticket of its own.

  constexpr Task gemm_task(std::int32_t number) const {  // 0 <= number < gemms()
    const std::int32_t batch = number / batch_gemms, rest = number - batch * batch_gemms;
    const FastDivide& row = groups_of(batch);
    return {TaskKind::gemm, batch * m + rest % row, rest / row};
  }
  constexpr std::int32_t streams() const { return size() - gemms(); }
  constexpr std::int32_t stream_start(std::int32_t batch, std::int32_t block) const {
    return n_f + inputs_before(batch, block) + outputs_before(batch, block);
  }
  constexpr std::int32_t batch_start(std::int32_t batch) const {  // stream_start(batch, 0), without divisions
    return n_f + least(inputs(), lead + batch * m * s_i) +
           (batch < delay ? 0 : least(outputs(), (batch - delay) * m * s_o));
  }
  constexpr Task stream_task(std::int32_t number) const {  // 0 <= number < streams()
    if (number < n_f) return {TaskKind::filter, 0, number};
    if (number < stream_start(0, 0)) return input_task(number - n_f);
    if (const std::int32_t end = stream_start(batches(), 0); number >= end) {
      return output_task(outputs_before(batches(), 0) + number - end);
    }
    const std::int32_t batch =
        last_before(batches(), [this, number](std::int32_t b) { return batch_start(b) <= number; });
    // A guess, exact but for one where the batch has all the tasks that a batch can have: a search has some 600
    // instructions, and a kernel does this for every ticket.
    const std::int32_t first = batch_start(batch), count = batch_start(batch + 1) - first;
    std::int32_t block = (number - first) * s_g / count;  // below 2^30: make_task_map
    if (stream_start(batch, block) > number) --block;
    if (stream_start(batch, block) > number || (block + 1 < s_g && stream_start(batch, block + 1) <= number)) {
      block = last_before(s_g, [this, batch, number](std::int32_t j) { return stream_start(batch, j) <= number; });
    }
    const std::int32_t rest = number - stream_start(batch, block), first_input = inputs_before(batch, block);
    const std::int32_t new_inputs = inputs_before(batch, block + 1) - first_input;
    if (rest < new_inputs) return input_task(first_input + rest);
    return output_task(outputs_before(batch, block) + rest - new_inputs);
  }

  // Counters start at 0. Number 0: filter tasks done; 1 + 3 g + 0, 1, 2: ITrans, GEMM, OTrans tasks done of group g.
  constexpr std::int32_t counters() const { return 1 + 3 * groups; }
  static constexpr std::int32_t counter_of(TaskKind kind, std::int32_t group) {
    return kind == TaskKind::filter ? 0 : 3 * group + static_cast<std::int32_t>(kind);
  }
  constexpr std::int32_t target(std::int32_t counter) const {
    if (counter == 0) return n_f;
    const std::int32_t group = (counter - 1) / 3, stage = (counter - 1) % 3;
    return stage == 0 ? inputs_of(group) : stage == 1 ? std::int32_t{s_g} : outputs_of(group);
  }
  constexpr Signals signals(const Task& task) const {
    const std::int32_t g = task.group, input = counter_of(TaskKind::input, g), gemm = input + 1, output = input + 2;
    Signals signals{};
    const auto wait = [&signals, this](std::int32_t counter) {
      signals.wait[signals.waits++] = {counter, target(counter)};
    };
    switch (task.kind) {
      case TaskKind::filter: signals.raises = 0; break;
      case TaskKind::input:
        if (g >= v_groups) wait(gemm - 3 * v_groups);  // the place in V is free
        signals.raises = input;
        break;
      case TaskKind::gemm:
        if (n_f > 0) wait(0);
        wait(input);
        if (g >= m_groups) wait(output - 3 * m_groups);  // the place in M is free
        signals.raises = gemm;
        break;
      case TaskKind::output:
        wait(gemm);
        signals.raises = output;
        break;
    }
    return signals;
  }

  // What a task covers. Neighbouring ITrans tasks are neighbouring tiles of the same channels: they share halo rows.
  constexpr Extent extent(const Task& task) const {
    const std::int32_t group_size = tiles_of(task.group);
    const bool last = task.group == groups - 1;
    switch (task.kind) {
      case TaskKind::filter:
        return blocks(task.index, filter_rows, k, shapes.filter_filters, c, shapes.filter_channels, points);
      case TaskKind::input:
        return blocks(task.index, last ? last_input_rows : input_rows, group_size, shapes.input_tiles, c,
                      shapes.input_channels, points);
      case TaskKind::gemm: {
        // Filters fastest: tasks of one group in a row read the same part of V.
        const std::int32_t filter = task.index % filter_blocks * shapes.gemm_filters;
        const std::int32_t point = task.index / filter_blocks * shapes.gemm_points;
        return {0,      group_size,
                filter, least(shapes.gemm_filters, k - filter),
                point,  least(shapes.gemm_points, points - point)};
      }
      case TaskKind::output: break;
    }
    return blocks(task.index, last ? last_output_rows : output_rows, group_size, shapes.output_tiles, k,
                  shapes.output_filters, points);
  }

 private:
  static constexpr std::int32_t least(std::int32_t a, std::int32_t b) { return a < b ? a : b; }
  // The largest i in [0, count) that holds; 0 does, and those that do come first.
  template <typename Holds>
  static constexpr std::int32_t last_before(std::int32_t count, Holds&& holds) {
    std::int32_t low = 0, high = count;
    while (high - low > 1) {
      const std::int32_t middle = low + (high - low) / 2;
      (holds(middle) ? low : high) = middle;
    }
    return low;
  }
  static constexpr Extent blocks(std::int32_t index, const FastDivide& row_blocks, std::int32_t rows,
                                 std::int32_t row_block, std::int32_t columns, std::int32_t column_block,
                                 std::int32_t points) {
    const std::int32_t row = index % row_blocks * row_block, column = index / row_blocks * column_block;
    return {row, least(row_block, rows - row), column, least(column_block, columns - column), 0, points};
  }
};

// Throws InvalidArgument naming the argument, its value and what was expected.
TaskMap make_task_map(std::int64_t tiles, std::int64_t c, std::int64_t k, const TaskShapes& shapes,
                      const Mapping& mapping, std::int64_t points = 36);

// The whole map as a list, written as the paper generates it. The kernels use task_at(), which is the same map.
std::vector<Task> list_tasks(const TaskMap& map);

}  // namespace fastconv
