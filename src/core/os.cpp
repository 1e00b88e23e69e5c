#include "core/os.h"

#include <sched.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/auxv.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#endif

namespace flashattn::os {

const char* environment(const char* name) noexcept {
  const char* value = std::getenv(name);
  return value && *value ? value : nullptr;
}

int64_t now() noexcept {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * int64_t{1'000'000'000} + t.tv_nsec;
}

void back_off(int32_t* waited) noexcept {
  pause();
  if (++*waited < 1024) {
    if (*waited % 256 == 0) sched_yield();
  } else {
    *waited = 1024;
    const timespec time{0, 50'000};
    nanosleep(&time, nullptr);
  }
}

#if defined(__linux__)
void Sleepers::sleep() noexcept {
  for (uint32_t permits = permits_.load();;) {
    if (permits == 0) {
      syscall(SYS_futex, &permits_, FUTEX_WAIT_PRIVATE, 0, nullptr, nullptr, 0);
      permits = permits_.load();
    } else if (permits_.compare_exchange_weak(permits, permits - 1)) {
      return;
    }
  }
}

void Sleepers::wake(int32_t threads) noexcept {
  permits_.fetch_add(static_cast<uint32_t>(threads));
  syscall(SYS_futex, &permits_, FUTEX_WAKE_PRIVATE, threads, nullptr, nullptr, 0);
}
#else
void Sleepers::sleep() noexcept {
  mutex_.lock();
  while (permits_.load() == 0) has_permit_.wait(mutex_);
  permits_.fetch_sub(1);
  mutex_.unlock();
}

void Sleepers::wake(int32_t threads) noexcept {
  mutex_.lock();
  permits_.fetch_add(static_cast<uint32_t>(threads));
  mutex_.unlock();
  for (int32_t n = 0; n < threads; ++n) has_permit_.signal();
}
#endif

bool start_thread(void* (*main)(void*), void* argument, size_t stack, const char* name) noexcept {
  pthread_attr_t attributes;
  if (pthread_attr_init(&attributes) != 0) return false;
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  // The default may be too small: `ulimit -s`, musl.
  pthread_attr_setstacksize(&attributes, stack);
  // A new thread inherits the mask of blocked signals.
  sigset_t most, before;
  sigfillset(&most);
  for (const int fault : {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGTRAP, SIGABRT, SIGPROF}) {
    sigdelset(&most, fault);
  }
  pthread_sigmask(SIG_SETMASK, &most, &before);
  pthread_t thread;
  const bool started = pthread_create(&thread, &attributes, main, argument) == 0;
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_attr_destroy(&attributes);
#if defined(__linux__)
  if (started) pthread_setname_np(thread, name);
#else
  (void)name;
#endif
  return started;
}

bool after_fork_in_child(void (*handler)()) noexcept {
  return pthread_atfork(nullptr, nullptr, handler) == 0;
}

namespace {

constexpr double kNoLimit = std::numeric_limits<double>::infinity();

#if defined(__linux__)
// A mask larger than any that Linux may be configured for: a mask smaller than the kernel's is
// refused.
struct AffinityMask {
  unsigned long words[1 << 10];

  cpu_set_t* set() { return reinterpret_cast<cpu_set_t*>(words); }
  bool read(pid_t thread) { return sched_getaffinity(thread, sizeof words, set()) == 0; }
  bool apply() { return sched_setaffinity(0, sizeof words, set()) == 0; }  // to the calling thread
};
#endif

int32_t masked_processors() {
#if defined(__linux__)
  AffinityMask mask{};
  // The number of a process is that of its first thread.
  if (mask.read(getpid())) return CPU_COUNT_S(sizeof mask.words, mask.set());
#endif
  return static_cast<int32_t>(sysconf(_SC_NPROCESSORS_ONLN));
}

std::vector<std::string> lines_of(const std::string& path) {
  std::vector<std::string> lines;
  FILE* file = std::fopen(path.c_str(), "re");
  if (!file) return lines;
  std::string line;
  for (int c = std::getc(file); c != EOF; c = std::getc(file)) {
    if (c != '\n') {
      line.push_back(static_cast<char>(c));
      continue;
    }
    lines.push_back(line);
    line.clear();
  }
  if (!line.empty()) lines.push_back(line);
  std::fclose(file);
  return lines;
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == separator) {
      parts.emplace_back();
    } else {
      parts.back().push_back(c);
    }
  }
  return parts;
}

bool holds(const std::vector<std::string>& words, const char* word) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

// Reads cpu.max: "quota period" or "max period", in microseconds.
double quota_v2(const std::string& folder) {
  const std::vector<std::string> lines = lines_of(folder + "/cpu.max");
  double quota = 0, period = 0;
  if (lines.empty() || std::sscanf(lines[0].c_str(), "%lf %lf", &quota, &period) != 2) {
    return kNoLimit;
  }
  return quota > 0 && period > 0 ? quota / period : kNoLimit;
}

// Reads cpu.cfs_quota_us, -1: no limit, and cpu.cfs_period_us.
double quota_v1(const std::string& folder) {
  const std::vector<std::string> quota = lines_of(folder + "/cpu.cfs_quota_us");
  const std::vector<std::string> period = lines_of(folder + "/cpu.cfs_period_us");
  if (quota.empty() || period.empty()) return kNoLimit;
  const double q = std::atof(quota[0].c_str()), p = std::atof(period[0].c_str());
  return q > 0 && p > 0 ? q / p : kNoLimit;
}

// A mounted hierarchy of cgroups that has CPU quotas, and the cgroup that the mount point shows.
struct Mount {
  std::string folder, group;
  bool is_v2;
};

// Reads /proc/self/mountinfo, a line per mount: number, parent's number, device, root, mount point,
// options, optional fields, "-", type, source, options of the type.
std::vector<Mount> mounts(const std::string& root) {
  std::vector<Mount> found;
  for (const std::string& line : lines_of(root + "/proc/self/mountinfo")) {
    const std::vector<std::string> words = split(line, ' ');
    const auto dash = std::find(words.begin(), words.end(), "-");
    if (dash - words.begin() < 6 || words.end() - dash < 4) continue;
    const bool is_v2 = dash[1] == "cgroup2";
    const bool is_v1 = dash[1] == "cgroup" && holds(split(dash[3], ','), "cpu");
    if (is_v1 || is_v2) found.push_back({root + words[4], words[3], is_v2});
  }
  return found;
}

// The cgroup of this process, from /proc/self/cgroup: "0::/group" in version 2,
// "4:cpu,cpuacct:/group" in version 1.
std::string group_of(const std::string& root, bool is_v2) {
  for (const std::string& line : lines_of(root + "/proc/self/cgroup")) {
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (is_v2 ? controllers.empty() : holds(split(controllers, ','), "cpu")) {
      return line.substr(second + 1);
    }
  }
  return "/";
}

}  // namespace

double cpu_quota(const char* root) {
  double least = kNoLimit;
  for (const Mount& mount : mounts(root)) {
    // In a container the mount point shows the container's own cgroup, whose path is then no part
    // of the folder. If no folder of the process's cgroup exists, the mount point's own quota
    // holds.
    std::string group = group_of(root, mount.is_v2);
    if (mount.group != "/" && group.compare(0, mount.group.size(), mount.group) == 0) {
      group.erase(0, mount.group.size());
    }
    for (;; group.erase(group.rfind('/'))) {
      while (!group.empty() && group.back() == '/') group.pop_back();
      const std::string folder = mount.folder + group;
      least = std::min(least, mount.is_v2 ? quota_v2(folder) : quota_v1(folder));
      if (group.find('/') == std::string::npos) break;
    }
  }
  return least;
}

int32_t usable_processors() {
  // No lock: one that another thread holds at a fork would stop the child. Threads that ask at once
  // may all read the quota.
  static std::atomic<int32_t> known{0};
  int32_t processors = known.load(std::memory_order_relaxed);
  if (processors == 0) {
    const double quota = std::ceil(cpu_quota(""));
    processors = static_cast<int32_t>(
        std::max(std::min(static_cast<double>(masked_processors()), quota), 1.0));
    known.store(processors, std::memory_order_relaxed);
  }
  return processors;
}

void use_all_processors() noexcept {
#if defined(__linux__)
  AffinityMask mask{};
  if (mask.read(getpid())) mask.apply();
#endif
}

int32_t current_processor() noexcept {
#if defined(__linux__)
  return sched_getcpu();
#else
  return -1;
#endif
}

bool avoid_processor(int32_t processor) noexcept {
#if defined(__linux__)
  AffinityMask mask{};
  if (processor < 0 || !mask.read(0)) return false;
  if (!CPU_ISSET_S(processor, sizeof mask.words, mask.set())) return false;
  CPU_CLR_S(processor, sizeof mask.words, mask.set());
  return mask.apply();  // fails if no processor is left
#else
  (void)processor;
  return false;
#endif
}

void allow_processor(int32_t processor) noexcept {
#if defined(__linux__)
  AffinityMask mask{};
  if (!mask.read(0)) return;
  CPU_SET_S(processor, sizeof mask.words, mask.set());
  mask.apply();
#else
  (void)processor;
#endif
}

bool request_tile_registers() noexcept {
#if defined(__x86_64__) && defined(SYS_arch_prctl)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // asm/prctl.h, since Linux 5.16
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

ProcessorFlags processor_flags() noexcept {
#if defined(__linux__) && defined(AT_HWCAP2)
  return {getauxval(AT_HWCAP), getauxval(AT_HWCAP2)};
#else
  return {};
#endif
}

int32_t sve_vector_bytes() noexcept {
#if defined(__linux__) && defined(__aarch64__)
  constexpr int kGetVectorLength = 51, kLength = 0xffff;  // PR_SVE_GET_VL, PR_SVE_VL_LEN_MASK
  const int length = prctl(kGetVectorLength);
  return length < 0 ? 0 : length & kLength;
#else
  return 0;
#endif
}

int64_t memory_bytes() noexcept {
  return static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
}

int64_t l2_cache_bytes() noexcept {
#if defined(_SC_LEVEL2_CACHE_SIZE)
  const long bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
  return bytes > 0 ? bytes : 0;
#else
  return 0;
#endif
}

}  // namespace flashattn::os
