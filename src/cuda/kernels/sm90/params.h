// Kernel parameters of the Hopper kernels.
#pragma once

#include <cuda.h>

#include "core/l2_swizzle.h"
#include "core/seqlen_info.h"
#include "cuda/host/schedule/stream_k.h"
#include "cuda/params.h"

namespace flashattn::cuda::sm90 {

// The score modification that a kernel is compiled for. In the forward pass softcap and ALiBi have
// a kernel each: code for both exceeds the instruction cache (128 KB, 8192 instructions), which
// costs 10 to 13 % at 512 tokens.
enum class ScoreModKind : int32_t {
  kPlain,         // scale only
  kSoftcap,       // forward only
  kAlibi,         // forward only
  kSoftcapAlibi,  // backward only: softcap, ALiBi, or both
  kDropout,
  kRuntime,  // chosen at run time: dense bias, block mask, any combination; forward: also scale < 0
};

// Limits of backward kernels of kRuntime: Q tiles that the kernel can number, and Q tiles of a GQA
// group for which it keeps the block mask's result in shared memory.
constexpr int32_t kMostAnyTiles = 1 << 20, kMostBlockTiles = 512;

// Threads of bwd_postprocess per multiprocessor.
constexpr int32_t kConverters = 1024;

// CTAs of bwd_preprocess that prepare heads while the backward kernel works on earlier heads.
constexpr int32_t kMostPreparers = 12;

// Counter of the dynamic tile scheduler: each CTA takes its tiles after the first from it. CTA 0
// clears `taken` and then stores the launch's stamp, which the other CTAs wait for, so that the
// memory needs no initial value. The CTA that takes the last tile clears the stamp, because a graph
// replay launches with the same stamp.
struct TileCounter {
  uint64_t stamp;
  int32_t taken;
};

// Progress of bwd_preprocess, which runs concurrently with the backward kernel. CTA 0 clears
// `blocks` and then stores the stamp to `begun`, as in TileCounter. The CTA that adds the last of
// `blocks` clears `begun` and stores the stamp to `ready`, for which the backward kernel waits: it
// then sees all that was written before, whenever it started. bwd_postprocess clears `ready`.
struct Preparation {
  uint64_t begun, ready;  // 0 or the launch's stamp
  int32_t blocks;         // CTAs that have prepared their part of the first heads
  // For each CTA that goes on with later heads: all its heads below this one, b * heads_q + h, are
  // prepared.
  alignas(16) int32_t heads[kMostPreparers];
};

// Softcap of x = q k: softcap * tanh(x * input_scale), in units of log2(e). Small |x| use odd
// minimax polynomials, which include both scales: x * (poly5[0] + poly5[1] x^2 + poly5[2] x^4)
// where |x| < poly5_limit, and x * (poly3[0] + poly3[1] x^2) where |x| < poly3_limit.
struct Softcap {
  float input_scale, poly5_limit, poly5[3], poly3_limit, poly3[2];
};

struct ForwardParams {
  CUtensorMap q, k, v, o;  // (column, row, head, batch or page)
  Problem problem;
  ForwardArgs args;
  L2Swizzle swizzle;          // heads: (batch, Q head); tiles: Q tiles, the last of a head first
  TileCounter* tile_counter;  // NULL: each CTA has one tile
  uint64_t stamp;             // unique to the launch, for tile_counter
  int32_t kv_box_rows;        // rows of a TMA box of K and V: a tile, or its part in one page
  int32_t kv_has_tail;        // memory may hold rows past a sequence's keys, not always finite
  int32_t o_by_tma;           // TMA stores O; otherwise rows are stored, as the lengths allow
  uint32_t dropout_threshold;
  Softcap softcap;
};

struct BackwardParams {
  CUtensorMap q, dout, k, v;  // (column, row, head, batch)
  cuda::BackwardParams common;
  L2Swizzle swizzle;      // heads: (batch, KV head); tiles: KV tiles
  L2Swizzle q_swizzle;    // heads: the same; tiles: Q tiles of all heads of a GQA group
  StreamK stream_k;       // tiles: KV tiles; iterations: Q tiles of one head
  float* partials;        // dK and dV of each partial, in the consumers' register layout
  Preparation* prepared;  // NULL: bwd_preprocess is done before the kernel starts
  uint64_t stamp;         // unique to the launch, for `prepared`
  int32_t dealt;  // work items taken by cluster index before work_counter: one per cluster, or 0
  int32_t first_key, key_step;      // tile n of a head begins with key first_key + n * key_step
  int32_t sequence_tiles;           // most Q tiles of a sequence
  int32_t head_tiles;               // Q tiles from one head to the next
  int32_t q_has_tail, kv_has_tail;  // memory may hold rows past a sequence's, not always finite
  // Scale of q k before the softcap's tanh (unused without softcap) and of the result, in units of
  // log2(e).
  float to_cap, factor;
};

}  // namespace flashattn::cuda::sm90
