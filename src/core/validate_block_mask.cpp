// Checks the arguments of a block mask that the library makes itself.
#include <cinttypes>
#include <string>

#include "core/error.h"
#include "core/validate_args.h"

namespace flashattn {
namespace {

// As many blocks as elements of an array of the library's.
constexpr int64_t kMaxBlocks = INT64_C(1) << 46;

// Entries of a list: each block once, and some padding.
constexpr int64_t kMaxEntries = INT32_MAX;

void check_entries(const Problem& problem, const flashattn_args& args) {
  if (args.block_entries < 0 || args.block_entries > kMaxEntries) {
    reject(FLASHATTN_REASON_SIZE, "block_entries",
           "block_entries = %" PRId64 " is not within 0 and %" PRId64
           "; give the number of entries of a row of block_index",
           args.block_entries, kMaxEntries);
  }
  if (args.block_entries != 0 && !problem.has_mask(FLASHATTN_MASK_BLOCK_LISTS)) {
    reject(FLASHATTN_REASON_VALUE, "block_entries",
           "block_entries = %" PRId64
           ", but this plan does not use it: flashattn_desc has no mask bit BLOCK_LISTS; ask for "
           "that in the descriptor, or leave it at 0",
           args.block_entries);
  }
}

}  // namespace

void check_block_mask_size(const Problem& problem, const Shape& shape, const char* prefix) {
  if (!problem.has_mask(kMaskOfBlocks)) return;
  const BlockMaskRows mask = block_mask_rows(problem, shape);
  int64_t blocks = mask.rows;
  bool overflow = false;
  for (const int64_t factor : {mask.stride_row, mask.batch, mask.heads}) {
    overflow |= __builtin_mul_overflow(blocks, factor, &blocks);
  }
  if (!overflow && blocks <= kMaxBlocks) return;
  const std::string field = std::string(prefix) + "seqlen_kv";
  reject(
      FLASHATTN_REASON_SIZE, field.c_str(),
      "%s = %d: %" PRId64 " x %" PRId64 " blocks of %d x %d for each of %" PRId64
      " heads make more than 2^46 blocks, the limit of a mask that the library makes; use larger "
      "blocks or split the batch",
      field.c_str(), shape.seqlen_kv, mask.rows, mask.columns, problem.block_q, problem.block_kv,
      mask.batch * mask.heads);
}

BlockMaskArgs check_block_mask(const Problem& problem, const Shape& shape, const Inputs& inputs,
                               flashattn_args args, ArrayList* arrays) {
  check_entries(problem, args);
  BlockMaskArgs own{};
  if (!problem.has_mask(kMaskOfBlocks)) return own;
  const int64_t batch = shape.batch, heads = problem.heads_q;
  const BlockMaskRows mask = block_mask_rows(problem, shape);
  const auto add = [&](const char* name, flashattn_tensor* tensor, int64_t rows, int64_t columns) {
    arrays->add(strided_array(name, Use::kInput, tensor, {batch, heads, rows, columns},
                              Order::kHeads, sizeof(int32_t)));
    return *tensor;
  };
  if (problem.has_mask(FLASHATTN_MASK_BLOCK_LISTS)) {
    own.entries = args.block_entries;
    own.index = add("block_index", &args.block_index, mask.rows, own.entries);
    if (args.block_begin.data) own.begin = add("block_begin", &args.block_begin, mask.rows, 1);
    if (args.block_end.data) own.end = add("block_end", &args.block_end, mask.rows, 1);
  } else {
    own.mask = {const_cast<uint8_t*>(inputs.block_mask), inputs.block_mask_stride_batch,
                inputs.block_mask_stride_head, inputs.block_mask_stride_row};
  }
  if (problem.has_mask(FLASHATTN_MASK_BLOCK_LENS)) {
    own.lens = add("block_lens", &args.block_lens, mask.columns, 1);
  }
  return own;
}

}  // namespace flashattn
