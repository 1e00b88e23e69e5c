#include "core/select.h"

#include <cstdio>
#include <cstring>

#include "core/error.h"
#include "core/log.h"
#include "core/os.h"

namespace flashattn {
namespace {

struct Verdict {
  const Predicate* refusal;  // the first that refuses; NULL: accepted
  size_t refusals;
};

Verdict judge(const Backend& backend, const Problem& problem, const Device& device) {
  Verdict verdict = {nullptr, 0};
  for (size_t i = 0; i < backend.predicate_count; ++i) {
    const Predicate& predicate = backend.predicates[i];
    if (!predicate.refuses(problem, device)) continue;
    ++verdict.refusals;
    if (!verdict.refusal) verdict.refusal = &predicate;
  }
  return verdict;
}

struct Message {
  char text[480];

  Message(const Predicate& predicate, const Problem& problem, const Device& device) {
    text[0] = 0;
    predicate.explain(problem, device, text, sizeof text);
  }
};

// Whether FLASHATTN_BACKEND names another GPU backend. The name x also allows backends whose names
// begin with x_.
bool is_excluded(const Backend& backend) {
  const char* forced = forced_backend();
  if (!forced || backend.device_kind != FLASHATTN_DEVICE_CUDA) return false;
  const size_t length = std::strlen(forced);
  return std::strncmp(forced, backend.name, length) != 0 ||
         (backend.name[length] != 0 && backend.name[length] != '_');
}

const char* kind_name(const Device& device) {
  return device.kind == FLASHATTN_DEVICE_CPU ? "CPU" : "CUDA";
}

}  // namespace

void explain_dim_above(const char* field, int32_t value, int32_t limit, char* text,
                       size_t capacity) {
  std::snprintf(text, capacity,
                "%s = %d is above %d, the limit of every backend on this device; use "
                "heads of at most %d elements",
                field, value, limit, limit);
}

const char* forced_backend() {
  static const char* const name = os::environment("FLASHATTN_BACKEND");
  return name;
}

const Backend& select_backend(const Problem& problem, const Device& device, BackendList list,
                              std::string* passed_over) {
  const Backend* closest = nullptr;
  Verdict best = {nullptr, 0};
  for (size_t i = 0; i < list.count; ++i) {
    const Backend& backend = *list.backends[i];
    if (backend.device_kind != device.kind || is_excluded(backend)) continue;
    const Verdict verdict = judge(backend, problem, device);
    if (!verdict.refusal) return backend;
    const Message message(*verdict.refusal, problem, device);
    if (passed_over && passed_over->empty()) {
      *passed_over = std::string("backend ") + backend.name + " refuses: " + message.text;
    }
    if (log_enabled(FLASHATTN_LOG_DEBUG)) {
      log(FLASHATTN_LOG_DEBUG, "backend %s refuses: %s", backend.name, message.text);
    }
    // On a tie the later backend wins: later backends are more general.
    // A delegated refusal is reported only if no backend has a reason of its own.
    const bool tells_more =
        !verdict.refusal->is_delegated && (best.refusal == nullptr || best.refusal->is_delegated ||
                                           verdict.refusals <= best.refusals);
    if (!closest || tells_more) {
      closest = &backend;
      best = verdict;
    }
  }
  const char* forced = forced_backend();
  if (!closest && forced && device.kind == FLASHATTN_DEVICE_CUDA) {
    refuse(
        FLASHATTN_ERROR_UNSUPPORTED, FLASHATTN_REASON_NOT_IN_THIS_BUILD, "device",
        "the environment's FLASHATTN_BACKEND = %s names no backend of this build for CUDA devices; "
        "unset it, or use one that flashattn_build_info lists",
        forced);
  }
  if (!closest) {
    refuse(FLASHATTN_ERROR_UNSUPPORTED, FLASHATTN_REASON_NOT_IN_THIS_BUILD, "device",
           "this build has no kernels for %s device %d (%s); use another build or device",
           kind_name(device), device.index, device.properties.name);
  }
  refuse(FLASHATTN_ERROR_UNSUPPORTED, best.refusal->reason, best.refusal->field,
         "%s (%s device %d: %s)", Message(*best.refusal, problem, device).text, kind_name(device),
         device.index, device.properties.name);
}

}  // namespace flashattn
