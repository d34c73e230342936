// cuBLAS and cuBLASLt, of torch: reached so that the library still loads where they are missing (a CPU-only torch), by
// a weak symbol and by dlopen of what is already loaded. The parts of their ABIs that are used (cublas_api.h,
// cublasLt.h) are declared here because the headers need not be installed. Row-major D = A B^T is column-major
// D^T = B A^T to them: the operands change places.
#include "ops/cublas_cuda.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <ranges>
#include <string>
#include <tuple>
#include <vector>

#include "core/error.h"
#include "core/text.h"
#include "ops/relaxed_capture.h"
#include "ops/stable.h"

#pragma weak torch_get_current_cuda_blas_handle

namespace fastconv::ops {
namespace {

void check_cublas(int status, const char* what) {
  if (status != 0) throw DeviceError(text_of(what, ": cuBLAS status ", status));
}

// The one that torch has loaded, never another.
void* loaded_library(std::initializer_list<const char*> names) {
  for (const char* name : names) {
    if (void* library = dlopen(name, RTLD_NOW | RTLD_NOLOAD)) return library;
  }
  throw DeviceError(text_of(*names.begin(), " is not loaded: torch was built without cuBLAS"));
}

template <typename Function>
void find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) throw DeviceError(text_of("cuBLAS lacks ", name, ": 12.0 or later expected"));
}

constexpr int no_transpose = 0, transpose = 1;
constexpr int compute_32f = 68, compute_32f_fast_tf32 = 77;

int compute_type(const GemmArgs& args) { return args.tf32 ? compute_32f_fast_tf32 : compute_32f; }

int element_type(DType dtype) {
  switch (dtype) {
    case DType::f16: return 2;    // CUDA_R_16F
    case DType::bf16: return 14;  // CUDA_R_16BF
    default: return 0;            // CUDA_R_32F
  }
}

struct Cublas {
  int (*gemm_strided_batched)(void* handle, int op_a, int op_b, std::int64_t m, std::int64_t n, std::int64_t k,
                              const void* alpha, const void* a, int a_type, std::int64_t lda, long long stride_a,
                              const void* b, int b_type, std::int64_t ldb, long long stride_b, const void* beta,
                              void* c, int c_type, std::int64_t ldc, long long stride_c, std::int64_t batch,
                              int compute_type, int algorithm) = nullptr;
  int (*get_math_mode)(void* handle, int* mode) = nullptr;
  int (*set_math_mode)(void* handle, int mode) = nullptr;
  // CUBLAS_DEFAULT_MATH (no TF32) | CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION: split sums stay in FP32, so that
  // FP16 and BF16 results are rounded once.
  static constexpr int default_math = 0 | 16, default_algorithm = -1;

  static const Cublas& get() {
    static const Cublas cublas = [] {
      void* const library = loaded_library({"libcublas.so.13", "libcublas.so.12", "libcublas.so.14"});
      Cublas functions;
      find(library, "cublasGemmStridedBatchedEx_64", functions.gemm_strided_batched);
      find(library, "cublasGetMathMode", functions.get_math_mode);
      find(library, "cublasSetMathMode", functions.set_math_mode);
      return functions;
    }();
    return cublas;
  }
};

// torch's handle, which cuBLASLt takes as its own, too.
void* current_handle() {
  void* handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(torch_get_current_cuda_blas_handle(&handle));
  return handle;
}

using Algorithm = std::array<std::uint64_t, 8>;  // cublasLtMatmulAlgo_t

struct HeuristicResult {
  Algorithm algorithm;
  std::size_t workspace_bytes;
  int status;
  float waves;
  int reserved[4];
};

struct CublasLt {
  int (*create_operation)(void** operation, int compute_type, int scale_type) = nullptr;
  int (*set_operation)(void* operation, int attribute, const void* value, std::size_t bytes) = nullptr;
  int (*destroy_operation)(void* operation) = nullptr;
  int (*create_layout)(void** layout, int type, std::uint64_t rows, std::uint64_t columns,
                       std::int64_t pitch) = nullptr;
  int (*destroy_layout)(void* layout) = nullptr;
  int (*create_preference)(void** preference) = nullptr;
  int (*set_preference)(void* preference, int attribute, const void* value, std::size_t bytes) = nullptr;
  int (*destroy_preference)(void* preference) = nullptr;
  int (*find_algorithms)(void* handle, void* operation, void* a, void* b, void* c, void* d, void* preference,
                         int requested, HeuristicResult* results, int* found) = nullptr;
  int (*check_algorithm)(void* handle, void* operation, void* a, void* b, void* c, void* d, const Algorithm* algorithm,
                         HeuristicResult* result) = nullptr;
  int (*multiply)(void* handle, void* operation, const void* alpha, const void* a, void* a_layout, const void* b,
                  void* b_layout, const void* beta, const void* c, void* c_layout, void* d, void* d_layout,
                  const Algorithm* algorithm, void* workspace, std::size_t workspace_bytes,
                  cudaStream_t stream) = nullptr;
  static constexpr int float_type = 0;                                                   // CUDA_R_32F
  static constexpr int transpose_a = 3, epilogue = 7, bias_pointer = 8;                  // of operations
  static constexpr int end_default = 1, end_relu = 2, end_bias = 4;                      // epilogues
  static constexpr int max_workspace = 1, reductions = 3, alignments[4] = {5, 6, 7, 8};  // of preferences
  static constexpr std::uint32_t sums_in_fp32 = 2, alignment = 16;

  static const CublasLt& get() {
    static const CublasLt lt = [] {
      void* const library = loaded_library({"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so.14"});
      CublasLt functions;
      find(library, "cublasLtMatmulDescCreate", functions.create_operation);
      find(library, "cublasLtMatmulDescSetAttribute", functions.set_operation);
      find(library, "cublasLtMatmulDescDestroy", functions.destroy_operation);
      find(library, "cublasLtMatrixLayoutCreate", functions.create_layout);
      find(library, "cublasLtMatrixLayoutDestroy", functions.destroy_layout);
      find(library, "cublasLtMatmulPreferenceCreate", functions.create_preference);
      find(library, "cublasLtMatmulPreferenceSetAttribute", functions.set_preference);
      find(library, "cublasLtMatmulPreferenceDestroy", functions.destroy_preference);
      find(library, "cublasLtMatmulAlgoGetHeuristic", functions.find_algorithms);
      find(library, "cublasLtMatmulAlgoCheck", functions.check_algorithm);
      find(library, "cublasLtMatmul", functions.multiply);
      return functions;
    }();
    return lt;
  }
};

// What a call of cuBLASLt's is told beside pointers. Bias runs along the rows of column-major D^T.
class Product {
 public:
  // relu: whether it is to end in one, if end.relu asks for it.
  Product(const GemmArgs& args, const GemmEnd& end, bool relu) : beta_(end.residual != nullptr ? 1.0f : 0.0f) {
    check_cublas(lt_.create_operation(&operation_, compute_type(args), CublasLt::float_type),
                 "cublasLtMatmulDescCreate");
    set(CublasLt::transpose_a, transpose);
    set(CublasLt::epilogue, (end.bias != nullptr ? CublasLt::end_bias : 0) | (relu ? CublasLt::end_relu : 0) |
                                (end.bias == nullptr && !relu ? CublasLt::end_default : 0));
    if (end.bias != nullptr) set(CublasLt::bias_pointer, end.bias);
    const int in = element_type(args.in), out = element_type(args.out);
    check_cublas(lt_.create_layout(&a_, in, args.k, args.n, args.ldb), "cublasLtMatrixLayoutCreate");
    check_cublas(lt_.create_layout(&b_, in, args.k, args.m, args.lda), "cublasLtMatrixLayoutCreate");
    check_cublas(lt_.create_layout(&d_, out, args.n, args.m, args.ldd), "cublasLtMatrixLayoutCreate");
  }
  Product(const Product&) = delete;
  Product& operator=(const Product&) = delete;
  ~Product() {
    for (void* layout : {a_, b_, d_}) {
      if (layout != nullptr) lt_.destroy_layout(layout);
    }
    if (operation_ != nullptr) lt_.destroy_operation(operation_);
  }

  // Those that the library prefers, best first.
  std::vector<HeuristicResult> algorithms(void* handle, std::size_t workspace_bytes) const {
    void* preference = nullptr;
    check_cublas(lt_.create_preference(&preference), "cublasLtMatmulPreferenceCreate");
    std::array<HeuristicResult, 8> results{};
    int found = 0;
    lt_.set_preference(preference, CublasLt::max_workspace, &workspace_bytes, sizeof workspace_bytes);
    lt_.set_preference(preference, CublasLt::reductions, &CublasLt::sums_in_fp32, sizeof CublasLt::sums_in_fp32);
    for (const int which : CublasLt::alignments) {
      lt_.set_preference(preference, which, &CublasLt::alignment, sizeof CublasLt::alignment);
    }
    const int status = lt_.find_algorithms(handle, operation_, a_, b_, d_, d_, preference,
                                           static_cast<int>(results.size()), results.data(), &found);
    lt_.destroy_preference(preference);
    if (status != 0) found = 0;  // CUBLAS_STATUS_NOT_SUPPORTED: none
    const auto first = results.begin(), end = first + found;
    std::vector<HeuristicResult> fitting;
    std::copy_if(first, end, std::back_inserter(fitting), [](const HeuristicResult& each) { return each.status == 0; });
    return fitting;
  }

  // Whether an algorithm of another product serves this one within so many bytes.
  bool takes(void* handle, const Algorithm& algorithm, std::size_t workspace_bytes) const {
    HeuristicResult result{};
    return lt_.check_algorithm(handle, operation_, a_, b_, d_, d_, &algorithm, &result) == 0 &&
           result.workspace_bytes <= workspace_bytes;
  }

  int run(void* handle, const GemmArgs& args, const GemmEnd& end, const Algorithm& algorithm, float alpha,
          cudaStream_t stream) const {
    const void* const residual = end.residual != nullptr ? end.residual : args.d;
    return lt_.multiply(handle, operation_, &alpha, args.b, a_, args.a, b_, &beta_, residual, d_, args.d, d_,
                        &algorithm, end.workspace, end.workspace_bytes, stream);
  }

 private:
  template <typename Value>
  void set(int attribute, const Value& value) {
    check_cublas(lt_.set_operation(operation_, attribute, &value, sizeof value), "cublasLtMatmulDescSetAttribute");
  }

  const CublasLt& lt_ = CublasLt::get();
  void *operation_ = nullptr, *a_ = nullptr, *b_ = nullptr, *d_ = nullptr;
  float beta_;
};

// Whether an algorithm's ReLU keeps NaN, which some make zeros of: asked of a small product of zeros times NaN, the
// first time that it comes up. On a stream of its own, so that a capture under way does not notice.
class NanTrial {
 public:
  enum class Verdict : std::uint8_t {
    keeps,
    loses,
    unfit,    // for so small a product, so that nothing is known
    starved,  // of memory: another time it may be tried
  };

  Verdict of(void* handle, const GemmArgs& args, const GemmEnd& end, const Algorithm& algorithm) {
    const auto key = std::tuple(algorithm, args.in, args.out, args.tf32, end.bias != nullptr, end.residual != nullptr);
    const auto known = verdicts_.find(key);
    if (known != verdicts_.end()) return known->second;
    const RelaxedCapture relaxed;
    const Verdict found = get_memory() ? try_it(handle, args, end, algorithm) : Verdict::starved;
    if (found == Verdict::keeps || found == Verdict::loses) verdicts_.emplace(key, found);
    return found;
  }

 private:
  static constexpr std::int64_t max_pixels = 256, max_filters = 256, max_terms = 1024;
  static constexpr std::size_t operand_bytes = std::size_t{1} << 20, workspace_bytes = std::size_t{8} << 20;
  static_assert(std::max(max_pixels, max_filters) * max_terms * sizeof(float) <= operand_bytes);

  bool get_memory() {
    void* memory = zeros_;
    if (memory != nullptr) return true;
    if ((stream_ == nullptr && cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking) != cudaSuccess) ||
        cudaMalloc(&memory, 2 * operand_bytes + workspace_bytes) != cudaSuccess) {
      static_cast<void>(cudaGetLastError());  // else the next launch would report it
      return false;
    }
    zeros_ = static_cast<char*>(memory);
    return true;
  }

  Verdict try_it(void* handle, GemmArgs args, GemmEnd end, const Algorithm& algorithm) {
    args.m = std::min(args.m, max_pixels), args.n = std::min(args.n, max_filters);
    args.k = std::min(args.k, max_terms);
    args.lda = args.ldb = args.k, args.ldd = args.n;
    char* const outputs = zeros_ + operand_bytes;
    args.a = args.b = zeros_, args.d = outputs;
    end.bias = end.bias != nullptr ? zeros_ : nullptr, end.residual = end.residual != nullptr ? zeros_ : nullptr;
    end.workspace = outputs + operand_bytes, end.workspace_bytes = workspace_bytes;
    const Product product(args, end, true);
    if (!product.takes(handle, algorithm, workspace_bytes)) return Verdict::unfit;
    check_cuda(cudaMemsetAsync(zeros_, 0, 2 * operand_bytes, stream_), "cudaMemsetAsync");
    if (product.run(handle, args, end, algorithm, std::nanf(""), stream_) != 0) {
      static_cast<void>(cudaGetLastError());
      return Verdict::starved;
    }
    const std::size_t count = static_cast<std::size_t>(args.m * args.n);
    std::vector<char> bytes(count * size_of(args.out));
    check_cuda(cudaMemcpyAsync(bytes.data(), outputs, bytes.size(), cudaMemcpyDeviceToHost, stream_),
               "cudaMemcpyAsync");
    check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    const bool keeps = std::ranges::all_of(std::views::iota(std::size_t{0}, count),
                                           [&](std::size_t i) { return is_nan(bytes.data(), i, args.out); });
    return keeps ? Verdict::keeps : Verdict::loses;
  }

  static bool is_nan(const char* values, std::size_t i, DType dtype) {
    std::uint32_t bits = 0;
    const std::size_t size = size_of(dtype);
    std::memcpy(&bits, values + i * size, size);
    const std::uint32_t infinity = dtype == DType::f16 ? 0x7c00 : dtype == DType::bf16 ? 0x7f80 : 0x7f800000;
    return (bits & (dtype == DType::f32 ? 0x7fffffff : 0x7fff)) > infinity;
  }

  cudaStream_t stream_ = nullptr;
  char* zeros_ = nullptr;
  std::map<std::tuple<Algorithm, DType, DType, bool, bool, bool>, Verdict> verdicts_;
};

// The algorithm of each product that was met, on a device.
class Choices {
 public:
  struct Choice {
    std::optional<Algorithm> algorithm;  // none: the library has no product that ends so
    bool relu = false;                   // whether that ends in it
    int calls = forever;                 // that it serves
  };

  static Choice of(void* handle, const GemmArgs& args, const GemmEnd& end, int device) {
    static auto* const mutex = new std::mutex;  // never destroyed: threads may outlive static objects
    static auto* const devices = new std::map<int, Choices>;
    thread_local std::map<Key, Choice> settled;  // which need no lock
    const Key key(device, args.m, args.n, args.k, args.lda, args.ldb, args.ldd, args.in, args.out, args.tf32,
                  end.bias != nullptr, end.residual != nullptr, end.relu, end.workspace_bytes);
    if (const auto known = settled.find(key); known != settled.end()) return known->second;
    const std::lock_guard lock(*mutex);
    const Choice choice = (*devices)[device].find(key, handle, args, end);
    if (settled.size() == most) settled.clear();
    if (choice.calls == forever) settled.emplace(key, choice);
    return choice;
  }

 private:
  using Key = std::tuple<int, std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t, DType,
                         DType, bool, bool, bool, bool, std::size_t>;
  static constexpr std::size_t most = 4096;  // of which each is found again in some 50 us
  static constexpr int forever = -1, starved_calls = 1000;

  Choice find(const Key& key, void* handle, const GemmArgs& args, const GemmEnd& end) {
    const auto known = choices_.find(key);
    if (known != choices_.end()) {
      if (known->second.calls == forever || --known->second.calls > 0) return known->second;
      choices_.erase(known);
    }
    if (choices_.size() == most) choices_.clear();
    return choices_.emplace(key, choose(handle, args, end)).first->second;
  }

  Choice choose(void* handle, const GemmArgs& args, const GemmEnd& end) {
    Choice choice;
    if (end.relu) {
      for (const HeuristicResult& each : Product(args, end, true).algorithms(handle, end.workspace_bytes)) {
        const NanTrial::Verdict verdict = trial_.of(handle, args, end, each.algorithm);
        if (verdict == NanTrial::Verdict::keeps) return {each.algorithm, true};
        if (verdict == NanTrial::Verdict::starved) {
          choice.calls = starved_calls;
          break;
        }
      }
    }
    const auto without = Product(args, end, false).algorithms(handle, end.workspace_bytes);
    if (!without.empty()) choice.algorithm = without.front().algorithm;
    return choice;
  }

  NanTrial trial_;
  std::map<Key, Choice> choices_;
};

}  // namespace

void cublas_gemm(const GemmArgs& args) {
  const Cublas& cublas = Cublas::get();
  void* const handle = current_handle();
  const float alpha = 1.0f, beta = 0.0f;
  // torch sets the handle's math mode from allow_tf32; what is computed here does not depend on that switch.
  int math_mode = Cublas::default_math;
  check_cublas(cublas.get_math_mode(handle, &math_mode), "cublasGetMathMode");
  check_cublas(cublas.set_math_mode(handle, Cublas::default_math), "cublasSetMathMode");
  const int status = cublas.gemm_strided_batched(
      handle, args.b_is_kn ? no_transpose : transpose, args.a_is_km ? transpose : no_transpose, args.n, args.m, args.k,
      &alpha, args.b, element_type(args.in), args.ldb, args.stride_b, args.a, element_type(args.in), args.lda,
      args.stride_a, &beta, args.d, element_type(args.out), args.ldd, args.stride_d, args.batch, compute_type(args),
      Cublas::default_algorithm);
  check_cublas(cublas.set_math_mode(handle, math_mode), "cublasSetMathMode");
  check_cublas(status, "cublasGemmStridedBatchedEx");
}

EndLeft cublas_gemm_with_end(const GemmArgs& args, const GemmEnd& end, int device, cudaStream_t stream) {
  void* const handle = current_handle();
  const Choices::Choice choice = Choices::of(handle, args, end, device);
  if (!choice.algorithm) {
    cublas_gemm(args);
    return EndLeft::all;
  }
  check_cublas(Product(args, end, choice.relu).run(handle, args, end, *choice.algorithm, 1.0f, stream),
               "cublasLtMatmul");
  return choice.relu || !end.relu ? EndLeft::nothing : EndLeft::relu;
}

}  // namespace fastconv::ops
