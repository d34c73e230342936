// Runs a package that fastconv.export wrote, without Python:
//
//   deploy libfastconv.so model.pt2 input.pt output.pt [repetitions]
//
// input.pt is a tensor that torch.save wrote, and output.pt one for torch.load. docs/using/deployment.md says how to
// build it.
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <chrono>
#include <fstream>
#include <iostream>
#include <iterator>

std::vector<char> read(const char* path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(std::string("cannot read ") + path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

int main(int argc, char** argv) try {
  if (argc < 5) throw std::runtime_error("usage: deploy libfastconv.so model.pt2 input.pt output.pt [repetitions]");
  // The operators register themselves with PyTorch's dispatcher, where the package looks for them.
  if (dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL) == nullptr) throw std::runtime_error(dlerror());
  torch::inductor::AOTIModelPackageLoader model(argv[2]);
  const at::Tensor input = torch::jit::pickle_load(read(argv[3])).toTensor();

  const c10::InferenceMode no_gradients;
  std::vector<at::Tensor> outputs = model.run({input});
  const int repetitions = argc > 5 ? std::stoi(argv[5]) : 0;
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < repetitions; ++i) outputs = model.run({input});
  const at::Tensor output = outputs.at(0).cpu();  // waits for the device
  const std::chrono::duration<double, std::milli> elapsed = std::chrono::steady_clock::now() - start;
  if (repetitions > 0) std::cout << elapsed.count() / repetitions << " ms\n";

  const std::vector<char> bytes = torch::jit::pickle_save(output);
  std::ofstream(argv[4], std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  return 0;
} catch (const std::exception& error) {
  std::cerr << error.what() << "\n";
  return 1;
}
