#include "core/device.h"

#include "core/error.h"
#include "cpu/family.h"

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
  return kind == FLASHATTN_DEVICE_CPU ? 1 : 0;
}

const Device& find_device(int32_t kind, int32_t index) {
  check_kind(kind);
  if (index < 0) {
    reject(FLASHATTN_REASON_VALUE, "device_index", "device_index = %d is below 0; count from 0",
           index);
  }
  if (kind == FLASHATTN_DEVICE_CUDA) {
    refuse(FLASHATTN_ERROR_UNSUPPORTED, FLASHATTN_REASON_NO_CUDA_BUILD, "device",
           "device = FLASHATTN_DEVICE_CUDA, but this library was built without CUDA; use "
           "FLASHATTN_DEVICE_CPU, or a build with the cuda option");
  }
  if (index > 0) {
    refuse(FLASHATTN_ERROR_UNSUPPORTED, FLASHATTN_REASON_NO_DEVICE, "device_index",
           "device_index = %d, but this machine has one CPU device, number 0, with all its cores; "
           "use 0",
           index);
  }
  return cpu_device();
}

}  // namespace flashattn
