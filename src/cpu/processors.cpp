#include "cpu/processors.h"

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
#include <sched.h>
#endif

namespace flashattn::cpu {
namespace {

constexpr double kNoLimit = std::numeric_limits<double>::infinity();

#if defined(__linux__)
// As many as Linux may be configured for, and more: a smaller mask than the kernel's is refused.
struct Mask {
  unsigned long words[1 << 10];

  cpu_set_t* set() { return reinterpret_cast<cpu_set_t*>(words); }
  bool read(pid_t thread) { return sched_getaffinity(thread, sizeof words, set()) == 0; }
  void apply() { sched_setaffinity(0, sizeof words, set()); }
};
#endif

int32_t masked_processors() {
#if defined(__linux__)
  Mask mask{};
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

// cpu.max: "quota period" or "max period", in microseconds.
double quota_v2(const std::string& folder) {
  const std::vector<std::string> lines = lines_of(folder + "/cpu.max");
  double quota = 0, period = 0;
  if (lines.empty() || std::sscanf(lines[0].c_str(), "%lf %lf", &quota, &period) != 2) {
    return kNoLimit;
  }
  return quota > 0 && period > 0 ? quota / period : kNoLimit;
}

// cpu.cfs_quota_us, -1: no limit, and cpu.cfs_period_us.
double quota_v1(const std::string& folder) {
  const std::vector<std::string> quota = lines_of(folder + "/cpu.cfs_quota_us");
  const std::vector<std::string> period = lines_of(folder + "/cpu.cfs_period_us");
  if (quota.empty() || period.empty()) return kNoLimit;
  const double q = std::atof(quota[0].c_str()), p = std::atof(period[0].c_str());
  return q > 0 && p > 0 ? q / p : kNoLimit;
}

// A hierarchy of groups that has CPU quotas: where it is mounted, and which of its groups is there.
struct Mount {
  std::string folder, group;
  bool is_v2;
};

// /proc/self/mountinfo: number, parent's number, device, root, mount point, options, optional
// fields, "-", type, source, options of the type.
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

// /proc/self/cgroup: "0::/group" of version 2, "4:cpu,cpuacct:/group" of version 1.
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
    // In a container the mount begins at the container's group. Where that is not said, the group
    // at the mount point is the one there is.
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
  // Threads that ask at once may all look: a lock that another holds at a fork would stop the
  // child.
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

void use_processors() {
#if defined(__linux__)
  Mask mask{};
  if (mask.read(getpid())) mask.apply();
#endif
}

int32_t current_processor() {
#if defined(__linux__)
  return sched_getcpu();
#else
  return -1;
#endif
}

void leave_processor(int32_t processor) {
#if defined(__linux__)
  Mask mask{};
  if (!mask.read(0)) return;
  Mask others = mask;
  CPU_CLR_S(processor, sizeof others.words, others.set());
  others.apply();  // refused where there are none
  mask.apply();
#else
  (void)processor;
#endif
}

}  // namespace flashattn::cpu
