// Block masks that the library makes in the workspace, from lists of blocks (BLOCK_LISTS) or with
// lengths of blocks (BLOCK_LENS): where their parts lie, and one row of each.
#pragma once

#include "core/bump_allocator.h"
#include "core/problem.h"

namespace flashattn {

// What the caller gives. A tensor whose data is NULL is not given.
struct BlockMaskArgs {
  flashattn_tensor mask;               // uint8_t; without BLOCK_LISTS
  flashattn_tensor index, begin, end;  // int32_t; with BLOCK_LISTS
  int64_t entries;
  flashattn_tensor lens;  // int32_t; with BLOCK_LENS
};

// A mask of `rows` x `columns` blocks for each of `batch` x `heads`; 1 where all of an extent have
// the same. With BLOCK_LENS the lengths of a head's blocks lie before its rows: block_lens_of().
struct BlockMaskRows {
  int64_t rows, columns, stride_row;  // stride_row: a multiple of 16
  int64_t batch, heads;
  int32_t block_kv, keys;
  bool has_lens;

  // The keys of block x, which may be the last.
  FLASHATTN_HD int32_t keys_of(int64_t x) const {
    const int64_t left = keys - x * block_kv;
    return left < block_kv ? static_cast<int32_t>(left) : block_kv;
  }
  FLASHATTN_HD int64_t lens_bytes() const { return has_lens ? stride_row * 4 : 0; }
  FLASHATTN_HD int64_t head_bytes() const { return lens_bytes() + rows * stride_row; }
  FLASHATTN_HD int64_t bytes() const { return batch * heads * head_bytes(); }
  FLASHATTN_HD uint8_t* row(uint8_t* base, int64_t b, int64_t h, int64_t y) const {
    return base + (b * heads + h) * head_bytes() + lens_bytes() + y * stride_row;
  }
  FLASHATTN_HD int32_t* lens(uint8_t* base, int64_t b, int64_t h) const {
    return reinterpret_cast<int32_t*>(base + (b * heads + h) * head_bytes());
  }
};

inline BlockMaskRows block_mask_rows(const Problem& problem, const Shape& shape) {
  const int64_t columns = ceil_div(shape.seqlen_kv, problem.block_kv);
  return {ceil_div(shape.seqlen_q, problem.block_q),
          columns,
          ceil_div(columns, 16) * 16,
          shape.batch,
          problem.heads_q,
          problem.block_kv,
          shape.seqlen_kv,
          problem.has_mask(FLASHATTN_MASK_BLOCK_LENS)};
}

// Where such a mask lies in the workspace: at its start.
using BlockMaskAllocator = BasicBumpAllocator<128>;

// The workspace that it takes, with what its alignment may cost.
inline int64_t block_mask_bytes(const Problem& problem, const Shape& shape) {
  if (!problem.has_mask(kMaskOfBlocks)) return 0;
  BlockMaskAllocator memory(nullptr);
  memory.take<uint8_t>(block_mask_rows(problem, shape).bytes());
  return memory.unaligned_bytes();
}

// The list of a row: its first entry, and how many there are.
struct BlockList {
  const int32_t* entries;
  int64_t count;
};

FLASHATTN_HD BlockList block_list(const BlockMaskArgs& args, int64_t b, int64_t h, int64_t y) {
  const auto at = [=](const flashattn_tensor& x) {
    return static_cast<const int32_t*>(x.data) + b * x.stride_batch + h * x.stride_head +
           y * x.stride_seq;
  };
  const auto within = [&args](int64_t x) {
    return x < 0 ? 0 : x < args.entries ? x : args.entries;
  };
  const int64_t begin = args.begin.data ? within(*at(args.begin)) : 0;
  const int64_t end = args.end.data ? within(*at(args.end)) : args.entries;
  return {at(args.index) + begin, end > begin ? end - begin : 0};
}

// The keys of block x that count, none of them behind the last key.
FLASHATTN_HD int32_t block_len(const BlockMaskArgs& args, const BlockMaskRows& mask, int64_t b,
                               int64_t h, int64_t x) {
  const flashattn_tensor& lens = args.lens;
  const int64_t at = b * lens.stride_batch + h * lens.stride_head + x * lens.stride_seq;
  return clamp_index(static_cast<const int32_t*>(lens.data)[at], mask.keys_of(x));
}

// The number for block x where the mask shows it: 1 or, with lengths, 0 if no key counts, 1 if only
// some do, 2.
FLASHATTN_HD uint8_t block_byte(const BlockMaskArgs& args, const BlockMaskRows& mask, int64_t b,
                                int64_t h, int64_t x) {
  if (!mask.has_lens) return 1;
  const int32_t len = block_len(args, mask, b, h, x);
  return len == 0 ? 0 : len < mask.keys_of(x) ? 1 : 2;
}

// The lengths of blocks of a head in such a mask. on, row: as score_mod() and BlockMask have them.
FLASHATTN_HD const int32_t* block_lens_of(const uint8_t* on, int64_t row) {
  return reinterpret_cast<const int32_t*>(on - 4 * row);
}

}  // namespace flashattn
