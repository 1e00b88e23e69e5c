// Vectors of fp32, as wide as the instruction set this file is compiled for: the compilers' generic
// vectors, so that one source serves every instruction set and architecture. Intrinsics stand only
// where no generic form exists: half-precision conversion and the bf16 dot product.
//
// Everything lives in a namespace named after the instruction set, and nothing here may call an
// inline function or template from outside it that is not always inlined: the linker would be free
// to share that copy with code that runs on an older machine.
#pragma once

#include <cstdint>
#include <utility>

#include "core/geometry.h"

#include <sched.h>
#include <time.h>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

#define FLASHATTN_INLINE inline __attribute__((always_inline))
#define FLASHATTN_INLINED __attribute__((always_inline))  // behind a lambda's parameters

namespace flashattn::cpu::FLASHATTN_ISA {

#if defined(__AVX512F__) || defined(FLASHATTN_WIDE_VECTORS)  // asked for by tests
constexpr int kWidth = 16;                                   // floats a vector
constexpr int kPanelVectors = 4;
#elif defined(__AVX__)
constexpr int kWidth = 8;
constexpr int kPanelVectors = 2;
#else
constexpr int kWidth = 4;
constexpr int kPanelVectors = 2;
#endif

typedef float Floats __attribute__((vector_size(4 * kWidth)));
typedef int32_t Ints __attribute__((vector_size(4 * kWidth)));
typedef uint32_t Words __attribute__((vector_size(4 * kWidth)));
typedef uint16_t Halves __attribute__((vector_size(2 * kWidth)));
// The same in memory, aligned to the element only; words may be pairs of 16-bit elements.
typedef float FloatsAt __attribute__((vector_size(4 * kWidth), aligned(4), may_alias));
typedef uint32_t WordsAt __attribute__((vector_size(4 * kWidth), aligned(2), may_alias));
typedef uint16_t HalvesAt __attribute__((vector_size(2 * kWidth), aligned(2), may_alias));

constexpr float kInfinity = __builtin_inff(), kMaxFloat = __FLT_MAX__;

FLASHATTN_INLINE Floats splat(float x) { return x - Floats{}; }
FLASHATTN_INLINE Words splat_word(uint32_t x) { return x - Words{}; }
FLASHATTN_INLINE Floats load(const float* p) { return *reinterpret_cast<const FloatsAt*>(p); }
FLASHATTN_INLINE void store(float* p, Floats x) { *reinterpret_cast<FloatsAt*>(p) = x; }
typedef uint64_t Longs __attribute__((vector_size(4 * kWidth)));
// The low halves of the lanes times b.
FLASHATTN_INLINE Longs multiply_low(Longs a, uint32_t b) {
#if defined(__AVX512F__)
  return reinterpret_cast<Longs>(
      _mm512_mul_epu32(reinterpret_cast<__m512i>(a), _mm512_set1_epi64(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<Longs>(
      _mm256_mul_epu32(reinterpret_cast<__m256i>(a), _mm256_set1_epi64x(b)));
#else
  return (a & 0xffffffffu) * uint64_t{b};
#endif
}
FLASHATTN_INLINE Words load_words(const void* p) { return *reinterpret_cast<const WordsAt*>(p); }
FLASHATTN_INLINE void store_words(uint32_t* p, Words x) { *reinterpret_cast<WordsAt*>(p) = x; }
// Keeps x in a register from here on: with fewer than 32 of them compilers load it anew for each
// product, which is no faster than two loads a cycle.
FLASHATTN_INLINE void hold([[maybe_unused]] Words& x) {
#if defined(__AVX__) && !defined(__AVX512F__)
  __asm__("" : "+x"(x));
#endif
}
FLASHATTN_INLINE Words as_words(Floats x) { return reinterpret_cast<Words>(x); }
FLASHATTN_INLINE Floats as_floats(Words x) { return reinterpret_cast<Floats>(x); }
FLASHATTN_INLINE Floats select(Ints mask, Floats a, Floats b) { return mask ? a : b; }
FLASHATTN_INLINE bool any(Ints mask) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask(reinterpret_cast<__m512i>(mask)) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_epi8(reinterpret_cast<__m256i>(mask)) != 0;
#else
  int32_t lanes[kWidth];
  __builtin_memcpy(lanes, &mask, sizeof lanes);
  int32_t some = 0;
  for (const int32_t lane : lanes) some |= lane;
  return some != 0;
#endif
}
// x where the byte at p is not zero, else y.
FLASHATTN_INLINE Floats select_by_bytes(const void* p, Floats x, Floats y) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(static_cast<const __m128i*>(p));
  return reinterpret_cast<Floats>(_mm512_mask_mov_ps(
      reinterpret_cast<__m512>(y), _mm_test_epi8_mask(bytes, bytes), reinterpret_cast<__m512>(x)));
#elif defined(__AVX2__)
  const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
  const __m256i none = _mm256_cmpeq_epi32(bytes, _mm256_setzero_si256());
  return reinterpret_cast<Floats>(_mm256_blendv_ps(
      reinterpret_cast<__m256>(x), reinterpret_cast<__m256>(y), _mm256_castsi256_ps(none)));
#else
  typedef uint8_t Bytes __attribute__((vector_size(kWidth)));
  Bytes bytes;
  __builtin_memcpy(&bytes, p, kWidth);
  return select(__builtin_convertvector(bytes, Ints) != 0, x, y);
#endif
}
// A NaN in x is kept.
FLASHATTN_INLINE Floats max_keep_nan(Floats x, Floats y) {
#if defined(__AVX512F__)
  return reinterpret_cast<Floats>(
      _mm512_max_ps(reinterpret_cast<__m512>(y), reinterpret_cast<__m512>(x)));
#elif defined(__AVX__)
  return reinterpret_cast<Floats>(
      _mm256_max_ps(reinterpret_cast<__m256>(y), reinterpret_cast<__m256>(x)));
#else
  return select(x < y, y, x);
#endif
}
FLASHATTN_INLINE Floats min_keep_nan(Floats x, Floats y) {
#if defined(__AVX512F__)
  return reinterpret_cast<Floats>(
      _mm512_min_ps(reinterpret_cast<__m512>(y), reinterpret_cast<__m512>(x)));
#elif defined(__AVX__)
  return reinterpret_cast<Floats>(
      _mm256_min_ps(reinterpret_cast<__m256>(y), reinterpret_cast<__m256>(x)));
#else
  return select(x > y, y, x);
#endif
}
FLASHATTN_INLINE Floats abs(Floats x) { return as_floats(as_words(x) & 0x7fffffffu); }

// 0, 1, 2, ...
template <int... kLane>
FLASHATTN_INLINE Floats iota_of(std::integer_sequence<int, kLane...>) {
  return Floats{static_cast<float>(kLane)...};
}
FLASHATTN_INLINE Floats iota() { return iota_of(std::make_integer_sequence<int, kWidth>{}); }

// For loops that wait for another thread: spins for some 50 us, then sleeps as long at a time, for
// that thread may be without a core.
FLASHATTN_INLINE void back_off(int32_t* waited) {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#endif
  if (++*waited < 1024) {
    if (*waited % 256 == 0) sched_yield();
  } else {
    *waited = 1024;
    const timespec time{0, 50'000};
    nanosleep(&time, nullptr);
  }
}

// ---- 16-bit formats, bit patterns in the low halves of words ----

FLASHATTN_INLINE Floats from_bf16(Words bits) { return as_floats(bits << 16); }

// Rounded to nearest even; NaN stays NaN.
FLASHATTN_INLINE Words to_bf16(Floats x) {
  const Words bits = as_words(x);
  const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return x == x ? rounded : (bits >> 16) | 0x40u;
}

FLASHATTN_INLINE Floats from_f16(Words bits) {
  const Words magnitude = (bits & 0x7fffu) << 13;
  // The multiplication moves the exponent's bias and makes subnormals exact.
  const Words scaled = as_words(as_floats(magnitude) * splat(0x1p112f));
  const Words special = scaled | 0x7f800000u;
  return as_floats(((bits & 0x7c00u) == 0x7c00u ? special : scaled) | (bits & 0x8000u) << 16);
}

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

// The compilers' conversions would take two halves.
FLASHATTN_INLINE Words load_halves(const uint16_t* p) {
#if defined(__AVX512F__)
  return reinterpret_cast<Words>(
      _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif defined(__AVX2__)
  return reinterpret_cast<Words>(
      _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
  return __builtin_convertvector(*reinterpret_cast<const HalvesAt*>(p), Words);
#endif
}
FLASHATTN_INLINE void store_halves(uint16_t* p, Words bits) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(bits)));
#else
  *reinterpret_cast<HalvesAt*>(p) = __builtin_convertvector(bits, Halves);
#endif
}

// kWidth elements of a 16-bit or 32-bit type at p, as fp32. AVX512-FP16 would not save the way over
// fp32: its multiply-adds round every sum to fp16.
template <int32_t kDtype>
FLASHATTN_INLINE Floats load_as_floats(const void* p) {
  if constexpr (kDtype == FLASHATTN_DTYPE_F32) {
    return load(static_cast<const float*>(p));
  } else if constexpr (kDtype == FLASHATTN_DTYPE_BF16) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    // One shuffle, where widening and shifting take three instructions.
    const __m256i both =
        _mm256_broadcastsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(p)));
    const __m256i order =
        _mm256_setr_epi8(-1, -1, 0, 1, -1, -1, 2, 3, -1, -1, 4, 5, -1, -1, 6, 7, -1, -1, 8, 9, -1,
                         -1, 10, 11, -1, -1, 12, 13, -1, -1, 14, 15);
    return reinterpret_cast<Floats>(_mm256_shuffle_epi8(both, order));
#else
    return from_bf16(load_halves(static_cast<const uint16_t*>(p)));
#endif
  } else {
#if defined(__AVX512F__)
    return reinterpret_cast<Floats>(
        _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p))));
#elif defined(__F16C__)
    return reinterpret_cast<Floats>(
        _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p))));
#else
    return from_f16(load_halves(static_cast<const uint16_t*>(p)));
#endif
  }
}

template <int32_t kDtype>
FLASHATTN_INLINE void store_floats(void* p, Floats x) {
  if constexpr (kDtype == FLASHATTN_DTYPE_F32) {
    store(static_cast<float*>(p), x);
  } else if constexpr (kDtype == FLASHATTN_DTYPE_BF16) {
    store_halves(static_cast<uint16_t*>(p), to_bf16(x));
  } else {
    store_halves(static_cast<uint16_t*>(p), to_f16(x));
  }
}

// Whether there are products of pairs of bf16: of vectors (vdpbf16ps), of tiles (AMX).
#if defined(__AVX512BF16__) || defined(__AMX_BF16__)
constexpr bool kHasBf16Dot = true;
#else
constexpr bool kHasBf16Dot = false;
#endif

#if defined(__AVX512BF16__)
// sum += a.lo * b.lo + a.hi * b.hi, of pairs of bf16. Subnormals count as zero.
FLASHATTN_INLINE Floats dot_bf16(Floats sum, Words a, Words b) {
  return reinterpret_cast<Floats>(_mm512_dpbf16_ps(
      reinterpret_cast<__m512>(sum), reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b)));
}
#else
FLASHATTN_INLINE Floats dot_bf16(Floats sum, Words a, Words b) {
  return sum + from_bf16(a) * from_bf16(b) +
         as_floats(a & 0xffff0000u) * as_floats(b & 0xffff0000u);
}
#endif

// Two vectors, one behind the other, as 2 * kWidth bf16.
FLASHATTN_INLINE void store_bf16_row(uint32_t* p, Floats first, Floats second) {
#if defined(__AVX512BF16__)
  store_words(p, reinterpret_cast<Words>(_mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(second),
                                                             reinterpret_cast<__m512>(first))));
#else
  store_halves(reinterpret_cast<uint16_t*>(p), to_bf16(first));
  store_halves(reinterpret_cast<uint16_t*>(p) + kWidth, to_bf16(second));
#endif
}

// kWidth pairs (low[n], high[n]) as words of two bf16.
FLASHATTN_INLINE Words pair_bf16(Floats low, Floats high) {
#if defined(__AVX512BF16__)
  const __m512bh halves =
      _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(high), reinterpret_cast<__m512>(low));
  const __m512i index = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24,
                                         8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return reinterpret_cast<Words>(
      _mm512_permutexvar_epi16(index, reinterpret_cast<__m512i>(halves)));
#else
  return to_bf16(low) | to_bf16(high) << 16;
#endif
}

// a and b hold 2 * kWidth halves each: words (a[n], b[n]) for the first kWidth, and the others.
FLASHATTN_INLINE void interleave(Words a, Words b, Words* first, Words* second) {
#if defined(__AVX512BW__)
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,
                                       39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  const __m512i x = reinterpret_cast<__m512i>(a), y = reinterpret_cast<__m512i>(b);
  *first = reinterpret_cast<Words>(_mm512_permutex2var_epi16(x, low, y));
  *second = reinterpret_cast<Words>(_mm512_permutex2var_epi16(x, high, y));
#else
  uint16_t halves[2][2 * kWidth], pairs[4 * kWidth];
  store_words(reinterpret_cast<uint32_t*>(halves[0]), a);
  store_words(reinterpret_cast<uint32_t*>(halves[1]), b);
  for (int n = 0; n < 4 * kWidth; ++n) pairs[n] = halves[n % 2][n / 2];
  *first = load_words(pairs);
  *second = load_words(pairs + 2 * kWidth);
#endif
}

// ---- Transposition ----

template <int kStep, int... kLane>
FLASHATTN_INLINE Ints lanes_with_of(std::integer_sequence<int, kLane...>) {
  return Ints{((kLane & kStep) ? -1 : 0)...};
}
// Set in lanes whose number has the bit kStep.
template <int kStep>
FLASHATTN_INLINE Ints lanes_with() {
  return lanes_with_of<kStep>(std::make_integer_sequence<int, kWidth>{});
}

template <int kStep, int... kLane>
FLASHATTN_INLINE Floats swap_lanes_of(Floats x, std::integer_sequence<int, kLane...>) {
#if defined(__clang__)
  return __builtin_shufflevector(x, x, (kLane ^ kStep)...);
#else
  return __builtin_shuffle(x, Ints{(kLane ^ kStep)...});
#endif
}
// Lane n of the result is lane n ^ kStep of x.
template <int kStep>
FLASHATTN_INLINE Floats swap_lanes(Floats x) {
  return swap_lanes_of<kStep>(x, std::make_integer_sequence<int, kWidth>{});
}

FLASHATTN_INLINE float sum(Floats x) {
  if constexpr (kWidth > 8) x += swap_lanes<8>(x);
  if constexpr (kWidth > 4) x += swap_lanes<4>(x);
  x += swap_lanes<2>(x);
  x += swap_lanes<1>(x);
  return x[0];
}

// A NaN on either side is kept.
FLASHATTN_INLINE Floats max_of_both(Floats x, Floats y) {
  return select(x == x, max_keep_nan(y, x), x);
}

template <bool kHigh, int kStep, int... kLane>
FLASHATTN_INLINE Words exchange(Words a, Words b, std::integer_sequence<int, kLane...>) {
  // Blocks of kStep lanes: of a where even, of b where odd; the low or the high half of each pair.
#if defined(__clang__)
  return __builtin_shufflevector(
      a, b,
      ((kLane & kStep) ? kWidth + kLane - (kHigh ? 0 : kStep) : kLane + (kHigh ? kStep : 0))...);
#else
  return __builtin_shuffle(
      a, b,
      Words{static_cast<uint32_t>((kLane & kStep) ? kWidth + kLane - (kHigh ? 0 : kStep)
                                                  : kLane + (kHigh ? kStep : 0))...});
#endif
}

template <int kStep>
FLASHATTN_INLINE void transpose_steps(Words (&rows)[kWidth]) {
  if constexpr (kStep < kWidth) {
    constexpr auto lanes = std::make_integer_sequence<int, kWidth>{};
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i) {
      if (i & kStep) continue;
      const Words a = rows[i], b = rows[i + kStep];
      rows[i] = exchange<false, kStep>(a, b, lanes);
      rows[i + kStep] = exchange<true, kStep>(a, b, lanes);
    }
    transpose_steps<kStep * 2>(rows);
  }
}

FLASHATTN_INLINE void transpose(Words (&rows)[kWidth]) { transpose_steps<1>(rows); }

// Lane n becomes all lanes of rows[n], combined in the order of sum().
template <int kStep = kWidth / 2, class Combine>
FLASHATTN_INLINE Floats combine_each(Floats (&rows)[kWidth], Combine combine) {
  constexpr auto lanes = std::make_integer_sequence<int, kWidth>{};
#pragma GCC unroll 16
  for (int i = 0; i < kStep; ++i) {
    const Words a = as_words(rows[i]), b = as_words(rows[i + kStep]);
    rows[i] = combine(as_floats(exchange<false, kStep>(a, b, lanes)),
                      as_floats(exchange<true, kStep>(a, b, lanes)));
  }
  if constexpr (kStep == 1) {
    return rows[0];
  } else {
    return combine_each<kStep / 2>(rows, combine);
  }
}

FLASHATTN_INLINE Floats sum_each(Floats (&rows)[kWidth]) {
  return combine_each(rows, [](Floats x, Floats y) { return x + y; });
}

// A NaN is kept.
FLASHATTN_INLINE Floats max_each(Floats (&rows)[kWidth]) {
  return combine_each(rows, [](Floats x, Floats y) { return max_of_both(x, y); });
}

}  // namespace flashattn::cpu::FLASHATTN_ISA
