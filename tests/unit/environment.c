/* The caller's floating-point environment is neither used nor changed: whatever it traps, flushes
   or rounds, calls end well and give the same bits, on every thread. */
#define _GNU_SOURCE
#include <fenv.h>
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include "fixture.h"

#if defined(FE_INVALID) && defined(__GLIBC__)
#define TRAPPED (FE_INVALID | FE_DIVBYZERO | FE_OVERFLOW | FE_UNDERFLOW | FE_INEXACT)
#endif

enum {
  LARGE = 300,
  DIM = 64,
  SIZE = LARGE * DIM
};

/* Arrays of the type under test: keys that some rows do not see, numbers that overflow, vanish and
   are subnormal. */
static float q[SIZE], k[SIZE], v[SIZE], lse[LARGE];
static struct results {
  float o[SIZE], gradients[3][SIZE];
  uint8_t codes[3][SIZE];
  float descales[3], mean[DIM], shift[LARGE];
  float rotated[SIZE], cache[2][SIZE];
  uint8_t narrow_cache[2][SIZE];
  float cache_descales[2];
} results[2];

static flashattn_plan *plan_of(struct fixture *f) {
  flashattn_plan *plan = NULL;
  CHECK_OK(flashattn_plan_create(&f->desc, &plan, NULL));
  return plan;
}

/* Every function that computes, but for those of quantize() and append() below. */
static void call_all(struct fixture *f, enum variant variant) {
  CHECK_OK(flashattn_check(&f->desc, NULL));
  flashattn_plan *plan = plan_of(f);
  if (!plan) return;
  CHECK_OK(flashattn_forward(plan, &f->forward, f->workspace, f->workspace_bytes, NULL));
  if (variant != PAGED) {
    memcpy(f->in->o, f->out->o, sizeof f->in->o);
    memcpy(f->in->lse, f->out->lse, sizeof f->in->lse);
    CHECK_OK(flashattn_backward(plan, &f->backward, f->workspace, f->workspace_bytes, NULL));
    CHECK_OK(flashattn_merge(plan, &f->merge, NULL));
  }
  if (variant == EVERYTHING) {
    CHECK_OK(flashattn_dropout_mask(plan, &f->forward, f->out->keep, NULL));
  }
  flashattn_plan_destroy(plan);
}

static int begin_plan(flashattn_plan **plan, int32_t dtype, int32_t dtype_o, int threads,
                      uint32_t features) {
  flashattn_desc desc;
  flashattn_desc_init(&desc, sizeof desc);
  desc.dtype = dtype;
  desc.dtype_o = dtype_o;
  desc.descale_block = dtype == FLASHATTN_DTYPE_F8E4M3 ? LARGE : 0; /* all tokens of a call */
  desc.heads_q = 1;
  desc.dim_qk = DIM;
  desc.ops = FLASHATTN_OP_FORWARD | (features ? FLASHATTN_OP_BACKWARD : 0);
  desc.features = features;
  desc.mask = FLASHATTN_MASK_CAUSAL;
  desc.threads = threads;
  return CHECK_OK(flashattn_plan_create(&desc, plan, NULL));
}

/* More queries than keys under a causal mask: the first see none. */
static void attend(struct results *to, int threads, int32_t dtype) {
  flashattn_plan *plan = NULL;
  flashattn_args forward, backward;
  flashattn_args_init(&forward, sizeof forward);
  int64_t bytes = 0, more = 0;
  if (!begin_plan(&plan, dtype, 0, threads, FLASHATTN_FEATURE_LSE)) return;
  forward.batch = 1;
  forward.seqlen_q = LARGE;
  forward.seqlen_kv = LARGE - 40;
  forward.q.data = q;
  forward.k.data = k;
  forward.v.data = v;
  forward.o.data = to->o;
  forward.lse = lse;
  backward = forward;
  backward.dout = forward.o;
  backward.dq.data = to->gradients[0];
  backward.dk.data = to->gradients[1];
  backward.dv.data = to->gradients[2];
  CHECK_OK(flashattn_workspace_size(plan, FLASHATTN_OP_FORWARD, &forward, &bytes));
  CHECK_OK(flashattn_workspace_size(plan, FLASHATTN_OP_BACKWARD, &forward, &more));
  if (more > bytes) bytes = more;
  void *workspace = malloc((size_t)bytes);
  if (CHECK(workspace)) {
    CHECK_OK(flashattn_forward(plan, &forward, workspace, bytes, NULL));
    CHECK_OK(flashattn_backward(plan, &backward, workspace, bytes, NULL));
  }
  free(workspace);
  flashattn_plan_destroy(plan);
}

static void quantize(struct results *to, int threads, int32_t dtype) {
  flashattn_plan *plan = NULL;
  flashattn_quantize_args args;
  flashattn_quantize_args_init(&args, sizeof args);
  if (!begin_plan(&plan, FLASHATTN_DTYPE_F8E4M3, FLASHATTN_DTYPE_F32, threads, 0)) return;
  args.batch = 1;
  args.seqlen_q = args.seqlen_kv = LARGE;
  args.dtype = dtype;
  args.transform = FLASHATTN_TRANSFORM_ROTATE | FLASHATTN_TRANSFORM_SMOOTH_K;
  flashattn_tensor *const from[] = {&args.q, &args.k, &args.v};
  flashattn_tensor *const codes[] = {&args.q_out, &args.k_out, &args.v_out};
  flashattn_tensor *const descales[] = {&args.descale_q, &args.descale_k, &args.descale_v};
  void *const data[] = {q, k, v};
  for (int n = 0; n < 3; ++n) {
    from[n]->data = data[n];
    codes[n]->data = to->codes[n];
    descales[n]->data = &to->descales[n];
  }
  args.k_mean.data = to->mean;
  args.lse_shift = to->shift;
  CHECK_OK(flashattn_quantize(plan, &args, NULL));
  flashattn_plan_destroy(plan);
}

/* Into a cache of the type, and into one of 8 bits. */
static void append(struct results *to, int threads, int32_t dtype) {
  for (int narrow = 0; narrow < 2; ++narrow) {
    flashattn_plan *plan = NULL;
    flashattn_append_kv_args args;
    int32_t lens[] = {0}, lens_out[1];
    flashattn_append_kv_args_init(&args, sizeof args);
    if (!begin_plan(&plan, narrow ? FLASHATTN_DTYPE_F8E4M3 : dtype,
                    narrow ? FLASHATTN_DTYPE_F32 : 0, threads, 0)) {
      return;
    }
    args.batch = 1;
    args.seqlen_q = args.seqlen_kv = LARGE;
    args.dtype = dtype;
    args.rotary_dim = DIM;
    args.rotary_base = 10000.0f;
    args.lens_kv = lens;
    args.lens_out = lens_out;
    args.q.data = q;
    args.k.data = k;
    args.v.data = v;
    args.q_out.data = to->rotated;
    args.k_cache.data = narrow ? (void *)to->narrow_cache[0] : to->cache[0];
    args.v_cache.data = narrow ? (void *)to->narrow_cache[1] : to->cache[1];
    if (narrow) {
      args.descale_k.data = &to->cache_descales[0];
      args.descale_v.data = &to->cache_descales[1];
      args.update_descales = 1;
    }
    CHECK_OK(flashattn_append_kv(plan, &args, NULL));
    CHECK(lens_out[0] == LARGE);
    flashattn_plan_destroy(plan);
  }
}

static void compute(int which, int threads, int32_t dtype) {
  attend(&results[which], threads, dtype);
  quantize(&results[which], threads, dtype);
  append(&results[which], threads, dtype);
}

static void compare(const char *mode, int32_t dtype) {
  const int same = memcmp(&results[0], &results[1], sizeof results[0]) == 0;
  if (!CHECK(same)) printf("the caller's mode changed bits of type %d: %s\n", dtype, mode);
  memset(&results[1], 0, sizeof results[1]);
}

/* Inputs of a type, whose results lie in results[0]. */
static void begin(int32_t dtype) {
  float *const arrays[] = {q, k, v};
  for (int n = 0; n < 3; ++n) {
    fill(arrays[n], SIZE, (unsigned)n + 1);
    /* Values are subnormal, of fp16 some. */
    for (int i = 0; n == 2 && i < SIZE; ++i) v[i] *= 1e-39f;
    uint16_t *const narrow = (uint16_t *)(void *)arrays[n];
    for (int i = 0; dtype != FLASHATTN_DTYPE_F32 && i < SIZE; ++i) {
      uint32_t bits;
      memcpy(&bits, &arrays[n][i], sizeof bits);
      narrow[i] =
          (uint16_t)(dtype == FLASHATTN_DTYPE_BF16 ? bits >> 16 /* up to 4: */
                                                   : (bits >> 3 & 0x83ffu) | bits % 17 << 10);
    }
  }
  memset(results, 0, sizeof results);
  compute(0, 2, dtype); /* helpers, where they stay, are there before the modes change */
}

static void try_modes(int32_t dtype) {
#if defined(FE_INVALID) && defined(__GLIBC__)
  for (int threads = 1; threads <= 2; ++threads) {
    feclearexcept(FE_ALL_EXCEPT);
    feenableexcept(TRAPPED);
    compute(1, threads, dtype);
    fedisableexcept(TRAPPED);
    CHECK(fetestexcept(FE_ALL_EXCEPT) == 0);
    compare("traps", dtype);
  }
#endif
#if defined(__SSE2__)
  for (int threads = 1; threads <= 2; ++threads) {
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040); /* flushes subnormals to zero, takes them for zero */
    compute(1, threads, dtype);
    CHECK(_mm_getcsr() == (before | 0x8040));
    _mm_setcsr(before);
    compare("flush to zero", dtype);
  }
#endif
#if defined(FE_UPWARD)
  for (int threads = 1; threads <= 2; ++threads) {
    fesetround(FE_UPWARD);
    compute(1, threads, dtype);
    CHECK(fegetround() == FE_UPWARD);
    fesetround(FE_TONEAREST);
    compare("rounding upward", dtype);
  }
#endif
}

int main(void) {
  struct fixture f;
  if (!fixture_open(&f)) return 2;
  begin(FLASHATTN_DTYPE_F32);
#if defined(FE_INVALID) && defined(__GLIBC__)
  for (int variant = PLAIN; variant <= PAGED; ++variant) {
    fixture_reset(&f, (enum variant)variant);
    feclearexcept(FE_ALL_EXCEPT);
    if (feenableexcept(TRAPPED) == -1) { /* a processor that traps nothing */
      ++check_skipped;
      break;
    }
    call_all(&f, (enum variant)variant);
    CHECK(fedisableexcept(TRAPPED) == TRAPPED);
  }
#endif
  try_modes(FLASHATTN_DTYPE_F32);
  for (int32_t dtype = FLASHATTN_DTYPE_F16; dtype <= FLASHATTN_DTYPE_BF16; ++dtype) {
    begin(dtype);
    try_modes(dtype);
  }
  /* Flags that the caller had raised stay raised. */
  feraiseexcept(FE_DIVBYZERO);
  compute(1, 1, FLASHATTN_DTYPE_BF16);
  CHECK(fetestexcept(FE_DIVBYZERO) != 0);
  fixture_close(&f);
  return check_report();
}
