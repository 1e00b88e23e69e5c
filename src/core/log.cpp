#include "core/log.h"

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <mutex>
#include <new>

#include "core/error.h"
#include "core/os.h"

namespace flashattn {
namespace {

// Constant-initialised, so that nothing runs when the library is loaded. The level is read without
// the lock, so that calls which log nothing do not contend. The level is OFF while g_fn and g_user
// change.
std::atomic<int32_t> g_level{FLASHATTN_LOG_OFF};
std::mutex g_mutex;  // guards g_fn, g_user and the order of lines
flashattn_log_fn g_fn = nullptr;
void* g_user = nullptr;

// A thread that does not exist in this forked child may have held the lock.
void free_lock_in_child() { new (&g_mutex) std::mutex; }

}  // namespace

void set_log(int32_t level, flashattn_log_fn fn, void* user) {
  if (level < FLASHATTN_LOG_OFF || level > FLASHATTN_LOG_DEBUG) {
    reject(FLASHATTN_REASON_VALUE, "level",
           "level = %d is no enumerator of flashattn_log_level; use FLASHATTN_LOG_OFF = %d to "
           "FLASHATTN_LOG_DEBUG = %d",
           level, FLASHATTN_LOG_OFF, FLASHATTN_LOG_DEBUG);
  }
  static const bool registered = os::after_fork_in_child(free_lock_in_child);
  (void)registered;  // if there was no memory for it, a child may hang, as it would in malloc
  const std::lock_guard<std::mutex> lock(g_mutex);
  g_level.store(FLASHATTN_LOG_OFF);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  g_fn = fn;
  g_user = user;
  g_level.store(fn ? level : FLASHATTN_LOG_OFF, std::memory_order_relaxed);
}

bool log_enabled(int32_t level) noexcept {
  return level <= g_level.load(std::memory_order_relaxed);
}

void log(int32_t level, const char* format, ...) noexcept {
  if (!log_enabled(level)) return;
  char text[1024];
  va_list values;
  va_start(values, format);
  std::vsnprintf(text, sizeof text, format, values);
  va_end(values);
  try {
    const std::lock_guard<std::mutex> lock(g_mutex);
    if (log_enabled(level)) g_fn(g_user, level, text);
  } catch (...) {
    // An exception of the caller's function ends here; the call that logged goes on.
  }
}

}  // namespace flashattn
