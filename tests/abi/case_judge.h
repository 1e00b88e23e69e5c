/* An output of a shared case, beside what it should hold. For case_file.c. */
#ifndef FLASHATTN_TESTS_CASE_JUDGE_H
#define FLASHATTN_TESTS_CASE_JUDGE_H

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "flashattn.h"

enum { NAME_SIZE = 40 };

typedef struct output {
  char name[NAME_SIZE];
  const double* expected;
  size_t elements;
  double tolerance;
  int32_t dtype;
  void* data;
} output;

static float float_of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static double half_value(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  double value = exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24);
  if (exponent == 31) value = fraction ? (double)NAN : (double)INFINITY;
  return bits >> 15 ? -value : value;
}

static double element(const output* out, size_t n) {
  if (out->dtype == FLASHATTN_DTYPE_F32) return ((const float*)out->data)[n];
  const uint16_t bits = ((const uint16_t*)out->data)[n];
  return out->dtype == FLASHATTN_DTYPE_BF16 ? (double)float_of_bits((uint32_t)bits << 16)
                                            : half_value(bits);
}

static int judge(const char* case_name, const output* out) {
  /* Pairs past a sequence's lengths in dbias: untouched, or zero. */
  const int may_be_zero = strcmp(out->name, "dbias") == 0;
  for (size_t n = 0; n < out->elements; ++n) {
    const double want = out->expected[n], got = element(out, n);
    const int ok = isnan(want) ? isnan(got) || (may_be_zero && got == 0)
                               : got == want || fabs(got - want) <= out->tolerance;
    if (ok) continue;
    printf("%s: %s[%lu] of %lu is %.9g, expected %.9g +- %.2g\n", case_name, out->name,
           (unsigned long)n, (unsigned long)out->elements, got, want, out->tolerance);
    return 0;
  }
  return 1;
}

static uint64_t add_to_digest(uint64_t digest, const output* out) {
  const unsigned char* bytes = out->data;
  const size_t size = out->elements * (out->dtype == FLASHATTN_DTYPE_F32 ? 4 : 2);
  for (size_t n = 0; n < size; ++n) digest = (digest ^ bytes[n]) * UINT64_C(0x100000001B3);
  return digest;
}

#endif
