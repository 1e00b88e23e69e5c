// What this processor can do at the most: multiply-adds per second with operands in registers, on
// as many threads as asked for. Prints a line for each arithmetic: its name and GFLOP/s.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "cpu/simd.h"

namespace {

using namespace flashattn::cpu::FLASHATTN_ISA;

constexpr int kChains = kWidth == 16 ? 24 : 12;  // enough to hide the latency, few enough to fit
constexpr int64_t kSteps = 1 << 20;
constexpr int kRounds = 40;

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

// GFLOP/s of all threads together, each at the best of its rounds.
template <class Step>
double rate(int threads, double flops_a_step, Step step) {
  std::vector<double> best(static_cast<size_t>(threads), 1e9);
  std::vector<std::thread> workers;
  std::atomic<int> waiting{threads};
  for (int t = 0; t < threads; ++t) {
    workers.emplace_back([&, t] {
      --waiting;
      while (waiting > 0) {
      }
      for (int round = 0; round < kRounds; ++round) {
        const double seconds = run_once(step);
        if (seconds < best[static_cast<size_t>(t)]) best[static_cast<size_t>(t)] = seconds;
      }
    });
  }
  double total = 0;
  for (int t = 0; t < threads; ++t) {
    workers[static_cast<size_t>(t)].join();
    total += flops_a_step * kSteps * kChains / best[static_cast<size_t>(t)] * 1e-9;
  }
  return total;
}

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 1;
  if (threads < 1) return 1;
  const Floats a = splat(0.999f), b = splat(0.001f);
  std::printf("f32 %.1f\n", rate(threads, 2.0 * kWidth, [=](Floats x) { return x * a + b; }));
  if (kHasBf16Dot) {
    const Words pair = splat_word(0x3c003c00u);
    std::printf("bf16 %.1f\n",
                rate(threads, 4.0 * kWidth, [=](Floats x) { return dot_bf16(x, pair, pair); }));
  }
  return 0;
}
