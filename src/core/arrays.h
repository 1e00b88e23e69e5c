// Array arguments, reduced to what every check of them needs: pointer, alignment, strides, reach
// and overlap are decided here once for all calls.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/problem.h"

namespace flashattn {

enum class Use { kInput, kOutput, kSum };  // kSum: an output in which stride 0 means "summed over"

// Indices, outermost first: (batch, head, token, element) for most arrays. The last is contiguous.
struct Array {
  const char* name;             // "inputs.q"
  const char* pointer_suffix;   // ".data": with the name, the pointer's structure member
  const char* const* suffixes;  // of the members that hold the first three strides; may be NULL
  int32_t index;                // of an array of arrays; -1: not one
  Use use;
  const void* data;
  int32_t element;  // bytes
  int64_t extent[4];
  int64_t stride[4];  // elements

  // Filled by check_array.
  uintptr_t begin, end;  // bytes it reaches; equal when it has no element
  bool dense;            // every byte between is part of it
};

// Refuses what is wrong with the array by itself, and fills begin, end and dense. Nothing else may
// be asked of an array before.
void check_array(Array* array);

// Refuses an output that certainly shares memory with another array: both without gaps and with a
// byte in common, starting at the same address, or one without gaps around the other's first
// element. Interleaved arrays (packed QKV) pass.
void check_apart(const Array& output, const Array& other);

// The arrays of one call, each checked as it is added.
class ArrayList {
 public:
  void add(Array array);
  // Memory without structure: a workspace.
  void add_bytes(const char* name, const void* data, int64_t bytes);
  // Refuses any output that overlaps another array of the list.
  void check_overlaps() const;

 private:
  static constexpr int32_t kCapacity = 32;
  Array arrays_[kCapacity];
  int32_t size_ = 0;
};

// Sequences and tokens of a tensor as they lie in memory. VARLEN: one batch of all tokens; pages:
// a batch is a page.
struct Rows {
  int64_t batch, tokens;
  bool varlen;
};

Rows query_rows(const Problem& problem, const flashattn_shape& shape);
Rows key_rows(const Problem& problem, const flashattn_shape& shape, int64_t pages);

// The tensor with packed strides written out, when all three are zero.
flashattn_tensor resolve_strides(const flashattn_tensor& tensor, Rows rows, int32_t heads,
                                 int32_t dim);

// Resolves the tensor's strides in place and describes it.
Array tensor_array(const char* name, Use use, flashattn_tensor* tensor, Rows rows, int32_t heads,
                   int32_t dim, int32_t dtype);

// An array without gaps.
Array packed_array(const char* name, Use use, const void* data, int32_t element, int64_t n0,
                   int64_t n1 = 1, int64_t n2 = 1, int64_t n3 = 1);

// lse, dlse: (batch, head, query), or (head, total_q).
Array lse_array(const char* name, Use use, const float* data, const Problem& problem, Rows rows);

}  // namespace flashattn
