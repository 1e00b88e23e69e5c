// Finds accesses to global memory that nothing puts in an order, of blocks of a kernel and of
// kernels that may run at once. The compiler tells of plain loads and stores: kernels are compiled
// with -fsanitize=thread, whose functions are the emulator's own.
//
// What puts them in an order, beside what does within a cluster (races.h): a release, or a fence
// and what is stored relaxed after it, that an acquire, or what is loaded relaxed and a fence after
// it, has read, also through additions by others; the end of a kernel. What the copy engine starts
// comes after what was known at the last fence of the global proxy, or when the kernel started. A
// kernel that was started early knows only what the one before it knew when it started, until it
// waits.
//
// A barrier passes on what was seen before it, for a fence after it, and what was fenced. GPUs do
// so; PTX's text wants the fence on the side of the barrier where the flag is.
#pragma once

#include <cstddef>
#include <cstdint>

#include "races.h"

namespace emulator {

// Memory that is allocated, and no more.
void watch(void* memory, size_t bytes);
void forget(void* memory);
// The host writes, as a kernel that the next may follow early.
void host_writes(const void* to, size_t bytes);

// kAdd: as one; nobody races who adds, too.
enum class Does { kRead, kWrite, kAdd };

// By the running warp.
void touch(const void* at, size_t bytes, Does what);
// By a copy, or by whom it is not known: nothing.
void touch(const Act* act, const void* at, size_t bytes, Does what);

}  // namespace emulator
