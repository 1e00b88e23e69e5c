// The contents of this build: its backends, in order of preference, and its kinds of device. The
// only file that names backends.
#include <cstdio>

#include "core/backend.h"
#include "cpu/backend.h"

#if FLASHATTN_CUDA
#include "cuda/host/backend.h"
#endif

namespace flashattn {

BackendList backends() {
  static const Backend* const list[] = {
#if FLASHATTN_CUDA_SM90
      &cuda_sm90_backend(), &cuda_sm90_fp8_backend(), &cuda_sm90_mla_backend(),
#endif
#if FLASHATTN_CUDA
      &cuda_sm80_backend(),
#endif
      &cpu_backend(),
  };
  return {list, sizeof list / sizeof *list};
}

const DeviceKind* device_kind(int32_t kind) {
  static const DeviceKind cpu = {[] { return int32_t{1}; },
                                 [](int32_t) -> const Device& { return cpu_device(); }, nullptr};
  if (kind == FLASHATTN_DEVICE_CPU) return &cpu;
#if FLASHATTN_CUDA
  static const DeviceKind cuda = {&cuda_device_count, &cuda_device, &cuda_no_device_reason};
  if (kind == FLASHATTN_DEVICE_CUDA) return &cuda;
#endif
  return nullptr;
}

void describe_build(char* text, size_t capacity) {
#if FLASHATTN_CUDA
  std::snprintf(text, capacity, "CPU: %s, CUDA: %s", cpu_instruction_sets(), cuda_architectures());
#else
  std::snprintf(text, capacity, "CPU: %s, without CUDA", cpu_instruction_sets());
#endif
}

}  // namespace flashattn
