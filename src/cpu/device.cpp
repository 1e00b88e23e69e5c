#include "cpu/device.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "cpu/family.h"
#include "cpu/parallel.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace flashattn {
namespace cpu {
namespace {

struct InstructionSet {
  const char* name;
  const Kernels& (*kernels)();
  bool (*runs_here)();
};

// Lowest first.
const InstructionSet kInstructionSets[] = {
    {"baseline", baseline::kernels, [] { return true; }},
#if FLASHATTN_HAVE_AVX2
    {"avx2", avx2::kernels,
     [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }},
#endif
#if FLASHATTN_HAVE_AVX512
    {"avx512", avx512::kernels,
     [] {
       return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
              __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
     }},
#endif
#if FLASHATTN_HAVE_AVX512_BF16
    {"avx512_bf16", avx512_bf16::kernels,
     [] {
       return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
              __builtin_cpu_supports("fma");
     }},
#endif
};

// Whether an instruction set that the processor has is slower there than the one below it.
bool is_slower_here(const char* name) {
#if defined(__x86_64__)
  // vdpbf16ps: less than half the rate of fp32 multiply-adds on Intel's, twice on AMD's.
  return std::strcmp(name, "avx512_bf16") == 0 && __builtin_cpu_is("intel");
#else
  (void)name;
  return false;
#endif
}

struct Choice {
  const Kernels* kernels;
  char reason[128];
};

Choice choose() {
#if defined(__x86_64__)
  __builtin_cpu_init();
#endif
  const char* wanted = std::getenv("FLASHATTN_CPU_ISA");
  if (wanted && !*wanted) wanted = nullptr;
  const InstructionSet* best = nullptr;
  bool capped = false;
  for (const InstructionSet& set : kInstructionSets) {
    if (capped || !set.runs_here() || (!wanted && is_slower_here(set.name))) continue;
    best = &set;
    capped = wanted && std::strcmp(wanted, set.name) == 0;
  }
  Choice choice = {&best->kernels(), {}};
  std::snprintf(choice.reason, sizeof choice.reason,
                capped ? "%s is what FLASHATTN_CPU_ISA allows"
                       : "%s is the fastest instruction set of this build on this processor",
                best->name);
  return choice;
}

const Choice& choice() {
  static const Choice chosen = choose();
  return chosen;
}

void read_name(char (&name)[64]) {
  std::snprintf(name, sizeof name, "CPU");
#if defined(__x86_64__)
  unsigned words[12] = {};
  for (unsigned n = 0; n < 3; ++n) {
    unsigned* w = words + 4 * n;
    if (!__get_cpuid(0x80000002u + n, w, w + 1, w + 2, w + 3)) return;
  }
  char brand[49] = {};
  std::memcpy(brand, words, 48);
  const char* text = brand + std::strspn(brand, " ");
  size_t length = std::strlen(text);
  while (length > 0 && text[length - 1] == ' ') --length;
  if (length > 0) std::snprintf(name, sizeof name, "%.*s", static_cast<int>(length), text);
#endif
}

struct MachineDevice {
  Device device;
  char name[64];

  MachineDevice() : device{} {
    read_name(name);
    flashattn_device_properties& p = device.properties;
    p.units = machine_threads();
    p.name = name;
    p.isa = machine_kernels().isa;
    p.memory = static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
#if defined(_SC_LEVEL2_CACHE_SIZE)
    const long cache = sysconf(_SC_LEVEL2_CACHE_SIZE);
    p.local_memory = cache > 0 ? static_cast<int32_t>(cache) : 0;
#endif
  }
};

}  // namespace

const Kernels& machine_kernels() { return *choice().kernels; }

const char* machine_kernels_reason() { return choice().reason; }

}  // namespace cpu

const Device& cpu_device() {
  static const cpu::MachineDevice machine;
  return machine.device;
}

const char* cpu_instruction_sets() {
  struct Text {
    char names[128] = {};
    Text() {
      for (const cpu::InstructionSet& set : cpu::kInstructionSets) {
        const size_t used = std::strlen(names);
        std::snprintf(names + used, sizeof names - used, used ? ", %s" : "%s", set.name);
      }
    }
  };
  static const Text text;
  return text.names;
}

}  // namespace flashattn
