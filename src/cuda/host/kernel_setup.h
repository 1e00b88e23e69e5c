// What the launchers share: kernels made ready at plan creation, and checks of a call.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "core/problem.h"
#include "cuda/host/driver.h"
#include "cuda/host/launch.h"

namespace flashattn::cuda {

// Records a failure of the runtime, which then forgets it; OK for cudaSuccess.
int32_t status_of(cudaError_t error, const char* what);
void throw_on(cudaError_t error, const char* what);

// A kernel of a table, with what the device says of it.
template <class Entry>
struct ReadyKernel {
  const Entry* entry;
  int32_t registers;
  int32_t resident;  // blocks at once on the whole device
};

struct Residency {
  int32_t registers, resident;
};

// Allows the kernel its shared memory. Throws Refused.
Residency make_ready(const void* kernel, int32_t threads, int32_t shared_bytes, int32_t units);

template <class Entry>
ReadyKernel<Entry> prepare(const Entry& entry, int32_t units) {
  const Residency r = make_ready(reinterpret_cast<const void*>(entry.kernel), entry.threads,
                                 entry.shared_bytes, units);
  return {&entry, r.registers, r.resident};
}

// What plan_info says of a kernel, but for splits and why.
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

// Whether the driver finds code of a kernel that the device can run. True also where something else
// is wrong: making the plan will tell. Throws Refused.
bool has_code(int32_t device, const void* kernel);

// Bytes of the device's L2 cache to reckon with: half of it, for it lies in two parts, but no more
// than was measured to be best on an H200, half of 50 MB, though that reports 60.
int64_t usable_l2_bytes(int32_t device);

// Whether scores need more than a factor.
bool is_modified(const Problem& p);

inline const char* dtype_name(int32_t dtype) {
  return dtype == FLASHATTN_DTYPE_F32 ? "f32" : dtype == FLASHATTN_DTYPE_BF16 ? "bf16" : "f16";
}

// How plan_info names a forward kernel, but for its scores.
template <class Entry>
std::string forward_name(const char* backend, const Entry& e) {
  return std::string(backend) + "_forward_" + dtype_name(e.dtype) + "_" + std::to_string(e.dim_qk) +
         "_" + std::to_string(e.dim_v) + "_q" + std::to_string(e.tile_q) + "_kv" +
         std::to_string(e.tile_kv);
}

// How plan_info begins to say why a portable kernel serves. reason: why another backend does not;
// empty: there is none.
inline std::string portable_for(const std::string& reason) {
  return "the portable family" + (reason.empty() ? "" : " (" + reason + ")");
}

// Of a launch: no other of the process has it, nor is it likely to lie in memory. Never 0.
uint64_t new_stamp();

class PlanContext;
// OK when the device is the current one, and so is the plan's context of it.
int32_t check_current(int32_t device, const PlanContext& context);

// Cuts a workspace, which may lie anywhere, into aligned pieces. With a NULL base it only counts.
class WorkspaceCutter {
 public:
  explicit WorkspaceCutter(void* base)
      : base_(static_cast<char*>(base)),
        at_(base ? (kAlignment - reinterpret_cast<intptr_t>(base) % kAlignment) % kAlignment : 0) {}

  template <class T>
  T* take(int64_t count) {
    char* piece = base_ ? base_ + at_ : nullptr;
    at_ += (count * static_cast<int64_t>(sizeof(T)) + kAlignment - 1) / kAlignment * kAlignment;
    return reinterpret_cast<T*>(piece);
  }

  // What is needed of a base that is not aligned.
  int64_t bytes() const { return at_ + kAlignment; }
  static int64_t bytes_for(int64_t piece) {
    WorkspaceCutter cutter(nullptr);
    cutter.take<char>(piece);
    return cutter.bytes();
  }

 private:
  static constexpr int64_t kAlignment = 128;
  char* const base_;
  int64_t at_;
};

struct NamedTensor {
  const char* name;
  const flashattn_tensor& tensor;
  int32_t dtype;
  bool copied = false;  // to shared memory, fp32 too 16 bytes at once
};

// Whether rows of a tensor can be moved in pieces of so many bytes.
bool is_aligned(const flashattn_tensor& tensor, int32_t dtype, int32_t bytes);

// OK when it can be moved in pieces of 16 bytes, fp32 that is not copied of 8.
int32_t check_alignment(const NamedTensor& named);

// OK when a one-dimensional grid may have so many blocks.
int32_t check_grid(int64_t blocks);

// Starts `blocks` blocks of a kernel of a table.
template <class Entry, class Params>
int32_t launch(const Entry& entry, int64_t blocks, const Params& params, cudaStream_t stream,
               const char* what) {
  if (const int32_t status = check_grid(blocks)) return status;
  return status_of(launch_kernel(entry.kernel, dim3(static_cast<unsigned>(blocks)), entry.threads,
                                 entry.shared_bytes, params, stream),
                   what);
}

}  // namespace flashattn::cuda
