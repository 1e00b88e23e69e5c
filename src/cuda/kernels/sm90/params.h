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

// Tiles of queries that a backward kernel for any scores can number, and those of the heads of a
// group of which it remembers what a block mask leaves.
constexpr int32_t kMostAnyTiles = 1 << 20, kMostBlockTiles = 512;

// Threads of a multiprocessor that convert dQ.
constexpr int32_t kConverters = 1024;

// Blocks that prepare heads while the backward kernel is at work on others.
constexpr int32_t kMostPreparers = 12;

// Numbers the tiles of queries beyond the first of each block. The first block clears it; that it
// has, the others see by the launch's stamp, whatever memory held before. Who takes the last number
// removes the stamp: a graph launches with the same again.
struct TileCounter {
  uint64_t stamp;
  int32_t taken;
};

// How far the heads are prepared under the backward kernel. The first block clears `blocks`; that
// it has, the other blocks of the preparation see by the stamp, as above. Who adds the last of them
// removes it, and puts it where the backward kernel looks: all before is there then, whenever that
// kernel started. The kernel after that one removes it there.
struct Preparation {
  uint64_t begun, ready;  // 0 or the launch's stamp
  int32_t blocks;         // that have prepared their part of the first heads
  // Of each block that then prepares others: the head, b * heads_q + h, before which it has nothing
  // left to do.
  alignas(16) int32_t heads[kMostPreparers];
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
  L2Swizzle swizzle;                // of units, (batch, KV head); a turn a tile of keys
  L2Swizzle q_swizzle;              // the same; a turn a tile of queries of a head of the group
  StreamK stream_k;                 // of tiles of keys: steps are tiles of queries of a head
  float* partials;                  // dK and dV of each, as consumers hold them
  Preparation* prepared;            // NULL: everything is, before the start
  uint64_t stamp;                   // of that
  int32_t dealt;                    // tickets: one for each block, or none: all are by number
  int32_t first_key, key_step;      // turn n of a unit begins with key first_key + n * key_step
  int32_t sequence_tiles;           // of queries: the most of a sequence
  int32_t head_tiles;               // of queries, from one head to the next
  int32_t q_has_tail, kv_has_tail;  // rows past a sequence's may lie in memory: not always finite
  // What a product is multiplied with before the softcap's tanh and after, that in units of
  // log2(e). Without a softcap there is no before.
  float to_cap, factor;
};

}  // namespace flashattn::cuda::sm90
