// Runs the task map of winograd_megakernel on std::threads, without torch: built with -fsanitize=thread by
// tests/test_megakernel_threads.py. Exit status 0, or 1 and a line per failure.
//
//   megakernel stages      after each stage of a small convolution, what it left against plain loops in double
//   megakernel stress      many maps, worker counts and delays: bits equal to those of one worker, counters at targets
//   megakernel expire      a parent that takes too long: the wait ends in an exception that names task and counter
//   megakernel race        tasks that write one variable: for the test that the sanitizer is at work
//   megakernel throw       a task that throws: every worker leaves, and the exception arrives
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "algos/winograd_megakernel/cpu/execution.h"
#include "algos/winograd_megakernel/cpu/tasks.h"

namespace fastconv::algos::winograd_megakernel {
void pack_cpu(const PackArgs& args, Runtime& runtime);
}  // namespace fastconv::algos::winograd_megakernel

namespace {

using namespace fastconv;
using namespace fastconv::algos::winograd_megakernel::cpu;
using Floats = std::vector<float>;
using Transform = winograd::Transform<4>;

int failures = 0;
void expect(bool condition, const std::string& what) {
  if (condition) return;
  ++failures;
  std::printf("failed: %s\n", what.c_str());
}

class Threads final : public Runtime {
 public:
  explicit Threads(int workers) : device_(cpu_device(workers, instruction_set_here())) {}
  const DeviceInfo& device() const override { return device_; }
  void* stream() const override { return nullptr; }
  void gemm(const GemmArgs&) override { expect(false, "nobody asks for the library's GEMM"); }
  EndLeft gemm_with_end(const GemmArgs&, const GemmEnd&) override {
    expect(false, "nobody asks for the library's GEMM");
    return EndLeft{};
  }
  void parallel_for(std::int64_t begin, std::int64_t end, std::int64_t, RangeFunction body) const override {
    std::vector<std::thread> threads;
    for (std::int64_t i = begin; i < end; ++i) threads.emplace_back([&body, i] { body(i, i + 1); });
    for (std::thread& thread : threads) thread.join();
  }

 private:
  DeviceInfo device_;
};

Floats random_floats(std::int64_t size, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  Floats values(static_cast<std::size_t>(size));
  for (float& value : values) value = normal(generator);
  return values;
}

// A convolution with everything that a map needs to run it.
struct Case {
  ConvProblem problem;
  TaskMap map;
  Floats x, weight, u, workspace, y;

  Case(std::int64_t c, std::int64_t k, std::int64_t h, std::int64_t w, TaskShapes shapes, Mapping mapping) {
    problem.n = 2, problem.c = c, problem.h = h, problem.w = w, problem.k = k, problem.r = problem.s = 3;
    problem.pad_h = 1, problem.pad_w = 2, problem.layout = Layout::nhwc, problem.accuracy = AccuracyClass::ieee;
    const winograd::TileGrid grid = winograd::tile_grid(tile_outputs, problem);
    map = make_task_map(problem.n * grid.rows * grid.columns, c, k, shapes, mapping);
    x = random_floats(problem.n * c * h * w, 1), weight = random_floats(k * c * 9, 2);
    u.resize(u_bytes(problem) / sizeof(float));
    Threads serial(1);
    algos::winograd_megakernel::pack_cpu({problem, weight.data(), false, u.data(), nullptr}, serial);
  }

  ConvArgs args() {
    return {problem, x.data(), u.data(), nullptr, nullptr, y.data(), workspace.data(), nullptr, problem.layout};
  }

  // Fresh memory, as hostile as that of the operators' debug mode.
  void poison() {
    const std::int64_t elements =
        map.v_groups * v_place(map, padded_channels(problem)) + map.m_groups * m_place(map, padded_filters(problem));
    workspace.assign(static_cast<std::size_t>(elements), NAN);
    y.assign(static_cast<std::size_t>(problem.output_numel()), NAN);
  }

  double input(std::int64_t n, std::int64_t c, std::int64_t h, std::int64_t w) const {
    if (h < 0 || h >= problem.h || w < 0 || w >= problem.w) return 0.0;
    return x[input_strides(problem)(n, c, h, w)];
  }
};

TaskShapes shapes_of(std::int32_t group_tiles, std::int32_t tiles, std::int32_t points) {
  return {group_tiles,
          0,
          0,
          tiles,
          static_cast<std::int32_t>(cpu_channel_block),
          points,
          16,
          tiles,
          static_cast<std::int32_t>(cpu_channel_block)};
}

// out = T in T^T for one of the three one-dimensional transforms, in double.
template <int in, int out, typename Step>
void transform_2d(const double (&source)[in][in], double (&target)[out][out], Step&& step) {
  double half[out][in];
  for (int j = 0; j < in; ++j) {
    double column[in], result[out];
    for (int i = 0; i < in; ++i) column[i] = source[i][j];
    step(column, result);
    for (int i = 0; i < out; ++i) half[i][j] = result[i];
  }
  for (int i = 0; i < out; ++i) step(half[i], target[i]);
}

void compare(const char* stage, double expected, float found, double scale, double& worst) {
  const double error = std::abs(expected - found) / scale;
  if (!(error < 2e-5)) expect(false, std::string(stage) + ": an element is off by " + std::to_string(error));
  worst = std::max(worst, error);
}

// What each stage has left, against double arithmetic.
void check_stage(Case& made, TaskKind last) {
  const ConvProblem& problem = made.problem;
  const winograd::TileGrid grid = winograd::tile_grid(tile_outputs, problem);
  const std::int64_t c_pad = padded_channels(problem), k_pad = padded_filters(problem);
  const ConvArgs args = made.args();
  const Tasks<float> tasks(args, made.map);
  double worst = 0.0;
  for (std::int32_t tile = 0; tile < made.map.tiles; ++tile) {
    const std::int64_t q = tile % grid.columns, p = tile / grid.columns % grid.rows,
                       n = tile / grid.columns / grid.rows;
    const std::int32_t group = tile / made.map.shapes.group_tiles, row = tile % made.map.shapes.group_tiles;
    const std::int64_t rows = made.map.tiles_of(group);
    std::vector<std::array<double, 36>> transformed(static_cast<std::size_t>(problem.c));
    for (std::int64_t c = 0; c < problem.c; ++c) {
      double d[6][6], v[6][6];
      for (int i = 0; i < 6; ++i) {
        for (int j = 0; j < 6; ++j) {
          d[i][j] = made.input(n, c, p * 4 + i - problem.pad_h, q * 4 + j - problem.pad_w);
        }
      }
      transform_2d(d, v, [](const double (&a)[6], double (&b)[6]) { Transform::input(a, b); });
      for (int f = 0; f < 36; ++f) transformed[c][f] = v[f / 6][f % 6];
      for (int f = 0; f < 36 && last == TaskKind::input; ++f) {
        compare("input", v[f / 6][f % 6], tasks.v(group)[(f * rows + row) * c_pad + c], 20.0, worst);
      }
    }
    for (std::int64_t k = 0; k < problem.k && last != TaskKind::input; ++k) {
      double m[6][6] = {}, y[4][4];
      for (std::int64_t c = 0; c < problem.c; ++c) {
        double g[3][3], u[6][6];
        for (int i = 0; i < 9; ++i) g[i / 3][i % 3] = made.weight[(k * problem.c + c) * 9 + i];
        transform_2d(g, u, [](const double (&a)[3], double (&b)[6]) { Transform::filter(a, b); });
        for (int f = 0; f < 36; ++f) m[f / 6][f % 6] += u[f / 6][f % 6] * transformed[c][f];
      }
      const double scale = 20.0 * std::sqrt(static_cast<double>(problem.c));
      for (int f = 0; f < 36 && last == TaskKind::gemm; ++f) {
        compare("gemm", m[f / 6][f % 6], tasks.products(group)[(f * rows + row) * k_pad + k], scale, worst);
      }
      transform_2d(m, y, [](const double (&a)[6], double (&b)[4]) { Transform::output(a, b); });
      for (int i = 0; i < 16 && last == TaskKind::output; ++i) {
        const std::int64_t op = p * 4 + i / 4, oq = q * 4 + i % 4;
        if (op >= problem.p() || oq >= problem.q()) continue;
        compare("output", y[i / 4][i % 4], made.y[output_strides(problem)(n, k, op, oq)], scale, worst);
      }
    }
  }
  expect(worst > 0.0, std::string(name_of(last)) + ": nothing was compared");
}

void stages() {
  for (TaskKind last : {TaskKind::input, TaskKind::gemm, TaskKind::output}) {
    Case made(9, 17, 13, 10, shapes_of(5, 2, 7), {.d_ig = 3, .d_go = 5, .m = 2, .bounded = false});
    made.poison();
    Execution execution(made.map, std::chrono::seconds(60), last);
    const ConvArgs args = made.args();
    const Tasks<float> tasks(args, made.map);
    Threads(3).parallel_for(0, 3, 1, [&](std::int64_t, std::int64_t) { execution.work(tasks); });
    execution.rethrow();
    check_stage(made, last);
    // Nothing after the stage has run.
    const bool untouched = last == TaskKind::output || std::isnan(made.y[0]);
    expect(untouched, std::string(name_of(last)) + ": outputs were written after all");
  }
}

// A delay of some tasks, different in every run: threads overtake one another where they can.
void jitter(unsigned& state) {
  state = state * 1664525u + 1013904223u;
  if (state % 7 == 0) std::this_thread::sleep_for(std::chrono::microseconds(state >> 24));
}

void stress() {
  int runs = 0;
  for (const Mapping& mapping : {Mapping{0, 0, 1, true}, Mapping{4, 9, 2, true}, Mapping{2, 0, 3, false}}) {
    for (std::int32_t group_tiles : {1, 3, 8}) {
      Case made(5, 18, 19, 22, shapes_of(group_tiles, 2, 12), mapping);
      Floats expected;
      for (int workers : {1, 2, 5, 16}) {
        made.poison();
        Execution execution(made.map, std::chrono::seconds(60));
        const ConvArgs args = made.args();
        const Tasks<float> tasks(args, made.map);
        Threads(workers).parallel_for(0, workers, 1, [&](std::int64_t worker, std::int64_t) {
          unsigned state = static_cast<unsigned>(worker) * 2654435761u + static_cast<unsigned>(runs);
          execution.work([&](const Task& task) {
            if (workers > 1) jitter(state);
            tasks(task);
            if (workers > 1) jitter(state);
          });
        });
        execution.rethrow();
        for (std::int32_t i = 0; i < made.map.counters(); ++i) {
          expect(execution.counter(i) == made.map.target(i), "counter " + std::to_string(i) + " missed its target");
        }
        if (workers == 1) {
          expected = made.y;
          if (group_tiles == 3) check_stage(made, TaskKind::output);
        }
        expect(std::memcmp(expected.data(), made.y.data(), expected.size() * sizeof(float)) == 0,
               std::to_string(workers) + " workers gave other bits than one");
        ++runs;
      }
    }
  }
  std::printf("%d runs\n", runs);
}

template <typename Body>
std::string message_of(const TaskMap& map, std::chrono::milliseconds limit, int workers, Body&& body) {
  Execution execution(map, limit);
  Threads(workers).parallel_for(0, workers, 1, [&](std::int64_t, std::int64_t) { execution.work(body); });
  try {
    execution.rethrow();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

void expire() {
  const TaskMap map = make_task_map(8, 4, 4, {4, 0, 0, 2, 4, 36, 4, 4, 4}, {0, 0, 1, false});
  const std::string message = message_of(map, std::chrono::milliseconds(50), 2, [](const Task& task) {
    if (task == Task{TaskKind::input, 0, 1}) std::this_thread::sleep_for(std::chrono::seconds(2));
  });
  expect(message.find("a wait has expired: task gemm 0 of group 0 waits for counter 1 to be 2; it is 1") !=
             std::string::npos,
         "the wait's message is '" + message + "'");
}

void throws() {
  const TaskMap map = make_task_map(64, 4, 4, {4, 0, 0, 2, 4, 6, 4, 2, 4}, {4, 4, 2, true});
  for (int workers : {1, 4}) {
    const std::string message = message_of(map, std::chrono::seconds(60), workers, [](const Task& task) {
      if (task == Task{TaskKind::gemm, 5, 3}) throw std::runtime_error("no memory for task 3");
    });
    expect(message == "no memory for task 3", "the task's message is '" + message + "'");
  }
}

void race() {
  const TaskMap map = make_task_map(64, 4, 4, {4, 0, 0, 2, 4, 6, 4, 2, 4}, {4, 4, 2, true});
  std::int64_t done = 0;
  message_of(map, std::chrono::seconds(60), 4, [&done](const Task&) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    ++done;
  });
  std::printf("%lld\n", static_cast<long long>(done));
}

}  // namespace

int main(int count, char** arguments) {
  const std::string mode = count > 1 ? arguments[1] : "";
  if (mode == "stages") {
    stages();
  } else if (mode == "stress") {
    stress();
  } else if (mode == "expire") {
    expire();
  } else if (mode == "race") {
    race();
  } else if (mode == "throw") {
    throws();
  } else {
    expect(false, "mode '" + mode + "' is unknown");
  }
  return failures == 0 ? 0 : 1;
}
