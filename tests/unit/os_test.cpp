// Affinity masks and CPU quotas of cgroups, as containers of both versions show them.
#include "core/os.h"

#include <sched.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"

using flashattn::os::cpu_quota;
using flashattn::os::Sleepers;

namespace {

// Files below a root of their own.
double quota_of(const std::vector<std::pair<const char*, const char*>>& files) {
  char root[] = "/tmp/flashattn-cgroups-XXXXXX";
  if (!CHECK(mkdtemp(root))) return -1;
  for (const auto& [path, text] : files) {
    const std::filesystem::path file = std::string(root) + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  const double quota = cpu_quota(root);
  std::filesystem::remove_all(root);
  return quota;
}

constexpr const char *kMounts = "/proc/self/mountinfo", *kGroup = "/proc/self/cgroup";
constexpr const char* kV2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n";
constexpr const char* kV1 =
    "22 1 0:21 / / rw - ext4 /dev/sda rw\n"
    "32 31 0:29 / /sys/fs/cgroup/cpuset rw shared:9 - cgroup cgroup rw,cpuset\n"
    "33 31 0:30 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 master:1 - cgroup cgroup rw,cpu,cpuacct\n";

// As many threads wake as were called, however long ago they announced themselves.
void test_sleepers() {
  constexpr int kThreads = 4;
  static Sleepers sleepers;
  std::atomic<int> announced{0}, awake{0};
  const auto become = [](const std::atomic<int>& number, int value) {
    for (int n = 0; n < 10000 && number != value; ++n) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return number == value;
  };
  std::vector<std::thread> threads;
  for (int n = 0; n < kThreads; ++n) {
    threads.emplace_back([&] {
      sleepers.announce();
      ++announced;
      sleepers.sleep();
      ++awake;
    });
  }
  CHECK(become(announced, kThreads));
  sleepers.call(kThreads - 1);
  CHECK(become(awake, kThreads - 1));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK(awake == kThreads - 1);
  sleepers.call(kThreads);
  for (std::thread& thread : threads) thread.join();
  CHECK(!sleepers.take_back());  // the calls beyond the last thread are none
  sleepers.announce();
  CHECK(sleepers.take_back());
  sleepers.announce();
  sleepers.call(1);
  CHECK(!sleepers.take_back());
  sleepers.sleep();  // returns at once
}

void test_quotas() {
  CHECK(std::isinf(quota_of({})));
  CHECK(std::isinf(quota_of({{kMounts, kV2}, {kGroup, "0::/\n"}})));
  CHECK(std::isinf(
      quota_of({{kMounts, kV2}, {kGroup, "0::/\n"}, {"/sys/fs/cgroup/cpu.max", "max 100000\n"}})));
  // A container with a namespace of its own.
  CHECK(
      quota_of({{kMounts, kV2}, {kGroup, "0::/\n"}, {"/sys/fs/cgroup/cpu.max", "150000 100000"}}) ==
      1.5);
  // The least of a group and those above it.
  CHECK(quota_of({{kMounts, kV2},
                  {kGroup, "0::/a/b/c\n"},
                  {"/sys/fs/cgroup/a/cpu.max", "300000 100000\n"},
                  {"/sys/fs/cgroup/a/b/cpu.max", "max 100000\n"},
                  {"/sys/fs/cgroup/a/b/c/cpu.max", "400000 100000\n"},
                  {"/sys/fs/cgroup/other/cpu.max", "100000 100000\n"}}) == 3);
  // Only the container's group is mounted, and the host's path is told.
  CHECK(quota_of({{kMounts, "30 23 0:26 /docker/1f /sys/fs/cgroup ro - cgroup2 cgroup rw\n"},
                  {kGroup, "0::/docker/1f/inner\n"},
                  {"/sys/fs/cgroup/cpu.max", "200000 100000\n"},
                  {"/sys/fs/cgroup/inner/cpu.max", "50000 100000\n"}}) == 0.5);
  // A group of this name is not there: what is at the mount point holds.
  CHECK(quota_of({{kMounts, kV2},
                  {kGroup, "0::/../elsewhere\n"},
                  {"/sys/fs/cgroup/cpu.max", "200000 100000\n"}}) == 2);
  CHECK(quota_of({{kMounts, kV1},
                  {kGroup, "5:cpuset:/no\n4:cpu,cpuacct:/job\n0::/other\n"},
                  {"/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "250000\n"},
                  {"/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us", "100000\n"},
                  {"/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n"},
                  {"/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n"}}) == 2.5);
  CHECK(std::isinf(quota_of({{kMounts, "nonsense\n\n- - -\n30 - cgroup2\n"},
                             {kGroup, "nonsense\n0\n:\n"},
                             {"/sys/fs/cgroup/cpu.max", "100000 100000\n"}})));
}

// The mask of the process, not of the thread that asks first.
void test_affinity() {
  cpu_set_t all, one;
  CPU_ZERO(&all);
  if (!CHECK(sched_getaffinity(0, sizeof all, &all) == 0)) return;
  int first = 0;
  while (!CPU_ISSET(first, &all)) ++first;
  CPU_ZERO(&one);
  CPU_SET(first, &one);
  const double quota = std::ceil(cpu_quota(""));
  const int expected = quota < CPU_COUNT(&all) ? static_cast<int>(quota) : CPU_COUNT(&all);
  const auto in_child = [](auto body) {  // for the answer is kept
    const pid_t child = fork();
    if (child == 0) _exit(body() ? 0 : 1);
    int status = -1;
    return waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
  };
  CHECK(in_child([&] { return flashattn::os::usable_processors() == expected; }));
  CHECK(in_child([&] {
    return sched_setaffinity(0, sizeof one, &one) == 0 && flashattn::os::usable_processors() == 1;
  }));
  const auto mask_is = [](const cpu_set_t& wanted) {  // of this thread
    cpu_set_t mask;
    CPU_ZERO(&mask);
    return sched_getaffinity(0, sizeof mask, &mask) == 0 && CPU_EQUAL(&mask, &wanted);
  };
  cpu_set_t others = all;
  if (CPU_COUNT(&all) > 1) CPU_CLR(first, &others);
  const bool has_others = CPU_COUNT(&all) > 1;
  std::thread([&] {  // whose mask alone changes
    CHECK(flashattn::os::avoid_processor(first) == has_others && mask_is(others));
    CHECK(!flashattn::os::avoid_processor(-1) && mask_is(others));
    CHECK(!has_others || !flashattn::os::avoid_processor(first));
    flashattn::os::allow_processor(first);
    CHECK(mask_is(all));
  })
      .join();
}

}  // namespace

int main() {
  test_sleepers();
  test_quotas();
  test_affinity();
  return check_report();
}
