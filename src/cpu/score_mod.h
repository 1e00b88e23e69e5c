// Score modifications: scale, softcap, ALiBi and dense bias, forward and derivative.
#pragma once

#include "core/score_mod.h"
#include "cpu/elementary.h"
#include "cpu/pack.h"

namespace flashattn::cpu::FLASHATTN_ISA {

constexpr float kPerNat = kLog2E / kModifiedUnit.log2;

// Turns the products of query i with the keys from `first` on into scores, in kModifiedUnit:
// columns [begin, end) of s, multiples of kWidth. Returns the maximum of each lane. derivative, if
// not NULL, receives the derivative of the softcap. add(x, key) returns x plus the biases of the
// keys from `key` on.
template <class Add>
FLASHATTN_INLINE Floats score_mod_columns(const ScoreMod& mods, int32_t i, int32_t first,
                                          int32_t begin, int32_t end, float* s, float* derivative,
                                          Add add) {
  const bool has_softcap = mods.softcap != 0;
  const Floats factor = splat(has_softcap ? mods.scale / mods.softcap : mods.scale * kPerNat);
  const Floats cap = splat(mods.softcap * kPerNat), slope = splat(mods.slope * kPerNat);
  Floats top = splat(-kInfinity);
  const auto step = [&](int32_t column, auto vectors) {
    constexpr int kVectors = decltype(vectors)::value;
    Floats x[kVectors];
    for (int v = 0; v < kVectors; ++v) x[v] = load(s + column + v * kWidth) * factor;
    if (has_softcap) {
      tanh_each(x);
      for (int v = 0; v < kVectors; ++v) {
        if (derivative) store(derivative + column + v * kWidth, 1.0f - x[v] * x[v]);
        x[v] *= cap;
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      const int32_t key = first + column + v * kWidth;
      if (mods.slope != 0) {
        const float at = static_cast<float>(i + static_cast<int64_t>(mods.offset) - key);
        x[v] -= abs(splat(at) - iota()) * slope;
      }
      x[v] = add(x[v], key);
      store(s + column + v * kWidth, x[v]);
      top = max_keep_nan(x[v], top);
    }
  };
  int32_t column = begin;
  for (; column + kPanel <= end; column += kPanel) {
    step(column, std::integral_constant<int, kPanelVectors>{});
  }
  for (; column < end; column += kWidth) step(column, std::integral_constant<int, 1>{});
  return top;
}

// As score_mod_columns(), with the dense bias if there is one. keys: the sequence's length.
inline Floats score_mod_row(const ScoreMod& mods, int32_t i, int32_t first, int32_t keys,
                            int32_t begin, int32_t end, float* s, float* derivative) {
  const auto modify = [&](auto add) {
    return score_mod_columns(mods, i, first, begin, end, s, derivative, add);
  };
  if (!mods.bias) return modify([](Floats x, int32_t) { return x; });
  const int64_t row_bytes = mods.bias_row * dtype_size(mods.dtype_bias);
  const char* row = mods.bias + i * row_bytes;
  // Prefetches the next query's bias, whose start hardware prefetchers do not predict.
  const auto fetch_next = [row_bytes](const char* at) { __builtin_prefetch(at + row_bytes); };
  if (mods.dtype_bias == FLASHATTN_DTYPE_U8) {
    // A byte of 0 masks the key, whatever its score.
    return modify([&](Floats x, int32_t key) {
      const int32_t count = keys - key;
      fetch_next(row + key);
      if (count >= kWidth) return select_by_bytes(row + key, x, splat(-kInfinity));
      uint8_t shown[kWidth] = {};
      if (count > 0) __builtin_memcpy(shown, row + key, static_cast<size_t>(count));
      return select_by_bytes(shown, x, splat(-kInfinity));
    });
  }
  return with_float_dtype(mods.dtype_bias, [&](auto tag) {
    constexpr int32_t kDtype = decltype(tag)::value;
    return modify([&](Floats x, int32_t key) {
      const char* at = row + key * int64_t{kElementBytes<kDtype>};
      fetch_next(at);
      return x + load_first<kDtype>(at, keys - key) * splat(kPerNat);
    });
  });
}

}  // namespace flashattn::cpu::FLASHATTN_ISA
