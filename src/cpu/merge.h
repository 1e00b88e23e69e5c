// Merging of partial results, and single rows of the dropout mask.
#pragma once

#include "cpu/softmax.h"

namespace flashattn::cpu::FLASHATTN_ISA {

FLASHATTN_INLINE const char* part_row(const MergeJob& job, const MergeRow& row, int32_t p) {
  if (!job.part_o) return reinterpret_cast<const char*>(row.o + p * job.o_stride);
  const flashattn_tensor& part = job.part_o[p];
  // As resolve_strides(): -1 asks for the stride of a packed array without the indices that repeat.
  const auto stride = [](int64_t given, int64_t packed) { return given == -1 ? packed : given; };
  const int64_t heads = part.stride_head == 0 ? job.dim : int64_t{job.dim} * job.heads;
  const int64_t tokens = part.stride_seq == 0 ? heads : heads * job.tokens;
  return static_cast<const char*>(part.data) +
         (row.b * stride(part.stride_batch, tokens) + row.h * stride(part.stride_head, job.dim) +
          row.i * stride(part.stride_seq, heads)) *
             dtype_size(job.dtype_part);
}

// The maximum m of a partial result and its sum l of P; l = 0 if nothing is visible. A caller's lse
// counts as one score.
struct PartSum {
  float m, l;
};
FLASHATTN_INLINE PartSum part_sum(const MergeJob& job, const MergeRow& row, int32_t p) {
  if (!job.part_o) return {row.m[p * job.row_stride], row.l[p * job.row_stride]};
  const float lse = job.part_lse[p][row.lse];
  return {lse, lse == -kInfinity ? 0.0f : 1.0f};
}

// Merges the partial results of a row, each weighted by its share of the softmax's denominator.
// Returns the lse.
inline float merge_row(const MergeJob& job, const MergeRow& row) {
  float top = -kInfinity;
  for (int32_t p = 0; p < job.parts; ++p) {
    const float m = part_sum(job, row, p).m;
    if (m > top || m != m) top = m;
  }
  // If nothing is visible in any part, the parts' shares are 0, not NaN.
  const float base = top == -kInfinity ? 0.0f : top;
  const auto weight = [&](int32_t p) {
    const PartSum part = part_sum(job, row, p);
    return splat(part.l) * exp2((splat(part.m) - splat(base)) * splat(row.unit.log2));
  };
  float total = 0;
  for (int32_t p = 0; p < job.parts; ++p) total += weight(p)[0];
  const RowResult end = normalize_row(top, total, row.unit.nats, row.sink);
  Floats most{};
  for (int32_t c = 0; c < job.dim; c += kWidth) {
    Floats x{};
    for (int32_t p = 0; p < job.parts; ++p) {
      if (part_sum(job, row, p).m == -kInfinity) continue;
      with_dtype(job.dtype_part, [&](auto tag) {
        constexpr int32_t kPart = decltype(tag)::value;
        x += weight(p) * splat(end.factor) *
             load_first<kPart>(part_row(job, row, p) + c * kElementBytes<kPart>, job.dim - c);
      });
    }
    most = max_of_both(abs(x), most);
    with_dtype(job.dtype, [&](auto tag) {
      constexpr int32_t kOut = decltype(tag)::value;
      store_first<kOut>(static_cast<char*>(row.out) + c * kElementBytes<kOut>, x * splat(row.scale),
                        job.dim - c);
    });
  }
  if (row.amax) {
    float lanes[kWidth];
    store(lanes, most);
    raise(row.amax, max_magnitude(lanes, kWidth));
  }
  return rounded_lse(end.lse);
}

inline void dropout_row(uint64_t seed, uint64_t offset, uint32_t threshold, uint32_t head,
                        int32_t i, int32_t keys, uint8_t* keep) {
  const DropoutStream stream = DropoutStream::make(seed, offset, head);
  constexpr int32_t kStep = 64;
  uint8_t rows[16 * kStep];
  for (int32_t j = 0; j < keys; j += kStep) {
    const int32_t count = keys - j < kStep ? keys - j : kStep;
    dropout_tiles(stream, threshold, i / 16, j, count, rows, kStep);
    __builtin_memcpy(keep + j, rows + i % 16 * kStep, static_cast<size_t>(count));
  }
}

}  // namespace flashattn::cpu::FLASHATTN_ISA
