// The tasks of a backward pass: preparation, the main pass, and the gradients of bias and sink.
#pragma once

#include "cpu/backward.h"

namespace flashattn::cpu::FLASHATTN_ISA {

// The square of the largest norm of some tokens; 0 of 8 bits, whose descales it does not know.
FLASHATTN_INLINE float largest_square(const TokenRows& x, Interval tokens, int32_t dtype,
                                      int32_t dim) {
  float largest = 0;
  if (dtype_size(dtype) == 1) return largest;
  with_dtype(dtype, [&](auto tag) {
    constexpr int32_t kDtype = decltype(tag)::value;
    for (int32_t i = tokens.begin; i < tokens.end; ++i) {
      Floats squares{};
      for (int32_t c = 0; c < dim; c += kWidth) {
        const Floats y = load_first<kDtype>(x.row(i) + c * kElementBytes<kDtype>, dim - c);
        squares += y * y;
      }
      const float square = sum(squares);
      largest = largest < square ? square : largest;
    }
  });
  return largest;
}

// Computes the softmax bases of the rows of a Q tile whose lse is large.
template <Compute kCompute>
void recompute_bases(const BackwardJob& job, int32_t b, int32_t head, int32_t tile, char* scratch) {
  const Problem& problem = *job.problem;
  const BackwardArgs& args = *job.args;
  const SeqlenInfo sequence = job.sequences[b];
  const int64_t begin = static_cast<int64_t>(tile) * job.tiling.tile_q;
  const Interval queries{clamp_index(begin, sequence.len.q),
                         clamp_index(begin + job.tiling.tile_q, sequence.len.q)};
  const int64_t at = job.q_tile_index(sequence, b, head, tile) * job.tiling.tile_q;
  const RowLayout layout = row_layout(problem, args.shape);
  const float* lse = args.lse + b * layout.batch_stride + head * layout.head_stride +
                     sequence.offset_q + queries.begin;
  const int32_t rows = queries.end - queries.begin;
  RowBase bases[kMaxBackwardRows];
  for (int32_t r = 0; r < rows; ++r) bases[r].wanted = is_large(lse[r]);
  for (int32_t kv_tile = 0; kv_tile < job.kv_tiles; ++kv_tile) {
    BackwardTile<kCompute>(job, b, head / problem.q_heads_per_kv_head(), kv_tile, scratch)
        .add_to_bases(head, queries, bases);
  }
  const ScoreUnit unit = score_mod(problem, args.inputs, b, head, sequence.len).unit();
  const TokenRows q = rows_of(args.inputs.q, dtype_size(problem.dtype), b, head, sequence.offset_q);
  const TokenRows k = rows_of(args.inputs.k, dtype_size(problem.dtype_kv), b,
                              head / problem.q_heads_per_kv_head(), sequence.offset_kv);
  const float square_k = largest_square(k, {0, sequence.len.kv}, problem.dtype_kv, problem.dim_qk);
  for (int32_t r = 0; r < rows; ++r) {
    if (!bases[r].wanted) continue;
    const int32_t i = queries.begin + r;
    const float square_q = largest_square(q, {i, i + 1}, problem.dtype, problem.dim_qk);
    const float magnitude = __builtin_fabsf(problem.scale) * __builtin_sqrtf(square_q) *
                            __builtin_sqrtf(square_k);  // at least that of each score of the row
    // If no key is visible the lse comes from a sink.
    const bool sees = bases[r].l != 0;
    job.softmax_base[at + r] = sees ? bases[r].m : kInfinity;
    job.lse_log2[at + r] =
        sees ? bases[r].above(lse[r], unit, sink_of(problem, args.inputs, head), magnitude)
             : kInfinity;
  }
}

// Prepares a Q tile: writes lse and delta in the layout of the main pass, and zeros to gradients
// that nothing is added to.
template <Compute kCompute>
void backward_prepare_task(const BackwardJob& job, int64_t task, char* scratch) {
  const Problem& problem = *job.problem;
  const BackwardArgs& args = *job.args;
  const int32_t tile = static_cast<int32_t>(task % job.q_tiles);
  const int32_t head = static_cast<int32_t>(task / job.q_tiles % problem.heads_q);
  const int32_t b = static_cast<int32_t>(task / job.q_tiles / problem.heads_q);
  const SeqlenInfo sequence = job.sequences[b];
  const int64_t begin = static_cast<int64_t>(tile) * job.tiling.tile_q;
  const Interval queries{clamp_index(begin, sequence.len.q),
                         clamp_index(begin + job.tiling.tile_q, sequence.len.q)};
  if (queries.begin >= queries.end) return;
  const int64_t index = job.q_tile_index(sequence, b, head, tile);
  job.dq_semaphore[index] = 0;

  const int32_t size = dtype_size(problem.dtype_o);
  const TokenRows o = rows_of(args.o, size, b, head, sequence.offset_q);
  const TokenRows dout = rows_of(args.dout, size, b, head, sequence.offset_q);
  const RowLayout layout = row_layout(problem, args.shape);
  const int64_t first = b * layout.batch_stride + head * layout.head_stride + sequence.offset_q;
  bool large = false;
  for (int32_t i = queries.begin; i < queries.end; ++i) {
    Floats products{};
    with_dtype(problem.dtype_o, [&](auto tag) {
      constexpr int32_t kDtype = decltype(tag)::value;
      for (int32_t c = 0; c < problem.dim_v; c += kWidth) {
        products += load_first<kDtype>(o.row(i) + c * kElementBytes<kDtype>, problem.dim_v - c) *
                    load_first<kDtype>(dout.row(i) + c * kElementBytes<kDtype>, problem.dim_v - c);
      }
    });
    const int64_t at = index * job.tiling.tile_q + i - queries.begin;
    const float lse = args.lse[first + i];
    // P of a row that sees no key must be 0: 2^(-inf - inf).
    job.lse_log2[at] = lse == -kInfinity ? kInfinity : lse * kLog2E;
    job.softmax_base[at] = kInfinity;
    large |= is_large(lse);
    job.delta[at] = sum(products) - (args.dlse ? args.dlse[first + i] : 0.0f);
  }

  if (large) recompute_bases<kCompute>(job, b, head, tile, scratch);
  const KeySpan span = key_span(problem.mask_rule(), queries, sequence.len);
  if (span.any.begin >= span.any.end) {
    const int32_t grad_size = dtype_size(problem.dtype_grad);
    const TokenRows dq = rows_of(args.dq, grad_size, b, head, sequence.offset_q);
    for (int32_t i = queries.begin; i < queries.end; ++i) {
      __builtin_memset(dq.row(i), 0, static_cast<size_t>(problem.dim_qk) * grad_size);
    }
  }
  if (args.dbias && !job.dbias_is_reduced) {
    for (int32_t i = queries.begin; i < queries.end; ++i) {
      __builtin_memset(args.dbias + b * args.dbias_stride_batch + head * args.dbias_stride_head +
                           i * args.dbias_stride_row,
                       0, sizeof(float) * static_cast<size_t>(sequence.len.kv));
    }
  }
}

template <Compute kCompute>
void backward_task(const BackwardJob& job, int64_t task, char* scratch) {
  const int32_t heads = job.problem->heads_kv;
  const auto tile = [&](int64_t n) {
    const L2Swizzle::Tile place = job.order.tile(static_cast<int32_t>(n));
    return BackwardTile<kCompute>(job, place.head_idx / heads, place.head_idx % heads,
                                  place.tile_idx, scratch);
  };
  const int64_t next = task + job.threads;
  if (next >= job.order.count()) return tile(task).gradients(nullptr);
  const BackwardTile<kCompute> next_tile = tile(next);
  tile(task).gradients(&next_tile);
}

// The gradient of a bias that several scores share. Each batch, head and KV tile of the bias is a
// task, which adds in a fixed order.
template <Compute kCompute>
void backward_dbias_task(const BackwardJob& job, int64_t task, char* scratch) {
  const Problem& problem = *job.problem;
  const BackwardArgs& args = *job.args;
  const bool each_head = args.dbias_stride_head != 0, each_batch = args.dbias_stride_batch != 0;
  const int32_t heads = each_head ? problem.heads_q : 1;
  const int32_t kv_tile = static_cast<int32_t>(task % job.kv_tiles);
  const int32_t head = static_cast<int32_t>(task / job.kv_tiles % heads);
  const int32_t batch = static_cast<int32_t>(task / job.kv_tiles / heads);
  const Interval batches{each_batch ? batch : 0, each_batch ? batch + 1 : args.shape.batch};
  const Interval head_range{each_head ? head : 0, each_head ? head + 1 : problem.heads_q};
  // The gradient of one sequence is as large as the sequence; a sum over several is as large as the
  // shape.
  Lengths end{args.shape.seqlen_q, args.shape.seqlen_kv};
  if (each_batch) end = job.sequences[batch].len;
  const int64_t first = static_cast<int64_t>(kv_tile) * job.tiling.tile_kv;
  const Interval columns{clamp_index(first, end.kv),
                         clamp_index(first + job.tiling.tile_kv, end.kv)};
  const int32_t rows = args.dbias_stride_row != 0 ? end.q : 1;
  for (int32_t i = 0; i < rows; ++i) {
    __builtin_memset(args.dbias + batch * args.dbias_stride_batch + head * args.dbias_stride_head +
                         i * args.dbias_stride_row + columns.begin,
                     0, sizeof(float) * static_cast<size_t>(columns.end - columns.begin));
  }
  for (int32_t b = batches.begin; b < batches.end; ++b) {
    for (int32_t h = head_range.begin; h < head_range.end; ++h) {
      BackwardTile<kCompute>(job, b, h / problem.q_heads_per_kv_head(), kv_tile, scratch)
          .bias_gradient(h);
    }
  }
}

// The gradient of one head's sink.
inline void backward_dsink_task(const BackwardJob& job, int64_t task) {
  const Problem& problem = *job.problem;
  const BackwardArgs& args = *job.args;
  const int32_t head = static_cast<int32_t>(task);
  const RowLayout layout = row_layout(problem, args.shape);
  double total = 0;
  for (int32_t b = 0; b < args.shape.batch; ++b) {
    const SeqlenInfo sequence = job.sequences[b];
    const int64_t first = job.q_tile_index(sequence, b, head, 0) * job.tiling.tile_q;
    const float* lse =
        args.lse + b * layout.batch_stride + head * layout.head_stride + sequence.offset_q;
    if (sequence.len.q == 0) continue;  // the sinks of an empty call may be NULL
    const double sink = args.inputs.sink[head];
    const ScoreUnit unit = score_mod(problem, args.inputs, b, head, sequence.len).unit();
    for (int32_t i = 0; i < sequence.len.q; ++i) {
      if (lse[i] == -kInfinity) continue;
      const int64_t at = first + i;
      // A sink far above all keys makes lse - m large. Then sink - lse is taken directly; it is
      // near 0.
      const bool exact = job.softmax_base[at] != kInfinity && job.lse_log2[at] < kLargeLse;
      const double above =
          exact ? sink - job.softmax_base[at] * unit.nats - job.lse_log2[at] * double{kLn2}
                : sink - double{lse[i]};
      total -= __builtin_exp(above) * double{job.delta[at]};
    }
  }
  args.dsink[head] = static_cast<float>(total);
}

}  // namespace flashattn::cpu::FLASHATTN_ISA
