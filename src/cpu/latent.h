// The quantised cache of latent attention, LATENT_KV: its rows widened to fp32, as they are packed.
#pragma once

#include "cpu/q_block.h"

namespace flashattn::cpu::FLASHATTN_ISA {

// Writes keys of the block's KV head to `out`, which has room for whole vectors behind the last
// row: elements of v times their descales, then those of k. The first dim_v of a row are the value.
// Returns the rows, of fp32.
inline TokenRows widen_latent(const QBlock& block, Interval keys, float* out) {
  const Problem& problem = block.problem;
  const ForwardArgs& args = *block.job.args;
  const int64_t first = block.sequence.offset_kv;
  const TokenRows values = block.v(), rest = block.k();
  const TokenRows descales = token_rows(problem, block.in, args.descale_latent, sizeof(float),
                                        block.b, block.kv_head, first);
  const int32_t row = round_up(problem.dim_qk, kWidth), step = problem.descale_dim;
  float* x = out;
  for (int32_t j = keys.begin; j < keys.end; ++j, x += row) {
    prefetch_row(values, j, keys, problem.dim_v);
    load_row(x, values.row(j), problem.dtype_kv, problem.dim_v);
    const float* descale = reinterpret_cast<const float*>(descales.row(j));
    for (int32_t begin = 0, end; begin < problem.dim_v; begin = end, ++descale) {
      end = step < problem.dim_v - begin ? begin + step : problem.dim_v;
      for (int32_t c = begin; c < end; ++c) x[c] *= *descale;
    }
    load_row(x + problem.dim_v, rest.row(j), problem.dtype, problem.columns_k());
  }
  const int64_t bytes = row * int64_t{sizeof(float)};
  return {reinterpret_cast<char*>(out) - keys.begin * bytes, bytes, nullptr, 1, 0, 0};
}

}  // namespace flashattn::cpu::FLASHATTN_ISA
