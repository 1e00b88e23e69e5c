// The pieces of work of a forward pass, as the launcher hands them out.
#pragma once

#include "cpu/forward.h"

namespace flashattn::cpu::FLASHATTN_ISA {

template <Compute kCompute>
void forward_task(const ForwardJob& job, int64_t task, char* scratch) {
  const ForwardWorkTile place = job.work_tile(task);
  const Interval heads = place.kv_heads;
  if (is_direct(*job.problem, job.sequences[place.b].len)) {
    return ForwardBlock<kCompute>(job, place, heads, scratch).run(nullptr);
  }
  for (int32_t h = heads.begin; h < heads.end; ++h) {
    ForwardBlock<kCompute> block(job, place, {h, h + 1}, scratch);
    if (task + job.threads >= job.tasks()) {
      block.run(nullptr);
      continue;
    }
    const ForwardWorkTile next = job.work_tile(task + job.threads);
    const int32_t first = next.kv_heads.begin;
    const ForwardBlock<kCompute> ahead(job, next, {first, first + 1}, scratch);
    block.run(&ahead);
  }
}

}  // namespace flashattn::cpu::FLASHATTN_ISA
