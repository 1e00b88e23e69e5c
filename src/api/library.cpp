// The C functions about the library and its devices.
#include <cstdio>
#include <cstring>

#include "api/guard.h"
#include "core/copy_in.h"
#include "core/device.h"
#include "core/backend.h"

namespace flashattn {
namespace {

#define FLASHATTN_TEXT_OF(x) #x
#define FLASHATTN_TEXT(x) FLASHATTN_TEXT_OF(x)
constexpr char kVersion[] = FLASHATTN_TEXT(FLASHATTN_VERSION_MAJOR) "." FLASHATTN_TEXT(
    FLASHATTN_VERSION_MINOR) "." FLASHATTN_TEXT(FLASHATTN_VERSION_PATCH);
#undef FLASHATTN_TEXT
#undef FLASHATTN_TEXT_OF

#if defined(__clang__)
constexpr char kCompiler[] = __VERSION__;
#else
constexpr char kCompiler[] = "gcc " __VERSION__;
#endif

// Plain data: nothing is destroyed at exit while another thread reads it.
struct BuildInfo {
  char text[512];

  BuildInfo() {
    const int length =
        std::snprintf(text, sizeof text, "libflashattn %s, %s, ", kVersion, kCompiler);
    describe_build(text + length, sizeof text - static_cast<size_t>(length));
  }
};

}  // namespace
}  // namespace flashattn

using namespace flashattn;

int32_t flashattn_version(void) {
  return FLASHATTN_VERSION_MAJOR * 10000 + FLASHATTN_VERSION_MINOR * 100 + FLASHATTN_VERSION_PATCH;
}

const char* flashattn_version_string(void) { return kVersion; }

const char* flashattn_build_info(void) {
  static const BuildInfo info;
  return info.text;
}

const char* flashattn_status_name(int32_t status) {
  switch (status) {
    case FLASHATTN_OK: return "FLASHATTN_OK";
    case FLASHATTN_ERROR_INVALID_ARGUMENT: return "FLASHATTN_ERROR_INVALID_ARGUMENT";
    case FLASHATTN_ERROR_UNSUPPORTED: return "FLASHATTN_ERROR_UNSUPPORTED";
    case FLASHATTN_ERROR_WORKSPACE: return "FLASHATTN_ERROR_WORKSPACE";
    case FLASHATTN_ERROR_OUT_OF_MEMORY: return "FLASHATTN_ERROR_OUT_OF_MEMORY";
    case FLASHATTN_ERROR_DEVICE: return "FLASHATTN_ERROR_DEVICE";
    case FLASHATTN_ERROR_VERSION: return "FLASHATTN_ERROR_VERSION";
    case FLASHATTN_ERROR_INTERNAL: return "FLASHATTN_ERROR_INTERNAL";
    default: return "unknown status";
  }
}

const char* flashattn_last_error(int32_t* reason, const char** field) {
  const Error& error = last_error();
  if (reason) *reason = error.reason;
  if (field) *field = error.field;
  return error.text;
}

int32_t flashattn_set_log(int32_t level, flashattn_log_fn callback, void* user) {
  return guard("flashattn_set_log", [&](ErrorOut&) {
    set_log(level, callback, user);
    return FLASHATTN_OK;
  });
}

int32_t flashattn_device_count(int32_t device, int32_t* count) {
  return guard("flashattn_device_count", [&](ErrorOut&) {
    check_address(count, "count");
    *count = device_count(device);
    return FLASHATTN_OK;
  });
}

int32_t flashattn_device_info(int32_t device, int32_t index,
                              flashattn_device_properties* properties) {
  return guard("flashattn_device_info", [&](ErrorOut&) {
    copy_in(properties, "properties");
    copy_out(find_device(device, index, "index").properties, properties);
    return FLASHATTN_OK;
  });
}
