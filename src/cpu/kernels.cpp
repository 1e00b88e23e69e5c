// The kernels of one instruction set: compiled once for each, FLASHATTN_ISA being its name.
#include "cpu/kernels.h"

#include "cpu/append.h"
#include "cpu/backward_tasks.h"
#include "cpu/forward.h"
#include "cpu/merge.h"
#include "cpu/quantize.h"

#define FLASHATTN_TEXT_OF(name) #name
#define FLASHATTN_TEXT(name) FLASHATTN_TEXT_OF(name)

// An instruction set with products of bf16 has kernels for these alone. FLASHATTN_F32_ISA names the
// one whose kernels, with vectors as wide, compute the rest in fp32.
#ifndef FLASHATTN_F32_ISA
#define FLASHATTN_F32_ISA FLASHATTN_ISA
#endif

namespace flashattn::cpu {

namespace FLASHATTN_F32_ISA {
const Kernels& kernels();
}

namespace FLASHATTN_ISA {
namespace {

constexpr Compute kCompute = kHasBf16Dot ? Compute::kBf16Pairs : Compute::kF32;

bool forward_is_own(const Problem& problem) { return !kHasBf16Dot || inputs_are_bf16(problem); }

bool backward_is_own(const Problem& problem) { return !kHasBf16Dot || backward_is_bf16(problem); }

const Kernels& f32() { return FLASHATTN_F32_ISA::kernels(); }

// Whether few queries multiply a cache of 8 bits as pairs of bf16. That rounds P, which an o of
// more bits would show. int8, which no table widens, needs several rows for it to pay. Processors
// with tiles take twice as long for pairs.
bool multiplies_byte_pairs(const Problem& problem) {
  return kHasBytePairs && !kHasAmx && problem.dtype == FLASHATTN_DTYPE_BF16 &&
         problem.dtype_o == FLASHATTN_DTYPE_BF16 &&
         (problem.dtype_kv == FLASHATTN_DTYPE_F8E4M3 ||
          (problem.dtype_kv == FLASHATTN_DTYPE_I8 && problem.q_heads_per_kv_head() >= kScoreRows));
}

// Whether few queries, whose softmax is in fp32 beside such a cache, have kernels of their own
// here.
bool widens_bytes(const Problem& problem) {
  return kHasBytePairs && (problem.has_f8_cache() || multiplies_byte_pairs(problem));
}

int64_t forward_scratch(const Problem& problem, const Tiling& tiling) {
  if (!forward_is_own(problem)) {
    const int64_t f32_bytes = f32().forward_scratch(problem, tiling);
    if (!widens_bytes(problem)) return f32_bytes;
    const int64_t own = ForwardScratch<Compute::kF32>(problem, kDirectTiling, nullptr).bytes;
    return own > f32_bytes ? own : f32_bytes;
  }
  const int64_t packed = ForwardScratch<kCompute>(problem, tiling, nullptr).bytes;
  const int64_t direct = ForwardScratch<kCompute>(problem, kDirectTiling, nullptr).bytes;
  return direct > packed ? direct : packed;
}

int64_t backward_scratch(const Problem& problem, const Tiling& tiling) {
  if (!backward_is_own(problem)) return f32().backward_scratch(problem, tiling);
  return BackwardScratch<kCompute>(problem, tiling.tile_q, tiling.tile_kv, nullptr).bytes;
}

// Sharing pays where products are so fast that packing is much of the work.
int64_t shared_tile_bytes(const Problem& problem, const Tiling& tiling) {
  if (!kFixedBase<kCompute> || !forward_is_own(problem)) return 0;
  return ForwardScratch<kCompute>(problem, tiling, nullptr).tile_bytes;
}

void forward(const ForwardJob& job, int64_t task, char* scratch) {
  if constexpr (kHasBytePairs) {
    if (job.direct && widens_bytes(*job.problem)) {
      return multiplies_byte_pairs(*job.problem)
                 ? direct_task<Compute::kF32, DirectBytes>(job, task, scratch)
                 : direct_task<Compute::kF32, DirectFloats>(job, task, scratch);
    }
  }
  if (!forward_is_own(*job.problem)) return f32().forward(job, task, scratch);
  forward_task<kCompute>(job, task, scratch);
  release_tiles();
}

void backward_prepare(const BackwardJob& job, int64_t task, char* scratch) {
  if (!backward_is_own(*job.problem)) return f32().backward_prepare(job, task, scratch);
  backward_prepare_task<kCompute>(job, task, scratch);
  release_tiles();
}

void backward(const BackwardJob& job, int64_t task, char* scratch) {
  if (!backward_is_own(*job.problem)) return f32().backward(job, task, scratch);
  backward_task<kCompute>(job, task, scratch);
  release_tiles();
}

void backward_dbias(const BackwardJob& job, int64_t task, char* scratch) {
  if (!backward_is_own(*job.problem)) return f32().backward_dbias(job, task, scratch);
  backward_dbias_task<kCompute>(job, task, scratch);
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
    shared_tile_bytes,
    forward,
    backward_prepare,
    backward,
    backward_dbias,
    backward_dsink,
    merge_row,
    k_mean,
    quantize_task,
    append_task,
    dropout_row,
};

}  // namespace

const Kernels& kernels() { return kKernels; }

}  // namespace FLASHATTN_ISA
}  // namespace flashattn::cpu
