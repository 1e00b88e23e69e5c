/* What may lie where: overlaps that are refused, and layouts that must be accepted because nothing
 * of theirs overlaps (packed QKV and its gradient, pads between rows, an in-place merge). */
#include "fixture.h"

static struct fixture f;

static void check_overlap(int32_t status, const char *wanted_field) {
  int32_t reason;
  const char *field;
  CHECK_STATUS(status, FLASHATTN_ERROR_INVALID_ARGUMENT);
  const char *text = flashattn_last_error(&reason, &field);
  if (!CHECK(reason == FLASHATTN_REASON_OVERLAP && strcmp(field, wanted_field) == 0)) {
    printf("  %s: %s\n", field, text);
  }
}

static int32_t forward(const flashattn_plan *plan) {
  return flashattn_forward(plan, &f.forward, f.workspace, f.workspace_bytes, NULL);
}

static int32_t backward(const flashattn_plan *plan) {
  return flashattn_backward(plan, &f.backward, f.workspace, f.workspace_bytes, NULL);
}

static int32_t merge(const flashattn_plan *plan) { return flashattn_merge(plan, &f.merge, NULL); }

static void test_refused(const flashattn_plan *plan) {
  fixture_reset(&f, PLAIN);
  f.forward.o.data = f.in->q;
  check_overlap(forward(plan), "o.data");
  f.forward.o.data = f.in->k + 4; /* inside */
  check_overlap(forward(plan), "o.data");
  fixture_reset(&f, PLAIN);
  f.forward.lse = f.out->o + 3;
  check_overlap(forward(plan), "o.data");
  fixture_reset(&f, PLAIN);
  f.forward.lse = (float *)f.in->lens_kv;
  check_overlap(forward(plan), "lse");
  fixture_reset(&f, PLAIN);
  f.workspace = f.in->v;
  check_overlap(forward(plan), "workspace");
  f.workspace = f.out->o;
  check_overlap(forward(plan), "o.data");
  fixture_reset(&f, PLAIN);
  f.backward.dq.data = f.in->q;
  check_overlap(backward(plan), "dq.data");
  fixture_reset(&f, PLAIN);
  f.backward.dv.data = f.out->dk + 1;
  check_overlap(backward(plan), "dk.data");
  fixture_reset(&f, PLAIN);
  f.backward.dk.data = f.in->lse;
  check_overlap(backward(plan), "dk.data");

  /* With gaps, but its first element is another's. */
  fixture_reset(&f, PLAIN);
  const flashattn_tensor gaps = {NULL, 2 * SEQ_Q * HEADS_Q * DIM_V, DIM_V, 2 * HEADS_Q * DIM_V};
  f.forward.o = gaps;
  f.forward.o.data = f.in->q + 8;
  check_overlap(forward(plan), "o.data");
  f.forward.o.data = f.out->workspace + 64;
  check_overlap(forward(plan), "o.data");

  fixture_reset(&f, PLAIN);
  f.merge.lse = f.out->o;
  check_overlap(merge(plan), "o.data");
  fixture_reset(&f, PLAIN);
  f.merge.o.data = f.in->part_o[1] + DIM_V;
  check_overlap(merge(plan), "o.data");
  fixture_reset(&f, PLAIN);
  f.merge.lse = f.in->part_lse[0] + 1;
  check_overlap(merge(plan), "lse");
  fixture_reset(&f, PLAIN);
  f.merge.o.data = f.in->part_lse[1];
  check_overlap(merge(plan), "o.data");
  fixture_reset(&f, PLAIN);
  f.merge.o.data = f.in->part_o[0]; /* the same place, but other strides */
  f.part_o[0].stride_seq = DIM_V;
  f.part_o[0].stride_head = SEQ_Q * DIM_V;
  f.part_o[0].stride_batch = HEADS_Q * SEQ_Q * DIM_V;
  check_overlap(merge(plan), "o.data");
}

/* Rows between rows: every byte of an array counts, not only its first element. */
static void test_between_rows(const flashattn_plan *plan) {
  enum {
    ROW = HEADS_Q * DIM_QK + 8 /* of a padded q */
  };
  float *q = (float *)calloc((size_t)BATCH * SEQ_Q * ROW, sizeof *q);
  if (!q) return;
  fixture_reset(&f, PLAIN);
  const flashattn_tensor padded = {q, SEQ_Q * ROW, DIM_QK, ROW};
  f.forward.q = padded;
  /* o without gaps, from the second row on: o begins inside of q, which has gaps. */
  f.forward.o.data = q + ROW;
  check_overlap(forward(plan), "o.data");
  /* With the strides of q, on q and in its padding. */
  const flashattn_tensor rows = {q + ROW, SEQ_Q * ROW, DIM_V, ROW};
  f.forward.batch = 1;
  f.forward.o = rows;
  check_overlap(forward(plan), "o.data");
  fixture_reset(&f, PLAIN);
  f.forward.batch = 1;
  f.forward.q = padded;
  f.forward.o = rows;
  f.forward.o.data = q + HEADS_Q * DIM_QK; /* 8 of the 16 columns that it needs are free */
  check_overlap(forward(plan), "o.data");
  free(q);
}

/* A merge into one of its parts gives what a merge elsewhere gives. */
static void test_merge_in_place(const flashattn_plan *plan) {
  for (int part = 0; part < 2; ++part) {
    fixture_reset(&f, PLAIN);
    CHECK_OK(merge(plan));
    f.merge.o.data = f.in->part_o[part];
    f.merge.lse = f.in->part_lse[part];
    CHECK_OK(merge(plan));
    CHECK(memcmp(f.out->o, f.in->part_o[part], sizeof f.out->o) == 0);
    CHECK(memcmp(f.out->lse, f.in->part_lse[part], sizeof f.out->lse) == 0);
    f.merge.lse = NULL;
    CHECK_OK(merge(plan));
  }
}

/* q, k and v in one array (batch, seq, 3, head, dim), their gradients in another. */
static void test_packed_qkv(void) {
  enum {
    ROW = 3 * HEADS_Q * DIM_QK
  };
  float *qkv = (float *)calloc(2 * BATCH * SEQ_Q * ROW, sizeof *qkv);
  float *dqkv = qkv + BATCH * SEQ_Q * ROW;
  fixture_reset(&f, PLAIN);
  f.desc.heads_kv = HEADS_Q;
  f.desc.dim_v = DIM_QK;
  flashattn_plan *plan = NULL;
  if (!qkv || !CHECK_OK(flashattn_plan_create(&f.desc, &plan, NULL))) return;
  flashattn_args *const calls[] = {&f.forward, &f.backward};
  for (int n = 0; n < 2; ++n) {
    flashattn_tensor *const tensors[] = {&calls[n]->q, &calls[n]->k, &calls[n]->v};
    calls[n]->seqlen_kv = SEQ_Q;
    calls[n]->lens_kv = calls[n]->lens_q = NULL;
    for (int t = 0; t < 3; ++t) {
      const flashattn_tensor part = {qkv + t * HEADS_Q * DIM_QK, SEQ_Q * ROW, DIM_QK, ROW};
      *tensors[t] = part;
    }
  }
  flashattn_tensor *const gradients[] = {&f.backward.dq, &f.backward.dk, &f.backward.dv};
  for (int t = 0; t < 3; ++t) {
    const flashattn_tensor part = {dqkv + t * HEADS_Q * DIM_QK, SEQ_Q * ROW, DIM_QK, ROW};
    *gradients[t] = part;
  }
  float *o = (float *)calloc(2 * BATCH * SEQ_Q * HEADS_Q * DIM_QK, sizeof *o);
  if (!o) return;
  f.forward.o.data = o;
  CHECK_OK(forward(plan));
  f.backward.o.data = o;
  f.backward.dout.data = o + BATCH * SEQ_Q * HEADS_Q * DIM_QK;
  f.backward.lse = f.out->lse;
  CHECK_OK(backward(plan));
  /* One head early, one element early, a head or a row too long. */
  f.backward.dk.data = dqkv + (HEADS_Q - 1) * DIM_QK;
  check_overlap(backward(plan), "dq.data");
  f.backward.dk.data = dqkv + HEADS_Q * DIM_QK - 1;
  check_overlap(backward(plan), "dq.data");
  f.backward.dk.data = dqkv + ROW - DIM_QK; /* into the next token's dq */
  check_overlap(backward(plan), "dq.data");
  f.backward.dk = f.backward.dq;
  check_overlap(backward(plan), "dq.data");
  free(o);
  free(qkv);
  flashattn_plan_destroy(plan);
}

/* Other layouts of inputs and outputs. */
static void test_layouts(const flashattn_plan *plan) {
  fixture_reset(&f, PLAIN);
  const flashattn_tensor bhsd = {f.out->o, HEADS_Q * SEQ_Q * DIM_V, SEQ_Q * DIM_V, DIM_V};
  const flashattn_tensor sbhd = {f.out->o, HEADS_Q * DIM_V, DIM_V, BATCH * HEADS_Q * DIM_V};
  f.forward.o = bhsd;
  CHECK_OK(forward(plan));
  f.forward.o = sbhd;
  CHECK_OK(forward(plan));
  f.forward.k.stride_batch = f.forward.k.stride_head = 0; /* one head and sequence for all */
  f.forward.k.stride_seq = DIM_QK;
  CHECK_OK(forward(plan));
  f.forward.v.data = f.forward.k.data; /* inputs may share memory */
  CHECK_OK(forward(plan));
  f.workspace = f.out->workspace + 1; /* need not be aligned */
  CHECK_OK(forward(plan));
}

/* Strides that nobody steps by are not looked at: one sequence, one head and one token. */
static void test_idle_strides(void) {
  fixture_reset(&f, PLAIN);
  f.desc.heads_q = f.desc.heads_kv = 1;
  f.desc.bias = FLASHATTN_BIAS_DENSE | FLASHATTN_BIAS_ALIBI;
  f.desc.mask = FLASHATTN_MASK_BLOCKS;
  f.desc.block_q = f.desc.block_kv = 16;
  f.desc.softcap = 3;
  f.desc.features |= FLASHATTN_FEATURE_DBIAS;
  flashattn_plan *plan = NULL;
  if (!CHECK_OK(flashattn_plan_create(&f.desc, &plan, NULL))) return;
  flashattn_args *const calls[] = {&f.forward, &f.backward};
  flashattn_tensor *const tensors[] = {&f.forward.o,   &f.backward.o,  &f.backward.dout,
                                       &f.backward.dq, &f.backward.dk, &f.backward.dv};
  for (int n = 0; n < 2; ++n) {
    calls[n]->batch = calls[n]->seqlen_q = calls[n]->seqlen_kv = 1;
    calls[n]->lens_q = calls[n]->lens_kv = NULL;
    calls[n]->bias.data = f.in->bias;
    calls[n]->alibi_slopes.data = f.in->slopes;
    calls[n]->block_mask.data = f.in->blocks;
  }
  f.backward.dbias.data = f.out->dbias;
  CHECK_OK(forward(plan));
  CHECK_OK(backward(plan));
  const float o = f.out->o[0], dq = f.out->dq[0], dbias = f.out->dbias[0];
  static const int64_t idle[] = {INT64_MAX, INT64_MAX / 2 + 1, INT64_MIN + 1, -1, 0, 12345};
  for (unsigned n = 0; n < sizeof idle / sizeof *idle; ++n) {
    const int64_t x = idle[n];
    memset(f.out->o, 0, sizeof f.out->o);
    memset(f.out->dq, 0, sizeof f.out->dq);
    for (unsigned t = 0; t < sizeof tensors / sizeof *tensors; ++t) {
      tensors[t]->stride_batch = tensors[t]->stride_head = tensors[t]->stride_seq = x;
    }
    for (int k = 0; k < 2; ++k) {
      flashattn_tensor *const given[] = {&calls[k]->q, &calls[k]->k, &calls[k]->v};
      for (int t = 0; t < 3; ++t) {
        given[t]->stride_batch = given[t]->stride_head = given[t]->stride_seq = x;
      }
      calls[k]->bias.stride_batch = calls[k]->bias.stride_head = calls[k]->bias.stride_seq = x;
      calls[k]->block_mask.stride_batch = calls[k]->block_mask.stride_head = x;
      calls[k]->block_mask.stride_seq = calls[k]->alibi_slopes.stride_batch = x;
    }
    f.backward.dbias.stride_batch = f.backward.dbias.stride_head = x;
    f.backward.dbias.stride_seq = x;
    CHECK_OK(forward(plan));
    CHECK_OK(backward(plan));
    CHECK(f.out->o[0] == o && f.out->dq[0] == dq && f.out->dbias[0] == dbias);
  }
  /* Nor in arrays without elements. */
  for (int n = 0; n < 2; ++n) calls[n]->seqlen_kv = 0;
  CHECK_OK(forward(plan));
  CHECK_OK(backward(plan));
  flashattn_plan_destroy(plan);
}

/* A call wants the workspace that flashattn_workspace_size says, also where there is no query. */
static void test_workspace_of_nothing(const flashattn_plan *plan) {
  for (int queries = 0; queries < 2; ++queries) {
    for (int batch = 0; batch < 2; ++batch) {
      int64_t bytes[2] = {-1, -1};
      fixture_reset(&f, PLAIN);
      f.forward.lens_q = f.forward.lens_kv = NULL;
      f.backward.lens_q = f.backward.lens_kv = NULL;
      f.forward.seqlen_q = f.backward.seqlen_q = queries;
      f.forward.batch = f.backward.batch = batch;
      CHECK_OK(flashattn_workspace_size(plan, FLASHATTN_OP_FORWARD, &f.forward, &bytes[0]));
      CHECK_OK(flashattn_workspace_size(plan, FLASHATTN_OP_BACKWARD, &f.backward, &bytes[1]));
      CHECK(batch > 0 || (bytes[0] == 0 && bytes[1] == 0));
      CHECK(queries > 0 || bytes[0] == 0);
      int32_t (*const calls[])(const flashattn_plan *) = {forward, backward};
      for (int pass = 0; pass < 2; ++pass) {
        f.workspace_bytes = bytes[pass];
        f.workspace = bytes[pass] ? f.out->workspace : NULL;
        CHECK_OK(calls[pass](plan));
        f.workspace_bytes = bytes[pass] - 1;
        CHECK_STATUS(calls[pass](plan),
                     bytes[pass] ? FLASHATTN_ERROR_WORKSPACE : FLASHATTN_ERROR_INVALID_ARGUMENT);
      }
    }
  }
}

/* Nothing to do, or nothing to read. */
static void test_empty(const flashattn_plan *plan) {
  fixture_reset(&f, PLAIN);
  f.forward.batch = f.backward.batch = f.merge.batch = 0;
  f.forward.q.data = f.forward.k.data = f.forward.v.data = NULL;
  f.forward.o.data = NULL;
  f.forward.lse = NULL;
  f.workspace = NULL;
  f.workspace_bytes = 0;
  CHECK_OK(forward(plan));
  CHECK_OK(backward(plan));
  CHECK_OK(merge(plan));
  CHECK_OK(flashattn_dropout_mask(plan, &f.forward, f.out->keep, NULL));
  CHECK(outputs_untouched(&f));

  fixture_reset(&f, PLAIN);
  f.forward.seqlen_q = 0;
  f.forward.lens_q = NULL;
  CHECK_OK(forward(plan));
  CHECK(outputs_untouched(&f));

  /* Queries without keys: o = 0, lse = -inf. */
  fixture_reset(&f, PLAIN);
  f.forward.seqlen_kv = 0;
  f.forward.lens_kv = f.forward.lens_q = NULL;
  f.forward.k.data = f.forward.v.data = NULL;
  CHECK_OK(forward(plan));
  int zero = 1;
  for (size_t n = 0; n < sizeof f.out->o / sizeof(float); ++n) zero = zero && f.out->o[n] == 0;
  for (size_t n = 0; n < sizeof f.out->lse / sizeof(float); ++n) {
    zero = zero && f.out->lse[n] < -3e38f;
  }
  CHECK(zero);
}

int main(void) {
  flashattn_plan *plan = NULL;
  if (!fixture_open(&f)) return 1;
  fixture_reset(&f, PLAIN);
  if (!CHECK_OK(flashattn_plan_create(&f.desc, &plan, NULL))) return check_report();
  test_refused(plan);
  test_merge_in_place(plan);
  test_layouts(plan);
  test_empty(plan);
  test_between_rows(plan);
  test_workspace_of_nothing(plan);
  flashattn_plan_destroy(plan);
  test_packed_qkv();
  test_idle_strides();
  fixture_close(&f);
  return check_report();
}
