// Writes new tokens to the cache and q to q_out, with rotary position embedding (Su et al. 2021).
#pragma once

#include <algorithm>

#include "core/append_rows.h"
#include "core/descale.h"
#include "cpu/amax.h"

namespace flashattn::cpu::FLASHATTN_ISA {

// Cosines and sines of the pairs of one token.
struct RotaryAngles {
  alignas(64) float cos[kMaxRotaryPairs + kWidth];
  alignas(64) float sin[kMaxRotaryPairs + kWidth];
};

FLASHATTN_INLINE void load_angles(const AppendArgs& args, int64_t position, RotaryAngles* angles) {
  const int32_t pairs = args.rotary_dim / 2;
  if (!args.rotary_cos.data) {
    for (int32_t c = 0; c < pairs; ++c) {
      const CosSin x = cos_sin_of_turns(args.turns[c] * static_cast<uint64_t>(position));
      angles->cos[c] = x.cos;
      angles->sin[c] = x.sin;
    }
    return;
  }
  with_float_dtype(args.dtype_rotary, [&](auto tag) {
    constexpr int32_t kDtype = decltype(tag)::value, kBytes = kElementBytes<kDtype>;
    const char* cos = static_cast<const char*>(args.rotary_cos.data) +
                      position * args.rotary_cos.stride_seq * kBytes;
    const char* sin = static_cast<const char*>(args.rotary_sin.data) +
                      position * args.rotary_sin.stride_seq * kBytes;
    for (int32_t c = 0; c < pairs; c += kWidth) {
      store(angles->cos + c, load_first<kDtype>(cos + c * kBytes, pairs - c));
      store(angles->sin + c, load_first<kDtype>(sin + c * kBytes, pairs - c));
    }
  });
}

#if defined(__AVX512F__)
constexpr size_t kRegisterBytes = 64;
#elif defined(__AVX__)
constexpr size_t kRegisterBytes = 32;
#else
constexpr size_t kRegisterBytes = 16;
#endif

// The compiler makes no fused multiply-add of x and the sum that it goes into: see the header.
// Floats that are wider than a register, as where AMX is emulated, lie in memory.
FLASHATTN_INLINE Floats rounded(Floats x) {
  if constexpr (sizeof x > kRegisterBytes) {
    asm("" : "+m"(x));
  } else {
#if defined(__x86_64__) || defined(__i386__)
    asm("" : "+x"(x));
#elif defined(__aarch64__)
    asm("" : "+w"(x));
#else
    asm("" : "+m"(x));
#endif
  }
  return x;
}

// Rotates the pairs of the first rotary_dim elements of a row.
FLASHATTN_INLINE void rotate(float* x, int32_t rotary_dim, bool interleaved,
                             const RotaryAngles& angles) {
  alignas(64) float first[kMaxRotaryPairs + kWidth], second[kMaxRotaryPairs + kWidth];
  const int32_t pairs = rotary_dim / 2;
  const int32_t step = interleaved ? 2 : 1, apart = interleaved ? 1 : pairs;
  for (int32_t c = 0; c < pairs; ++c) {
    first[c] = x[c * step];
    second[c] = x[c * step + apart];
  }
  for (int32_t c = pairs; c < pairs + kWidth; ++c) first[c] = second[c] = 0;
  for (int32_t c = 0; c < pairs; c += kWidth) {
    const Floats a = load(first + c), b = load(second + c);
    const Floats cos = load(angles.cos + c), sin = load(angles.sin + c);
    store(first + c, rounded(a * cos) - rounded(b * sin));
    store(second + c, rounded(a * sin) + rounded(b * cos));
  }
  for (int32_t c = 0; c < pairs; ++c) {
    x[c * step] = first[c];
    x[c * step + apart] = second[c];
  }
}

// Loads a new row like load_row(), and rotates it if angles is not NULL.
FLASHATTN_INLINE void load_new_row(const AppendArgs& args, const char* in, int32_t dim,
                                   const RotaryAngles* angles, float* x) {
  load_row(x, in, args.dtype, dim);
  if (angles) rotate(x, args.rotary_dim, args.rotary == FLASHATTN_ROTARY_INTERLEAVED, *angles);
}

// Writes one row to `out`: rotated if angles is not NULL, times factor, in dtype_out.
FLASHATTN_INLINE void append_row(const AppendArgs& args, const char* in, char* out,
                                 int32_t dtype_out, int32_t dim, const RotaryAngles* angles,
                                 float factor) {
  if (!angles && dtype_out == args.dtype) {
    __builtin_memmove(out, in, static_cast<size_t>(dim) * dtype_size(dtype_out));
    return;
  }
  alignas(64) float x[kMaxDim + kWidth];
  load_new_row(args, in, dim, angles, x);
  store_row(out, dtype_out, x, factor, dim);
}

// Multiplies a row that the cache holds by a factor, and rounds it again.
FLASHATTN_INLINE void rescale_row(char* row, int32_t dtype, float factor, int32_t dim) {
  alignas(64) float x[kMaxDim + kWidth];
  load_row(x, row, dtype, dim);
  store_row(row, dtype, x, factor, dim);
}

// K or V: the new tokens, the cache that they go to, and its descales.
struct AppendSide {
  const flashattn_tensor &from, &cache, &descale;
  int32_t dim;
  bool rotates;
};

// Makes the descales of the blocks that some new tokens of a sequence lie in, and rescales what the
// first of these blocks holds. No other task has new tokens in them.
inline void update_descales(const Problem& problem, const AppendArgs& args, const AppendRows& to,
                            int32_t b, Interval tokens, const AppendSide& side) {
  const Inputs& in = args.inputs;
  const int32_t before = to.sequence.len.kv, block = problem.descale_block;
  const float largest = problem.dtype_kv == FLASHATTN_DTYPE_I8 ? kMaxI8 : kMaxF8;
  alignas(64) float x[kMaxDim + kWidth];
  RotaryAngles angles = {};
  for (Interval rows{tokens.begin, 0}; rows.begin < tokens.end; rows.begin = rows.end) {
    const int32_t n = (before + rows.begin) / block;
    rows.end = clamp_index((int64_t{n} + 1) * block - before, tokens.end);
    for (int32_t h = 0; h < problem.heads_kv; ++h) {
      const TokenRows new_rows =
          rows_of(side.from, dtype_size(args.dtype), b, h, to.sequence.offset_q);
      float most = 0;
      for (int32_t i = rows.begin; i < rows.end; ++i) {
        if (side.rotates) load_angles(args, rotary_position(args, to.position, i), &angles);
        load_new_row(args, new_rows.row(i), side.dim, side.rotates ? &angles : nullptr, x);
        most = std::max(most, finite_magnitude(x, side.dim));
      }
      const bool held = int64_t{n} * block < before;
      float* const descale = static_cast<float*>(side.descale.data) +
                             b * side.descale.stride_batch + h * side.descale.stride_head +
                             n * side.descale.stride_seq;
      const float made = updated_descale(most, largest, block, held, *descale);
      if (held && made != *descale) {
        const TokenRows cached =
            kv_rows(problem, in, side.cache, side.descale, b, h, to.sequence.offset_kv);
        for (int32_t j = n * block; j < before; ++j) {
          rescale_row(cached.row(j), problem.dtype_kv, *descale / made, side.dim);
        }
      }
      *descale = made;
    }
  }
}

// One task: appends some new tokens of a sequence, all heads.
inline void append_task(const Problem& problem, const AppendArgs& args, int32_t b,
                        Interval tokens) {
  const Inputs& in = args.inputs;
  const AppendRows to = append_rows(problem, args, b);
  const SeqlenInfo& sequence = to.sequence;
  const int32_t size = dtype_size(args.dtype);
  RotaryAngles angles = {};
  const RotaryAngles* const rotation = args.rotary_dim > 0 ? &angles : nullptr;
  const AppendSide sides[] = {
      {in.k, args.k_cache, in.descale_k, problem.dim_qk, rotation != nullptr},
      {in.v, args.v_cache, in.descale_v, problem.dim_v, false},
  };
  tokens.end = std::min(tokens.end, to.tokens);
  for (const AppendSide& side : sides) {
    if (!args.update_descales || !side.from.data) continue;
    update_descales(problem, args, to, b, {tokens.begin, std::min(tokens.end, to.stored)}, side);
  }
  for (int32_t i = tokens.begin; i < tokens.end; ++i) {
    if (rotation) load_angles(args, rotary_position(args, to.position, i), &angles);
    for (int32_t h = 0; in.q.data && h < problem.heads_q; ++h) {
      append_row(args, rows_of(in.q, size, b, h, sequence.offset_q).row(i),
                 rows_of(args.q_out, size, b, h, sequence.offset_q).row(i), args.dtype,
                 problem.dim_qk, rotation, 1);
    }
    if (i >= to.stored) continue;
    for (const AppendSide& side : sides) {
      for (int32_t h = 0; side.from.data && h < problem.heads_kv; ++h) {
        const TokenRows rows =
            kv_rows(problem, in, side.cache, side.descale, b, h, sequence.offset_kv);
        const int32_t j = sequence.len.kv + i;
        append_row(args, rows_of(side.from, size, b, h, sequence.offset_q).row(i), rows.row(j),
                   problem.dtype_kv, side.dim, side.rotates ? rotation : nullptr,
                   1 / rows.descales.of(j));
      }
    }
  }
}

}  // namespace flashattn::cpu::FLASHATTN_ISA
