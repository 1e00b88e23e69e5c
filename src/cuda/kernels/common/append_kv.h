// New keys and values into a cache, with rotary position embedding: flashattn_append_kv.
#pragma once

#include <cuda_runtime_api.h>

#include "core/append_rows.h"

namespace flashattn::cuda {

// A thread moves one unit at a time: some pairs of elements of a row, which turn together.
struct AppendParams {
  Problem problem;
  AppendArgs args;
  int32_t units_q, units_k, units;  // of a token: of q, of k, of q, k and v
  int32_t tokens_per_cta;
  bool writes_lens;  // false: another kernel does, once all CTAs have read lens_kv
  FastDivmod by_units, by_units_qk, by_units_v, by_page;  // units_qk, units_v: of a row
  FastDivmod by_heads;                                    // of k and of v
};
static_assert(sizeof(AppendParams) <= 4096, "kernel parameters of any toolkit and driver");

// Loads the kernels that a plan with this problem may launch.
cudaError_t preload_append_kernels(const Problem& problem);
// vectors: rows of all arrays of the call can be moved 8 elements at once. multiprocessors: of the
// device.
cudaError_t launch_append_kv(const Problem& problem, const AppendArgs& args, bool vectors,
                             int32_t multiprocessors, cudaStream_t stream);

}  // namespace flashattn::cuda
