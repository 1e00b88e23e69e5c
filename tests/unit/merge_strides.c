/* Parts of a merge that repeat over heads or tokens, beside packed strides: -1 asks for the stride
 * of an array without the indices that repeat. Each part lies in memory that ends where it ends. */
#include <stdlib.h>

#include "check.h"

enum {
  BATCH = 3,
  HEADS = 4,
  SEQ = 5,
  DIM = 8,
  ROWS = BATCH * HEADS * SEQ
};

static float *part_of(int64_t heads, int64_t tokens) {
  const size_t n = (size_t)(BATCH * heads * tokens * DIM);
  float *part = malloc(n * sizeof *part);
  if (!part) abort();
  for (size_t i = 0; i < n; ++i) part[i] = (float)i;
  return part;
}

/* One part, which the merge copies: o[b, i, h, c] is the element that the strides lead to. */
static void check_part(const flashattn_plan *plan, int64_t heads, int64_t tokens) {
  static float o[ROWS * DIM];
  static float lse[ROWS];
  float *const part = part_of(heads, tokens);
  flashattn_tensor tensor = {part, -1, heads == 1 ? 0 : -1, tokens == 1 ? 0 : -1};
  const float *part_lse = lse;
  flashattn_merge_args args;
  flashattn_merge_args_init(&args, sizeof args);
  args.parts = 1;
  args.batch = BATCH;
  args.seqlen_q = SEQ;
  args.part_o = &tensor;
  args.part_lse = &part_lse;
  args.o.data = o;
  CHECK(flashattn_merge(plan, &args, NULL) == FLASHATTN_OK);
  int wrong = 0;
  for (int64_t b = 0; b < BATCH; ++b) {
    for (int64_t i = 0; i < SEQ; ++i) {
      for (int64_t h = 0; h < HEADS; ++h) {
        for (int64_t c = 0; c < DIM; ++c) {
          const int64_t token = b * tokens + (tokens == 1 ? 0 : i);
          const int64_t from = (token * heads + (heads == 1 ? 0 : h)) * DIM + c;
          wrong += o[((b * SEQ + i) * HEADS + h) * DIM + c] != (float)from;
        }
      }
    }
  }
  if (!CHECK(wrong == 0)) {
    printf("  heads %d, tokens %d: %d elements\n", (int)heads, (int)tokens, wrong);
  }
  free(part);
}

int main(void) {
  flashattn_desc desc;
  flashattn_desc_init(&desc, sizeof desc);
  desc.dtype = FLASHATTN_DTYPE_F32;
  desc.heads_q = HEADS;
  desc.dim_qk = DIM;
  desc.threads = 1;
  flashattn_plan *plan = NULL;
  if (!CHECK(flashattn_plan_create(&desc, &plan, NULL) == FLASHATTN_OK)) return check_report();
  check_part(plan, HEADS, SEQ);
  check_part(plan, 1, SEQ);
  check_part(plan, HEADS, 1);
  check_part(plan, 1, 1);
  flashattn_plan_destroy(plan);
  return check_report();
}
