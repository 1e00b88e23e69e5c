// What the host hands to the Hopper kernels, by value.
#pragma once

#include <cuda.h>

#include "core/l2_swizzle.h"
#include "core/seqlen_info.h"
#include "cuda/host/schedule/stream_k.h"
#include "cuda/params.h"

namespace flashattn::cuda::sm90 {

// The score modifications that a kernel is compiled for. In the forward pass softcap and ALiBi have
// kernels of their own: together they exceed the instruction cache (128 KB, 8192 instructions),
// which costs 10 to 13 % at 512 tokens.
enum class ScoreModKind : int32_t {
  kPlain,         // a factor
  kSoftcap,       // forward only
  kAlibi,         // forward only
  kSoftcapAlibi,  // backward only: either, or both
  kDropout,
  kRuntime,  // chosen at run time: dense bias, block mask, any combination; forward: scale < 0
};

// Limits of the run-time backward kernel: Q tiles of a head; with a block mask, Q tiles of all
// heads of a GQA group.
constexpr int32_t kMaxRuntimeTiles = 1 << 20, kMaxBlockMaskTiles = 512;

// Threads per multiprocessor of the dQ postprocess kernel.
constexpr int32_t kPostprocessThreadsPerSm = 1024;

// CTAs that preprocess the later heads while the backward kernel works on the first ones.
constexpr int32_t kMaxPreprocessTailCtas = 12;

// Numbers the tiles of queries beyond the first of each block. The first block clears it; that it
// has, the others see by the launch's stamp, whatever memory held before. Who takes the last number
// removes the stamp: a graph launches with the same again.
struct TileCounter {
  uint64_t stamp;
  int32_t taken;
};

// Progress of the preprocess kernel that overlaps the backward kernel. Its first CTA clears
// `ctas_done` and then stores the launch's stamp to `cleared`, which the other CTAs wait for. The
// CTA that arrives last sets `cleared` back to 0 and stores the stamp to `ready`. The backward
// kernel waits for `ready`: the first heads, and all that earlier kernels wrote, are visible then,
// however early it started. The postprocess kernel sets `ready` back to 0.
struct PreprocessProgress {
  uint64_t cleared, ready;  // 0 or the launch's stamp
  int32_t ctas_done;        // CTAs that have preprocessed their part of the first heads
  // Per tail CTA: the head, b * heads_q + h, below which it has no head left to preprocess.
  alignas(16) int32_t next_head[kMaxPreprocessTailCtas];
};

// The softcap of a product x: tanh(x * inner) times what is left to multiply. All that at once, in
// units of log2(e): x * (factor[0] + factor[1] x^2 + factor[2] x^4) while |x| < limit, and
// x * (short_factor[0] + short_factor[1] x^2) while |x| < short_limit.
struct Softcap {
  float inner, limit, factor[3], short_limit, short_factor[2];
};

struct ForwardParams {
  CUtensorMap q, k, v, o;  // (column, row, head, batch or page)
  Problem problem;
  ForwardArgs args;
  L2Swizzle swizzle;     // of units, heads of sequences; a turn a tile, the last first
  TileCounter* counter;  // NULL: each block has one tile
  uint64_t stamp;
  int32_t kv_box;       // rows of a box of K and V: a tile's, or what of a tile lies in one page
  int32_t kv_has_tail;  // rows past a sequence's keys may lie in memory: they need not be finite
  int32_t store_boxes;  // O leaves by the copy engine; else row by row, as lengths allow
  uint32_t dropout_threshold;
  Softcap cap;
};

struct BackwardParams {
  CUtensorMap q, dout, k, v;  // (column, row, head, batch)
  cuda::BackwardParams common;
  L2Swizzle swizzle;                // KV tiles; a head is (batch, KV head)
  L2Swizzle q_swizzle;              // Q tiles of all heads of a GQA group; the same heads
  StreamK stream_k;                 // tiles are KV tiles, iterations are Q tiles of a head
  float* partials;                  // dK and dV of each partial, in accumulator order
  PreprocessProgress* preprocess;   // NULL: the preprocess kernel has ended before this one starts
  uint64_t preprocess_stamp;        // of this launch, in *preprocess
  int32_t static_work_items;        // work items taken by CTA index, the others by work_counter
  int32_t first_key, key_step;      // KV tile n of a head begins with key first_key + n * key_step
  int32_t max_q_tiles;              // Q tiles of the longest sequence
  int32_t head_q_tiles;             // Q tiles from one head to the next in dq, lse2 and delta
  int32_t q_has_tail, kv_has_tail;  // rows past a sequence's end may lie in memory, may be NaN
  // s = score_scale * tanh(softcap_inner * q k^T) with a softcap, score_scale * q k^T without, in
  // units of log2(e).
  float softcap_inner, score_scale;
};

}  // namespace flashattn::cuda::sm90
