// From a plan to a launch: what an algorithm's planner has decided, kept for its launchers.
#pragma once

#include <typeinfo>
#include <utility>

namespace fastconv {

// What runs: an algorithm's launchers read it (ConvArgs::kernel_plan) and choose nothing themselves. Each has its own
// type.
struct KernelPlan {
  virtual ~KernelPlan() = default;
};
template <typename Plan>
struct KernelPlanOf final : KernelPlan {
  Plan plan;
  explicit KernelPlanOf(Plan plan) : plan(std::move(plan)) {}
};
// What keep_plan() (core/algorithm.h) was given. Throws std::bad_cast if that was of another type.
template <typename Plan>
const Plan& plan_as(const KernelPlan* kept) {
  const auto* found = dynamic_cast<const KernelPlanOf<Plan>*>(kept);
  if (found == nullptr) throw std::bad_cast();
  return found->plan;
}

}  // namespace fastconv
