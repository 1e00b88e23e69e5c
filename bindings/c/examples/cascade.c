/* Sequences that share a prefix, such as a system prompt:
 *     cascade [cpu|cuda [PREFIX [SEQUENCES [HEADS_KV]]]]
 *
 * One token is decoded for each of SEQUENCES sequences, whose first PREFIX keys are the same pages.
 *   whole    one call, in which each sequence reads the keys of the prefix for itself.
 *   cascade  three calls: the prefix as one sequence that has the queries of all, so that its keys
 *            are read once; the suffixes, sequence by sequence; and flashattn_merge of both, which
 *            is exact, since each part comes with the logarithm of its sum, lse (Ye et al. 2024,
 *            Juravsky et al. 2024).
 * Both take the keys from the same pools of pages and the same page table.
 *
 * Prints the time of both, and how far they are from float64. Exits with 0 if both are as close to
 * it as bf16 allows. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common.h"

enum {
  HEADS = 8,
  DIM = 128,
  PAGE_SIZE = 64,
  LONGEST_SUFFIX = 3 * PAGE_SIZE, /* tokens behind the prefix */
  CHECKED = 8,                    /* sequences compared with float64 */
  ROUNDS = 3                      /* the fastest counts */
};

typedef struct {
  int32_t prefix, sequences, heads_kv; /* prefix: a multiple of PAGE_SIZE */
  int32_t prefix_pages, sequence_pages, pages;
  compute_device *device;
  /* Host memory. bf16 as its 16 bits. */
  uint16_t *q;         /* (sequences, HEADS, DIM) */
  uint16_t *k, *v;     /* (pages, PAGE_SIZE, heads_kv, DIM) */
  int32_t *page_table; /* (sequences, sequence_pages) */
  int32_t *lens;       /* (sequences): tokens of a sequence; then of its suffix */
  /* Device memory, likewise. */
  void *q_there, *k_there, *v_there, *workspace;
  int32_t *table_there, *lens_there;
  int32_t *cu_there; /* (sequences + 1): a query a sequence */
  float *o[3];       /* (sequences, HEADS, DIM): of the prefix, of the suffix, and of all */
  float *lse[3];     /* (HEADS, sequences) */
  flashattn_plan *prefix_plan, *suffix_plan; /* suffix_plan also computes the whole */
  int64_t workspace_bytes;
} problem;

static uint16_t bf16_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16); /* to nearest even */
}

static double value_of(uint16_t bf16) {
  const uint32_t bits = (uint32_t)bf16 << 16;
  float x;
  memcpy(&x, &bits, sizeof x);
  return (double)x;
}

static void *upload(problem *p, const void *from, size_t bytes) {
  void *to = device_allocate(p->device, bytes);
  if (to && device_write(p->device, to, from, bytes)) return to;
  device_release(p->device, to);
  return NULL;
}

static uint16_t *random_bf16(size_t count, float size, uint64_t *state) {
  uint16_t *made = allocate(count, sizeof *made);
  for (size_t n = 0; made && n < count; ++n) made[n] = bf16_of(size * random_number(state));
  return made;
}

/* Random numbers; the pages of the prefix first, then each sequence's own. */
static int fill(problem *p) {
  uint64_t state = 1;
  const size_t sequences = (size_t)p->sequences, width = (size_t)p->heads_kv * DIM;
  const size_t elements = (size_t)p->pages * PAGE_SIZE * width;
  p->q = random_bf16(sequences * HEADS * DIM, 3.0f, &state);
  p->k = random_bf16(elements, 1.7f, &state);
  p->v = random_bf16(elements, 1.7f, &state);
  p->page_table = allocate(sequences * (size_t)p->sequence_pages, sizeof(int32_t));
  p->lens = allocate(2 * sequences, sizeof(int32_t));
  int32_t *cu_seqlens = allocate(sequences + 1, sizeof *cu_seqlens);
  int good = p->q && p->k && p->v && p->page_table && p->lens && cu_seqlens;
  for (int32_t b = 0, next = p->prefix_pages; good && b < p->sequences; ++b) {
    int32_t *row = p->page_table + (size_t)b * (size_t)p->sequence_pages;
    for (int32_t n = 0; n < p->sequence_pages; ++n) row[n] = n < p->prefix_pages ? n : next++;
    const int32_t suffix = 1 + b * 53 % LONGEST_SUFFIX;
    p->lens[b] = p->prefix + suffix;
    p->lens[p->sequences + b] = suffix;
    cu_seqlens[b + 1] = b + 1;
  }
  if (good) {
    p->q_there = upload(p, p->q, sequences * HEADS * DIM * sizeof *p->q);
    p->k_there = upload(p, p->k, elements * sizeof *p->k);
    p->v_there = upload(p, p->v, elements * sizeof *p->v);
    p->table_there =
        upload(p, p->page_table, sequences * (size_t)p->sequence_pages * sizeof(int32_t));
    p->lens_there = upload(p, p->lens, 2 * sequences * sizeof(int32_t));
    p->cu_there = upload(p, cu_seqlens, (sequences + 1) * sizeof(int32_t));
    good = p->q_there && p->k_there && p->v_there && p->table_there && p->lens_there && p->cu_there;
  }
  free(cu_seqlens);
  for (int n = 0; good && n < 3; ++n) {
    p->o[n] = device_allocate(p->device, sequences * HEADS * DIM * sizeof(float));
    p->lse[n] = device_allocate(p->device, sequences * HEADS * sizeof(float));
    good = p->o[n] && p->lse[n];
  }
  return good;
}

/* Both layouts of queries have the same lse, (HEADS, sequences): the prefix sees them as one
 * sequence, dense; the suffix as packed sequences of one query each. */
static int create_plans(problem *p) {
  flashattn_desc desc;
  if (!succeeded(flashattn_desc_init(&desc, sizeof desc))) return 0;
  desc.device = device_kind(p->device);
  desc.dtype = FLASHATTN_DTYPE_BF16;
  desc.dtype_o = FLASHATTN_DTYPE_F32; /* parts are merged before they are rounded */
  desc.heads_q = HEADS;
  desc.heads_kv = p->heads_kv;
  desc.dim_qk = DIM;
  desc.page_size = PAGE_SIZE;
  desc.features = FLASHATTN_FEATURE_LSE;
  /* Every query sees all of the prefix: no mask. */
  desc.layout = FLASHATTN_LAYOUT_PAGED_KV;
  if (!succeeded(flashattn_plan_create(&desc, &p->prefix_plan, NULL))) return 0;
  desc.layout = FLASHATTN_LAYOUT_PAGED_KV | FLASHATTN_LAYOUT_VARLEN_Q;
  desc.mask = FLASHATTN_MASK_CAUSAL; /* for sequences with several new tokens */
  return succeeded(flashattn_plan_create(&desc, &p->suffix_plan, NULL));
}

static int start_args(const problem *p, flashattn_args *args, int part) {
  if (!succeeded(flashattn_args_init(args, sizeof *args))) return 0;
  args->q.data = p->q_there;
  args->k.data = p->k_there;
  args->v.data = p->v_there;
  args->pages = p->pages;
  args->page_table.data = p->table_there;
  args->page_table.stride_batch = p->sequence_pages;
  args->o.data = p->o[part];
  args->lse = p->lse[part];
  return 1;
}

/* The prefix: one sequence, whose pages stand in the first row of the table. */
static int prefix_args(const problem *p, flashattn_args *args) {
  if (!start_args(p, args, 0)) return 0;
  args->batch = 1;
  args->seqlen_q = p->sequences;
  args->seqlen_kv = p->prefix;
  return 1;
}

/* The suffixes: their pages stand in the table behind those of the prefix. */
static int suffix_args(const problem *p, flashattn_args *args) {
  if (!start_args(p, args, 1)) return 0;
  args->batch = p->sequences;
  args->seqlen_q = 1;
  args->total_q = p->sequences;
  args->seqlen_kv = LONGEST_SUFFIX;
  args->cu_seqlens_q = p->cu_there;
  args->page_table.data = p->table_there + p->prefix_pages;
  args->lens_kv = p->lens_there + p->sequences;
  return 1;
}

/* Prefix and suffix of each sequence, in one call. */
static int whole_args(const problem *p, flashattn_args *args) {
  if (!suffix_args(p, args)) return 0;
  args->seqlen_kv = p->prefix + LONGEST_SUFFIX;
  args->page_table.data = p->table_there;
  args->lens_kv = p->lens_there;
  args->o.data = p->o[2];
  args->lse = p->lse[2];
  return 1;
}

static int forward(problem *p, const flashattn_plan *plan, const flashattn_args *args) {
  return succeeded(
      flashattn_forward(plan, args, p->workspace, p->workspace_bytes, device_stream(p->device)));
}

static int run_whole(problem *p) {
  flashattn_args args;
  return whole_args(p, &args) && forward(p, p->suffix_plan, &args);
}

static int run_cascade(problem *p) {
  flashattn_args args;
  if (!prefix_args(p, &args) || !forward(p, p->prefix_plan, &args)) return 0;
  if (!suffix_args(p, &args) || !forward(p, p->suffix_plan, &args)) return 0;

  const flashattn_tensor parts[2] = {
      {.data = p->o[0], .stride_batch = -1, .stride_head = -1, .stride_seq = -1},
      {.data = p->o[1], .stride_batch = -1, .stride_head = -1, .stride_seq = -1},
  };
  const float *const part_lse[2] = {p->lse[0], p->lse[1]};
  flashattn_merge_args merge;
  if (!succeeded(flashattn_merge_args_init(&merge, sizeof merge))) return 0;
  merge.parts = 2;
  merge.total_q = p->sequences;
  merge.part_o = parts;
  merge.part_lse = part_lse;
  merge.o.data = p->o[2];
  merge.lse = p->lse[2];
  return succeeded(flashattn_merge(p->suffix_plan, &merge, device_stream(p->device)));
}

static int all_args(const problem *p, flashattn_args args[3]) {
  return prefix_args(p, &args[0]) && suffix_args(p, &args[1]) && whole_args(p, &args[2]);
}

/* One workspace for all three calls, which follow each other. */
static int create_workspace(problem *p) {
  flashattn_args args[3];
  const flashattn_plan *const plans[3] = {p->prefix_plan, p->suffix_plan, p->suffix_plan};
  if (!all_args(p, args)) return 0;
  for (int n = 0; n < 3; ++n) {
    int64_t bytes = 0;
    if (!succeeded(flashattn_workspace_size(plans[n], FLASHATTN_OP_FORWARD, &args[n], &bytes))) {
      return 0;
    }
    if (bytes > p->workspace_bytes) p->workspace_bytes = bytes;
  }
  p->workspace = device_allocate(p->device, (size_t)p->workspace_bytes);
  return p->workspace != NULL;
}

/* The attention of sequence b and head h in float64: o (DIM). Returns its lse. */
static double exact(const problem *p, int32_t b, int32_t h, double *scores, double *o) {
  const int32_t length = p->lens[b];
  const size_t width = (size_t)p->heads_kv * DIM;
  const size_t head = (size_t)(h / (HEADS / p->heads_kv)) * DIM;
  const uint16_t *q = p->q + ((size_t)b * HEADS + (size_t)h) * DIM;
  const int32_t *row = p->page_table + (size_t)b * (size_t)p->sequence_pages;
  double largest = -INFINITY, sum = 0.0;
  for (int32_t j = 0; j < length; ++j) {
    const size_t token = (size_t)row[j / PAGE_SIZE] * PAGE_SIZE + (size_t)(j % PAGE_SIZE);
    const uint16_t *k = p->k + token * width + head;
    scores[j] = 0.0;
    for (int c = 0; c < DIM; ++c) scores[j] += value_of(q[c]) * value_of(k[c]);
    scores[j] /= sqrt((double)DIM);
    largest = fmax(largest, scores[j]);
  }
  for (int c = 0; c < DIM; ++c) o[c] = 0.0;
  for (int32_t j = 0; j < length; ++j) {
    const size_t token = (size_t)row[j / PAGE_SIZE] * PAGE_SIZE + (size_t)(j % PAGE_SIZE);
    const double weight = exp(scores[j] - largest);
    sum += weight;
    for (int c = 0; c < DIM; ++c) o[c] += weight * value_of(p->v[token * width + head + (size_t)c]);
  }
  for (int c = 0; c < DIM; ++c) o[c] /= sum;
  return largest + log(sum);
}

/* Some sequences' results against float64. The weights of a key may have been rounded to bf16, o
 * and lse are fp32. */
static int check(problem *p, const char *what) {
  const size_t rows = (size_t)p->sequences * HEADS;
  float *o = allocate(rows * DIM, sizeof *o), *lse = allocate(rows, sizeof *lse);
  double *scores = allocate((size_t)(p->prefix + LONGEST_SUFFIX), sizeof *scores);
  int good = o && lse && scores && device_read(p->device, o, p->o[2], rows * DIM * sizeof *o) &&
             device_read(p->device, lse, p->lse[2], rows * sizeof *lse);
  double difference = 0.0, size = 0.0, lse_difference = 0.0;
  const int32_t checked = p->sequences < CHECKED ? p->sequences : CHECKED;
  for (int32_t n = 0; good && n < checked * HEADS; ++n) {
    const int32_t b = n / HEADS * (p->sequences / checked), h = n % HEADS;
    double want[DIM];
    const double deviation =
        lse[(size_t)h * (size_t)p->sequences + (size_t)b] - exact(p, b, h, scores, want);
    lse_difference = fmax(lse_difference, isnan(deviation) ? INFINITY : fabs(deviation));
    for (int c = 0; c < DIM; ++c) {
      const double got = (double)o[((size_t)b * HEADS + (size_t)h) * DIM + (size_t)c];
      difference += (got - want[c]) * (got - want[c]);
      size += want[c] * want[c];
    }
  }
  free(o);
  free(lse);
  free(scores);
  if (!good) return 0;
  const double relative = sqrt(difference / size);
  printf("%s differs from float64 by %.1e of o (Frobenius) and by %.1e in lse\n", what, relative,
         lse_difference);
  return relative < 0x1p-8 && lse_difference < 1e-4;
}

/* Results that no call has written are NaN. */
static int clear_results(problem *p) {
  const size_t count = (size_t)p->sequences * HEADS * DIM;
  float *nothing = allocate(count, sizeof *nothing);
  for (size_t n = 0; nothing && n < count; ++n) nothing[n] = NAN;
  int good = nothing != NULL;
  for (int n = 0; good && n < 3; ++n) {
    good = device_write(p->device, p->o[n], nothing, count * sizeof *nothing) &&
           device_write(p->device, p->lse[n], nothing, count / DIM * sizeof *nothing);
  }
  free(nothing);
  return good;
}

/* Seconds of the fastest of some rounds, or a negative number. */
static double measure(problem *p, int (*run)(problem *)) {
  double best = INFINITY;
  if (!clear_results(p)) return -1.0;
  if (!run(p) || !device_wait(p->device)) return -1.0; /* the first call starts threads */
  for (int n = 0; n < ROUNDS; ++n) {
    const double start = seconds();
    if (!run(p) || !device_wait(p->device)) return -1.0;
    best = fmin(best, seconds() - start);
  }
  return best;
}

static void release(problem *p) {
  if (!p->device) return;
  void *const there[] = {p->q_there,    p->k_there,  p->v_there, p->workspace, p->table_there,
                         p->lens_there, p->cu_there, p->o[0],    p->o[1],      p->o[2],
                         p->lse[0],     p->lse[1],   p->lse[2]};
  for (size_t n = 0; n < sizeof there / sizeof there[0]; ++n) device_release(p->device, there[n]);
  flashattn_plan_destroy(p->prefix_plan);
  flashattn_plan_destroy(p->suffix_plan);
  free(p->q);
  free(p->k);
  free(p->v);
  free(p->page_table);
  free(p->lens);
  device_close(p->device);
}

/* Least bytes that each way moves: every input that a call reads, once. */
static int print_bytes(const problem *p) {
  flashattn_args args[3];
  flashattn_plan_properties info[3];
  const flashattn_plan *const plans[3] = {p->prefix_plan, p->suffix_plan, p->suffix_plan};
  if (!all_args(p, args)) return 0;
  for (int n = 0; n < 3; ++n) {
    info[n] = (flashattn_plan_properties){.struct_size = sizeof info[n]};
    if (!succeeded(flashattn_plan_info(plans[n], FLASHATTN_OP_FORWARD, &args[n], &info[n]))) {
      return 0;
    }
  }
  printf("whole moves %.1f MB, cascade %.1f MB\n", 1e-6 * (double)info[2].bytes,
         1e-6 * (double)(info[0].bytes + info[1].bytes));
  return 1;
}

static int compare(problem *p) {
  flashattn_device_properties info = {.struct_size = sizeof info};
  if (!fill(p) || !create_plans(p) || !create_workspace(p)) return 0;
  if (!succeeded(flashattn_device_info(device_kind(p->device), 0, &info))) return 0;
  printf("%d sequences behind a prefix of %d tokens, %d heads on %d of %d, bf16; %s\n",
         p->sequences, p->prefix, HEADS, p->heads_kv, DIM, info.name);
  if (!print_bytes(p)) return 0;
  const double whole = measure(p, run_whole);
  if (whole < 0.0 || !check(p, "whole")) return 0;
  const double cascade = measure(p, run_cascade);
  if (cascade < 0.0 || !check(p, "cascade")) return 0;
  printf("whole %.2f ms, cascade %.2f ms: %.1f times as fast\n", 1e3 * whole, 1e3 * cascade,
         whole / cascade);
  return 1;
}

/* The number of an argument that may be missing; -1 where it is none from 1 to most. */
static int32_t number(int argc, char **argv, int n, int32_t otherwise, int32_t most) {
  if (argc <= n) return otherwise;
  char *end;
  const long value = strtol(argv[n], &end, 10);
  return *end == '\0' && value >= 1 && value <= most ? (int32_t)value : -1;
}

int main(int argc, char **argv) {
  problem p = {.prefix = number(argc, argv, 2, 32768, 1 << 20),
               .sequences = number(argc, argv, 3, 64, 4096),
               .heads_kv = number(argc, argv, 4, HEADS, HEADS)};
  if (argc > 5 || p.prefix < 0 || p.prefix % PAGE_SIZE || p.sequences < 0 || p.heads_kv < 0 ||
      HEADS % p.heads_kv) {
    fprintf(stderr,
            "usage: cascade [cpu|cuda [PREFIX [SEQUENCES [HEADS_KV]]]]: a multiple of %d up to %d, "
            "1 to 4096, a divisor of %d\n",
            PAGE_SIZE, 1 << 20, HEADS);
    return 2;
  }
  p.prefix_pages = p.prefix / PAGE_SIZE;
  p.sequence_pages = p.prefix_pages + LONGEST_SUFFIX / PAGE_SIZE;
  p.pages = p.prefix_pages + p.sequences * (LONGEST_SUFFIX / PAGE_SIZE);
  p.device = device_open(argc > 1 ? argv[1] : NULL);
  const int good = p.device && compare(&p);
  release(&p);
  return good ? 0 : 1;
}
