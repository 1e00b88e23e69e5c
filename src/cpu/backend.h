// The CPU backend, as core and api see it.
#pragma once

#include "core/backend.h"

namespace flashattn {

const Backend& cpu_backend();

// The machine's CPU, with the best instruction set of this build that it runs, capped by the
// environment variable FLASHATTN_CPU_ISA (baseline; avx2, avx512, avx512_bf16, avx512_amx; neon,
// sve, neon_bf16). Read once a process.
const Device& cpu_device();

// The instruction sets of this build, lowest first, separated by ", ".
const char* cpu_instruction_sets();

}  // namespace flashattn
