// Descriptors and arguments out of the bytes of an input.
#pragma once

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

// A structure of the caller's, with a size that this library takes or, by mistake, does not.
template <typename Struct>
Struct* draw_sized(Input* in, const Struct& value, size_t refused, Memory* memory,
                   const char* name) {
  if (in->mistake(24)) {
    const uint32_t sizes[] = {
        0,    4,         static_cast<uint32_t>(sizeof value) - 8, static_cast<uint32_t>(refused),
        4097, 0xffffffff};
    return Sized<Struct>(sizes[in->below(6)], memory, name).get();
  }
  size_t rest = in->one_in(4) ? static_cast<size_t>(in->below(8)) * 8 : 0;
  if (sizeof value + rest == refused) rest += 8;
  const uint8_t tail = in->mistake(8) ? 1 : 0;
  return Sized<Struct>(value, rest, tail, memory, name).get();
}

}  // namespace fuzz
