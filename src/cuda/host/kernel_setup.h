// Shared by the launchers: set-up of kernels at plan creation, and checks of a call.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <string>

#include "core/bump_allocator.h"
#include "core/problem.h"
#include "cuda/host/driver.h"
#include "cuda/host/launch.h"
#include "cuda/params.h"

namespace flashattn::cuda {

// Records a failure of the CUDA runtime and clears it there. Returns OK for cudaSuccess.
int32_t status_of(cudaError_t error, const char* what);
void throw_on(cudaError_t error, const char* what);

// A kernel of a table, set up on a device.
template <class Entry>
struct ReadyKernel {
  const Entry* entry;
  int32_t registers;
  int32_t resident;  // CTAs that run at once on the whole device
};

struct Residency {
  int32_t registers, resident;
};

// Lets the kernel use its shared memory. Throws Refused.
Residency make_ready(const void* kernel, int32_t threads, int32_t shared_bytes,
                     int32_t multiprocessors);

template <class Entry>
ReadyKernel<Entry> make_ready(const Entry& entry, int32_t multiprocessors) {
  const Residency r = make_ready(reinterpret_cast<const void*>(entry.kernel), entry.threads,
                                 entry.shared_bytes, multiprocessors);
  return {&entry, r.registers, r.resident};
}

// Fills the properties that plan_info reports of a kernel, except splits and why.
template <class Entry>
void describe_kernel(const ReadyKernel<Entry>& choice, int32_t stages, const std::string& name,
                     const char* isa, flashattn_plan_properties* properties) {
  properties->tile_q = choice.entry->tile_q;
  properties->tile_kv = choice.entry->tile_kv;
  properties->stages = stages;
  properties->threads = choice.entry->threads;
  properties->registers = choice.registers;
  properties->shared_memory = choice.entry->shared_bytes;
  properties->splits = 1;
  properties->kernel = name.c_str();
  properties->isa = isa;
}

// Whether the driver finds code of a kernel that a device can run. The driver is asked once for
// each device. Also true if something else is wrong: creating the plan reports that, and the next
// plan asks again. Throws Refused.
class CodeCheck {
 public:
  bool has_code(int32_t device, const void* kernel);

 private:
  std::atomic<int8_t> known_[kMaxDevices] = {};  // 1: yes, -1: no
};

// Bytes of the L2 cache that the L2 swizzle may fill: half of the cache, which consists of two
// partitions, and at most 25 MB, measured to be best on an H200 (which reports 60 MB).
int64_t usable_l2_bytes(int32_t device);

// The name of a forward kernel in plan_info, without its score modification.
template <class Entry>
std::string forward_name(const char* backend, const Entry& e) {
  return std::string(backend) + "_forward_" + dtype_label(e.dtype) + "_" +
         std::to_string(e.dim_qk) + "_" + std::to_string(e.dim_v) + "_q" +
         std::to_string(e.tile_q) + "_kv" + std::to_string(e.tile_kv);
}

// A number that no other launch of the process has and that is unlikely to be found in memory by
// chance. Never 0.
uint64_t new_stamp();

class PlanContext;
// Returns OK if the device is current, and the plan's context is or could be made so.
int32_t make_current(int32_t device, const PlanContext& context);

// Divides the workspace, which may have any alignment, into arrays that begin with a cache line of
// the GPU.
using WorkspaceAllocator = BasicBumpAllocator<128>;

// Bytes of workspace for one array of `count` elements.
template <class T>
int64_t workspace_of(int64_t count) {
  WorkspaceAllocator memory(nullptr);
  memory.take<T>(count);
  return memory.unaligned_bytes();
}

struct NamedTensor {
  const char* name;
  const flashattn_tensor& tensor;
  int32_t dtype;
  bool copied = false;  // to shared memory, 16 bytes at once even if fp32
};

// Whether rows of the tensor can be moved in vectors of so many bytes.
bool is_aligned(const flashattn_tensor& tensor, int32_t dtype, int32_t bytes);

// Returns OK if the tensor can be moved in vectors of 16 bytes (8 for fp32 that is not copied).
int32_t check_alignment(const NamedTensor& named);

// Return OK if the kernels can move the arrays of a call.
int32_t check_forward_arrays(const Problem& problem, const ForwardArgs& args);
int32_t check_backward_arrays(const Problem& problem, const BackwardArgs& args);

// Fills problem, tree rule and shape. With TREE the kernel's problem has the hull of its masks.
void set_problem(const Problem& problem, const Shape& shape, ForwardParams* params);

// Fills the arrays of a call, and divides the workspace where keys are split. Returns an enum
// flashattn_status.
int32_t set_arrays(const ForwardArgs& args, void* workspace, ForwardParams* params);

// Returns OK if a one-dimensional grid may have so many CTAs.
int32_t check_grid(int64_t ctas);

// Launches a kernel of a table with a grid of `ctas` CTAs, in clusters of `cluster`. early: by PDL.
template <class Entry, class Params>
int32_t launch(const Entry& entry, int64_t ctas, const Params& params, cudaStream_t stream,
               const char* what, int cluster = 1, bool early = false) {
  if (const int32_t status = check_grid(ctas)) return status;
  return status_of(launch_with(early, entry.kernel, dim3(static_cast<unsigned>(ctas)),
                               entry.threads, entry.shared_bytes, params, stream, cluster),
                   what);
}

// Writes 0 to amax_o, which a kernel then raises.
int32_t clear_amax(const Problem& problem, const ForwardArgs& args, cudaStream_t stream);

}  // namespace flashattn::cuda
