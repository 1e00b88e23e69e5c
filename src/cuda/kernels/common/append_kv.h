// New keys and values into a cache, with rotary position embedding: flashattn_append_kv.
#pragma once

#include <cuda_runtime_api.h>

#include "core/append_rows.h"

namespace flashattn::cuda {

// q, k or v: from the new tokens to q_out or the cache. A thread moves one unit at a time: some
// elements x of a row and as many elements y, which are rotated together. Units before `split`
// begin with elements c and split + c of the row, for c a multiple of their size; others are
// neighbours.
struct AppendOperand {
  flashattn_tensor from, to, descale;  // data NULL: nothing is moved; the descale is 1
  FastDivmod by_units;                 // of a row
  int32_t first_unit;                  // of a token's units
  int32_t dim, pairs, split;           // pairs: to rotate
};

struct AppendParams {
  Problem problem;
  AppendArgs args;
  AppendOperand operands[3];  // q, k, v
  int32_t units;              // of a token
  int32_t slots;              // tokens that a CTA moves at once
  int32_t tokens_per_cta;
  int32_t pairs;     // of a token, to rotate; 0: none
  bool writes_lens;  // false: another kernel does, once all CTAs have read lens_kv
  FastDivmod by_units, by_pairs, by_page, by_block;
  FastDivmod by_heads;  // of k and of v
};
static_assert(sizeof(AppendParams) <= 4096, "kernel parameters of any toolkit and driver");

// Loads the kernels that a plan with this problem may launch.
cudaError_t preload_append_kernels(const Problem& problem);
// vectors: rows of all arrays of the call can be moved 8 elements at once. multiprocessors: of the
// device.
cudaError_t launch_append_kv(const Problem& problem, const AppendArgs& args, bool vectors,
                             int32_t multiprocessors, cudaStream_t stream);

}  // namespace flashattn::cuda
