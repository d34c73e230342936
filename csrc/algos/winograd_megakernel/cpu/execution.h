// Runs a task map on threads: a ticket, a counter per group and stage, bounded waits.
#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

#include "core/text.h"
#include "winograd/task_map.h"

namespace fastconv::algos::winograd_megakernel::cpu {

// A wait that has lasted longer than the limit. Names the task and the counter.
struct WaitExpired : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Execution {
 public:
  // `last`: tasks of later kinds are passed over, so that what this one leaves can be looked at (of an unbounded map).
  Execution(const TaskMap& map, std::chrono::milliseconds limit, TaskKind last = TaskKind::output)
      : map_(map),
        limit_(limit),
        last_(last),
        counters_(std::make_unique<std::atomic<std::int32_t>[]>(static_cast<std::size_t>(map.counters()))) {}

  // One worker: body(task) for one task after the other, until none is left. Called by any number of threads, at the
  // same time or in turn. Throws nothing: see rethrow().
  template <typename Body>
  void work(Body&& body) noexcept {
    try {
      while (!failed_.load(std::memory_order_relaxed)) {
        // The ticket, not the thread's number: every lower position has been started by a thread that runs.
        const std::int64_t position = ticket_.fetch_add(1, std::memory_order_relaxed);
        if (position >= map_.size()) return;
        const Task task = map_.task_at(static_cast<std::int32_t>(position));
        if (task.kind > last_) continue;
        const Signals signals = map_.signals(task);
        for (std::int32_t i = 0; i < signals.waits; ++i) {
          if (!wait(signals.wait[i], task)) return;
        }
        body(task);
        // Release: who reads this value, or a later one, sees what the task has written.
        counters_[signals.raises].fetch_add(1, std::memory_order_release);
      }
    } catch (...) {
      const std::lock_guard lock(mutex_);
      if (error_ == nullptr) error_ = std::current_exception();
      failed_.store(true, std::memory_order_relaxed);
    }
  }

  // After all workers: throws the first exception of a task or a wait.
  void rethrow() const {
    if (error_ != nullptr) std::rethrow_exception(error_);
  }

  std::int32_t counter(std::int32_t number) const { return counters_[number].load(std::memory_order_acquire); }

 private:
  // False: another worker has failed.
  bool wait(const Signals::Wait& wait, const Task& task) const {
    if (counter(wait.counter) >= wait.value) return true;
    const auto end = std::chrono::steady_clock::now() + limit_;
    for (int polls = 1; counter(wait.counter) < wait.value; ++polls) {
      if (failed_.load(std::memory_order_relaxed)) return false;
      if (polls % 64 != 0) continue;
      if (std::chrono::steady_clock::now() > end) {
        throw WaitExpired(text_of("winograd_megakernel: a wait has expired: task ", name_of(task.kind), " ", task.index,
                                  " of group ", task.group, " waits for counter ", wait.counter, " to be ", wait.value,
                                  "; it is ", counter(wait.counter)));
      }
      std::this_thread::yield();  // the thread that we wait for may need this core
    }
    return true;
  }

  const TaskMap map_;
  const std::chrono::milliseconds limit_;
  const TaskKind last_;
  alignas(64) std::atomic<std::int64_t> ticket_{0};
  alignas(64) std::unique_ptr<std::atomic<std::int32_t>[]> counters_;
  std::atomic<bool> failed_{false};
  std::mutex mutex_;
  std::exception_ptr error_;
};

}  // namespace fastconv::algos::winograd_megakernel::cpu
