// What this processor can do at the most: multiply-adds per second with operands in registers, on
// as many threads as asked for. For each character that it reads, prints the GFLOP/s of some
// milliseconds.
//
//     peak THREADS f32|bf16
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "cpu/simd.h"

namespace {

using namespace flashattn::cpu::FLASHATTN_ISA;

constexpr int kChains = kWidth == 16 ? 24 : 12;  // enough to hide the latency, few enough to fit
constexpr int64_t kSteps = 1 << 17;
constexpr int kRounds = 5;

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
  Floats total{};
  for (const Floats& c : chain) total += c;
  volatile float sink = sum(total);
  (void)sink;
  return elapsed.count();
}

// GFLOP/s of all threads together.
template <class Step>
double rate(int threads, double flops_a_step, Step step) {
  std::vector<double> median(static_cast<size_t>(threads));
  std::vector<std::thread> workers;
  std::atomic<int> waiting{threads};
  for (int t = 0; t < threads; ++t) {
    workers.emplace_back([&, t] {
      --waiting;
      while (waiting > 0) {
      }
      double seconds[kRounds];
      for (double& each : seconds) each = run_once(step);
      std::nth_element(seconds, seconds + kRounds / 2, seconds + kRounds);
      median[static_cast<size_t>(t)] = seconds[kRounds / 2];
    });
  }
  double total = 0;
  for (int t = 0; t < threads; ++t) {
    workers[static_cast<size_t>(t)].join();
    total += flops_a_step * kSteps * kChains / median[static_cast<size_t>(t)] * 1e-9;
  }
  return total;
}

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 1;
  if (threads < 1) return 1;
  const Floats a = splat(0.999f), b = splat(0.001f);
  const Words pair = splat_word(0x3c003c00u);
  const bool pairs = kHasBf16Dot && argc > 2 && std::strcmp(argv[2], "bf16") == 0;
  while (std::getchar() != EOF) {
    std::printf("%.1f\n", pairs ? rate(threads, 4.0 * kWidth,
                                       [=](Floats x) { return dot_bf16(x, pair, pair); })
                                : rate(threads, 2.0 * kWidth, [=](Floats x) { return x * a + b; }));
    std::fflush(stdout);
  }
  return 0;
}
