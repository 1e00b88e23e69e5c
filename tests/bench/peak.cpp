// This program measures what the processor reaches at the most, on as many threads as asked for:
// multiply-adds per second with operands in registers, or bytes per second that it reads from
// memory to sum them. For each character that it reads, it prints the GFLOP/s, or the GB/s, of some
// milliseconds.
//
//     peak THREADS f32|bf16
//     peak THREADS read BYTES
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "cpu/amx.h"

#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

using namespace flashattn::cpu::FLASHATTN_ISA;

constexpr int kChains = kWidth == 16 ? 24 : 12;  // enough to hide the latency, few enough to fit
constexpr int64_t kSteps = 1 << 17;
constexpr int kRounds = 5;

// Uses numbers, so that the compiler computes them.
template <int kCount>
void keep(const Floats (&x)[kCount]) {
  Floats total{};
  for (const Floats& each : x) total += each;
  volatile float sink = sum(total);
  (void)sink;
}

// Seconds that one thread takes for kSteps * kChains steps.
template <class Step>
double run_once(Step step) {
  Floats chain[kChains];
  for (int c = 0; c < kChains; ++c) chain[c] = splat(static_cast<float>(c));
  const auto start = std::chrono::steady_clock::now();
  for (int64_t n = 0; n < kSteps; ++n) {
#pragma GCC unroll 24
    for (int c = 0; c < kChains; ++c) chain[c] = step(chain[c]);
  }
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  keep(chain);
  return elapsed.count();
}

#if defined(__AMX_BF16__)
// Seconds that one thread takes for kSteps products of tile registers, of numbers of any size.
double run_tiles_once() {
  uint16_t numbers[2 * kTileRows * kTileRows];
  uint32_t random = 1;
  for (uint16_t& x : numbers) {
    random = random * 1664525u + 1013904223u;
    x = static_cast<uint16_t>(0x3e80u + (random >> 16 & 0x80ffu));
  }
  configure_tiles(kTileRows, kTileRows, kTileRows);
  __asm__ volatile("" : : : "memory");  // the intrinsics do not say that they read it
  _tile_loadd(4, numbers, 4 * kTileRows);
  _tile_loadd(5, numbers, 4 * kTileRows);
  _tile_loadd(6, numbers, 4 * kTileRows);
  _tile_loadd(7, numbers, 4 * kTileRows);
  const auto start = std::chrono::steady_clock::now();
  for (int64_t n = 0; n < kSteps / 4; ++n) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  release_tiles();
  return elapsed.count();
}
#endif

// Seconds that a thread takes to sum `count` floats.
double run_read(const float* x, int64_t count) {
  constexpr int kLines = 16;  // at once: enough loads to be on their way
  constexpr int kStep = kLines * 64 / 4;
  Floats sums[kLines] = {};
  const auto start = std::chrono::steady_clock::now();
  for (int64_t n = 0; n + kStep <= count; n += kStep) {
#pragma GCC unroll 16
    for (int line = 0; line < kLines; ++line) {
      __builtin_prefetch(x + n + 8 * kStep + line * 16, 0, 2);
      for (int c = 0; c < 16; c += kWidth) sums[line] += load(x + n + line * 16 + c);
    }
  }
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  keep(sums);
  return elapsed.count();
}

// 1e9 units a second of all threads together; once(t): seconds that thread t takes for so many.
template <class Once>
double rate(int threads, double units, Once once) {
  std::vector<double> median(static_cast<size_t>(threads));
  std::vector<std::thread> workers;
  std::atomic<int> waiting{threads};
  for (int t = 0; t < threads; ++t) {
    workers.emplace_back([&, t] {
      --waiting;
      while (waiting > 0) {
      }
      double seconds[kRounds];
      for (double& each : seconds) each = once(t);
      std::nth_element(seconds, seconds + kRounds / 2, seconds + kRounds);
      median[static_cast<size_t>(t)] = seconds[kRounds / 2];
    });
  }
  double total = 0;
  for (int t = 0; t < threads; ++t) {
    workers[static_cast<size_t>(t)].join();
    total += units / median[static_cast<size_t>(t)] * 1e-9;
  }
  return total;
}

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 1;
  if (threads < 1) return 1;
  const Floats a = splat(0.999f), b = splat(0.001f);
  const Words pair = splat_word(0x3c003c00u);
  const double lanes = 1.0 * kWidth * kChains * kSteps;
  const auto rate_of = [&](bool bf16) {
#if defined(__AMX_BF16__)
    if (bf16)
      return rate(threads, 4.0 * kTileRows * kTileRows * kTileRows * kSteps,
                  [](int) { return run_tiles_once(); });
#endif
    if (kHasBf16Dot && bf16) {
      return rate(threads, 4 * lanes,
                  [=](int) { return run_once([=](Floats x) { return dot_bf16(x, pair, pair); }); });
    }
    return rate(threads, 2 * lanes,
                [=](int) { return run_once([=](Floats x) { return x * a + b; }); });
  };
#if defined(__AMX_BF16__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // as src/cpu/device.cpp
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) return 1;
#endif
  const bool bf16 = argc > 2 && std::strcmp(argv[2], "bf16") == 0;
  const int64_t part = argc > 3 ? std::atoll(argv[3]) / 4 / threads : 0;
  const std::vector<float> memory(static_cast<size_t>(part * threads), 1.0f);
  const auto read = [&](int t) { return run_read(memory.data() + t * part, part); };
  while (std::getchar() != EOF) {
    std::printf("%.1f\n", part > 0 ? rate(threads, 4.0 * part, read) : rate_of(bf16));
    std::fflush(stdout);
  }
  return 0;
}
