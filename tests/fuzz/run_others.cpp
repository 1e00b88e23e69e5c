// Merge and the dropout mask.
#include <algorithm>
#include <cmath>

#include "calls.h"

namespace fuzz {
namespace {

struct Merge {
  flashattn_merge_args args;
  Array o, lse;
  std::vector<Array> part_o, part_lse;
  std::vector<flashattn_tensor> tensors;
  std::vector<const float*> lses;
};

// An array shaped like o or like lse. Its pointer is set by place().
Array shaped(const Facts& facts, const flashattn_merge_args& args, const char* name, Role role,
             int32_t dtype, bool is_lse, void** pointer) {
  const flashattn_desc& d = facts.desc;
  const int64_t rows = facts.varlen_q() ? args.total_q : args.seqlen_q;
  Array a{};
  a.name = name;
  a.pointer = pointer;
  a.forward = a.backward = role;
  a.dtype = dtype;
  a.element = bytes_of(dtype);
  a.heads_first = is_lse;
  const int64_t extent[4] = {facts.varlen_q() ? 1 : args.batch, d.heads_q, rows,
                             is_lse ? 1 : d.dim_v};
  std::copy(extent, extent + 4, a.extent);
  return a;
}

void draw_tensor(Input* in, Array* array, flashattn_tensor* tensor, Memory* memory, Kind kind,
                 Numbers* numbers) {
  *tensor = draw_strides(in, *array);
  array->tensor = tensor;
  array->pointer = &tensor->data;
  place(in, array, memory);
  fill(*array, kind, numbers);
}

void draw_flat(Input* in, Array* array, const float** pointer, Memory* memory, Kind kind,
               Numbers* numbers) {
  void* address = nullptr;
  array->pointer = &address;
  place(in, array, memory);
  array->pointer = nullptr;
  *pointer = static_cast<const float*>(address);
  fill(*array, kind, numbers);
}

void draw_merge(Input* in, const Request& request, const Facts& facts, Memory* memory, Merge* m) {
  flashattn_merge_args& args = m->args;
  flashattn_merge_args_init(&args, sizeof args);
  args.parts = 1 + in->below(4);
  args.batch = request.sizes.batch;
  args.seqlen_q = request.sizes.seqlen_q;
  args.total_q = request.sizes.total_q;
  args.dtype_part = in->pick<int32_t>({0, facts.desc.dtype_o, FLASHATTN_DTYPE_F32});
  if (in->mistake(8)) args.dtype_part = static_cast<int32_t>(in->wild());
  if (in->mistake(8)) args.batch = static_cast<int32_t>(in->wild());
  if (in->mistake(8)) args.seqlen_q = static_cast<int32_t>(in->wild());
  if (in->mistake(8)) args.total_q = in->wild();
  if (in->mistake(24)) args.reserved = static_cast<int32_t>(in->wild());
  const int32_t dtype = args.dtype_part == 0 ? facts.desc.dtype_o : args.dtype_part;

  Numbers numbers(in->word());
  m->o = shaped(facts, args, "o", Role::kOutput, facts.desc.dtype_o, false, nullptr);
  draw_tensor(in, &m->o, &args.o, memory, Kind::kUsual, &numbers);
  m->lse = shaped(facts, args, "lse", Role::kOutput, FLASHATTN_DTYPE_F32, true, nullptr);
  const float* lse = nullptr;
  if (in->one_in(2)) draw_flat(in, &m->lse, &lse, memory, Kind::kUsual, &numbers);
  args.lse = const_cast<float*>(lse);
  const size_t parts = static_cast<size_t>(args.parts);
  m->tensors.resize(parts);
  m->lses.resize(parts);
  for (size_t p = 0; p < parts; ++p) {
    m->part_o.push_back(shaped(facts, args, "part_o", Role::kInput, dtype, false, nullptr));
    draw_tensor(in, &m->part_o[p], &m->tensors[p], memory, draw_kind(in), &numbers);
    m->part_lse.push_back(
        shaped(facts, args, "part_lse", Role::kInput, FLASHATTN_DTYPE_F32, true, nullptr));
    draw_flat(in, &m->part_lse[p], &m->lses[p], memory, draw_kind(in), &numbers);
    if (in->mistake(32)) m->tensors[p].data = nullptr;
    if (in->mistake(32)) m->lses[p] = nullptr;
  }
  if (in->one_in(4) && dtype == facts.desc.dtype_o) m->tensors[0] = args.o;  // in place
  if (in->one_in(8) && args.lse) m->lses[0] = args.lse;
}

// The host's list of parts, in a block that ends with it.
template <typename T>
const T* list_of(const std::vector<T>& values, Memory* memory, const char* name) {
  Block& block = memory->make(values.size() * sizeof(T), name);
  std::memcpy(block.data.get(), values.data(), block.size);
  return reinterpret_cast<const T*>(block.data.get());
}

}  // namespace

void run_merge(Round* round) {
  Input* const in = round->in;
  Memory memory;
  Merge m{};
  draw_merge(in, round->request, round->facts, &memory, &m);
  flashattn_merge_args& args = m.args;
  const double rows = round->facts.varlen_q() ? static_cast<double>(args.total_q)
                                              : static_cast<double>(args.batch) * args.seqlen_q;
  if (rows * round->facts.desc.heads_q * round->facts.desc.dim_v > 1e6) return;
  args.part_o = list_of(m.tensors, &memory, "part_o, the list");
  args.part_lse = list_of(m.lses, &memory, "part_lse, the list");
  bool bad = false;
  const auto mistake = [&] { return in->mistake(32) && (bad = true); };
  if (mistake()) args.part_o = nullptr;
  if (mistake()) args.part_lse = nullptr;
  if (mistake()) args.parts = -in->below(3);
  draw_parallel(in, &args.parallel, &args.parallel_user);
  flashattn_error* const error = args.error = draw_error(in, &round->structs);
  const flashattn_merge_args* const own = draw_sized(in, args, &round->structs, "merge args");
  const bool mine = is_taken(own);
  memory.remember();
  const Answer answer = ask("merge", mine ? error : nullptr,
                            [&] { return flashattn_merge(round->plan, own, nullptr); });
  FUZZ_CHECK(in->careless || answer.status == FLASHATTN_OK, "a good merge");
  FUZZ_CHECK(!bad || answer.status != FLASHATTN_OK, "a bad merge passed");
  round->deeds |= answer.status == FLASHATTN_OK ? kMerge : kRefusedCall;
  allow(m.o);
  allow(m.lse);
  memory.check("merge", answer.status != FLASHATTN_OK);
}

void run_dropout_mask(Round* round) {
  Input* const in = round->in;
  Memory memory;
  flashattn_args args;
  draw_sizes(in, round->request, &args);
  args.rng_seed = in->word();
  args.rng_offset = in->word();
  const double count =
      static_cast<double>(args.batch) * round->facts.desc.heads_q * args.seqlen_q * args.seqlen_kv;
  if (std::fabs(count) > 1e6) return;
  const bool none = in->mistake(16);
  const size_t bytes =
      count > 0 && args.batch > 0 && args.seqlen_q > 0 ? static_cast<size_t>(count) : 0;
  Block& rng = memory.make(2 * sizeof(uint64_t), "rng_device");
  if (in->one_in(3)) args.rng_device = reinterpret_cast<const uint64_t*>(rng.data.get());
  Block& keep = memory.make(bytes, "keep");
  std::fill_n(keep.data.get(), keep.size, uint8_t{0x7e});
  draw_parallel(in, &args.parallel, &args.parallel_user);
  flashattn_error* const error = args.error = draw_error(in, &round->structs);
  const flashattn_args* const own = draw_sized(in, args, &round->structs, "args");
  const bool mine = is_taken(own);
  memory.remember();
  const Answer answer = ask("dropout_mask", mine ? error : nullptr, [&] {
    return flashattn_dropout_mask(round->plan, own, none ? nullptr : keep.data.get(), nullptr);
  });
  const bool passed = answer.status == FLASHATTN_OK;
  FUZZ_CHECK(in->careless || passed, "a good dropout_mask");
  round->deeds |= passed ? kDropoutMask : kRefusedCall;
  keep.writable.assign(keep.size, 1);
  memory.check("dropout_mask", !passed);
  if (!passed) return;
  FUZZ_CHECK(bytes == 0 || !none, "a dropout_mask into nothing passed");
  const bool off = round->facts.desc.dropout == 0;
  for (size_t i = 0; i < keep.size; ++i) {
    const uint8_t kept = keep.data.get()[i];
    FUZZ_CHECK(kept == 1 || (kept == 0 && !off), "byte %zu of the mask is %d", i, kept);
  }
}

}  // namespace fuzz
