// Where a problem runs. A plain struct, so that tests can plan for GPUs that are not present.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fastconv {

enum class DeviceType : std::uint8_t { cpu, cuda };

// Of a CPU, as far as kernels differ by it: AVX2 with FMA (x86-64-v3), AVX-512 (x86-64-v4), or neither.
enum class InstructionSet : std::uint8_t { generic, avx2, avx512 };

struct DeviceInfo {
  DeviceType type = DeviceType::cpu;
  int index = -1;
  char name[256] = "cpu";               // see set_name(); as long as cudaDeviceProp has it
  int compute_capability = 0;           // 90 for sm_90; 0 on the CPU
  int processors = 1;                   // multiprocessors, or threads of torch's pool
  std::size_t shared_memory_bytes = 0;  // most that one block may ask for
  std::size_t l2_bytes = 0;
  double bandwidth_bytes_per_s = 20e9;                       // sustained, not the datasheet's
  double fp32_flops_per_s = 50e9;                            // FFMA (or CPU vector) rate, sustained
  double fp16_tensor_flops_per_s = 0.0;                      // tensor-core rate with FP32 accumulation, sustained
  double clock_hz = 0.0;                                     // of the multiprocessors, while tensor cores are at work
  bool has_kernels = true;                                   // false: a CUDA device that fastconv was not built for
  InstructionSet instruction_set = InstructionSet::generic;  // of a CPU
};

// Of a longer one the beginning.
void set_name(DeviceInfo& device, const char* name);

// Reduces a CUDA device to what kernels built for these architectures (FASTCONV_CUDA_ARCHS) can use: without `90a` no
// Hopper kernels, whose bodies are empty in other builds; has_kernels is false if none can be loaded.
void limit_to_build(DeviceInfo& device, const char* architectures);

// What this machine has, detected at run time like the loader's choice among the kernels' versions.
InstructionSet instruction_set_here();
const char* name_of(InstructionSet set);  // "generic", "avx2", "avx512"

// A CPU with so many threads, at the rates of its instruction set in the table of CPUs.
DeviceInfo cpu_device(int threads, InstructionSet set);
// Sets the sustained rates of a CUDA device whose name, compute capability and processors are known: those of its row
// in the table of GPUs, or shares of its peaks at `boost_hz` (of the multiprocessors) and `memory_bytes_per_s`.
void set_rates(DeviceInfo& device, double boost_hz, double memory_bytes_per_s);

// The H200: what the planner's tests and cost models are calibrated on. A constant that was fitted there follows
// another GPU by its share of these.
constexpr double h200_bytes_per_s = 4.3e12;
constexpr int h200_processors = 132;
DeviceInfo h200_device();

}  // namespace fastconv
