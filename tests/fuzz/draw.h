// Descriptors and arguments out of the bytes of an input.
#pragma once

#include <algorithm>
#include <vector>

#include "arrays.h"

namespace fuzz {

// Sizes that every maximum of the descriptor allows. Small: thousands of sizes a second are
// worth more than large ones.
struct Sizes {
  int32_t batch, seqlen_q, seqlen_kv;
  int64_t total_q, total_kv;
};

struct Request {
  flashattn_desc desc;
  Sizes sizes;
};
Request draw_request(Input* in);

// The arguments of one call, in memory of their own.
struct Call {
  Facts facts;
  flashattn_args args;
  std::vector<Array> arrays;
  bool outputs_alias;  // an array lies in the memory of another one, and one is written
};
void draw_sizes(Input* in, const Request& request, flashattn_args* args);
void draw_call(Input* in, const Request& request, const Facts& facts, Memory* memory, Call* call);

flashattn_tensor draw_strides(Input* in, const Array& array);

// Memory for the array, or NULL where it is too large to exist: such a call must be refused.
void place(Input* in, Array* array, Memory* memory);

Kind draw_kind(Input* in);

// The sizes of a structure in 0.2.0, below which none is taken, and in 0.1, which is refused.
template <typename Struct>
struct SizeOf;
template <>
struct SizeOf<flashattn_desc> {
  static constexpr size_t kFirst = 160, kOf01 = 184;
};
template <>
struct SizeOf<flashattn_args> {
  static constexpr size_t kFirst = 704, kOf01 = 464;
};
template <>
struct SizeOf<flashattn_merge_args> {
  static constexpr size_t kFirst = 112, kOf01 = 40;
};
template <>
struct SizeOf<flashattn_append_kv_args> {
  static constexpr size_t kFirst = 496, kOf01 = 8;  // 0.1 had none
};
template <>
struct SizeOf<flashattn_quantize_args> {
  static constexpr size_t kFirst = 440, kOf01 = 8;  // nor this
};
template <>
struct SizeOf<flashattn_plan_properties> {
  static constexpr size_t kFirst = 96, kOf01 = 88;
};

// The library takes the structure's size, and has read its members.
template <typename Struct>
bool is_taken(const Struct* given) {
  return given->struct_size >= SizeOf<Struct>::kFirst && given->struct_size <= 4096 &&
         given->struct_size != SizeOf<Struct>::kOf01;
}

// A structure of the caller's: of this header, of an older one that says the same, of a newer one,
// or, by mistake, of a size that is refused.
template <typename Struct>
Struct* draw_sized(Input* in, const Struct& value, Memory* memory, const char* name) {
  constexpr size_t kFirst = SizeOf<Struct>::kFirst, kOf01 = SizeOf<Struct>::kOf01;
  if (in->mistake(24)) {
    const uint32_t sizes[] = {
        0, 4, static_cast<uint32_t>(kFirst) - 8, static_cast<uint32_t>(kOf01), 4097, 0xffffffff};
    return Sized<Struct>(sizes[in->below(6)], memory, name).get();
  }
  size_t size = sizeof value;
  if (in->one_in(8)) {
    const auto* const bytes = reinterpret_cast<const char*>(&value);
    const auto is_zero = [&](size_t i) {
      return std::all_of(bytes + i, bytes + i + 8, [](char c) { return c == 0; });
    };
    while (size > kFirst && is_zero(size - 8)) size -= 8;
  } else if (in->one_in(4)) {
    size += static_cast<size_t>(in->below(8)) * 8;
  }
  if (size == kOf01) size += 8;
  const uint8_t tail = in->mistake(8) ? 1 : 0;
  return Sized<Struct>(value, size, tail, memory, name).get();
}

}  // namespace fuzz
