// The kernels of one instruction set: compiled once for each, with FLASHATTN_ISA naming it.
#include "cpu/kernels.h"

#include "cpu/backward_tasks.h"
#include "cpu/forward_task.h"
#include "cpu/merge.h"

#define FLASHATTN_TEXT_OF(name) #name
#define FLASHATTN_TEXT(name) FLASHATTN_TEXT_OF(name)

namespace flashattn::cpu::FLASHATTN_ISA {
namespace {

template <Compute kValue>
struct ComputeTag {
  static constexpr Compute value = kValue;
};

// Runs body with the arithmetic that suits the operands.
template <class Body>
FLASHATTN_INLINE auto with_compute(bool bf16, Body body) {
  if constexpr (kHasBf16Dot) {
    if (bf16) return body(ComputeTag<Compute::kBf16Pairs>{});
  }
  return body(ComputeTag<Compute::kF32>{});
}

bool forward_is_bf16(const Problem& problem) { return problem.dtype == FLASHATTN_DTYPE_BF16; }

int64_t forward_scratch(const Problem& problem, const Tiling& tiling) {
  return with_compute(forward_is_bf16(problem), [&](auto tag) {
    using Scratch = ForwardScratch<decltype(tag)::value>;
    const int64_t packed = Scratch(problem, tiling, nullptr).bytes;
    const int64_t direct = Scratch(problem, kDirectTiling, nullptr).bytes;
    return direct > packed ? direct : packed;
  });
}

int64_t backward_scratch(const Problem& problem, const Tiling& tiling) {
  return with_compute(backward_is_bf16(problem), [&](auto tag) {
    return BackwardScratch<decltype(tag)::value>(problem, tiling.tile_q, tiling.tile_kv, nullptr)
        .bytes;
  });
}

void forward(const ForwardJob& job, int64_t task, char* scratch) {
  with_compute(forward_is_bf16(*job.problem),
               [&](auto tag) { forward_task<decltype(tag)::value>(job, task, scratch); });
  release_tiles();
}

void backward_prepare(const BackwardJob& job, int64_t task, char*) {
  backward_prepare_task(job, task);
}

void backward(const BackwardJob& job, int64_t task, char* scratch) {
  with_compute(backward_is_bf16(*job.problem),
               [&](auto tag) { backward_task<decltype(tag)::value>(job, task, scratch); });
  release_tiles();
}

void backward_dbias(const BackwardJob& job, int64_t task, char* scratch) {
  with_compute(backward_is_bf16(*job.problem),
               [&](auto tag) { backward_dbias_task<decltype(tag)::value>(job, task, scratch); });
  release_tiles();
}

void backward_dsink(const BackwardJob& job, int64_t task, char*) { backward_dsink_task(job, task); }

constexpr Kernels kKernels = {
    FLASHATTN_TEXT(FLASHATTN_ISA),
    forward_tiling,
    backward_tiling,
    dq_columns,
    forward_scratch,
    backward_scratch,
    forward,
    backward_prepare,
    backward,
    backward_dbias,
    backward_dsink,
    merge_row,
    dropout_row,
};

}  // namespace

const Kernels& kernels() { return kKernels; }

}  // namespace flashattn::cpu::FLASHATTN_ISA
