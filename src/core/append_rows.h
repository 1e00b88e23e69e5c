// flashattn_append_kv: where the new tokens of a sequence go, and the angles of their rotation.
// Used by the CPU backend and the kernel.
#pragma once

#include "core/seqlen_info.h"

namespace flashattn {

struct AppendRows {
  SeqlenInfo sequence;  // as it is before the call, without the rows before starts_kv
  int32_t tokens;       // new tokens: as many as queries
  int32_t stored;       // new tokens that the cache has room for
  int32_t end;          // tokens in the cache after the call, as lens_out has it
  int64_t position;     // position of the first new token
};

// Whatever values lie in device memory, rows [len.kv, len.kv + stored) behind offset_kv lie inside
// the cache.
FLASHATTN_HD AppendRows append_rows(const Problem& problem, const AppendArgs& args, int32_t b) {
  const Inputs& in = args.inputs;
  AppendRows r{seqlen_info(problem, args.shape, in, b), 0, 0, 0, 0};
  int32_t capacity = args.shape.seqlen_kv;
  if (problem.layout & FLASHATTN_LAYOUT_VARLEN_KV) {
    const Interval rows = packed_rows(in.cu_seqlens_kv, b, args.shape.total_kv);
    capacity = clamp_index(rows.end - rows.begin, capacity);
  }
  const int32_t length = clamp_index(in.lens_kv[b], capacity);
  r.tokens = r.sequence.len.q;
  r.stored = clamp_index(r.tokens, capacity - length);
  r.end = length + r.stored;
  r.position = args.positions ? args.positions[b] : r.sequence.len.kv;
  return r;
}

// The position of new token i, within the tables if there are any.
FLASHATTN_HD int64_t rotary_position(const AppendArgs& args, int64_t first, int32_t i) {
  const int64_t position = first + i;
  return args.rotary_cos.data ? clamp_index(position, args.rotary_positions - 1)
         : position < 0       ? 0
                              : position;
}

struct CosSin {
  float cos, sin;
};

// The cosine and sine of an angle in units of 2^-64 turns, to 5e-9. All arithmetic is in 32-bit
// integers and their products, so that every machine computes the same bits.
FLASHATTN_HD constexpr CosSin cos_sin_of_turns(uint64_t turns) {
  // The angle is quarter * pi/2 + x * pi/4; x lies in [-1, 1], in units of 2^-30.
  const uint32_t angle =
      static_cast<uint32_t>(turns >> 32) + static_cast<uint32_t>(turns >> 31 & 1);
  const uint32_t quarter = (angle + (1u << 29)) >> 30;
  const int32_t x = static_cast<int32_t>(angle - (quarter << 30)) * 2;
  const auto times = [](int32_t a, int32_t b) {
    return static_cast<int32_t>(int64_t{a} * b >> 30);
  };
  const int32_t square = times(x, x);
  // Taylor's coefficients, (pi/4)^n / n!.
  constexpr int32_t kSin[] = {843314857, -86699834, 2674041, -39273, 336, -2};
  constexpr int32_t kCos[] = {1073741824, -331168970, 17023473, -350031, 3856, -26};
  int32_t sine = kSin[5], cosine = kCos[5];
  for (int n = 4; n >= 0; --n) {
    sine = times(sine, square) + kSin[n];
    cosine = times(cosine, square) + kCos[n];
  }
  sine = times(sine, x);
  const int32_t c = quarter & 1 ? sine : cosine, s = quarter & 1 ? cosine : sine;
  constexpr float kUnit = 1.0f / (1 << 30);
  return {static_cast<float>(quarter == 1 || quarter == 2 ? -c : c) * kUnit,
          static_cast<float>(quarter & 2 ? -s : s) * kUnit};
}

}  // namespace flashattn
