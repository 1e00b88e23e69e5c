#include "cpu/device.h"

#include <cstdio>
#include <cstring>

#include "core/os.h"
#include "cpu/backend.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace flashattn {
namespace cpu {
namespace {

#if defined(__x86_64__)
[[maybe_unused]] bool has_bf16() {
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("fma");
}

[[maybe_unused]] bool has_tiles() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & 1u << 27)) return false;
  constexpr unsigned kBf16 = 1u << 22, kTiles = 1u << 24;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (kBf16 | kTiles)) != (kBf16 | kTiles)) {
    return false;
  }
  unsigned low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  constexpr unsigned kSavedTiles = 3u << 17;
  return (low & kSavedTiles) == kSavedTiles;
}
#elif defined(__aarch64__)
// Bits of Linux: HWCAP_ASIMD, HWCAP_SVE and HWCAP2_BF16.
[[maybe_unused]] bool has_neon() { return os::processor_flags().first & 1u << 1; }
[[maybe_unused]] bool has_sve() {
  constexpr int32_t kBytes = 32;  // bytes of the vectors that the kernels are compiled for
  return has_neon() && os::processor_flags().first & 1u << 22 && os::sve_vector_bytes() == kBytes;
}
[[maybe_unused]] bool has_neon_bf16() {
  return has_neon() && os::processor_flags().second & 1u << 14;
}
#endif

struct InstructionSet {
  const char* name;
  const Kernels& (*kernels)();
  bool (*is_supported)();
  bool (*request)();  // asks the system for it; NULL: it needs no permission
};

// Lowest first.
const InstructionSet kInstructionSets[] = {
    {"baseline", baseline::kernels, [] { return true; }, nullptr},
#if FLASHATTN_HAVE_AVX2
    {"avx2", avx2::kernels,
     [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }, nullptr},
#endif
#if FLASHATTN_HAVE_AVX512
    {"avx512", avx512::kernels,
     [] {
       return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
              __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
     },
     nullptr},
#endif
#if FLASHATTN_HAVE_AVX512_BF16
    {"avx512_bf16", avx512_bf16::kernels, has_bf16, nullptr},
#endif
#if FLASHATTN_HAVE_AVX512_AMX
    {"avx512_amx", avx512_amx::kernels, [] { return has_bf16() && has_tiles(); },
     os::request_tile_registers},
#endif
#if FLASHATTN_HAVE_NEON
    {"neon", neon::kernels, has_neon, nullptr},
#endif
#if FLASHATTN_HAVE_SVE
    {"sve", sve::kernels, has_sve, nullptr},
#endif
#if FLASHATTN_HAVE_NEON_BF16
    {"neon_bf16", neon_bf16::kernels, has_neon_bf16, nullptr},
#endif
};

struct Processor {
  char vendor[13];
  unsigned family, model;  // family and model of CPUID; 0: unknown

  Processor() : vendor{}, family(0), model(0) {
#if defined(__x86_64__)
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid(0, &a, &b, &c, &d)) return;
    const unsigned words[3] = {b, d, c};
    std::memcpy(vendor, words, 12);
    if (!__get_cpuid(1, &a, &b, &c, &d)) return;
    family = (a >> 8 & 15) + ((a >> 8 & 15) == 15 ? a >> 20 & 255 : 0);
    model = (a >> 4 & 15) | (a >> 12 & 0xf0);
#endif
  }
};

// Processors on which instructions for bf16 are the fastest; no CPUID flag tells. Intel's vector
// units take twice as long for vdpbf16ps as for multiply-adds of fp32, AMD's half as long. Tile
// registers pay on every processor that has them so far, whatever model a virtual machine reports.
struct PreferredIsa {
  const char *name, *vendor;
  unsigned family;
};
const PreferredIsa kPreferredIsas[] = {
    {"avx512_bf16", "AuthenticAMD", 25},  // Zen 4
    {"avx512_bf16", "AuthenticAMD", 26},  // Zen 5
    {"avx512_amx", "GenuineIntel", 6},    // Sapphire, Emerald, Granite Rapids
};

struct Choice {
  const Kernels* kernels;
  char reason[384];
};

Choice choose() {
#if defined(__x86_64__)
  __builtin_cpu_init();
#endif
  const char* given = os::environment("FLASHATTN_CPU_ISA");
  const char* wanted = nullptr;  // `given`, if it names an instruction set
  for (const InstructionSet& set : kInstructionSets) {
    if (given && std::strcmp(given, set.name) == 0) wanted = given;
  }
  const Processor processor;
  const InstructionSet *best = nullptr, *left_out = nullptr;
  bool is_named = false;
  for (const InstructionSet& set : kInstructionSets) {
    // The system is not asked to permit an instruction set that is not used.
    if (is_named || !set.is_supported()) continue;
    if (!wanted && !is_preferred(set.name, processor.vendor, processor.family)) {
      left_out = &set;
      continue;
    }
    if (set.request && !set.request()) continue;
    best = &set;
    left_out = nullptr;
    is_named = wanted && std::strcmp(wanted, set.name) == 0;
  }
  Choice choice = {&best->kernels(), {}};
  if (is_named) {
    std::snprintf(choice.reason, sizeof choice.reason, "%s is what FLASHATTN_CPU_ISA allows",
                  best->name);
    return choice;
  }
  int used = std::snprintf(choice.reason, sizeof choice.reason,
                           "%s is the fastest instruction set of this build on ", best->name);
  used += std::snprintf(choice.reason + used, sizeof choice.reason - static_cast<size_t>(used),
                        processor.family ? "processors of family %u, model %u" : "this processor",
                        processor.family, processor.model);
  const auto add = [&](const char* format, const char* name) {
    const size_t room = sizeof choice.reason - static_cast<size_t>(used);
    used += std::snprintf(choice.reason + used, room, format, name, name);
  };
  if (left_out) {
    add("; %s is not known to pay there, FLASHATTN_CPU_ISA=%s uses it", left_out->name);
  }
  // The text is so short that no name makes `used` exceed the room.
  if (given) {
    add(wanted ? "; FLASHATTN_CPU_ISA = %.40s is not to be had here"
               : "; FLASHATTN_CPU_ISA = %.40s is no instruction set of this build",
        given);
  }
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
    p.threads = os::usable_processors();
    p.name = name;
    p.isa = machine_kernels().isa;
    p.memory = os::memory_bytes();
    p.l2_cache = static_cast<int32_t>(os::l2_cache_bytes());
  }
};

}  // namespace

bool is_preferred(const char* isa, const char* vendor, unsigned family) {
  bool listed = false;
  for (const PreferredIsa& fast : kPreferredIsas) {
    if (std::strcmp(fast.name, isa) != 0) continue;
    listed = true;
    if (std::strcmp(fast.vendor, vendor) == 0 && fast.family == family) {
      return true;
    }
  }
  return !listed;
}

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
