#include "ops/compiled_settings.h"

#include <cstdlib>
#include <sstream>
#include <unordered_map>
#include <utility>

#include "core/error.h"
#include "core/names.h"

namespace fastconv::ops {

const CompiledSettings& settings_of_text(const std::string& text, std::size_t count) {
  thread_local std::unordered_map<std::string, CompiledSettings> known;  // as many as the code of models has
  const auto found = known.find(text);
  if (found != known.end() && found->second.sizes.size() == count) return found->second;
  CompiledSettings s;
  std::istringstream in(text);
  std::string slope, max_error, max_workspace, rest;
  in >> s.algorithm >> s.precision >> s.activation >> slope >> s.backend_flags >> s.residual_after >> s.max_pool >>
      max_error >> max_workspace;
  for (std::int64_t size = 0; s.sizes.size() < count && in >> size;) s.sizes.push_back(size);
  FASTCONV_REQUIRE(in && !(in >> rest), "settings are '", text,
                   "'; expected algorithm, precision, activation, negative_slope, backend_flags, residual_after, "
                   "max_pool, max_error, max_workspace and ",
                   count, " sizes");
  s.negative_slope = std::strtod(slope.c_str(), nullptr);  // "inf", too, which streams do not read
  if (max_error != "None") s.max_error = std::stod(max_error);
  if (max_workspace != "None") s.max_workspace = std::stoll(max_workspace);
  const auto g = s.sizes.end() - 7;
  s.problem = settings_of({g, g + 2}, {g + 2, g + 4}, {g + 4, g + 6}, g[6], limits_of(s.max_error, s.max_workspace));
  s.problem.activation = activation_from_name(s.activation);
  s.problem.negative_slope = static_cast<float>(s.negative_slope);
  s.problem.residual = s.residual_after ? Residual::after : Residual::before;  // of calls that have one
  s.problem.max_pool = s.max_pool;
  s.accuracy = accuracy_from_name(s.precision);
  return known.insert_or_assign(text, std::move(s)).first->second;
}

}  // namespace fastconv::ops
