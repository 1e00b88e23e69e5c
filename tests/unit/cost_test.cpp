// Bytes that plan_info reports, beside what one counts by hand: every backend reports these. And
// when splitting keys pays.
#include "core/cost.h"

#include "check.h"
#include "core/seqlen_info.h"
#include "core/validate_desc.h"

using namespace flashattn;

namespace {

flashattn_desc make_desc(int32_t dtype, int32_t heads_q, int32_t heads_kv, int32_t dim) {
  flashattn_desc desc;
  flashattn_desc_init(&desc, sizeof desc);
  desc.device = FLASHATTN_DEVICE_CUDA;
  desc.ops = FLASHATTN_OP_FORWARD | FLASHATTN_OP_BACKWARD;
  desc.dtype = dtype;
  desc.heads_q = heads_q;
  desc.heads_kv = heads_kv;
  desc.dim_qk = dim;
  return desc;
}

Problem problem_of(flashattn_desc desc) { return make_problem(desc); }

int64_t forward_bytes(const flashattn_desc& desc, const Shape& shape) {
  return operation_cost(problem_of(desc), FLASHATTN_OP_FORWARD, shape).bytes;
}

int64_t backward_bytes(const flashattn_desc& desc, const Shape& shape) {
  return operation_cost(problem_of(desc), FLASHATTN_OP_BACKWARD, shape).bytes;
}

// 4 sequences of 4,096 tokens, 16 heads of 128 in bf16: 64 MiB an array.
void test_training() {
  constexpr int64_t kArray = int64_t{64} << 20, kRows = 4 * 16 * 4096 * 4;
  flashattn_desc desc = make_desc(FLASHATTN_DTYPE_BF16, 16, 16, 128);
  const Shape shape = {4, 4096, 4096, 0, 0};
  CHECK(forward_bytes(desc, shape) == 4 * kArray);
  desc.mask = FLASHATTN_MASK_CAUSAL;  // what is skipped is read for other queries
  desc.features = FLASHATTN_FEATURE_LSE;
  CHECK(forward_bytes(desc, shape) == 4 * kArray + kRows);
  // Read: q, k, v, o, dout, lse. Written: dq, dk, dv.
  CHECK(backward_bytes(desc, shape) == 8 * kArray + kRows);
  desc.features |= FLASHATTN_FEATURE_DLSE;
  CHECK(backward_bytes(desc, shape) == 8 * kArray + 2 * kRows);
  desc.dtype_o = FLASHATTN_DTYPE_F32;  // o and dout
  CHECK(backward_bytes(desc, shape) == 10 * kArray + 2 * kRows);
  desc.dtype_o = 0;
  desc.dtype = FLASHATTN_DTYPE_F32;
  CHECK(backward_bytes(desc, shape) == 16 * kArray + 2 * kRows);
}

// One query against 8,192 cached tokens of 8 heads of 128: 16 MiB of keys, as much of values, and
// 512 page numbers for each of 16 sequences.
void test_decoding() {
  constexpr int64_t kCache = int64_t{16} << 20, kQuery = 32 * 128 * 2;
  flashattn_desc desc = make_desc(FLASHATTN_DTYPE_F16, 32, 8, 128);
  desc.ops = FLASHATTN_OP_FORWARD;
  const Shape shape = {16, 1, 8192, 0, 0};
  CHECK(forward_bytes(desc, shape) == 16 * (2 * kCache + 2 * kQuery));
  desc.layout = FLASHATTN_LAYOUT_PAGED_KV;
  desc.page_size = 16;
  CHECK(forward_bytes(desc, shape) == 16 * (2 * kCache + 2 * kQuery + 512 * 4));
  desc.page_size = 100;  // the last of 82 pages is not full
  CHECK(forward_bytes(desc, shape) == 16 * (2 * kCache + 2 * kQuery + 82 * 4));
}

// 10 queries and 30 keys in 3 sequences; heads of 24 and 40 in fp32.
void test_packed() {
  flashattn_desc desc = make_desc(FLASHATTN_DTYPE_F32, 6, 2, 24);
  desc.dim_v = 40;
  desc.layout = FLASHATTN_LAYOUT_VARLEN_Q | FLASHATTN_LAYOUT_VARLEN_KV;
  const Shape shape = {3, 5, 20, 10, 30};
  constexpr int64_t kQ = 10 * 6 * 24 * 4, kO = 10 * 6 * 40 * 4, kK = 30 * 2 * 24 * 4,
                    kV = 30 * 2 * 40 * 4, kLse = 10 * 6 * 4, kBounds = 2 * 4 * 4;
  CHECK(forward_bytes(desc, shape) == kQ + kO + kK + kV + kBounds);
  CHECK(backward_bytes(desc, shape) == 2 * (kQ + kO + kK + kV) + kLse + kBounds);
}

// What is added to scores, and its gradients.
void test_scores() {
  flashattn_desc desc = make_desc(FLASHATTN_DTYPE_F16, 4, 4, 64);
  const Shape shape = {2, 100, 300, 0, 0};
  const int64_t plain = forward_bytes(desc, shape), gradients = backward_bytes(desc, shape);
  CHECK(plain == 2 * 4 * 64 * 2 * (2 * 100 + 2 * 300));
  desc.bias = FLASHATTN_BIAS_DENSE | FLASHATTN_BIAS_ALIBI;
  desc.features = FLASHATTN_FEATURE_SINK;
  CHECK(forward_bytes(desc, shape) == plain + 100 * 300 * 2 + 2 * 4 * 4);
  desc.features |= FLASHATTN_FEATURE_DBIAS | FLASHATTN_FEATURE_DSINK;
  CHECK(backward_bytes(desc, shape) == gradients + 100 * 300 * (2 + 4) + 3 * 4 * 4);
  desc = make_desc(FLASHATTN_DTYPE_F16, 4, 4, 64);
  desc.mask = FLASHATTN_MASK_BLOCKS;
  desc.block_q = 64;
  desc.block_kv = 128;
  CHECK(forward_bytes(desc, shape) == plain + 2 * 3);
  desc = make_desc(FLASHATTN_DTYPE_F16, 4, 4, 64);
  desc.ops = FLASHATTN_OP_FORWARD;
  desc.mask = FLASHATTN_MASK_TREE;
  desc.tree = 40;  // two words a query
  CHECK(forward_bytes(desc, shape) == plain + 100 * 2 * 4);
}

// Where parts gained or lost on an H200, or come near it: decoding with 32 heads on 8 and one query
// or four, and 512 queries of 16 heads. A row for each query and head, a block for each KV head.
void test_splits() {
  const auto pays = [](int32_t batch, int32_t queries, int32_t keys, int64_t parts) {
    return pays_to_split(int64_t{32} * batch * queries, keys, parts, int64_t{8} * batch, 132);
  };
  CHECK(!pays(1, 1, 8192, 0));
  CHECK(!pays(1, 1, 8192, 1));
  CHECK(pays(1, 1, 8192, 64));
  CHECK(pays(1, 1, 2048, 16));
  CHECK(!pays(1, 1, 256, 2));
  CHECK(pays(16, 1, 8192, 5));
  CHECK(!pays(32, 1, 2048, 2));
  CHECK(pays(32, 1, 8192, 2));
  CHECK(!pays(32, 4, 8192, 2));
  CHECK(pays_to_split(32 * 128, 32768, 6, 64, 132));
  CHECK(!pays_to_split(16 * 512, 512, 3, 128, 132));
}

}  // namespace

int main() {
  test_splits();
  test_training();
  test_decoding();
  test_packed();
  test_scores();
  return check_report();
}
