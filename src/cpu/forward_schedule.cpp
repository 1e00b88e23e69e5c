#include "cpu/forward_schedule.h"

#include <algorithm>

namespace flashattn::cpu {
namespace {

constexpr int32_t kCutParts = 4;  // parts of a cut task, where tasks are not equally long

// Whether the heads of a token lie side by side, and no block mask tells them apart.
bool reads_heads_together(const ForwardJob& job) {
  const Inputs& in = job.args->inputs;
  return job.direct && !job.problem->has_mask(FLASHATTN_MASK_BLOCKS) &&
         in.k.stride_head < in.k.stride_seq && in.v.stride_head < in.v.stride_seq;
}

// Sets Q blocks of `rows` queries, and cuts the last tasks into up to `parts` parts.
void set_blocks(int32_t rows, int32_t parts, ForwardJob* job) {
  const int32_t tile = job->tiling.tile_q;
  job->block_queries = rows;
  job->q_blocks = static_cast<int32_t>(ceil_div(job->seqlen_q, rows));
  const auto part = static_cast<int32_t>(ceil_div(ceil_div(rows, parts), tile) * tile);
  job->part_queries = std::max(part, min_block_rows(job->tiling));
  job->parts = static_cast<int32_t>(ceil_div(rows, job->part_queries));
  job->cut_tasks = job->parts > 1
                       ? static_cast<int32_t>(std::min<int64_t>(job->whole_tasks(), job->threads))
                       : 0;
}

// The time of a job whose Q blocks are equally long, in rows of one thread.
double cost(const ForwardJob& job, bool shares_tiles) {
  const int64_t threads = job.threads, heads = job.tasks_per_q_block();
  const int64_t whole = job.whole_tasks(), tasks = job.tasks();
  // Packing a KV tile, or reading a shared one again, takes as long as the work of so many rows. A
  // thread packs the keys of its next Q block anew, unless they are the same and one tile.
  const double packing = shares_tiles ? 4 : 12;
  int64_t packs = tasks;
  if (!shares_tiles && job.args->shape.seqlen_kv <= job.tiling.tile_kv) {
    if (heads % threads == 0) packs = whole;
    if (threads % heads == 0) packs = std::min(threads, tasks);
  }
  // If heads divide evenly among threads, each thread has all Q blocks of its heads, and as many
  // short ones as others. Otherwise the tasks of the last wave, which do not fill all threads, are
  // cut, like as many before them.
  const int64_t waves = whole / threads, rest = whole % threads;
  const bool cut = job.parts > 1;
  const int32_t last = cut ? job.part_queries : job.block_queries;
  const double work =
      heads % threads == 0
          ? static_cast<double>(waves) * job.seqlen_q / job.q_blocks
          : static_cast<double>(waves * job.block_queries +
                                ceil_div(rest * (cut ? job.parts : 1), threads) * last);
  // Threads are not equally fast: at the end all wait for part of the slowest thread's last task,
  // or of its work.
  const double end = threads > 1 ? std::min(last / 4.0, work / 8) : 0.0;
  return work + end + static_cast<double>(ceil_div(packs, threads)) * packing +
         static_cast<double>(ceil_div(tasks, threads));
}

}  // namespace

void choose_q_blocks(bool shares_tiles, ForwardJob* job) {
  const Problem& problem = *job->problem;
  const int32_t seqlen_q = job->seqlen_q, group = problem.q_heads_per_kv_head(),
                tile = job->tiling.tile_q, fewest_rows = min_block_rows(job->tiling);
  const int64_t wanted = 4 * int64_t{job->threads};
  job->kv_heads = 1;
  for (int32_t rows = job->tiling.q_block_rows;;
       rows = std::max(rows / 2 / tile * tile, fewest_rows)) {
    job->block_queries = std::min(seqlen_q, rows);
    // Block masks may differ between heads.
    const int32_t fitting = problem.has_mask(FLASHATTN_MASK_BLOCKS) ? 1 : rows / job->block_queries;
    job->block_heads = std::min(group, std::max(fitting, 1));
    job->head_blocks = static_cast<int32_t>(ceil_div(group, job->block_heads));
    job->q_blocks = static_cast<int32_t>(ceil_div(seqlen_q, job->block_queries));
    if (rows == fewest_rows || job->tasks() >= wanted) break;
  }
  if (reads_heads_together(*job)) {
    for (int32_t heads = std::min(kDirectRows / (group * seqlen_q), problem.heads_kv); heads > 1;
         heads /= 2) {
      job->kv_heads = heads;
      if (job->tasks() >= wanted) break;
      job->kv_heads = 1;
    }
  }
  if (job->block_heads > 1) return;
  const int32_t fewest = job->block_queries;
  if (problem.mask != 0 || problem.layout != 0) {
    return set_blocks(fewest, job->threads > 1 ? kCutParts : 1, job);
  }
  // All Q blocks take equally long.
  const int32_t most = std::min(job->tiling.q_block_rows, seqlen_q);
  double least = 0;
  int32_t best_rows = 0, best_parts = 1;
  const auto consider = [&](int32_t rows) {
    for (const int32_t parts : {1, 2, 4, 8}) {
      set_blocks(rows, parts, job);
      if (parts > 1 && job->parts <= parts / 2) break;  // parts are as small as they may be
      const double found = cost(*job, shares_tiles);
      if (best_rows > 0 && found >= least) continue;
      least = found;
      best_rows = rows;
      best_parts = parts;
    }
  };
  consider(most);
  for (int32_t rows = (most - 1) / tile * tile; rows >= fewest; rows -= tile) consider(rows);
  set_blocks(best_rows, best_parts, job);
}

}  // namespace flashattn::cpu
