// candle's own kernels, on the host: those that the tests of the crate candle call on tensors of a
// GPU. Loaded before the emulator's libcuda.so.1; see tests/bindings/test_rust_gpu.py.
#include <cuda.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>

namespace {

float widen(uint16_t bits, bool half) {
  if (half) {
    _Float16 number;
    std::memcpy(&number, &bits, sizeof number);
    return static_cast<float>(number);
  }
  const uint32_t word = uint32_t{bits} << 16;
  float number;
  std::memcpy(&number, &word, sizeof number);
  return number;
}

uint16_t narrow(float number, bool half) {
  if (half) {
    const _Float16 rounded = static_cast<_Float16>(number);
    uint16_t bits;
    std::memcpy(&bits, &rounded, sizeof bits);
    return bits;
  }
  uint32_t word;
  std::memcpy(&word, &number, sizeof word);
  return static_cast<uint16_t>((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

template <typename T>
T argument(void** arguments, int index) {
  return *static_cast<T*>(arguments[index]);
}

// (count, dims, dims and strides, a value, an array)
template <typename T>
void const_set(void** arguments) {
  const T value = argument<T>(arguments, 3);
  T* array = argument<T*>(arguments, 4);
  for (size_t i = 0; i < argument<size_t>(arguments, 0); ++i) array[i] = value;
}

// (count, dims, dims and strides, a, b, an array)
template <typename T, typename Operation>
void binary(void** arguments, Operation operation) {
  const T *a = argument<const T*>(arguments, 3), *b = argument<const T*>(arguments, 4);
  T* array = argument<T*>(arguments, 5);
  for (size_t i = 0; i < argument<size_t>(arguments, 0); ++i) array[i] = operation(a[i], b[i]);
}

template <bool kHalf>
uint16_t add(uint16_t a, uint16_t b) {
  return narrow(widen(a, kHalf) + widen(b, kHalf), kHalf);
}

const struct Kernel {
  const char* name;
  void (*run)(void** arguments);
} kKernels[] = {
    {"const_set_f32", const_set<uint32_t>},
    {"const_set_f16", const_set<uint16_t>},
    {"const_set_bf16", const_set<uint16_t>},
    {"badd_f32", [](void** a) { binary<float>(a, std::plus<float>()); }},
    {"badd_f16", [](void** a) { binary<uint16_t>(a, add<true>); }},
    {"badd_bf16", [](void** a) { binary<uint16_t>(a, add<false>); }},
    {"bsub_u32", [](void** a) { binary<uint32_t>(a, std::minus<uint32_t>()); }},
};

}  // namespace

extern "C" {

CUresult cuModuleLoadData(CUmodule* module, const void*) { return *module = nullptr, CUDA_SUCCESS; }
CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  for (const Kernel& kernel : kKernels) {
    if (std::strcmp(name, kernel.name) != 0) continue;
    *function = reinterpret_cast<CUfunction>(const_cast<Kernel*>(&kernel));
    return CUDA_SUCCESS;
  }
  std::fprintf(stderr, "emulator: no kernel %s of candle's\n", name);
  return CUDA_ERROR_NOT_FOUND;
}
CUresult cuLaunchKernel(CUfunction function, unsigned, unsigned, unsigned, unsigned, unsigned,
                        unsigned, unsigned, CUstream, void** arguments, void**) {
  if (argument<void*>(arguments, 2)) return CUDA_ERROR_NOT_SUPPORTED;  // strides
  reinterpret_cast<const Kernel*>(function)->run(arguments);
  return CUDA_SUCCESS;
}

}  // extern "C"
