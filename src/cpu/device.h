// The processor this library runs on.
#pragma once

#include "cpu/kernels.h"

namespace flashattn::cpu {

// The kernels that this processor runs: the best it has, or what FLASHATTN_CPU_ISA names. Fixed for
// the life of the process.
const Kernels& machine_kernels();

// Whether an instruction set is the fastest of those that a processor has: a fixed rule by CPUID's
// vendor and family, for virtual machines hide the model.
bool is_preferred(const char* isa, const char* vendor, unsigned family);

// Why they were chosen: one clause.
const char* machine_kernels_reason();

}  // namespace flashattn::cpu
