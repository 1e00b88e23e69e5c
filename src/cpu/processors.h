// Processors that this process may use.
#pragma once

#include <cstdint>

namespace flashattn::cpu {

// Those of the affinity mask of the process, which is that of its first thread, and no more than
// the CPU quota of its cgroups is worth; at least one. Asked once: later changes are not seen.
int32_t usable_processors();

// The calling thread may run on all of that mask, whatever thread has started it.
void use_processors();

// The one that runs this thread; -1: not known.
int32_t current_processor();

// Moves the calling thread to another one that it may run on, if there is one.
void leave_processor(int32_t processor);

// Processors' worth of time that the cgroups of this process have: the least quota of its group and
// of those above, of versions 1 and 2; infinite: no limit. root: of the file system that holds
// proc, and the mounts that proc names; "" but in tests.
double cpu_quota(const char* root);

}  // namespace flashattn::cpu
