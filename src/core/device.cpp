#include "core/device.h"

#include "core/backend.h"
#include "core/error.h"

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
  const DeviceKind* devices = device_kind(kind);
  return devices ? devices->count() : 0;
}

const Device& find_device(int32_t kind, int32_t index, const char* field) {
  check_kind(kind);
  if (index < 0) {
    reject(FLASHATTN_REASON_VALUE, field, "%s = %d is below 0; count from 0", field, index);
  }
  const DeviceKind* devices = device_kind(kind);
  if (!devices) {
    refuse(FLASHATTN_ERROR_UNSUPPORTED, FLASHATTN_REASON_NO_CUDA_BUILD, "device",
           "device = FLASHATTN_DEVICE_CUDA, but this library was built without CUDA; use "
           "FLASHATTN_DEVICE_CPU, or build it with CUDA: \"./run build --cuda\" in its sources, "
           "which is \"meson setup -Dcuda=enabled\"");
  }
  const int32_t count = devices->count();
  if (index < count) return devices->device(index);
  if (kind == FLASHATTN_DEVICE_CPU) {
    refuse(FLASHATTN_ERROR_UNSUPPORTED, FLASHATTN_REASON_NO_DEVICE, field,
           "%s = %d, but this machine has one CPU device, number 0, with all its cores; use 0",
           field, index);
  }
  if (count == 0) {
    refuse(FLASHATTN_ERROR_UNSUPPORTED, FLASHATTN_REASON_NO_DEVICE, "device",
           "device = FLASHATTN_DEVICE_CUDA, but this machine offers none (%s); use "
           "FLASHATTN_DEVICE_CPU, or install a driver",
           devices->why_none());
  }
  refuse(FLASHATTN_ERROR_UNSUPPORTED, FLASHATTN_REASON_NO_DEVICE, field,
         "%s = %d, but this machine has %d CUDA devices; count from 0", field, index, count);
}

}  // namespace flashattn
