// Records of the tasks of a persistent kernel: who ran which one when. One thread writes each time of a task, into a
// row of its own. Without a buffer nothing is read or written but the pointer, a parameter of the kernel.
//
// How a kernel records: its parameters hold a TaskTrace by value;
//   trace.take(row);                                               the worker turns to a task
//   ... waits ...
//   trace.begin(row, kind, group, index, ticket, worker);          its waits are over
//   ... works, raises its counter ...
//   trace.end(row);                                                any thread that is ordered after begin()
#pragma once

#include <cstdint>

namespace fastconv {

// A row of the tensor that fastconv.trace reads (int64), so eight bytes each. Times: ns of %globaltimer.
struct TaskRecord {
  std::int64_t taken, begin, end;
  std::int64_t kind, group, index;  // as in winograd/task_map.h
  std::int64_t ticket;              // increases with the tasks of a worker
  std::int64_t worker;              // of the block: who does one task at a time
  std::int64_t processor, block;
};
constexpr int task_record_fields = 10;
static_assert(sizeof(TaskRecord) == 8 * task_record_fields);

struct TaskTrace {
  TaskRecord* records;  // [tasks], or null: nothing is recorded

#ifdef __CUDACC__
  // Nothing is kept in registers from one to the next: kernels have none to spare.
  __device__ __forceinline__ void take(int row) const {
    if (records != nullptr) records[row].taken = time();
  }
  __device__ __forceinline__ void begin(int row, int kind, int group, int index, int ticket, int worker) const {
    if (records == nullptr) return;
    TaskRecord& record = records[row];
    record.begin = time();
    int processor;
    asm volatile("mov.u32 %0, %smid;" : "=r"(processor));
    record.kind = kind, record.group = group, record.index = index;
    record.ticket = ticket, record.worker = worker;
    record.processor = processor, record.block = static_cast<int>(blockIdx.x);
  }
  __device__ __forceinline__ void end(int row) const {
    if (records != nullptr) records[row].end = time();
  }

 private:
  static __device__ __forceinline__ std::int64_t time() {
    std::int64_t time;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time)::"memory");
    return time;
  }
#endif
};

}  // namespace fastconv
