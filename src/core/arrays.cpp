#include "core/arrays.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>

#include "core/error.h"

namespace flashattn {
namespace {

constexpr const char* kTensorStrides[] = {".stride_batch", ".stride_head", ".stride_seq"};

// A structure member's name for last_error, and the same name with its index for the message.
struct Label {
  char field[64];
  char text[80];

  Label(const Array& array, const char* suffix) {
    std::snprintf(field, sizeof field, "%s%s", array.name, suffix);
    if (array.index < 0) {
      std::snprintf(text, sizeof text, "%s", field);
    } else {
      std::snprintf(text, sizeof text, "%s[%d]%s", array.name, array.index, suffix);
    }
  }
};

[[noreturn]] void reject_too_large(const Array& array) {
  const Label label(array, array.pointer_suffix);
  reject(FLASHATTN_REASON_SIZE, label.field,
         "%s with %" PRId64 " x %" PRId64 " x %" PRId64 " x %" PRId64
         " elements (batch, head, token, element) and its strides reaches past 2^63 bytes or the "
         "end of the address space; check the "
         "sizes and strides",
         label.text, array.extent[0], array.extent[1], array.extent[2], array.extent[3]);
}

// Whether the array has an element. Refuses negative strides and counts past 2^63 bytes.
bool check_counts(const Array& array) {
  int64_t bytes = array.element;
  bool empty = false, overflow = false;
  for (int d = 0; d < 4; ++d) {
    if (array.stride[d] < 0) {
      const Label label(array, array.suffixes ? array.suffixes[d] : "");
      reject(FLASHATTN_REASON_STRIDE, label.field,
             "%s = %" PRId64
             " is below 0; strides count elements upwards: give the first element of memory as the "
             "pointer, and positive strides, or -1 for those of a packed array",
             label.text, array.stride[d]);
    }
    empty = empty || array.extent[d] == 0;
    overflow = overflow || __builtin_mul_overflow(bytes, array.extent[d], &bytes);
  }
  if (empty) return false;
  if (overflow) reject_too_large(array);
  return true;
}

void check_pointer(const Array& array) {
  if (!array.data) {
    const Label label(array, array.pointer_suffix);
    reject(FLASHATTN_REASON_NULL_POINTER, label.field,
           "%s is NULL, but this plan and shape need it; give %s %" PRId64 " elements of %d bytes",
           label.text, array.use == Use::kInput ? "an array of" : "memory for",
           array.extent[0] * array.extent[1] * array.extent[2] * array.extent[3], array.element);
  }
  const uintptr_t misfit =
      reinterpret_cast<uintptr_t>(array.data) % static_cast<uintptr_t>(array.element);
  if (misfit != 0) {
    const Label label(array, array.pointer_suffix);
    reject(FLASHATTN_REASON_MISALIGNED, label.field,
           "%s = %p is not aligned to its element of %d bytes; move the array to a multiple of "
           "that",
           label.text, array.data, array.element);
  }
}

void find_reach(Array* array) {
  int64_t last = 0, bytes = 0;
  bool overflow = false;
  for (int d = 0; d < 4; ++d) {
    int64_t step = 0;
    overflow |= __builtin_mul_overflow(array->extent[d] - 1, array->stride[d], &step);
    overflow |= __builtin_add_overflow(last, step, &last);
  }
  overflow |= __builtin_add_overflow(last, int64_t{1}, &last);
  overflow |= __builtin_mul_overflow(last, static_cast<int64_t>(array->element), &bytes);
  array->begin = reinterpret_cast<uintptr_t>(array->data);
  overflow |= __builtin_add_overflow(array->begin, static_cast<uintptr_t>(bytes), &array->end);
  if (overflow) reject_too_large(*array);
}

// Adds the next step, no shorter than those before. It extends the run, or the last step if it
// continues that step's places; otherwise it is a step of its own.
void add_step(Array* array, Array::Step next) {
  if (array->steps == 0 && next.bytes <= array->run) {
    array->run += next.bytes * (next.count - 1);
    return;
  }
  if (array->steps > 0) {
    Array::Step& last = array->step[array->steps - 1];
    if (next.bytes % last.bytes == 0 && next.bytes / last.bytes <= last.count) {
      last.count += next.bytes / last.bytes * (next.count - 1);
      return;
    }
  }
  array->step[array->steps++] = next;
}

// Walks the indices from the smallest stride to the largest. Each stride must pass all that the
// indices before it reach; otherwise elements would share memory.
void check_nesting(Array* array) {
  int order[4], n = 0;
  for (int d = 3; d >= 0; --d) {
    if (array->extent[d] <= 1) continue;
    if (array->stride[d] == 0) {
      if (array->use != Use::kOutput) continue;
      const Label label(*array, array->suffixes ? array->suffixes[d] : "");
      reject(FLASHATTN_REASON_STRIDE, label.field,
             "%s = 0, but %" PRId64
             " results would be written to the same place; zero strides repeat inputs only: give "
             "the stride, or -1 for that of a packed array (flashattn_args_init sets it)",
             label.text, array->extent[d]);
    }
    int at = n++;
    for (; at > 0 && array->stride[order[at - 1]] > array->stride[d]; --at) {
      order[at] = order[at - 1];
    }
    order[at] = d;
  }
  int64_t filled = 1;  // elements reached so far, from the first to one past the last
  array->run = array->element;
  for (int at = 0; at < n; ++at) {
    const int d = order[at];
    add_step(array, {array->stride[d] * array->element, array->extent[d]});
    if (array->stride[d] < filled && array->use != Use::kInput) {
      const Label label(*array, array->suffixes && d < 3 ? array->suffixes[d] : "");
      reject(FLASHATTN_REASON_STRIDE, label.field,
             "%s = %" PRId64 " is below %" PRId64
             ", the elements one step reaches over: results "
             "would overlap each other; use a larger stride",
             label.text, array->stride[d], filled);
    }
    filled += array->stride[d] * (array->extent[d] - 1);
  }
}

// Searches for a run of x (Array::run) that shares a byte with a run of y: for steps of x, less
// steps of y, that add up to an offset within [low_, high_].
class Differences {
 public:
  Differences(const Array& x, const Array& y)
      : low_(Int128{y.begin} - x.begin - x.run + 1), high_(Int128{y.begin} - x.begin + y.run - 1) {
    int32_t nx = x.steps, ny = y.steps;
    for (; nx > 0 || ny > 0; ++count_) {
      const int64_t of_x = nx > 0 ? x.step[nx - 1].bytes : 0;
      const int64_t of_y = ny > 0 ? y.step[ny - 1].bytes : 0;
      Times& times = times_[count_];
      times.bytes = std::max({of_x, of_y, int64_t{1}});  // steps are positive
      if (of_x == times.bytes) times.most = x.step[--nx].count - 1;
      if (of_y == times.bytes) times.least = 1 - y.step[--ny].count;
    }
    for (int32_t n = count_ - 1; n >= 0; --n) {
      const Times& times = times_[n];
      least_[n] = least_[n + 1] + times.bytes * times.least;
      most_[n] = most_[n + 1] + times.bytes * times.most;
    }
  }

  // Whether a run of x and a run of y have a byte in common.
  bool meet() { return meet(0, low_, high_); }

 private:
  __extension__ using Int128 = __int128;  // sums of numbers that just fit 64 bits

  struct Times {
    Int128 bytes = 1, least = 0, most = 0;
  };

  static Int128 floor(Int128 a, Int128 b) { return a / b - (a % b < 0); }

  // Whether the steps from number n on, longest first, can add up to an offset within [low, high].
  bool meet(int32_t n, Int128 low, Int128 high) {
    if (n == count_) return low <= 0 && high >= 0;
    const Times& times = times_[n];
    // With any other t the remaining steps do not reach the bounds.
    const Int128 first = -floor(most_[n + 1] - low, times.bytes);
    const Int128 last = floor(high - least_[n + 1], times.bytes);
    const Int128 end = last < times.most ? last : times.most;
    for (Int128 t = first > times.least ? first : times.least; t <= end; ++t) {
      if (trials_-- <= 0) return false;
      if (meet(n + 1, low - t * times.bytes, high - t * times.bytes)) return true;
    }
    return false;
  }

  Int128 low_, high_;                    // runs share a byte at these offsets
  Times times_[8];                       // how often each step is taken; the longest step first
  Int128 least_[9] = {}, most_[9] = {};  // offsets that the steps from one on add up to
  int32_t count_ = 0, trials_ = 1024;
};

}  // namespace

void check_array(Array* array) {
  array->begin = array->end = reinterpret_cast<uintptr_t>(array->data);
  array->run = 0;
  array->steps = 0;
  if (!check_counts(*array)) return;
  check_pointer(*array);
  find_reach(array);
  check_nesting(array);
}

bool share_memory(const Array& x, const Array& y) {
  if (x.begin >= y.end || y.begin >= x.end || x.run == 0 || y.run == 0) return false;
  return x.begin == y.begin || Differences(x, y).meet();
}

void check_apart(const Array& output, const Array& other) {
  if (!share_memory(output, other)) return;
  const Label label(output, output.pointer_suffix), with(other, other.pointer_suffix);
  reject(FLASHATTN_REASON_OVERLAP, label.field,
         "%s (%" PRIu64 " bytes at %p) overlaps %s (%" PRIu64
         " bytes at %p); what is written must "
         "not share memory with anything else of the call: use memory of its own",
         label.text, static_cast<uint64_t>(output.end - output.begin), output.data, with.text,
         static_cast<uint64_t>(other.end - other.begin), other.data);
}

void ArrayList::add(Array array) {
  check_array(&array);
  if (size_ == kCapacity) {
    refuse(FLASHATTN_ERROR_INTERNAL, FLASHATTN_REASON_NONE, "",
           "more than %d arrays in a call; this is a fault of the library, please report it",
           kCapacity);
  }
  arrays_[size_++] = array;
}

void ArrayList::add_bytes(const char* name, const void* data, int64_t bytes) {
  add(packed_array(name, Use::kOutput, data, 1, bytes));
}

void ArrayList::check_overlaps() const {
  for (int32_t i = 0; i < size_; ++i) {
    if (arrays_[i].use == Use::kInput) continue;
    for (int32_t j = 0; j < size_; ++j) {
      // Each pair of outputs is compared once.
      if (j == i || (j < i && arrays_[j].use != Use::kInput)) continue;
      check_apart(arrays_[i], arrays_[j]);
    }
  }
}

Rows query_rows(const Problem& problem, const Shape& shape) {
  if (problem.has_layout(FLASHATTN_LAYOUT_VARLEN_Q)) return {1, shape.total_q};
  return {shape.batch, shape.seqlen_q};
}

Rows key_rows(const Problem& problem, const Shape& shape, int64_t pages) {
  if (problem.has_layout(FLASHATTN_LAYOUT_VARLEN_KV)) return {1, shape.total_kv};
  if (!problem.has_layout(FLASHATTN_LAYOUT_PAGED_KV)) return {shape.batch, shape.seqlen_kv};
  const bool used = shape.batch > 0 && shape.seqlen_kv > 0;
  return {used ? pages : 0, problem.page_size};
}

flashattn_tensor resolve_strides(const flashattn_tensor& tensor, const int64_t (&extent)[4],
                                 Order order) {
  flashattn_tensor resolved = tensor;
  int64_t* const strides[] = {&resolved.stride_batch, &resolved.stride_head, &resolved.stride_seq};
  // Packs from the innermost index outwards.
  const int order_of[][3] = {{1, 2, 0}, {2, 1, 0}};
  int64_t packed = extent[3];
  for (const int d : order_of[order == Order::kHeads]) {
    if (*strides[d] == 0) continue;
    if (*strides[d] == -1) *strides[d] = packed;
    // A packed array past 2^63 does not exist, and check_array refuses the count.
    if (__builtin_mul_overflow(packed, extent[d], &packed)) packed = 0;
  }
  const bool empty = extent[0] == 0 || extent[1] == 0 || extent[2] == 0 || extent[3] == 0;
  for (int d = 0; d < 3; ++d) {
    if (empty || extent[d] <= 1) *strides[d] = 0;
  }
  return resolved;
}

flashattn_tensor resolve_strides(const flashattn_tensor& tensor, Rows rows, int32_t heads,
                                 int32_t dim) {
  return resolve_strides(tensor, {rows.batch, heads, rows.tokens, dim}, Order::kTokens);
}

Array strided_array(const char* name, Use use, flashattn_tensor* tensor, const int64_t (&extent)[4],
                    Order order, int32_t element) {
  const flashattn_tensor given = *tensor;
  *tensor = resolve_strides(given, extent, order);
  if (use == Use::kSum) {
    const auto keep = [](int64_t before, int64_t* stride) {
      if (before != 0 && *stride == 0) *stride = 1;
    };
    keep(given.stride_batch, &tensor->stride_batch);
    keep(given.stride_head, &tensor->stride_head);
    keep(given.stride_seq, &tensor->stride_seq);
  }
  Array array = packed_array(name, use, tensor->data, element, 0);
  array.pointer_suffix = ".data";
  array.suffixes = kTensorStrides;
  const int64_t stride[4] = {tensor->stride_batch, tensor->stride_head, tensor->stride_seq, 1};
  for (int d = 0; d < 4; ++d) {
    array.extent[d] = extent[d];
    array.stride[d] = stride[d];
  }
  return array;
}

Array tensor_array(const char* name, Use use, flashattn_tensor* tensor, Rows rows, int32_t heads,
                   int32_t dim, int32_t dtype) {
  return strided_array(name, use, tensor, {rows.batch, heads, rows.tokens, dim}, Order::kTokens,
                       dtype_size(dtype));
}

Array packed_array(const char* name, Use use, const void* data, int32_t element, int64_t n0,
                   int64_t n1, int64_t n2, int64_t n3) {
  Array array = {};
  array.name = name;
  array.pointer_suffix = "";
  array.index = -1;
  array.use = use;
  array.data = data;
  array.element = element;
  const int64_t extent[4] = {n0, n1, n2, n3};
  int64_t stride = 1;
  for (int d = 3; d >= 0; --d) {
    array.extent[d] = extent[d];
    array.stride[d] = stride;
    // A count past 2^63 is refused by check_array, which does not look at the strides before.
    if (__builtin_mul_overflow(stride, extent[d], &stride)) stride = 0;
  }
  return array;
}

Array lse_array(const char* name, Use use, const float* data, const Problem& problem, Rows rows) {
  return packed_array(name, use, data, sizeof(float), rows.batch, problem.heads_q, rows.tokens);
}

}  // namespace flashattn
