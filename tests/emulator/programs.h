// Programs of kernels, good ones and bad ones, run by a child each, in many orders: each fault is
// found in every one, and nothing else.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>

#include "emulator.h"
#include "unit/check.h"

// What a child says that runs a program once; empty: it ended well.
inline std::string outcome(const std::function<void()>& program, int seed) {
  int ends[2];
  if (pipe(ends) != 0) return "no pipe";
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], STDERR_FILENO);
    setenv("FLASHATTN_EMULATOR_SEED", std::to_string(seed).c_str(), 1);
    program();
    _exit(0);
  }
  close(ends[1]);
  std::string text;
  char part[256];
  for (ssize_t n; (n = read(ends[0], part, sizeof part)) > 0;) {
    text.append(part, static_cast<size_t>(n));
  }
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  if (text.empty() && status != 0) text = "status " + std::to_string(status);
  return text;
}

// Makes blocks, which takes long, once for all children.
inline void warm_up() {
  emulator::run_grid(dim3(emulator::kMultiprocessors), 32, 0, [] {});
}

inline void check_programs(const char* name, const std::function<void()>& good,
                           const std::function<void()>& bad, const char* finds = ": a race: ") {
  for (int seed = 0; seed < 10; ++seed) {
    const std::string fine = outcome(good, seed);
    if (!CHECK(fine.empty())) std::printf("%s: %s", name, fine.c_str());
    const std::string found = outcome(bad, seed);
    if (!CHECK(found.find(finds) != std::string::npos)) {
      std::printf("%s, seed %d: not found: %s\n", name, seed, found.c_str());
    }
  }
}
