// Quantises wider numbers to 8 bits, with a descale for each block of tokens. q and k are
// transformed before: FLASHATTN_TRANSFORM_ROTATE rotates them in registers (Shah et al. 2024), and
// the mean of k is subtracted from k.
#pragma once

#include "core/descale.h"
#include "core/philox.h"
#include "cpu/amax.h"

namespace flashattn::cpu::FLASHATTN_ISA {

// Hadamard steps within a vector: sums and differences of lanes whose numbers differ by kStep, then
// by twice that, and so on below `size`.
template <int kStep>
FLASHATTN_INLINE Floats hadamard_lanes(Floats x, int32_t size) {
  if constexpr (kStep >= kWidth) {
    return x;
  } else {
    if (kStep >= size) return x;
    const Ints high = (__builtin_convertvector(iota(), Ints) & kStep) != 0;
    const Floats sum = select(high, -x, x) + swap_lanes<kStep>(x);
    return hadamard_lanes<kStep * 2>(sum, size);
  }
}

// x[0, dim) times the Hadamard matrix of `size`, which divides dim, block by block.
FLASHATTN_INLINE void hadamard(float* x, int32_t dim, int32_t size) {
  for (int32_t c = 0; c < dim; c += kWidth) store(x + c, hadamard_lanes<1>(load(x + c), size));
  for (int32_t step = kWidth; step < size; step *= 2) {
    for (int32_t c = 0; c < dim; c += kWidth) {
      if (c & step) continue;
      const Floats a = load(x + c), b = load(x + c + step);
      store(x + c, a + b);
      store(x + c + step, a - b);
    }
  }
}

// Loads rows of a task, transformed.
class QuantizeRow {
 public:
  FLASHATTN_INLINE QuantizeRow(const QuantizeJob& job, int32_t b, int32_t kv_head)
      : job_(job),
        rotates_((job.is_q || job.is_k) && job.args->transform & FLASHATTN_TRANSFORM_ROTATE) {
    const flashattn_tensor& mean = job.args->k_mean;
    mean_ = mean.data ? head_entry(mean, b, kv_head) : nullptr;
    if (!rotates_) return;
    size_ = job.dim & -job.dim;
    const float norm = static_cast<float>(1 / __builtin_sqrt(static_cast<double>(size_)));
    const uint64_t seed = job.args->rotation_seed;
    for (int32_t c = 0; c < job.dim; ++c) {
      const PhiloxWords bits =
          philox4x32_7({{static_cast<uint32_t>(c / 128), 0, 0, 0}}, static_cast<uint32_t>(seed),
                       static_cast<uint32_t>(seed >> 32));
      signs_[c] = bits.word[c / 32 % 4] >> c % 32 & 1 ? -norm : norm;
    }
  }

  // Loads a row to x[0, dim), zeros behind it. dot, if not NULL, receives the product of the row as
  // given and the mean of k.
  FLASHATTN_INLINE void load_to(float* x, const char* row, double* dot) const {
    const int32_t dim = job_.dim;
    load_row(x, row, job_.args->dtype, dim);
    if (dot) {
      *dot = 0;
      for (int32_t c = 0; c < dim; ++c) *dot += double{x[c]} * double{mean_[c]};
    }
    if (job_.is_k && mean_) {
      for (int32_t c = 0; c < dim; ++c) x[c] -= mean_[c];
    }
    if (!rotates_) return;
    for (int32_t c = 0; c < dim; ++c) x[c] *= signs_[c];
    hadamard(x, dim, size_);
  }

 private:
  const QuantizeJob& job_;
  const float* mean_;
  const bool rotates_;
  int32_t size_ = 1;
  float signs_[kMaxDim];  // the signs over the root of size_
};

// One task: job.task_tokens tokens from `first` on, of the heads that share a KV head.
inline void quantize_task(const QuantizeJob& job, int32_t b, int32_t kv_head, int32_t first) {
  const Problem& problem = *job.problem;
  const QuantizeArgs& args = *job.args;
  const SeqlenInfo sequence = seqlen_info(problem, args.shape, args.inputs, b);
  const int32_t length = job.is_q ? sequence.len.q : sequence.len.kv;
  const int64_t offset = job.is_q ? sequence.offset_q : sequence.offset_kv;
  const Interval task{clamp_index(first, length),
                      clamp_index(int64_t{first} + job.task_tokens, length)};
  const int32_t block = problem.descale_block > 0 ? problem.descale_block : job.task_tokens;
  const bool is_8bit = dtype_size(job.dtype_out) == 1;
  const float largest = job.dtype_out == FLASHATTN_DTYPE_I8 ? kMaxI8 : kMaxF8;
  const QuantizeRow source(job, b, kv_head);
  const RowLayout layout = row_layout(problem, args.shape);
  alignas(64) float x[kMaxDim + kWidth];
  for (Interval tokens{task.begin, 0}; tokens.begin < task.end; tokens.begin = tokens.end) {
    tokens.end = clamp_index(int64_t{tokens.begin} + block, task.end);
    const auto for_each_row = [&](auto body) {
      for (int32_t h = kv_head * job.heads; h < (kv_head + 1) * job.heads; ++h) {
        const TokenRows in = rows_of(job.in, dtype_size(args.dtype), b, h, offset);
        for (int32_t i = tokens.begin; i < tokens.end; ++i) body(h, i, in.row(i));
      }
    };
    float most = 0;
    for_each_row([&](int32_t h, int32_t i, const char* row) {
      const bool shifts = job.is_q && args.lse_shift;
      double dot = 0;
      source.load_to(x, row, shifts ? &dot : nullptr);
      if (shifts) {
        args.lse_shift[b * layout.batch_stride + h * layout.head_stride + offset + i] =
            static_cast<float>(dot * double{problem.scale});
      }
      const float highest = finite_magnitude(x, job.dim);
      if (highest > most) most = highest;
    });
    if (!job.out.data) continue;
    float factor = 1;
    if (is_8bit) {
      const float descale = descale_of(most, largest);
      *(head_entry(job.descale, b, kv_head) + tokens.begin / block * job.descale.stride_seq) =
          descale;
      factor = 1 / descale;
    }
    for_each_row([&](int32_t h, int32_t i, const char* row) {
      source.load_to(x, row, nullptr);
      const TokenRows out = rows_of(job.out, dtype_size(job.dtype_out), b, h, offset);
      store_row(out.row(i), job.dtype_out, x, factor, job.dim);
    });
  }
}

// Writes the mean of the keys of a head; 0 if there are none.
inline void k_mean(const QuantizeArgs& args, const Problem& problem, int32_t b, int32_t kv_head) {
  const SeqlenInfo sequence = seqlen_info(problem, args.shape, args.inputs, b);
  const TokenRows keys =
      rows_of(args.inputs.k, dtype_size(args.dtype), b, kv_head, sequence.offset_kv);
  const int32_t count = sequence.len.kv, dim = problem.dim_qk;
  // kFew keys at a time are summed in fp32, and their sums in double.
  constexpr int32_t kFew = 64;
  double total[kMaxDim] = {};
  alignas(64) float sum[kMaxDim + kWidth];
  for (int32_t first = 0; first < count; first += kFew) {
    __builtin_memset(sum, 0, sizeof sum);
    with_float_dtype(args.dtype, [&](auto tag) {
      constexpr int32_t kDtype = decltype(tag)::value;
      for (int32_t j = first; j < count && j < first + kFew; ++j) {
        const char* row = keys.row(j);
        for (int32_t c = 0; c < dim; c += kWidth) {
          store(sum + c,
                load(sum + c) + load_first<kDtype>(row + c * kElementBytes<kDtype>, dim - c));
        }
      }
    });
    for (int32_t c = 0; c < dim; ++c) total[c] += double{sum[c]};
  }
  float* mean = head_entry(args.k_mean, b, kv_head);
  for (int32_t c = 0; c < dim; ++c) mean[c] = count > 0 ? static_cast<float>(total[c] / count) : 0;
}

}  // namespace flashattn::cpu::FLASHATTN_ISA
