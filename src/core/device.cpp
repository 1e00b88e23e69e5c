#include "core/device.h"

#include "core/error.h"
#include "cpu/family.h"

#if FLASHATTN_CUDA
#include "cuda/family.h"
#endif

namespace flashattn {
namespace {

void check_kind(int32_t kind) {
  if (kind == FLASHATTN_DEVICE_CPU || kind == FLASHATTN_DEVICE_CUDA) return;
  reject(FLASHATTN_REASON_VALUE, "device",
         "device = %d is no enumerator of flashattn_device; use FLASHATTN_DEVICE_CPU = 0 or "
         "FLASHATTN_DEVICE_CUDA = 1",
         kind);
}

}  // namespace

int32_t device_count(int32_t kind) {
  check_kind(kind);
  if (kind == FLASHATTN_DEVICE_CPU) return 1;
#if FLASHATTN_CUDA
  return cuda_device_count();
#else
  return 0;
#endif
}

const Device& find_device(int32_t kind, int32_t index, const char* field) {
  check_kind(kind);
  if (index < 0) {
    reject(FLASHATTN_REASON_VALUE, field, "%s = %d is below 0; count from 0", field, index);
  }
  if (kind == FLASHATTN_DEVICE_CUDA) {
#if FLASHATTN_CUDA
    const int32_t count = cuda_device_count();
    if (index < count) return cuda_device(index);
    if (count == 0) {
      refuse(FLASHATTN_ERROR_UNSUPPORTED, FLASHATTN_REASON_NO_DEVICE, "device",
             "device = FLASHATTN_DEVICE_CUDA, but this machine offers none (%s); use "
             "FLASHATTN_DEVICE_CPU, or install a driver",
             cuda_no_device_reason());
    }
    refuse(FLASHATTN_ERROR_UNSUPPORTED, FLASHATTN_REASON_NO_DEVICE, field,
           "%s = %d, but this machine has %d CUDA devices; count from 0", field, index, count);
#else
    refuse(FLASHATTN_ERROR_UNSUPPORTED, FLASHATTN_REASON_NO_CUDA_BUILD, "device",
           "device = FLASHATTN_DEVICE_CUDA, but this library was built without CUDA; use "
           "FLASHATTN_DEVICE_CPU, or build it with CUDA: \"./run build --cuda\" in its sources, "
           "which is \"meson setup -Dcuda=enabled\"");
#endif
  }
  if (index > 0) {
    refuse(FLASHATTN_ERROR_UNSUPPORTED, FLASHATTN_REASON_NO_DEVICE, field,
           "%s = %d, but this machine has one CPU device, number 0, with all its cores; use 0",
           field, index);
  }
  return cpu_device();
}

}  // namespace flashattn
