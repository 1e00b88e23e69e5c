// Converts rows of q, k and v, or of their gradients, between types, for 16-bit kernels where they
// are E4M3.
#pragma once

#include "core/call.h"
#include "core/problem.h"

namespace flashattn::cuda::sm90 {

constexpr int kConvertThreads = 256;
constexpr int kConvertVector = 8;  // elements of a row that a thread has
constexpr int kConvertRows = 4;    // rows per thread, loaded together

// One array. E4M3 becomes F16 or BF16; F16 or BF16, without a descale, F16, BF16 or F32.
struct ConvertOperand {
  flashattn_tensor from, to, descale;  // from.data NULL: left out. descale.data NULL: 1
  int32_t dtype_from, dtype_to;
  // Filled by launch_convert().
  bool is_q = false;  // has the rows and heads of q
  int32_t heads = 0, dim = 0, log2_lanes = 0;
  int32_t ctas = 0;  // per head of a sequence
  int64_t first_cta = 0;

  // Rows that a CTA converts at once.
  FLASHATTN_HD int32_t tile_rows() const { return kConvertThreads * kConvertRows >> log2_lanes; }
};

// The problem gives layout, page_size, mask, heads, dims and descale_block. With PAGED_KV k and v
// come from pages; they are written as (batch, seqlen_kv, heads_kv, dim).
struct ConvertParams {
  Problem problem;
  Shape shape;
  Inputs inputs;  // lengths and page table
  // Whether only keys that some query sees are read. Up to kMaxTileKv others on either side become
  // 0, as they may share a tile with those.
  bool visible_only;
  ConvertOperand operands[3];  // q, k, v; of the same types
};
static_assert(sizeof(ConvertParams) <= 4096, "kernel parameters of any toolkit and driver");

constexpr int32_t kMaxTileKv = 256;  // keys that any 16-bit kernel loads at once

struct ConvertKernels {
  void (*f8_to_f16)(ConvertParams);
  void (*f8_to_bf16)(ConvertParams);
  void (*other)(ConvertParams);
};
ConvertKernels convert_kernels();

}  // namespace flashattn::cuda::sm90
