#include "plan/measured.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <sstream>
#include <unordered_map>
#include <utility>

#include "core/error.h"
#include "core/names.h"
#include "core/text.h"

namespace fastconv {
namespace {

std::mutex mutex;
std::unordered_map<std::string, std::string> table;  // "device\tpass\tproblem" -> choice
std::atomic<std::uint64_t> generation{0};

constexpr std::array pass_names{"forward", "backward_input", "backward_weight"};

ConvProblem without_epilogue(const ConvProblem& problem) {
  ConvProblem bare = without_ranges(without_affine(without_pool(problem)));
  bare.residual = Residual::none, bare.activation = Activation::none, bare.packs = false;
  return bare;
}

}  // namespace

Pass pass_from_name(const std::string& name) {
  std::string known;
  for (std::size_t i = 0; i < pass_names.size(); ++i) {
    if (name == pass_names[i]) return static_cast<Pass>(i);
    known += (i == 0 ? "" : ", ") + std::string(pass_names[i]);
  }
  throw InvalidArgument("pass is '" + name + "'; expected one of " + known);
}

std::string measured_device(const DeviceInfo& device) {
  if (device.type == DeviceType::cpu) {
    return text_of(device.name, ", ", device.processors, (device.processors == 1 ? " thread" : " threads"));
  }
  return text_of(device.name, ", sm_", device.compute_capability);  // of the kernels, which may be lower
}

void set_measured(const std::string& lines) {
  std::unordered_map<std::string, std::string> replacement;
  std::istringstream stream(lines);
  for (std::string line; std::getline(stream, line);) {
    const std::size_t end = line.rfind('\t');
    if (std::ranges::count(line, '\t') != 3) {
      throw InvalidArgument("a measured choice is '" + line +
                            "'; expected device, pass, problem, choice with tabs between");
    }
    replacement[line.substr(0, end)] = line.substr(end + 1);
  }
  const std::lock_guard lock(mutex);
  table = std::move(replacement);
  ++generation;
}

std::string find_measured(Pass pass, const ConvProblem& problem, const DeviceInfo& device) {
  const std::lock_guard lock(mutex);
  if (table.empty()) return {};
  ConvProblem asked = pass == Pass::forward ? problem : without_epilogue(problem);
  const std::string place = measured_device(device) + '\t' + pass_names[static_cast<std::size_t>(pass)] + '\t';
  // The fastest under another limit, if the caller's own was not measured: it is the fastest of those within both.
  const auto [max_error, max_workspace] = problem.limits;
  for (const Limits& limits : {problem.limits, Limits{max_error}, Limits{0.0, max_workspace}, Limits{}}) {
    asked.limits = limits;
    const auto found = table.find(place + to_string(asked));
    if (found != table.end()) return found->second;
  }
  return {};
}

std::uint64_t measured_generation() { return generation; }

}  // namespace fastconv
