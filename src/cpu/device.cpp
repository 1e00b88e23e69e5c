#include "cpu/device.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "cpu/family.h"
#include "cpu/parallel.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#endif

namespace flashattn {
namespace cpu {
namespace {

bool has_bf16() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("fma");
#else
  return false;
#endif
}

// Whether this process may use tile registers. Linux wants to be asked, once a process, before the
// first thread uses them: their 8 KB would not fit every signal stack.
bool may_use_tiles() {
#if defined(__x86_64__) && defined(SYS_arch_prctl)
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & 1u << 27)) return false;
  constexpr unsigned kBf16 = 1u << 22, kTiles = 1u << 24;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (kBf16 | kTiles)) != (kBf16 | kTiles)) {
    return false;
  }
  unsigned low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  constexpr unsigned kSavedTiles = 3u << 17;
  if ((low & kSavedTiles) != kSavedTiles) return false;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // asm/prctl.h, since Linux 5.16
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

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
    {"avx512_bf16", avx512_bf16::kernels, has_bf16},
#endif
#if FLASHATTN_HAVE_AVX512_AMX
    {"avx512_amx", avx512_amx::kernels, [] { return has_bf16() && may_use_tiles(); }},
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
    // Above the cap nothing is asked of the system.
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
