#include "core/copy_in.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstring>

#include "core/error.h"

namespace flashattn {
namespace {

// No structure will ever be larger. A larger struct_size is garbage, and nothing is read by it.
constexpr uint32_t kMaxStructSize = 4096;

uint32_t struct_size_of(const void* given) {
  uint32_t size = 0;
  std::memcpy(&size, given, sizeof size);
  return size;
}

}  // namespace

void check_address(const void* address, const char* name) {
  if (address) return;
  reject(FLASHATTN_REASON_NULL_POINTER, name, "%s is NULL; give an address", name);
}

void init_struct(void* given, const char* name, uint32_t struct_size) {
  check_address(given, name);
  if (struct_size < sizeof struct_size || struct_size > kMaxStructSize) {
    reject(FLASHATTN_REASON_STRUCT_SIZE, "struct_size",
           "struct_size = %u is not within %zu and %u bytes; give the sizeof of %s", struct_size,
           sizeof struct_size, kMaxStructSize, name);
  }
  std::memset(given, 0, struct_size);
  std::memcpy(given, &struct_size, sizeof struct_size);
}

void check_struct_size(const void* given, const char* name, Sizes sizes) {
  check_address(given, name);
  const size_t size = struct_size_of(given);
  if (size < sizes.least || size == sizes.never) {
    refuse(FLASHATTN_ERROR_VERSION, FLASHATTN_REASON_STRUCT_SIZE, "struct_size",
           "struct_size of %s is %zu, not the %zu bytes or more of 0.2.0: it is not set, or the "
           "program was compiled for libflashattn 0.1, and this is %d.%d.%d; set it to the size of "
           "the structure, and compile the program with this version's header",
           name, size, sizes.least, FLASHATTN_VERSION_MAJOR, FLASHATTN_VERSION_MINOR,
           FLASHATTN_VERSION_PATCH);
  }
  if (size > kMaxStructSize) {
    refuse(FLASHATTN_ERROR_VERSION, FLASHATTN_REASON_STRUCT_SIZE, "struct_size",
           "struct_size of %s is %zu, above %u bytes, more than any version has; set it to the "
           "size of the structure",
           name, size, kMaxStructSize);
  }
}

void copy_in_bytes(const void* given, const char* name, Sizes sizes, void* own, size_t own_size) {
  check_struct_size(given, name, sizes);
  const size_t size = struct_size_of(given);
  const unsigned char* bytes = static_cast<const unsigned char*>(given);
  for (size_t i = own_size; i < size; ++i) {
    if (bytes[i] == 0) continue;
    refuse(FLASHATTN_ERROR_VERSION, FLASHATTN_REASON_STRUCT_SIZE, "struct_size",
           "struct_size of %s is %zu, this library (%d.%d.%d) knows %zu bytes, and byte %zu is not "
           "zero: a field of a newer header is in use; update the library or leave the field zero",
           name, size, FLASHATTN_VERSION_MAJOR, FLASHATTN_VERSION_MINOR, FLASHATTN_VERSION_PATCH,
           own_size, i);
  }
  const size_t common = std::min(size, own_size);
  std::memcpy(own, given, common);
  std::memset(static_cast<unsigned char*>(own) + common, 0, own_size - common);
}

void copy_out_bytes(const void* own, size_t own_size, void* given) {
  const size_t common = std::min<size_t>(struct_size_of(given), own_size);
  constexpr size_t kHead = sizeof(uint32_t);
  std::memcpy(static_cast<unsigned char*>(given) + kHead,
              static_cast<const unsigned char*>(own) + kHead, common - kHead);
}

}  // namespace flashattn
