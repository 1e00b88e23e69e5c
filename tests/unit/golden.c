/* Worked examples of the literature, through the API: the running sums of an online softmax, two
 * partial states merged, five tokens whole and split; and dropout masks that are frozen. */
#include <math.h>
#include <stdlib.h>

#include "check.h"

static int near(double got, double wanted, double tolerance) {
  if (fabs(got - wanted) <= tolerance) return 1;
  printf("  %.9g, wanted %.9g\n", got, wanted);
  return 0;
}

static flashattn_plan *make_plan(int32_t dim_qk, int32_t dim_v, float scale) {
  flashattn_desc desc;
  flashattn_plan *plan = NULL;
  flashattn_desc_init(&desc, sizeof desc);
  desc.dtype = FLASHATTN_DTYPE_F32;
  desc.heads_q = 1;
  desc.dim_qk = dim_qk;
  desc.dim_v = dim_v;
  desc.scale = scale;
  desc.features = FLASHATTN_FEATURE_LSE;
  CHECK_OK(flashattn_plan_create(&desc, &plan, NULL));
  return plan;
}

/* One sequence, one head, packed. */
static void attend(const flashattn_plan *plan, int32_t queries, int32_t keys, const float *q,
                   const float *k, const float *v, float *o, float *lse) {
  flashattn_args args;
  flashattn_args_init(&args, sizeof args);
  int64_t bytes = 0;
  args.batch = 1;
  args.seqlen_q = queries;
  args.seqlen_kv = keys;
  args.q.data = (void *)q;
  args.k.data = (void *)k;
  args.v.data = (void *)v;
  args.o.data = o;
  args.lse = lse;
  CHECK_OK(flashattn_workspace_size(plan, FLASHATTN_OP_FORWARD, &args, &bytes));
  void *workspace = malloc((size_t)bytes + 1);
  CHECK_OK(flashattn_forward(plan, &args, workspace, bytes, NULL));
  free(workspace);
}

static void merge(const flashattn_plan *plan, int32_t queries, int32_t parts, float *const *o_parts,
                  const float *const *lse_parts, float *o, float *lse) {
  flashattn_merge_args args;
  flashattn_merge_args_init(&args, sizeof args);
  flashattn_tensor tensors[4];
  for (int p = 0; p < parts; ++p) tensors[p] = (flashattn_tensor){o_parts[p], -1, -1, -1};
  args.parts = parts;
  args.batch = 1;
  args.seqlen_q = queries;
  args.part_o = tensors;
  args.part_lse = lse_parts;
  args.o.data = o;
  args.lse = lse;
  CHECK_OK(flashattn_merge(plan, &args, NULL));
}

/* Six scores in blocks of two: the sum after each block, relative to the maximum so far. Printed
 * sums come from printed terms: one unit of the last digit. */
static void test_online_row(void) {
  const float one = 1, scores[6] = {1, 3, 2, 5, 4, 0}, values[6] = {0};
  const double running_max[3] = {3, 5, 5}, running_sum[3] = {1.1353, 1.2035, 1.578};
  flashattn_plan *plan = make_plan(1, 1, 1);
  float o[3], lse[3], state_o = 0, state_lse = -INFINITY;
  for (int block = 0; block < 3; ++block) {
    attend(plan, 1, 2, &one, scores + 2 * block, values + 2 * block, &o[block], &lse[block]);
    float *const o_parts[2] = {&state_o, &o[block]};
    const float *const lse_parts[2] = {&state_lse, &lse[block]};
    merge(plan, 1, 2, o_parts, lse_parts, &state_o, &state_lse);
    CHECK(near(exp((double)state_lse - running_max[block]), running_sum[block], 1e-4));
  }
  float whole_o, whole_lse;
  attend(plan, 1, 6, &one, scores, values, &whole_o, &whole_lse);
  CHECK(near(exp((double)whole_lse - 5), 1.578, 1e-4));
  CHECK(near(state_lse, whole_lse, 1e-6));
  flashattn_plan_destroy(plan);
}

static void test_merge(void) {
  const float one = 1, scores[3] = {1, 2, 0.5f}, values[3] = {10, 20, 40};
  flashattn_plan *plan = make_plan(1, 1, 1);
  float o[3], lse[3], merged, merged_lse, whole, whole_lse;
  attend(plan, 1, 2, &one, scores, values, &o[0], &lse[0]);
  attend(plan, 1, 1, &one, scores + 2, values + 2, &o[1], &lse[1]);
  attend(plan, 1, 3, &one, scores, values, &whole, &whole_lse);
  o[2] = 0;
  lse[2] = -INFINITY;
  float *const o_parts[3] = {&o[0], &o[1], &o[2]};
  const float *const lse_parts[3] = {&lse[0], &lse[1], &lse[2]};
  merge(plan, 1, 2, o_parts, lse_parts, &merged, &merged_lse);
  CHECK(near(merged, 20.492649, 5e-6));
  CHECK(near(whole, 20.492649, 5e-6));
  CHECK(near(merged_lse, whole_lse, 1e-6));
  merge(plan, 1, 3, o_parts, lse_parts, &merged, &merged_lse);
  CHECK(near(merged, 20.492649, 5e-6));
  merge(plan, 1, 1, o_parts, lse_parts, &merged, &merged_lse);
  CHECK(near(merged, o[0], 1e-6) && near(merged_lse, lse[0], 1e-6));
  merge(plan, 1, 1, o_parts + 2, lse_parts + 2, &merged, &merged_lse);
  CHECK(merged == 0 && merged_lse == -INFINITY);
  flashattn_plan_destroy(plan);
}

static void test_five_tokens(void) {
  const float q[5][4] = {{1, 0, 1, 0}, {0, 2, 0, 1}, {1, 1, 1, 0}, {0, 0, 1, 1}, {1, 0, 0, 1}};
  const float k[5][4] = {
      {0, 1, 0, 1}, {1, 0, 1, 0}, {1, 1, 0, 0}, {0, 0, 1, 1}, {1, 0, 0.5f, 0.5f}};
  const float v[5][4] = {
      {1, 0, 0, 0}, {0, 1, 0, 0}, {0, 0, 1, 0}, {0, 0, 0, 1}, {0.5f, 0.5f, 0.5f, 0.5f}};
  const double output[5][4] = {{0.2254, 0.4135, 0.2964, 0.2964},
                               {0.4602, 0.1475, 0.3018, 0.2058},
                               {0.2495, 0.3481, 0.3481, 0.2495},
                               {0.2854, 0.2854, 0.2106, 0.4089},
                               {0.3108, 0.3108, 0.3108, 0.3108}};
  flashattn_plan *plan = make_plan(4, 4, 0); /* 1 / sqrt(4) */
  float whole[5][4], lse[5], part[3][5][4], part_lse[3][5], merged[5][4], merged_lse[5];
  attend(plan, 5, 5, q[0], k[0], v[0], whole[0], lse);
  for (int p = 0; p < 3; ++p) {
    attend(plan, 5, p < 2 ? 2 : 1, q[0], k[2 * p], v[2 * p], part[p][0], part_lse[p]);
  }
  float *const o_parts[3] = {part[0][0], part[1][0], part[2][0]};
  const float *const lse_parts[3] = {part_lse[0], part_lse[1], part_lse[2]};
  merge(plan, 5, 3, o_parts, lse_parts, merged[0], merged_lse);
  for (int i = 0; i < 5; ++i) {
    /* The page prints rounded weights times values: one unit of the last digit. */
    for (int c = 0; c < 4; ++c) {
      CHECK(near(whole[i][c], output[i][c], 1.01e-4));
      CHECK(near(merged[i][c], whole[i][c], 1e-6));
    }
    CHECK(near(merged_lse[i], lse[i], 1e-6));
  }
  flashattn_plan_destroy(plan);
}

/* Second head of two, 3 x 20, p = 0.3: part of the ABI, the same on every device. */
static void test_dropout_mask(void) {
  static const char *const golden[3] = {"11101000110101110011", "11011111101010111111",
                                        "11110101110001101110"};
  flashattn_desc desc;
  flashattn_plan *plan = NULL;
  flashattn_desc_init(&desc, sizeof desc);
  desc.dtype = FLASHATTN_DTYPE_F32;
  desc.heads_q = 2;
  desc.dim_qk = 8;
  desc.dropout = 0.3f;
  if (!CHECK_OK(flashattn_plan_create(&desc, &plan, NULL))) return;
  flashattn_args args;
  flashattn_args_init(&args, sizeof args);
  const uint64_t device[2] = {1234567890000u, UINT64_C(1) << 33};
  uint8_t keep[2][3][20];
  args.batch = 1;
  args.seqlen_q = 3;
  args.seqlen_kv = 20;
  for (int host = 0; host < 2; ++host) {
    args.rng_seed = host ? 1234567890123u : 123;
    args.rng_offset = host ? (UINT64_C(1) << 33) + 5 : 5;
    args.rng_device = host ? NULL : device;
    memset(keep, 0xA5, sizeof keep);
    CHECK_OK(flashattn_dropout_mask(plan, &args, &keep[0][0][0], NULL));
    int same = 1;
    for (int i = 0; i < 3; ++i) {
      for (int j = 0; j < 20; ++j) same = same && keep[1][i][j] == golden[i][j] - '0';
    }
    CHECK(same);
  }
  flashattn_plan_destroy(plan);
}

int main(void) {
  test_online_row();
  test_merge();
  test_five_tokens();
  test_dropout_mask();
  return check_report();
}
