/* A small valid call of every kind, to be spoilt field by field. C99. */
#ifndef FLASHATTN_TESTS_FIXTURE_H
#define FLASHATTN_TESTS_FIXTURE_H

#include <stdlib.h>

#include "check.h"

enum { BATCH = 2, HEADS_Q = 4, HEADS_KV = 2, SEQ_Q = 5, SEQ_KV = 7, DIM_QK = 8, DIM_V = 4 };
enum { PAGE = 4, PAGES = 6, BLOCK = 2, BLOCKS_Q = 3, BLOCKS_KV = 4, WORKSPACE = 1 << 22 };

/* What a plan is made of. */
enum variant {
  PLAIN,      /* lse, forward and backward */
  EVERYTHING, /* every bias, mask, feature and dropout, forward and backward */
  VARLEN,     /* queries and keys, forward and backward */
  PAGED,      /* forward */
  STARTS      /* left padding, forward and backward */
};

struct inputs {
  float q[BATCH * SEQ_Q * HEADS_Q * DIM_QK];
  float k[PAGES * PAGE * HEADS_KV * DIM_QK];
  float v[PAGES * PAGE * HEADS_KV * DIM_V];
  float o[BATCH * SEQ_Q * HEADS_Q * DIM_V], dout[BATCH * SEQ_Q * HEADS_Q * DIM_V];
  float lse[BATCH * HEADS_Q * SEQ_Q], dlse[BATCH * HEADS_Q * SEQ_Q];
  float bias[SEQ_Q * SEQ_KV], slopes[HEADS_Q], sink[HEADS_Q];
  uint8_t blocks[BLOCKS_Q * BLOCKS_KV];
  int32_t cu_q[BATCH + 1], cu_kv[BATCH + 1], lens_q[BATCH], lens_kv[BATCH], starts_kv[BATCH];
  int32_t pages[BATCH * 2];
  uint64_t rng[2];
  float part_o[2][BATCH * SEQ_Q * HEADS_Q * DIM_V], part_lse[2][BATCH * HEADS_Q * SEQ_Q];
};

/* Between the arrays lie canaries. Everything in here keeps its bytes when a call is refused. */
struct outputs {
  char before[256];
  float o[BATCH * SEQ_Q * HEADS_Q * DIM_V];
  char after_o[256];
  float lse[BATCH * HEADS_Q * SEQ_Q];
  char after_lse[256];
  float dq[BATCH * SEQ_Q * HEADS_Q * DIM_QK];
  char after_dq[256];
  float dk[BATCH * SEQ_KV * HEADS_KV * DIM_QK];
  char after_dk[256];
  float dv[BATCH * SEQ_KV * HEADS_KV * DIM_V];
  char after_dv[256];
  float dbias[SEQ_Q * SEQ_KV];
  char after_dbias[256];
  float dsink[HEADS_Q];
  char after_dsink[256];
  uint8_t keep[BATCH * HEADS_Q * SEQ_Q * SEQ_KV];
  char after_keep[256];
  char workspace[WORKSPACE];
};

struct fixture {
  struct inputs* in;
  struct outputs* out;
  flashattn_desc desc;
  flashattn_args forward;
  flashattn_args backward;
  flashattn_merge_args merge;
  flashattn_tensor part_o[2];
  const float* part_lse[2];
  void* workspace;
  int64_t workspace_bytes;
  void* stream;
};

static inline void fill(float* x, size_t n, unsigned seed) {
  for (size_t i = 0; i < n; ++i) {
    seed = seed * 1664525u + 1013904223u;
    x[i] = (float)(seed >> 8) / 8388608.0f - 1.0f;
  }
}

static inline void fixture_desc(struct fixture* f, enum variant variant) {
  flashattn_desc* d = &f->desc;
  flashattn_desc_init(d, sizeof *d);
  d->ops = FLASHATTN_OP_FORWARD | FLASHATTN_OP_BACKWARD;
  d->dtype = FLASHATTN_DTYPE_F32;
  d->heads_q = HEADS_Q;
  d->heads_kv = HEADS_KV;
  d->dim_qk = DIM_QK;
  d->dim_v = DIM_V;
  d->features = FLASHATTN_FEATURE_LSE;
  d->threads = 1;
  if (variant == EVERYTHING) {
    d->mask = FLASHATTN_MASK_CAUSAL | FLASHATTN_MASK_WINDOW | FLASHATTN_MASK_CHUNK |
              FLASHATTN_MASK_BLOCKS;
    d->window_left = 5;
    d->chunk = 6;
    d->block_q = d->block_kv = BLOCK;
    d->bias = FLASHATTN_BIAS_ALIBI | FLASHATTN_BIAS_DENSE;
    d->features |= FLASHATTN_FEATURE_SINK | FLASHATTN_FEATURE_DLSE | FLASHATTN_FEATURE_DBIAS |
                   FLASHATTN_FEATURE_DSINK;
    d->softcap = 5;
    d->dropout = 0.25f;
  }
  if (variant == VARLEN) d->layout = FLASHATTN_LAYOUT_VARLEN_Q | FLASHATTN_LAYOUT_VARLEN_KV;
  if (variant == PAGED) {
    d->ops = FLASHATTN_OP_FORWARD;
    d->layout = FLASHATTN_LAYOUT_PAGED_KV;
    d->page_size = PAGE;
  }
}

static inline void fixture_inputs(struct fixture* f, enum variant variant, flashattn_args* inputs) {
  struct inputs* in = f->in;
  flashattn_args_init(inputs, sizeof *inputs);
  inputs->batch = BATCH;
  inputs->seqlen_q = SEQ_Q;
  inputs->seqlen_kv = SEQ_KV;
  inputs->q.data = in->q;
  inputs->k.data = in->k;
  inputs->v.data = in->v;
  inputs->lens_kv = in->lens_kv;
  inputs->lens_q = in->lens_q;
  if (variant == EVERYTHING) {
    inputs->bias.data = in->bias;
    inputs->bias.stride_batch = inputs->bias.stride_head = 0;
    inputs->alibi_slopes.data = in->slopes;
    inputs->alibi_slopes.stride_batch = 0;
    inputs->sink = in->sink;
    inputs->block_mask.data = in->blocks;
    inputs->block_mask.stride_batch = inputs->block_mask.stride_head = 0;
    inputs->rng_device = in->rng;
    inputs->rng_seed = 7;
  }
  if (variant == VARLEN) {
    inputs->total_q = BATCH * SEQ_Q;
    inputs->total_kv = BATCH * SEQ_KV;
    inputs->cu_seqlens_q = in->cu_q;
    inputs->cu_seqlens_kv = in->cu_kv;
  }
  if (variant == STARTS) inputs->starts_kv = in->starts_kv;
  if (variant == PAGED) {
    inputs->page_table.data = in->pages;
    inputs->pages = PAGES;
  }
}

static inline void fixture_reset_inputs(struct inputs* in) {
  memset(in, 0, sizeof *in);
  float* arrays[] = {in->q,         in->k,           in->v,          in->o,    in->dout,
                     in->dlse,      in->bias,        in->slopes,     in->sink, in->part_o[0],
                     in->part_o[1], in->part_lse[0], in->part_lse[1]};
  const size_t bytes[] = {sizeof in->q,          sizeof in->k,         sizeof in->v,
                          sizeof in->o,          sizeof in->dout,      sizeof in->dlse,
                          sizeof in->bias,       sizeof in->slopes,    sizeof in->sink,
                          sizeof in->part_o[0],  sizeof in->part_o[1], sizeof in->part_lse[0],
                          sizeof in->part_lse[1]};
  for (unsigned i = 0; i < sizeof arrays / sizeof *arrays; ++i) {
    fill(arrays[i], bytes[i] / sizeof(float), i);
  }
  memset(in->blocks, 1, sizeof in->blocks);
  in->blocks[1] = 0;
  for (int b = 0; b <= BATCH; ++b) {
    in->cu_q[b] = b * SEQ_Q;
    in->cu_kv[b] = b * SEQ_KV;
  }
  for (int b = 0; b < BATCH; ++b) {
    in->lens_q[b] = SEQ_Q - b;
    in->lens_kv[b] = SEQ_KV - 2 * b;
    in->starts_kv[b] = 1 + b;
    in->pages[2 * b] = PAGES - 1 - b;
    in->pages[2 * b + 1] = b;
  }
}

/* A valid call in every field, with fresh contents. */
static inline void fixture_reset(struct fixture* f, enum variant variant) {
  struct inputs* in = f->in;
  struct outputs* out = f->out;
  memset(f, 0, sizeof *f);
  f->in = in;
  f->out = out;
  fixture_reset_inputs(in);
  memset(out, 0xA5, sizeof *out);
  fixture_desc(f, variant);

  fixture_inputs(f, variant, &f->forward);
  f->forward.o.data = out->o;
  f->forward.lse = out->lse;

  fixture_inputs(f, variant, &f->backward);
  f->backward.o.data = in->o;
  f->backward.dout.data = in->dout;
  f->backward.lse = in->lse;
  f->backward.dq.data = out->dq;
  f->backward.dk.data = out->dk;
  f->backward.dv.data = out->dv;
  if (variant == EVERYTHING) {
    f->backward.dlse = in->dlse;
    f->backward.dbias.data = out->dbias;
    f->backward.dbias.stride_batch = f->backward.dbias.stride_head = 0;
    f->backward.dsink = out->dsink;
  }

  flashattn_merge_args_init(&f->merge, sizeof f->merge);
  f->merge.parts = 2;
  f->merge.batch = f->forward.batch;
  f->merge.seqlen_q = f->forward.seqlen_q;
  f->merge.total_q = f->forward.total_q;
  for (int p = 0; p < 2; ++p) {
    f->part_o[p] = (flashattn_tensor){in->part_o[p], -1, -1, -1};
    f->part_lse[p] = in->part_lse[p];
  }
  f->merge.part_o = f->part_o;
  f->merge.part_lse = f->part_lse;
  f->merge.o.data = out->o;
  f->merge.lse = out->lse;

  f->workspace = out->workspace;
  f->workspace_bytes = WORKSPACE;
}

/* The sizes of a dense call. */
static inline flashattn_args sizes_of(int32_t batch, int32_t seqlen_q, int32_t seqlen_kv) {
  flashattn_args args;
  flashattn_args_init(&args, sizeof args);
  args.batch = batch;
  args.seqlen_q = seqlen_q;
  args.seqlen_kv = seqlen_kv;
  return args;
}

static inline int fixture_open(struct fixture* f) {
  memset(f, 0, sizeof *f);
  f->in = (struct inputs*)malloc(sizeof *f->in);
  f->out = (struct outputs*)malloc(sizeof *f->out);
  return f->in && f->out;
}

static inline void fixture_close(struct fixture* f) {
  free(f->in);
  free(f->out);
}

static inline int outputs_untouched(const struct fixture* f) {
  const unsigned char* bytes = (const unsigned char*)f->out;
  return bytes[0] == 0xA5 && memcmp(bytes, bytes + 1, sizeof *f->out - 1) == 0;
}

#endif
