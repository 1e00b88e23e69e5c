// The arguments of a call as backends and kernels receive them: validated, with strides resolved,
// without fields that concern the host only. The structures of the ABI grow; these are internal.
#pragma once

#include <cstdint>

#include "flashattn.h"

namespace flashattn {

struct Shape {
  int32_t batch;
  int32_t seqlen_q, seqlen_kv;
  int64_t total_q, total_kv;  // VARLEN, else 0
};

// The maxima of a plan; 0: not set.
inline Shape maxima_of(const flashattn_desc& desc) {
  return {desc.max_batch, desc.max_seqlen_q, desc.max_seqlen_kv, desc.max_total_q,
          desc.max_total_kv};
}

// The inputs that forward and backward share. Fields that the plan does not use are 0.
struct Inputs {
  flashattn_tensor q, k, v;
  const int32_t *cu_seqlens_q, *cu_seqlens_kv;
  const int32_t *lens_q, *lens_kv;
  const int32_t* starts_kv;
  const int32_t* page_table;
  int64_t page_table_stride;  // entries from sequence to sequence
  int64_t pages;              // pages in the pool
  const void* bias;
  int64_t bias_stride_batch, bias_stride_head, bias_stride_row;
  const float* alibi_slopes;
  int64_t alibi_stride_batch, alibi_stride_head;
  const float* sink;
  flashattn_tensor descale_q, descale_k, descale_v;  // stride_seq: from block to block
  const uint8_t* block_mask;
  int64_t block_mask_stride_batch, block_mask_stride_head, block_mask_stride_row;
  uint64_t rng_seed, rng_offset;
  const uint64_t* rng_device;
};

// The caller's thread pool. run NULL: the library's own.
struct Parallel {
  flashattn_parallel_fn run = nullptr;
  void* user = nullptr;
};

// Where a call runs: on a stream of a GPU, or on threads of a CPU.
struct Executor {
  void* stream = nullptr;  // cudaStream_t
  Parallel parallel = {};
};

// The arrays that every forward kernel takes.
struct ForwardArrays {
  Shape shape;
  Inputs inputs;
  flashattn_tensor o;
  float* lse;
  flashattn_tensor scale_o, amax_o;  // data NULL: scale_o is 1, amax_o is not wanted
};

struct ForwardArgs : ForwardArrays {
  flashattn_tensor tree_bits;       // uint32_t
  flashattn_tensor descale_latent;  // fp32; its rows lie as those of v do
};

struct BackwardArgs {
  Shape shape;
  Inputs inputs;
  flashattn_tensor o, dout;
  const float *lse, *dlse;
  flashattn_tensor dq, dk, dv;
  float* dbias;
  int64_t dbias_stride_batch, dbias_stride_head, dbias_stride_row;  // 0: summed over that index
  float* dsink;
};

struct MergeArgs {
  Shape shape;
  int32_t parts;
  int32_t dtype_part;
  const flashattn_tensor* part_o;  // strides as the caller gave them: see resolve_strides()
  const float* const* part_lse;
  flashattn_tensor o;
  float* lse;
};

// A tensor whose data is NULL is not given. stride_seq of a descale steps from block to block of
// the plan's descale_block tokens.
struct QuantizeArgs {
  Shape shape;
  Inputs inputs;  // lengths, and q, k and v of type dtype
  int32_t dtype;
  uint32_t transform;
  uint64_t rotation_seed;
  flashattn_tensor q_out, k_out, v_out;
  flashattn_tensor descale_q, descale_k, descale_v;
  flashattn_tensor k_mean;
  float* lse_shift;
};

// The largest number of pairs of elements that rotary position embedding turns.
constexpr int32_t kMaxRotaryPairs = 256;

// A tensor whose data is NULL is not given. `inputs` has lengths, pages, q, k and v of type dtype,
// and their descales.
struct AppendArgs {
  Shape shape;
  Inputs inputs;
  int32_t dtype;
  int32_t rotary, rotary_dim, rotary_positions, dtype_rotary;
  bool update_descales;
  const int32_t* positions;
  int32_t* lens_out;
  flashattn_tensor q_out, k_cache, v_cache;
  flashattn_tensor rotary_cos, rotary_sin;  // data NULL: `turns` gives the angles
  uint64_t turns[kMaxRotaryPairs];          // each pair's rotation per position, in 2^-64 turns
};

}  // namespace flashattn
