// The tasks of the CPU's forward pass: together they have every query of every head once, whatever
// is cut; the parts of a task that is cut go to one thread; and a call's end is cut small.
#include "cpu/forward_schedule.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "check.h"

using namespace flashattn;
using namespace flashattn::cpu;

namespace {

constexpr Tiling kFp32{1056, 48, 1024}, kAmx{512, 32, 1024}, kAvx2{1056, 24, 768};

struct Call {
  Problem problem{};
  ForwardArgs args{};
  ForwardJob job{};

  Call(const Tiling& tiling, int32_t threads, int32_t batch, int32_t heads_kv, int32_t group,
       int32_t seqlen_q, int32_t seqlen_kv, uint32_t mask, bool shares_tiles) {
    problem.heads_kv = heads_kv;
    problem.heads_q = heads_kv * group;
    problem.mask = mask;
    args.shape = {batch, seqlen_q, seqlen_kv, 0, 0};
    job.problem = &problem;
    job.args = &args;
    job.tiling = tiling;
    job.seqlen_q = seqlen_q;
    job.splits = 1;
    job.threads = threads;
    choose_q_blocks(shares_tiles, &job);
  }
};

// Whether the tasks are right. Writes the rows of the longest task, and of the longest of the last
// tasks, one for each thread.
bool right(const Call& call, int32_t* longest, int32_t* longest_of_last) {
  const ForwardJob& job = call.job;
  const int32_t group = call.problem.q_heads_per_kv_head(), batch = call.args.shape.batch;
  const int64_t heads = int64_t{batch} * call.problem.heads_q, tasks = job.tasks();
  const int64_t queues = std::gcd(job.tasks_per_q_block(), std::min<int64_t>(job.threads, tasks));
  std::vector<int> found(static_cast<size_t>(heads * job.seqlen_q));
  std::vector<int64_t> queue_of_cut(static_cast<size_t>(heads), -1);
  bool ok = true;
  *longest = *longest_of_last = 0;
  for (int64_t task = 0; task < tasks; ++task) {
    const ForwardWorkTile tile = job.work_tile(task);
    const int32_t count = tile.queries.end - tile.queries.begin;
    if (count == 0 && job.parts > 1) continue;  // a block that is short of some part
    ok = ok && count > 0 && tile.kv_heads.end == tile.kv_heads.begin + 1;
    ok = ok && tile.b >= 0 && tile.b < batch && tile.split == 0;
    ok = ok && tile.queries.begin % job.block_queries % job.tiling.tile_q == 0;
    const int32_t first = tile.kv_heads.begin * group + tile.head_block * job.block_heads;
    const int32_t end = std::min(first + job.block_heads, (tile.kv_heads.begin + 1) * group);
    ok = ok && (end - first) * count <= job.tiling.q_block_rows;
    for (int32_t head = first; head < end; ++head) {
      const int64_t row = int64_t{tile.b} * call.problem.heads_q + head;
      for (int32_t i = tile.queries.begin; i < tile.queries.end; ++i) {
        ++found[static_cast<size_t>(row * job.seqlen_q + i)];
      }
      // Where a thread has several parts of a head's task, they are in one queue.
      if (task < job.whole_tasks() - job.cut_tasks || job.cut_tasks > heads) continue;
      int64_t& queue = queue_of_cut[static_cast<size_t>(row)];
      ok = ok && (queue < 0 || queue == task % queues || job.cut_tasks % queues != 0);
      queue = task % queues;
    }
    *longest = std::max(*longest, (end - first) * count);
    if (task >= tasks - job.threads) {
      *longest_of_last = std::max(*longest_of_last, (end - first) * count);
    }
  }
  return ok && std::all_of(found.begin(), found.end(), [](int n) { return n == 1; });
}

void test_shapes() {
  for (const Tiling& tiling : {kFp32, kAmx, kAvx2}) {
    for (const int32_t threads : {1, 2, 3, 16, 36}) {
      for (const int32_t batch : {1, 3}) {
        for (const int32_t heads : {1, 2, 5, 16}) {
          for (const int32_t group : {1, 4}) {
            for (const int32_t queries : {1, 15, 96, 97, 128, 511, 1024, 2100}) {
              for (const uint32_t mask : {uint32_t{0}, uint32_t{FLASHATTN_MASK_CAUSAL}}) {
                const Call call(tiling, threads, batch, heads, group, queries, queries, mask,
                                tiling.tile_q == kAmx.tile_q);
                int32_t longest, last;
                const bool ok = right(call, &longest, &last);
                CHECK(ok);
                if (!ok) {
                  printf("tile_q %d, %d threads, batch %d, %d x %d heads, %d queries, mask %u\n",
                         tiling.tile_q, threads, batch, heads, group, queries, mask);
                }
              }
            }
          }
        }
      }
    }
  }
}

// The rows of the last tasks of a call without a mask: 16 threads.
int32_t last_rows(int32_t heads, int32_t seqlen, int32_t* longest) {
  const Call call(kFp32, 16, 1, heads, 1, seqlen, seqlen, 0, false);
  int32_t last;
  CHECK(right(call, longest, &last));
  return last;
}

void test_ends() {
  int32_t longest;
  // A head for each thread, all keys in one tile: small Q blocks cost nothing.
  for (const int32_t seqlen : {256, 512, 1024}) CHECK(last_rows(16, seqlen, &longest) == 96);
  // More heads, or more keys: large Q blocks first.
  CHECK(last_rows(64, 1024, &longest) <= 288 && longest >= 1000);
  CHECK(last_rows(16, 8192, &longest) <= 288 && longest >= 1000);
  // 20 heads: four threads have two. Their work is shared.
  CHECK(last_rows(20, 1024, &longest) <= 288);
  // One thread has no end to wait for.
  const Call alone(kFp32, 1, 1, 1, 1, 1024, 1024, 0, false);
  CHECK(alone.job.tasks() == 1);
}

}  // namespace

int main() {
  test_shapes();
  test_ends();
  return check_report();
}
