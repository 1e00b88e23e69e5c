// Checks of array arguments, once for all calls: pointer, alignment, strides, reach and overlap.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/problem.h"

namespace flashattn {

enum class Use { kInput, kOutput, kSum };  // kSum: an output in which stride 0 means "summed over"

// Indices are outermost first: (batch, head, token, element) for most arrays. The last is
// contiguous.
struct Array {
  const char* name;             // "q"
  const char* pointer_suffix;   // ".data": with the name, the pointer's structure member
  const char* const* suffixes;  // ".stride_batch", ...: members of the first three strides; or NULL
  int32_t index;                // index in an array of arrays; -1: not in one
  Use use;
  const void* data;
  int32_t element;  // bytes
  int64_t extent[4];
  int64_t stride[4];  // elements

  // Filled by check_array.
  uintptr_t begin, end;  // addresses that it spans; equal if it has no element
  // The bytes of the array form runs of `run` contiguous bytes. Each step repeats what lies before
  // it at `count` places, `bytes` apart.
  int64_t run;
  int32_t steps;
  struct Step {
    int64_t bytes, count;  // bytes > 0; count >= 2 places
  } step[4];               // the longest last
};

// Refuses an array that is wrong by itself, and fills the derived members. All other functions need
// a checked array.
void check_array(Array* array);

// Whether two checked arrays have a byte in common. Exact if every step of both, in ascending
// order, is at least as long as the reach of the smaller ones: true for outputs with equal strides,
// and if one array has no gaps. Otherwise a search of a thousand trials; arrays for which it finds
// no common byte count as apart.
bool share_memory(const Array& x, const Array& y);

// Refuses an output that shares memory with another array. Interleaved arrays (packed QKV) pass.
void check_apart(const Array& output, const Array& other);

// The arrays of one call, each checked as it is added.
class ArrayList {
 public:
  void add(Array array);
  // Adds memory without structure: a workspace.
  void add_bytes(const char* name, const void* data, int64_t bytes);
  // Refuses any output that overlaps another array of the list.
  void check_overlaps() const;

 private:
  static constexpr int32_t kCapacity = 32;
  Array arrays_[kCapacity];
  int32_t size_ = 0;
};

// Sequences and tokens of a tensor as they lie in memory. VARLEN: one batch of all tokens. Paged: a
// batch entry is a page.
struct Rows {
  int64_t batch, tokens;
};

Rows query_rows(const Problem& problem, const Shape& shape);
Rows key_rows(const Problem& problem, const Shape& shape, int64_t pages);

// The order of the indices of a packed array: (batch, token, head, element) or (batch, head, token,
// element).
enum class Order { kTokens, kHeads };

// Returns the tensor with the strides to use. -1 becomes the stride of a packed array without the
// indices whose stride is 0, because these repeat the array. Strides of extents of 1 and of arrays
// without elements become 0. extent: batch, head, token, element.
flashattn_tensor resolve_strides(const flashattn_tensor& tensor, const int64_t (&extent)[4],
                                 Order order);
// Resolves the strides of q, k, v, o or one of their gradients.
flashattn_tensor resolve_strides(const flashattn_tensor& tensor, Rows rows, int32_t heads,
                                 int32_t dim);

// Describes the tensor and resolves its strides in place. In an output that sums (Use::kSum),
// unused strides other than 0 become 1, because 0 has a meaning there.
Array strided_array(const char* name, Use use, flashattn_tensor* tensor, const int64_t (&extent)[4],
                    Order order, int32_t element);

// Describes q, k, v, o or one of their gradients likewise.
Array tensor_array(const char* name, Use use, flashattn_tensor* tensor, Rows rows, int32_t heads,
                   int32_t dim, int32_t dtype);

// Describes an array without gaps.
Array packed_array(const char* name, Use use, const void* data, int32_t element, int64_t n0,
                   int64_t n1 = 1, int64_t n2 = 1, int64_t n3 = 1);

// Describes lse or dlse: (batch, head, query), or (head, total_q).
Array lse_array(const char* name, Use use, const float* data, const Problem& problem, Rows rows);

}  // namespace flashattn
