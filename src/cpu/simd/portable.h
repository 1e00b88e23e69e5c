// Vector types and operations that every instruction set has: the compilers' generic vectors of
// kWidth elements, which the header that includes this one has set. `namespace portable` holds
// operations for which an instruction set may have a better form of its own: its header defines
// that form, or takes this one by a using-declaration.
#pragma once

#include <cstdint>
#include <utility>

#include "core/mask_geometry.h"

#define FLASHATTN_INLINE inline __attribute__((always_inline))
#define FLASHATTN_INLINED __attribute__((always_inline))  // behind a lambda's parameters

namespace flashattn::cpu::FLASHATTN_ISA {

typedef float Floats __attribute__((vector_size(4 * kWidth)));
typedef int32_t Ints __attribute__((vector_size(4 * kWidth)));
typedef uint32_t Words __attribute__((vector_size(4 * kWidth)));
typedef uint64_t Longs __attribute__((vector_size(4 * kWidth)));
typedef uint16_t Halves __attribute__((vector_size(2 * kWidth)));
// Unaligned forms in memory, aligned to an element only. A word may be a pair of 16-bit elements.
typedef float FloatsAt __attribute__((vector_size(4 * kWidth), aligned(4), may_alias));
typedef uint32_t WordsAt __attribute__((vector_size(4 * kWidth), aligned(2), may_alias));
typedef uint16_t HalvesAt __attribute__((vector_size(2 * kWidth), aligned(2), may_alias));

constexpr float kInfinity = __builtin_inff(), kMaxFloat = __FLT_MAX__;

FLASHATTN_INLINE Floats splat(float x) { return x - Floats{}; }
FLASHATTN_INLINE Words splat_word(uint32_t x) { return x - Words{}; }
FLASHATTN_INLINE Floats load(const float* p) { return *reinterpret_cast<const FloatsAt*>(p); }
FLASHATTN_INLINE void store(float* p, Floats x) { *reinterpret_cast<FloatsAt*>(p) = x; }
FLASHATTN_INLINE Words load_words(const void* p) { return *reinterpret_cast<const WordsAt*>(p); }
FLASHATTN_INLINE void store_words(uint32_t* p, Words x) { *reinterpret_cast<WordsAt*>(p) = x; }
FLASHATTN_INLINE Words as_words(Floats x) { return reinterpret_cast<Words>(x); }
FLASHATTN_INLINE Floats as_floats(Words x) { return reinterpret_cast<Floats>(x); }
FLASHATTN_INLINE Floats select(Ints mask, Floats a, Floats b) { return mask ? a : b; }
FLASHATTN_INLINE Floats abs(Floats x) { return as_floats(as_words(x) & 0x7fffffffu); }

// Lane n holds n: 0, 1, 2, ...
template <int... kLane>
FLASHATTN_INLINE Floats iota_of(std::integer_sequence<int, kLane...>) {
  return Floats{static_cast<float>(kLane)...};
}
FLASHATTN_INLINE Floats iota() { return iota_of(std::make_integer_sequence<int, kWidth>{}); }

// ---- 16-bit formats, bit patterns in the low halves of words ----

FLASHATTN_INLINE Floats from_bf16(Words bits) { return as_floats(bits << 16); }

// Rounds to nearest even; a NaN stays a NaN.
FLASHATTN_INLINE Words to_bf16(Floats x) {
  const Words bits = as_words(x);
  const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return x == x ? rounded : (bits >> 16) | 0x40u;
}

FLASHATTN_INLINE Floats from_f16(Words bits) {
  const Words magnitude = (bits & 0x7fffu) << 13;
  // The multiplication rebases the exponent and makes subnormals exact.
  const Words scaled = as_words(as_floats(magnitude) * splat(0x1p112f));
  const Words special = scaled | 0x7f800000u;
  return as_floats(((bits & 0x7c00u) == 0x7c00u ? special : scaled) | (bits & 0x8000u) << 16);
}

// Rounds to nearest even; a NaN stays a NaN.
FLASHATTN_INLINE Words to_f16(Floats x) {
  const Words bits = as_words(x), magnitude = bits & 0x7fffffffu;
  const Words normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
  // Adding 1/2 leaves multiples of 2^-24, the unit of fp16's subnormals, in the low bits.
  const Words tiny = as_words(as_floats(magnitude) + splat(0.5f)) - 0x3f000000u;
  Words result = magnitude < splat_word(0x38800000u) ? tiny : normal;
  result = magnitude >= splat_word(0x477ff000u) ? splat_word(0x7c00u) : result;
  result = x == x ? result : 0x7e00u | (magnitude >> 13 & 0x3ffu);
  return result | (bits & 0x80000000u) >> 16;
}

// ---- E4M3, bit patterns in the low bytes of words ----

constexpr float kMaxF8 = 448.0f;

// Rounds to nearest even and saturates, infinity too. A NaN stays a NaN.
FLASHATTN_INLINE Words to_f8(Floats x) {
  const Words bits = as_words(x), magnitude = bits & 0x7fffffffu;
  const Words normal = (magnitude + 0x7ffffu + ((magnitude >> 20) & 1u) - 0x3c000000u) >> 20;
  // Adding 2^14 leaves multiples of 2^-9, the unit of E4M3's subnormals, in the low bits.
  const Words tiny = as_words(as_floats(magnitude) + splat(0x1p14f)) - 0x46800000u;
  Words result = magnitude < splat_word(0x3c800000u) ? tiny : normal;
  result = magnitude >= splat_word(0x43e00000u) ? splat_word(0x7eu) : result;
  result = x == x ? result : splat_word(0x7fu);
  return result | (bits & 0x80000000u) >> 24;
}

// ---- 8-bit integers, in the low bytes of words ----

constexpr float kMaxI8 = 127.0f;

// Rounds to nearest even and saturates at kMaxI8, infinity too. A NaN becomes 0.
FLASHATTN_INLINE Words to_i8(Floats x) {
  x = select(x < splat(-kMaxI8), splat(-kMaxI8), select(x > splat(kMaxI8), splat(kMaxI8), x));
  // Adding 1.5 * 2^23 leaves an integer in the low bits.
  return as_words(select(x == x, x, Floats{}) + splat(0x1.8p23f));
}

namespace portable {

typedef uint8_t Bytes __attribute__((vector_size(kWidth)));

// Loads kWidth numbers of E4M3, each divided by kF8Unit.
constexpr float kF8Unit = 1.0f;
FLASHATTN_INLINE Floats load_f8_units(const void* p) {
  Bytes bytes;
  __builtin_memcpy(&bytes, p, kWidth);
  const Words bits = __builtin_convertvector(bytes, Words), magnitude = bits & 0x7fu;
  const Words normal = (magnitude << 20) + 0x3c000000u;
  const Words tiny =
      as_words(__builtin_convertvector(reinterpret_cast<Ints>(magnitude), Floats) * 0x1p-9f);
  Words result = magnitude < splat_word(8) ? tiny : normal;
  result |= magnitude == splat_word(0x7f) ? splat_word(0x7fc00000u) : Words{};
  return as_floats(result | (bits & 0x80u) << 24);
}

// Loads 2 * kWidth numbers of E4M3, each divided by kF8Unit.
FLASHATTN_INLINE void load_f8_pair(const void* p, Floats* first, Floats* second) {
  *first = load_f8_units(p);
  *second = load_f8_units(static_cast<const char*>(p) + kWidth);
}

// Loads kWidth 8-bit integers as fp32.
FLASHATTN_INLINE Floats load_i8(const void* p) {
  typedef int8_t SignedBytes __attribute__((vector_size(kWidth)));
  SignedBytes bytes;
  __builtin_memcpy(&bytes, p, kWidth);
  return __builtin_convertvector(__builtin_convertvector(bytes, Ints), Floats);
}

// Writes the low bytes of words.
FLASHATTN_INLINE void store_bytes(void* p, Words bits) {
  const Bytes bytes = __builtin_convertvector(bits, Bytes);
  __builtin_memcpy(p, &bytes, kWidth);
}

// The low halves of the 64-bit lanes of a, times b.
FLASHATTN_INLINE Longs multiply_low(Longs a, uint32_t b) { return (a & 0xffffffffu) * uint64_t{b}; }

// Keeps x in a register from here on, where compilers would load it again for each product.
FLASHATTN_INLINE void hold(Words&) {}

// Whether any lane is set.
FLASHATTN_INLINE bool any(Ints mask) {
  int32_t lanes[kWidth];
  __builtin_memcpy(lanes, &mask, sizeof lanes);
  int32_t some = 0;
  for (const int32_t lane : lanes) some |= lane;
  return some != 0;
}

// x where the byte at p is not zero, else y.
FLASHATTN_INLINE Floats select_by_bytes(const void* p, Floats x, Floats y) {
  Bytes bytes;
  __builtin_memcpy(&bytes, p, kWidth);
  return select(__builtin_convertvector(bytes, Ints) != 0, x, y);
}

// The larger and the smaller of x and y. A NaN in x is kept.
FLASHATTN_INLINE Floats max_keep_nan(Floats x, Floats y) { return select(x < y, y, x); }
FLASHATTN_INLINE Floats min_keep_nan(Floats x, Floats y) { return select(x > y, y, x); }

// x * y - z; rounded once where the instruction set has fused multiply-adds.
FLASHATTN_INLINE Floats multiply_subtract(Floats x, Floats y, Floats z) { return x * y - z; }

// 1 / x with a relative error below 2e-7, for x neither tiny nor huge.
FLASHATTN_INLINE Floats reciprocal(Floats x) { return 1.0f / x; }

// kWidth 16-bit elements, in the low halves of words.
FLASHATTN_INLINE Words load_halves(const uint16_t* p) {
  return __builtin_convertvector(*reinterpret_cast<const HalvesAt*>(p), Words);
}
FLASHATTN_INLINE void store_halves(uint16_t* p, Words bits) {
  *reinterpret_cast<HalvesAt*>(p) = __builtin_convertvector(bits, Halves);
}
FLASHATTN_INLINE Floats load_bf16(const void* p) {
  return from_bf16(load_halves(static_cast<const uint16_t*>(p)));
}
FLASHATTN_INLINE Floats load_f16(const void* p) {
  return from_f16(load_halves(static_cast<const uint16_t*>(p)));
}

// sum += a.lo * b.lo + a.hi * b.hi, of pairs of bf16.
FLASHATTN_INLINE Floats dot_bf16(Floats sum, Words a, Words b) {
  return sum + from_bf16(a) * from_bf16(b) +
         as_floats(a & 0xffff0000u) * as_floats(b & 0xffff0000u);
}

// Writes two vectors, one behind the other, as 2 * kWidth bf16.
FLASHATTN_INLINE void store_bf16_row(uint32_t* p, Floats first, Floats second) {
  store_halves(reinterpret_cast<uint16_t*>(p), to_bf16(first));
  store_halves(reinterpret_cast<uint16_t*>(p) + kWidth, to_bf16(second));
}

// kWidth pairs (low[n], high[n]) as words of two bf16.
FLASHATTN_INLINE Words pair_bf16(Floats low, Floats high) {
  return to_bf16(low) | to_bf16(high) << 16;
}

// a and b hold 2 * kWidth 16-bit elements each. *first receives the words (a[n], b[n]) of the first
// kWidth, *second those of the others.
FLASHATTN_INLINE void interleave(Words a, Words b, Words* first, Words* second) {
  uint16_t halves[2][2 * kWidth], pairs[4 * kWidth];
  store_words(reinterpret_cast<uint32_t*>(halves[0]), a);
  store_words(reinterpret_cast<uint32_t*>(halves[1]), b);
  for (int n = 0; n < 4 * kWidth; ++n) pairs[n] = halves[n % 2][n / 2];
  *first = load_words(pairs);
  *second = load_words(pairs + 2 * kWidth);
}

// 2^x is split into 2^n, n an integer near x, and 2 to the power of the rest. Exp2Power holds 2^n
// in a form that scale_exp2 multiplies by.
constexpr bool kExp2FromBelow = false;  // the rest lies in [-1/2, 1/2]; true: in [0, 1]
using Exp2Power = Words;

// 1.5 * 2^23: a sum with it is rounded to an integer, which its low bits hold.
constexpr float kRoundingMagic = 12582912.0f;

// The bits of 2^n from x + kRoundingMagic: (n + 127) << 23 is 2^n, 0 for n = -127 and infinity for
// n = 128.
FLASHATTN_INLINE Exp2Power exp2_power(Floats shifted) {
  return (as_words(shifted) + (127u - 0x4b400000u)) << 23;
}

// Makes x the rest and returns 2^n. kNonPositive: x is not above 0.
template <bool kNonPositive>
FLASHATTN_INLINE Exp2Power split_exp2(Floats& x) {
  if (!kNonPositive) x = min_keep_nan(x, splat(128.0f));
  x = max_keep_nan(x, splat(-127.0f));
  const Floats magic = splat(kRoundingMagic), shifted = x + magic;
  x -= shifted - magic;
  return exp2_power(shifted);
}

FLASHATTN_INLINE Floats scale_exp2(Floats x, Exp2Power power) { return x * as_floats(power); }

}  // namespace portable
}  // namespace flashattn::cpu::FLASHATTN_ISA
