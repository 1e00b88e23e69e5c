// Kernel parameters of the Hopper kernels.
#pragma once

#include <cuda.h>

#include "core/l2_swizzle.h"
#include "core/seqlen_info.h"
#include "cuda/host/schedule/stream_k.h"
#include "cuda/kernels/sm90/block_mask_bits.h"
#include "cuda/params.h"

namespace flashattn::cuda::sm90 {

// The score modification that a kernel is compiled for. In the forward pass softcap and ALiBi have
// a kernel each: code for both exceeds the instruction cache (128 KB, 8192 instructions), which
// costs 10 to 13 % at 512 tokens.
enum class ScoreModKind : int32_t {
  kPlain,         // scale only
  kSoftcap,       // forward only
  kAlibi,         // backward: heads up to kMaxAlibiDim
  kSoftcapAlibi,  // backward only: softcap with or without ALiBi; larger heads: ALiBi alone, too
  kDropout,
  kBlockMask,
  kDenseBias,      // a bias that TMA loads, see accepts_bias()
  kBlockDescales,  // E4M3: descales of blocks of multiples of 64 tokens
  kRuntime,        // chosen at run time: any bias, any combination; forward: also scale < 0
};

// The largest head dimension with backward kernels of kAlibi; larger heads have kSoftcapAlibi.
constexpr int32_t kMaxAlibiDim = 128;

// Limit of the backward kernel with dropout: Q tiles of a head.
constexpr int32_t kMaxDropoutTiles = 1 << 20;
// Limits of backward kernels that list their Q tiles, for block masks or any score modification: Q
// tiles of a head; heads of a GQA group.
constexpr int32_t kMaxListedTiles = 1 << 17, kMaxListedHeads = 1 << 11;

// Work tiles of a CTA of the backward kernel that are planned or at work.
constexpr int kWorkTileStages = 2;

// Threads per multiprocessor of the dQ postprocess kernel.
constexpr int32_t kPostprocessThreadsPerSm = 1024;

// CTAs that preprocess the later heads while the backward kernel works on the first ones.
constexpr int32_t kMaxPreprocessTailCtas = 12;

// Counter of the dynamic tile scheduler: each CTA takes its tiles after the first from it. CTA 0
// clears `taken` and then stores the launch's stamp, which the other CTAs wait for, so that the
// memory needs no initial value. The CTA that takes the last tile clears the stamp, because a graph
// replay launches with the same stamp.
struct TileCounter {
  uint64_t stamp;
  int32_t taken;
};

// Progress of the preprocess kernel that overlaps the backward kernel. Its first CTA clears
// `ctas_done` and then stores the launch's stamp, which the other CTAs wait for. The backward
// kernel waits for the stamp, then for all CTAs: the first heads, and all that earlier kernels
// wrote, are visible then, however early it started. The postprocess kernel clears the stamp.
struct PreprocessProgress {
  uint64_t stamp;     // 0 or the launch's
  int32_t ctas_done;  // CTAs that have preprocessed their part of the first heads
  // Per tail CTA: the head, b * heads_q + h, below which it has no head left to preprocess.
  alignas(16) int32_t next_head[kMaxPreprocessTailCtas];
};

// Packed heads: the query heads of a KV head share Q tiles. Row r of a KV head of a sequence is
// query r >> log2_group of query head r % 2^log2_group of its group; if the group has fewer heads,
// the other rows are empty. A work tile has one split of the keys.
struct PackedHeads {
  int32_t log2_group;
  SplitRule split;
  int32_t max_splits;  // the most splits of a sequence
  FastDivmod by_splits;
  int32_t partial_queries;  // as in cuda::ForwardParams
  int32_t evict_kv_first;   // the L2 policy of K and V is evict_first, else evict_last
  TreeParams tree;          // with TREE; the problem's masks are its hull then
};

constexpr int32_t kFp8TileKv = 128;  // keys of a tile of E4M3

// Descales of half a tile.
struct alignas(8) HalfDescales {
  float k;
  float log2_v;  // of V's relative to the largest of its head, at least kLeastLog2V
};
// An element of P of at most 448 times 2^this is 0 in E4M3.
constexpr float kLeastLog2V = -20.0f;

struct ForwardParams {
  CUtensorMap q, k, v, o;  // (column, row, head, batch or page); packed heads: Q's rows are heads
  Problem problem;
  ForwardArrays args;
  L2Swizzle swizzle;          // heads: (batch, Q head); tiles: Q tiles, the last of a head first
  TileCounter* tile_counter;  // NULL: each CTA has one tile
  uint64_t stamp;             // unique to the launch, for tile_counter
  int32_t kv_box_rows;        // rows of a TMA box of K and V: a tile, or its part in one page
  int32_t kv_has_tail;        // memory may hold rows past a sequence's keys, not always finite
  int32_t o_by_tma;           // TMA stores O; otherwise rows are stored, as the lengths allow
  uint32_t dropout_threshold;
  SoftcapPolynomials softcap;
  const uint8_t* v_transposed;  // E4M3: tiles of V^T, see fp8_transpose_v.cu
  CUtensorMap bias;             // kDenseBias: (key, query, head, batch)
  // Heads of the swizzle are KV heads then, and its tiles (Q tile, split).
  PackedHeads packed;
  StreamK stream_k;  // tiles are Q tiles, iterations are KV tiles; only kernels with kUseStreamK
  // Partial results: of splits as in cuda::ForwardParams; stream-K: (partial, row of the tile).
  float* partial_o;
  PartialSum* partial_sums;
  // kBlockDescales: (KV head, tile of HeadTiles::of_keys, half); (batch, KV head).
  const HalfDescales* half_descales;
  const float* largest_descale_v;
  float softcap_log2;  // E4M3: the softcap in units of log2(e)
};

// Elements of V that share a descale in the kernel for LATENT_KV.
constexpr int32_t kLatentDescaleDim = 128;

// Latent attention. Row r of a sequence's KV head is query r / q_heads_per_kv_head of query head
// r % q_heads_per_kv_head of its group. A CTA has consecutive rows, of one query or of several, and
// a split of the keys. V is the first columns of K.
struct MlaParams {
  CUtensorMap k;               // (column, row, head, batch or page); not of LATENT_KV
  cuda::ForwardParams common;  // without its tiles of rows: cta_queries to q_tiles, swizzle
  int32_t row_tiles;           // CTAs for the rows of a sequence's KV head
  int32_t kv_box_rows;   // rows of a TMA box of K; 0: pages are small or hidden, threads copy rows
  int32_t cluster_size;  // 2: CTAs of row tiles 2n and 2n + 1 load K for both, by multicast
  int32_t releases_early;  // stages are released as soon as possible: memory is the limit
  FastDivmod by_row_tiles, by_group, by_page_size;  // by_group: q_heads_per_kv_head
  // LATENT_KV: from a row of V to that of k, and to its descales, in bytes. All have V's strides.
  int64_t k_of_record, descales_of_record;
  // The producer prefetches record_bytes of a row from record_begin on; 0: none, as the arrays lie
  // far apart. record_run: rows of a tile that follow each other in memory; 0: too few.
  int32_t record_begin, record_bytes, record_run;
  int32_t zero;  // 0, in a form that ptxas cannot fold
  // The kernel that transposes: records that a bulk copy takes at once; 0: the parts of a record
  // lie apart, and are copied each by itself. Where they lie in a record in shared memory, in
  // bytes.
  int32_t bulk_run, v_in_record, descales_in_record, k_in_record;
};

// The derivative of the score by x * scale, in the ranges of the polynomials: derivative5[0] +
// derivative5[1] x^2 + derivative5[2] x^4, and derivative3[0] + derivative3[1] x^2.
struct SoftcapWithDerivative : SoftcapPolynomials {
  float derivative5[3], derivative3[2];
};

struct BackwardParams {
  CUtensorMap q, dout, k, v;  // (column, row, head, batch)
  cuda::BackwardParams common;
  L2Swizzle swizzle;                // KV tiles; a head is (batch, KV head)
  L2Swizzle q_swizzle;              // Q tiles of all heads of a GQA group; the same heads
  StreamK stream_k;                 // tiles are KV tiles, iterations are Q tiles of a head
  float* partials;                  // dK and dV of each partial, in accumulator order
  PreprocessProgress* preprocess;   // NULL: the preprocess kernel has ended before this one starts
  uint64_t preprocess_stamp;        // this launch's, in *preprocess
  int32_t preprocess_ctas;          // the preprocess kernel's grid
  int32_t static_work_items;        // work items taken by CTA index, the others by work_counter
  int32_t first_key, key_step;      // KV tile n of a head begins with key first_key + n * key_step
  int32_t max_q_tiles;              // Q tiles of the longest sequence
  int32_t head_q_tiles;             // Q tiles from one head to the next in dq, lse2 and delta
  int32_t q_has_tail, kv_has_tail;  // rows past a sequence's end may lie in memory, may be NaN
  // s = score_scale * tanh(softcap_inner * q k^T) with a softcap, score_scale * q k^T without, in
  // units of log2(e).
  float softcap_inner, score_scale;
  int32_t adds_dbias;  // kDenseBias: the kernel adds dbias to args.dbias, which is cleared before
  CUtensorMap bias;    // kDenseBias: (key, query, head, batch)
  SoftcapWithDerivative softcap;
  float keep_scale;  // of the elements of P that dropout keeps
  BlockMaskBits block_mask;
  // Kernels that list their Q tiles: for each CTA and each of its work-tile stages q_tile_list_size
  // QTileEntry, then, if additions to dQ are ordered, as many turns. See BwdWorkTile::q_tile_list.
  uint32_t* q_tile_lists;
  int64_t q_tile_list_size;
};

}  // namespace flashattn::cuda::sm90
