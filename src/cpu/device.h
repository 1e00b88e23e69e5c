// The processor that this library runs on.
#pragma once

#include "cpu/kernels.h"

namespace flashattn::cpu {

// The kernels chosen for this processor: the best that it runs, or those that FLASHATTN_CPU_ISA
// names. Fixed for the life of the process.
const Kernels& machine_kernels();

// Whether an instruction set is the fastest of those that a processor has. The rule depends only on
// CPUID's vendor and family, because virtual machines hide the model.
bool is_preferred(const char* isa, const char* vendor, unsigned family);

// Why machine_kernels() were chosen: one clause of a message.
const char* machine_kernels_reason();

}  // namespace flashattn::cpu
