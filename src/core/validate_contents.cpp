// Checks the values of lengths and page numbers that the host can read. A wrong value is refused
// with its index before it is used as an address.
#include <cinttypes>
#include <initializer_list>

#include "core/error.h"
#include "core/validate_args.h"

namespace flashattn {
namespace {

// One side: queries or keys.
struct Side {
  const char *cu_name, *lens_name;
  const char *seqlen_name, *total_name;
  const int32_t *cu, *lens;
  int64_t seqlen, total;
};

void check_cumulative(const Side& side, int32_t batch) {
  if (side.cu[0] < 0) {
    reject(FLASHATTN_REASON_LENGTHS, side.cu_name,
           "%s[0] = %d is below 0; the first sequence starts at row 0 or later", side.cu_name,
           side.cu[0]);
  }
  for (int32_t b = 0; b < batch; ++b) {
    if (side.cu[b + 1] >= side.cu[b]) continue;
    reject(FLASHATTN_REASON_LENGTHS, side.cu_name,
           "%s[%" PRId64 "] = %d is below %s[%d] = %d; starts of sequences must not decrease",
           side.cu_name, static_cast<int64_t>(b) + 1, side.cu[b + 1], side.cu_name, b, side.cu[b]);
  }
  if (side.cu[batch] > side.total) {
    reject(FLASHATTN_REASON_LENGTHS, side.cu_name,
           "%s[%d] = %d is above %s = %" PRId64
           "; the last sequence must end within the rows that "
           "are there",
           side.cu_name, batch, side.cu[batch], side.total_name, side.total);
  }
}

void check_lengths(const Side& side, int32_t batch) {
  if (side.cu) check_cumulative(side, batch);
  for (int32_t b = 0; b < batch; ++b) {
    const int64_t capacity = side.cu ? side.cu[b + 1] - side.cu[b] : side.seqlen;
    const int64_t length = side.lens ? side.lens[b] : capacity;
    if (length < 0 || length > capacity) {
      reject(FLASHATTN_REASON_LENGTHS, side.lens_name,
             "%s[%d] = %" PRId64 " is not within 0 and %" PRId64
             ", the rows of this sequence; give the number of tokens in use",
             side.lens_name, b, length, capacity);
    }
    if (length > side.seqlen) {
      reject(FLASHATTN_REASON_LENGTHS, side.lens ? side.lens_name : side.cu_name,
             "sequence %d has %" PRId64 " rows in %s, above %s = %" PRId64
             "; set that to the length of the longest sequence",
             b, length, side.lens ? side.lens_name : side.cu_name, side.seqlen_name, side.seqlen);
    }
  }
}

// Left padding: at most the length of the sequence.
void check_starts(const Side& side, const int32_t* starts, int32_t batch) {
  for (int32_t b = 0; b < batch; ++b) {
    const int64_t capacity = side.cu ? side.cu[b + 1] - side.cu[b] : side.seqlen;
    const int64_t length = side.lens ? side.lens[b] : capacity;
    if (starts[b] >= 0 && starts[b] <= length) continue;
    reject(FLASHATTN_REASON_LENGTHS, "starts_kv",
           "starts_kv[%d] = %d is not within 0 and %" PRId64
           ", the tokens of the sequence; give the number of keys to leave out at its start",
           b, starts[b], length);
  }
}

void check_pages(const Problem& problem, const Shape& shape, const Inputs& inputs) {
  for (int32_t b = 0; b < shape.batch; ++b) {
    const int32_t length = inputs.lens_kv ? inputs.lens_kv[b] : shape.seqlen_kv;
    const int64_t used = ceil_div(length, problem.page_size);
    const int32_t* row = inputs.page_table + b * inputs.page_table_stride;
    for (int64_t n = 0; n < used; ++n) {
      if (row[n] >= 0 && row[n] < inputs.pages) continue;
      if (row[n] < 0 && problem.has_mask(FLASHATTN_MASK_PAGES)) continue;
      reject(FLASHATTN_REASON_LENGTHS, "page_table",
             "page_table[%d][%" PRId64 "] = %d is not within 0 and %" PRId64
             ", the last of pages = %" PRId64 "; sequence %d uses its first %" PRId64
             " entries (%d tokens in pages of %d): give each the number of a page of the pool",
             b, n, row[n], inputs.pages - 1, inputs.pages, b, used, length, problem.page_size);
    }
  }
}

}  // namespace

void check_contents(const Problem& problem, const Shape& shape, const Inputs& inputs) {
  if (shape.batch == 0) return;
  const Side q = {"cu_seqlens_q",      "lens_q",      "seqlen_q",     "total_q",
                  inputs.cu_seqlens_q, inputs.lens_q, shape.seqlen_q, shape.total_q};
  const Side kv = {"cu_seqlens_kv",      "lens_kv",      "seqlen_kv",     "total_kv",
                   inputs.cu_seqlens_kv, inputs.lens_kv, shape.seqlen_kv, shape.total_kv};
  for (const Side* side : {&q, &kv}) {
    if (side->cu || side->lens) check_lengths(*side, shape.batch);
  }
  if (inputs.starts_kv) check_starts(kv, inputs.starts_kv, shape.batch);
  if (problem.has_layout(FLASHATTN_LAYOUT_PAGED_KV)) check_pages(problem, shape, inputs);
}

}  // namespace flashattn
