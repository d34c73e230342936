// Records of the tasks of a persistent kernel: who ran which one when. One thread writes each time of a task, into a
// row of its own. Without a buffer nothing is read or written but the pointer, a parameter of the kernel.
//
// How a kernel records: its parameters hold a TaskTrace by value;
//   const std::int64_t taken = trace.now();             the worker turns to a task
//   ... waits ...
//   const std::int64_t begin = trace.now();             its waits are over
//   trace.begin(row, {taken, begin, 0, kind, group, index, ticket, worker});
//   ... works, raises its counter ...
//   trace.end(row);                                     any thread that is ordered after begin()
#pragma once

#include <cstdint>

namespace fastconv {

// A row of the tensor that fastconv.trace reads (int64), so eight bytes each. Times: ns of %globaltimer, whose steps
// may be coarse (docs/megakernel.md).
struct TaskRecord {
  std::int64_t taken, begin, end;
  std::int64_t kind, group, index;  // as in plan/task_map.h
  std::int64_t ticket;              // increases with the tasks of a worker
  std::int64_t worker;              // of the block: who does one task at a time
  std::int64_t processor, block;    // filled in by begin()
};
constexpr int task_record_fields = 10;
static_assert(sizeof(TaskRecord) == 8 * task_record_fields);

struct TaskTrace {
  TaskRecord* records;  // [tasks], or null: nothing is recorded

#ifdef __CUDACC__
  __device__ __forceinline__ std::int64_t now() const {
    std::int64_t time = 0;
    if (records != nullptr) asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
    return time;
  }
  __device__ __forceinline__ void begin(int row, TaskRecord record) const {
    if (records == nullptr) return;
    int processor;
    asm volatile("mov.u32 %0, %smid;" : "=r"(processor));
    record.processor = processor;
    record.block = static_cast<int>(blockIdx.x);
    records[row] = record;
  }
  __device__ __forceinline__ void end(int row) const {
    if (records != nullptr) records[row].end = now();
  }
#endif
};

}  // namespace fastconv
