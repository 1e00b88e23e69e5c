// The tasks that make a block mask: each makes some rows of it.
#include <algorithm>
#include <cstring>

#include "cpu/launcher.h"

namespace flashattn::cpu {

int32_t CpuLauncher::make_block_mask(const BlockMaskArgs& args, const BlockMaskRows& mask,
                                     uint8_t* base, const Executor& on) const {
  constexpr int64_t kTaskBytes = 1 << 16;
  const int64_t task_rows = std::max<int64_t>(kTaskBytes / mask.stride_row, 1);
  const int64_t head_tasks = ceil_div(mask.rows, task_rows);
  const auto make_row = [&](int64_t b, int64_t h, int64_t y) {
    uint8_t* const row = mask.row(base, b, h, y);
    if (args.mask.data) {
      const uint8_t* const from = static_cast<const uint8_t*>(args.mask.data) +
                                  b * args.mask.stride_batch + h * args.mask.stride_head +
                                  y * args.mask.stride_seq;
      for (int64_t x = 0; x < mask.columns; ++x) {
        row[x] = from[x] ? block_byte(args, mask, b, h, x) : 0;
      }
      return;
    }
    std::memset(row, 0, static_cast<size_t>(mask.columns));
    const BlockList list = block_list(args, b, h, y);
    for (int64_t n = 0; n < list.count; ++n) {
      const int32_t x = list.entries[n];
      if (x >= 0 && x < mask.columns) row[x] = block_byte(args, mask, b, h, x);
    }
  };
  const double bytes = static_cast<double>(mask.bytes());
  parallel_tasks(threads_for(threads_, bytes, on), mask.batch * mask.heads * head_tasks, 1,
                 [&](int64_t task, int32_t) {
                   const int64_t head = task / head_tasks, b = head / mask.heads;
                   const int64_t h = head - b * mask.heads;
                   const int64_t first = (task - head * head_tasks) * task_rows;
                   for (int64_t y = first; y < std::min(first + task_rows, mask.rows); ++y) {
                     make_row(b, h, y);
                   }
                   if (!mask.has_lens || first > 0) return;
                   int32_t* const lens = mask.lens(base, b, h);
                   for (int64_t x = 0; x < mask.columns; ++x) {
                     lens[x] = block_len(args, mask, b, h, x);
                   }
                 });
  return FLASHATTN_OK;
}

}  // namespace flashattn::cpu
