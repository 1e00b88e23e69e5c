// The arrays of a call as the header describes them, found out anew: the fuzzer shares no code
// with the library's own checks.
#pragma once

#include <cstdint>
#include <vector>

#include "flashattn.h"
#include "input.h"
#include "memory.h"

namespace fuzz {

constexpr int64_t kMostBytes = 1 << 24;  // of an array that is made

enum class Role {
  kInput,
  kOutput,
  kSum,    // an output with strides of 0 where it is summed
  kUnused  // by this operation
};

struct Array {
  const char* name;
  void** pointer;            // the member that holds the address
  flashattn_tensor* tensor;  // NULL: packed, without strides
  Role forward, backward;
  int32_t dtype;      // enum flashattn_dtype; 0: integers
  int32_t element;    // bytes
  bool heads_first;   // (batch, head, seq, element) in packed memory, not (batch, seq, head, ...)
  int64_t extent[4];  // batch, head, seq, element
  int64_t stride[4];  // elements; resolved
  int64_t bytes;      // it reaches; 0: empty; -1: cannot be made
  Block* block;       // NULL: none was made
  int64_t offset;     // in the block

  Role role(uint32_t op) const { return op == FLASHATTN_OP_FORWARD ? forward : backward; }
  bool wanted() const { return forward != Role::kUnused || backward != Role::kUnused; }
  int64_t at(int64_t b, int64_t h, int64_t s, int64_t c) const {
    return offset + (b * stride[0] + h * stride[1] + s * stride[2] + c * stride[3]) * element;
  }
};

// What a plan computes with, defaults resolved.
struct Facts {
  flashattn_desc desc;
  bool has(uint32_t bits, uint32_t bit) const { return (bits & bit) != 0; }
  bool varlen_q() const { return has(desc.layout, FLASHATTN_LAYOUT_VARLEN_Q); }
  bool varlen_kv() const { return has(desc.layout, FLASHATTN_LAYOUT_VARLEN_KV); }
  bool paged() const { return has(desc.layout, FLASHATTN_LAYOUT_PAGED_KV); }
};

int32_t bytes_of(int32_t dtype);

// All arrays that the plan can use, with their extents; pointers into args. Strides are those of
// args, not resolved yet.
std::vector<Array> list_arrays(const Facts& facts, flashattn_args* args);

// Resolves the strides of args and says how far the array reaches.
void measure(Array* array);

// Fills an array of floats or of free bytes: numbers of magnitude up to 1, any bits (infinities,
// NaN, FLT_MAX), or the one with some of the other.
enum class Kind { kUsual, kHostile, kMixed };
void fill(const Array& array, Kind kind, Numbers* numbers);

// Sequence by sequence, how a call that was accepted looks. False: its lengths are impossible.
struct Rows {
  int64_t first_q, len_q, first_kv, len_kv;  // VARLEN: first in the whole array; else in a batch
};
bool sequences_of(const Facts& facts, const flashattn_args& args, std::vector<Rows>* rows);

// All elements of an output may be written.
void allow(const Array& a);

// Whether two arrays have a byte in common, by looking at each.
bool share_bytes(const Array& x, const Array& y);

}  // namespace fuzz
