/* The caller's floating-point environment is neither used nor changed: whatever it traps, flushes
   or rounds, calls end well and give the same bits, on every thread. */
#define _GNU_SOURCE
#include <fenv.h>
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include "fixture.h"

enum {
  LARGE = 300,
  DIM = 64
};

/* Keys that some rows do not see, numbers that overflow, vanish and are subnormal. */
static float q[LARGE * DIM], k[LARGE * DIM], v[LARGE * DIM], lse[LARGE];
static float o[2][LARGE * DIM], gradients[2][3][LARGE * DIM];

static flashattn_plan *plan_of(struct fixture *f) {
  flashattn_plan *plan = NULL;
  CHECK_OK(flashattn_plan_create(&f->desc, &plan, NULL));
  return plan;
}

/* Every function that computes. */
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

/* More queries than keys under a causal mask: the first see none. */
static void attend(int which, int threads) {
  flashattn_desc desc;
  flashattn_plan *plan = NULL;
  flashattn_args forward, backward;
  flashattn_args_init(&forward, sizeof forward);
  int64_t bytes = 0, more = 0;
  flashattn_desc_init(&desc, sizeof desc);
  desc.dtype = FLASHATTN_DTYPE_F32;
  desc.heads_q = 1;
  desc.dim_qk = DIM;
  desc.ops = FLASHATTN_OP_FORWARD | FLASHATTN_OP_BACKWARD;
  desc.features = FLASHATTN_FEATURE_LSE;
  desc.mask = FLASHATTN_MASK_CAUSAL;
  desc.threads = threads;
  if (!CHECK_OK(flashattn_plan_create(&desc, &plan, NULL))) return;
  forward.batch = 1;
  forward.seqlen_q = LARGE;
  forward.seqlen_kv = LARGE - 40;
  forward.q.data = q;
  forward.k.data = k;
  forward.v.data = v;
  forward.o.data = o[which];
  forward.lse = lse;
  backward = forward;
  backward.dout = forward.o;
  backward.dq.data = gradients[which][0];
  backward.dk.data = gradients[which][1];
  backward.dv.data = gradients[which][2];
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

static void compare(const char *mode) {
  const int same = memcmp(o[0], o[1], sizeof o[0]) == 0 &&
                   memcmp(gradients[0], gradients[1], sizeof gradients[0]) == 0;
  if (!CHECK(same)) printf("the caller's mode changed bits: %s\n", mode);
}

int main(void) {
  struct fixture f;
  if (!fixture_open(&f)) return 2;
  fill(q, LARGE * DIM, 1);
  fill(k, LARGE * DIM, 2);
  fill(v, LARGE * DIM, 3);
  for (int i = 0; i < LARGE * DIM; ++i) v[i] *= 1e-39f;
  attend(0, 2); /* helpers, where they stay, are there before the modes change */

#if defined(FE_INVALID) && defined(__GLIBC__)
  const int trapped = FE_INVALID | FE_DIVBYZERO | FE_OVERFLOW | FE_UNDERFLOW | FE_INEXACT;
  for (int variant = PLAIN; variant <= PAGED; ++variant) {
    fixture_reset(&f, (enum variant)variant);
    feclearexcept(FE_ALL_EXCEPT);
    if (feenableexcept(trapped) == -1) { /* a processor that traps nothing */
      ++check_skipped;
      break;
    }
    call_all(&f, (enum variant)variant);
    CHECK(fedisableexcept(trapped) == trapped);
  }
  for (int threads = 1; threads <= 2; ++threads) {
    feclearexcept(FE_ALL_EXCEPT);
    feenableexcept(trapped);
    attend(1, threads);
    fedisableexcept(trapped);
    CHECK(fetestexcept(FE_ALL_EXCEPT) == 0);
    compare("traps");
  }
#endif
#if defined(__SSE2__)
  for (int threads = 1; threads <= 2; ++threads) {
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040); /* flushes subnormals to zero, takes them for zero */
    attend(1, threads);
    CHECK(_mm_getcsr() == (before | 0x8040));
    _mm_setcsr(before);
    compare("flush to zero");
  }
#endif
#if defined(FE_UPWARD)
  for (int threads = 1; threads <= 2; ++threads) {
    fesetround(FE_UPWARD);
    attend(1, threads);
    CHECK(fegetround() == FE_UPWARD);
    fesetround(FE_TONEAREST);
    compare("rounding upward");
  }
#endif
  /* Flags that the caller had raised stay raised. */
  feraiseexcept(FE_DIVBYZERO);
  attend(1, 1);
  CHECK(fetestexcept(FE_DIVBYZERO) != 0);
  fixture_close(&f);
  return check_report();
}
