/* Descriptors and shapes out of a hat: every answer is a status with a sentence, sizes are never
 * negative, and what check accepts plan_create makes. Only numbers are random, so that nothing is
 * read or written through them. The failing round is printed. */
#include <inttypes.h>
#include <stdlib.h>
#include <time.h>

#include "check.h"

enum {
  ROUNDS = 40000,
  REFUSED = -77
};

static uint64_t state;

static uint32_t random_below(uint32_t n) {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return (uint32_t)(state >> 32) % n;
}

/* Mostly small and sensible, sometimes at the edges of a type. */
static int32_t random_size(void) {
  static const int32_t edges[] = {0, -1, 1, 2147483647, -2147483647 - 1, 65536, 1 << 20, 513};
  return random_below(8) ? (int32_t)random_below(300) + 1
                         : edges[random_below(sizeof edges / sizeof *edges)];
}

static uint32_t random_bits(uint32_t known) {
  return random_below(60) ? random_below(2 * known) & known & random_below(2 * known)
                          : random_below(0xffffffffu);
}

static void random_desc(flashattn_desc *d) {
  flashattn_desc_init(d, sizeof *d);
  d->ops = random_bits(3);
  d->dtype = (int32_t)random_below(4);
  d->dtype_o = random_below(3) ? 0 : (int32_t)random_below(4);
  d->heads_kv = random_size();
  d->heads_q = random_below(4) ? (int32_t)((uint32_t)d->heads_kv * random_below(9)) : random_size();
  d->dim_qk = random_size();
  d->dim_v = random_below(2) ? 0 : random_size();
  d->layout = random_bits(7);
  if (d->layout & FLASHATTN_LAYOUT_PAGED_KV) d->page_size = random_size();
  d->mask = random_bits(31);
  if (d->mask & FLASHATTN_MASK_WINDOW) d->window_left = random_size();
  if (d->mask & FLASHATTN_MASK_WINDOW) d->window_right = random_size();
  if (d->mask & FLASHATTN_MASK_CHUNK) d->chunk = random_size();
  if (d->mask & FLASHATTN_MASK_BLOCKS) d->block_q = d->block_kv = random_size();
  d->bias = random_bits(3);
  d->features = random_bits(31);
  d->determinism = (int32_t)random_below(3);
  d->dropout = (float)random_below(4) / 4;
  d->splits = random_below(2) ? 0 : random_size();
  d->threads = random_below(2) ? 0 : random_size();
  if (random_below(2)) d->max_batch = random_size();
  if (random_below(2)) d->max_seqlen_q = random_size();
  if (random_below(2)) d->max_seqlen_kv = random_size();
  if (random_below(20) == 0) d->workspace_limit = random_size();
}

static void random_sizes(flashattn_args *args, const flashattn_desc *desc) {
  flashattn_args_init(args, sizeof *args);
  args->batch = random_size();
  args->seqlen_q = random_size();
  args->seqlen_kv = random_size();
  if (desc->layout & FLASHATTN_LAYOUT_VARLEN_Q) args->total_q = random_size();
  if (desc->layout & FLASHATTN_LAYOUT_VARLEN_KV) args->total_kv = random_size();
}

static int refusal_explained(void) {
  int32_t reason;
  const char *field;
  const char *text = flashattn_last_error(&reason, &field);
  return strlen(text) > 20 && strlen(text) < 600 && reason != FLASHATTN_REASON_NONE &&
         field[0] != 0;
}

/* Whether a args is answered as the header says. *bytes: of the workspace, or REFUSED. */
static int try_sizes(const flashattn_plan *plan, uint32_t op, const flashattn_args *args,
                     int64_t *bytes) {
  flashattn_plan_properties info = {.struct_size = sizeof info};
  *bytes = REFUSED;
  if (flashattn_workspace_size(plan, op, args, bytes) != FLASHATTN_OK) {
    return refusal_explained() && *bytes == REFUSED &&
           (!args || flashattn_plan_info(plan, op, args, &info) != FLASHATTN_OK);
  }
  const int ok = *bytes >= 0 && flashattn_plan_info(plan, op, args, &info) == FLASHATTN_OK &&
                 info.workspace == *bytes && info.flops >= 0 && info.bytes >= 0 && info.splits >= 0;
  if (!ok) {
    printf("  op %u, args %d %d %d %" PRId64 " %" PRId64 ": workspace %" PRId64 ", flops %" PRId64
           ", bytes %" PRId64 ", splits %d\n",
           op, args ? args->batch : 0, args ? args->seqlen_q : 0, args ? args->seqlen_kv : 0,
           args ? args->total_q : 0, args ? args->total_kv : 0, *bytes, info.flops, info.bytes,
           info.splits);
  }
  return ok;
}

/* Half of the rounds are the same in every run, half begin with a seed that is printed and that the
 * first argument repeats. */
int main(int argc, char **argv) {
  const uint64_t same = 88172645463325252u;
  const uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 10) : (uint64_t)time(NULL) ^ same;
  int accepted = 0;
  printf("the second half: fuzz %" PRIu64 "\n", seed);
  state = same;
  for (int round = 0; round < ROUNDS; ++round) {
    if (round == ROUNDS / 2) state = seed;
    flashattn_desc desc;
    flashattn_plan *plan = NULL;
    random_desc(&desc);
    const int32_t status = flashattn_check(&desc, NULL);
    int ok = status == FLASHATTN_OK || status == FLASHATTN_ERROR_INVALID_ARGUMENT ||
             status == FLASHATTN_ERROR_UNSUPPORTED;
    if (status != FLASHATTN_OK) ok = ok && refusal_explained();
    ok = ok && flashattn_plan_create(&desc, &plan, NULL) == status;
    for (uint32_t op = 1; ok && plan && op <= 2; ++op) {
      int64_t bytes, larger;
      flashattn_args args;
      random_sizes(&args, &desc);
      ok = try_sizes(plan, op, NULL, &bytes) && try_sizes(plan, op, &args, &bytes);
      if (ok && bytes != REFUSED && desc.max_batch == 0 && args.batch < 1 << 16) {
        ++args.batch;
        ok = try_sizes(plan, op, &args, &larger) && (larger >= bytes || larger == REFUSED);
        if (!ok) printf("  workspace %" PRId64 ", for one more %" PRId64 "\n", bytes, larger);
      }
    }
    accepted += plan != NULL;
    if (!CHECK(ok)) {
      printf("  round %d, %s: %s\n", round, flashattn_status_name(status),
             flashattn_last_error(NULL, NULL));
      printf("  heads %d %d, dims %d %d, layout %u, mask %u, splits %d, threads %d\n", desc.heads_q,
             desc.heads_kv, desc.dim_qk, desc.dim_v, desc.layout, desc.mask, desc.splits,
             desc.threads);
    }
    flashattn_plan_destroy(plan);
  }
  CHECK(accepted > ROUNDS / 100);
  printf("%d of %d descriptors accepted\n", accepted, ROUNDS);
  return check_report();
}
