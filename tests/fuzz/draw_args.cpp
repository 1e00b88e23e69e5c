#include <algorithm>

#include "draw.h"

namespace fuzz {
namespace {

void set_pointer(const Array& array, void* address) {
  std::memcpy(static_cast<void*>(array.pointer), &address, sizeof address);
}

Array& find(std::vector<Array>* arrays, const char* name) {
  return *std::find_if(arrays->begin(), arrays->end(),
                       [&](const Array& a) { return std::strcmp(a.name, name) == 0; });
}

bool has(const std::vector<Array>& arrays, const char* name) {
  return std::any_of(arrays.begin(), arrays.end(),
                     [&](const Array& a) { return std::strcmp(a.name, name) == 0; });
}

int32_t* ints(std::vector<Array>* arrays, const char* name) {
  const Array& array = find(arrays, name);
  const bool there = array.block && array.bytes > 0;
  return there ? reinterpret_cast<int32_t*>(array.block->data.get() + array.offset) : nullptr;
}

void damage(Input* in, int32_t* values, int64_t n) {
  while (values && n > 0 && in->mistake(6)) {
    const auto at = static_cast<int32_t>(std::min<int64_t>(n, 65536));
    values[in->below(static_cast<uint32_t>(at))] = static_cast<int32_t>(in->wild());
  }
}

// Lengths that go together, for one side: starts of sequences, tokens in use.
void draw_lengths(Input* in, int32_t batch, int64_t seqlen, int64_t total, int32_t* cu,
                  int32_t* lens, int32_t* starts) {
  // Hostile numbers are too many for the products below.
  constexpr int64_t kMost = int64_t{1} << 40;
  seqlen = std::clamp(seqlen, -kMost, kMost);
  total = std::clamp(total, -kMost, kMost);
  int64_t at = cu && in->one_in(4) ? std::min<int64_t>(in->below(4), total) : 0;
  for (int32_t b = 0; b < batch; ++b) {
    int64_t room = seqlen;
    if (cu) {
      room = std::min(seqlen, total - at);
      if (in->one_in(2)) room = room * in->byte() / 255;
      cu[b] = static_cast<int32_t>(at);
      at += room;
      cu[b + 1] = static_cast<int32_t>(at);
    }
    if (lens) {
      if (in->one_in(2)) room = room * in->byte() / 255;
      lens[b] = static_cast<int32_t>(room);
    }
    if (starts) starts[b] = static_cast<int32_t>(in->one_in(2) ? room * in->byte() / 255 : 0);
  }
  if (batch == 0) return;
  damage(in, cu, batch + 1);
  damage(in, lens, batch);
  damage(in, starts, batch);
}

void draw_pages(Input* in, const flashattn_args& args, bool hides, const Array& table) {
  if (!table.block || table.bytes <= 0) return;
  Numbers numbers(in->word());
  int32_t* const entries = reinterpret_cast<int32_t*>(table.block->data.get() + table.offset);
  const int64_t n = table.bytes / 4;
  for (int64_t i = 0; i < n; ++i) {
    entries[i] = args.pages > 0 ? static_cast<int32_t>(numbers.next() % args.pages) : 0;
    if (hides && numbers.next() % 4 == 0) entries[i] = -1 - entries[i];
  }
  damage(in, entries, n);
}

// Numbers of blocks, places in lists, lengths of blocks: some are near those that exist.
void draw_blocks(Input* in, std::vector<Array>* arrays) {
  for (const char* name : {"block_index", "block_begin", "block_end", "block_lens"}) {
    int32_t* const values = has(*arrays, name) ? ints(arrays, name) : nullptr;
    if (!values) continue;
    const int64_t n = find(arrays, name).bytes / 4;
    const uint64_t most = 1 + in->below(128);
    Numbers numbers(in->word());
    for (int64_t i = 0; i < n; ++i) {
      const uint64_t bits = numbers.next();
      values[i] = static_cast<int32_t>(bits >> 60 == 0 ? bits : bits % most);
      if (bits >> 60 == 1) values[i] = -1 - values[i];
    }
  }
}

// What is optional is given or not; what the plan does not use is NULL.
bool wants(Input* in, const Array& array) {
  for (const char* optional :
       {"lens_q", "lens_kv", "starts_kv", "rng_device", "descale_q", "descale_k", "descale_v",
        "scale_o", "amax_o", "block_begin", "block_end"}) {
    if (std::strcmp(array.name, optional) == 0) return array.wanted() && in->one_in(3);
  }
  return array.wanted() ? !in->mistake(64) : in->mistake(64);
}

// Lets an array lie in the memory of another one, or off its alignment.
void move_somewhere(Input* in, Call* call) {
  const auto any = [&]() -> Array& {
    return call->arrays[static_cast<size_t>(in->below(static_cast<uint32_t>(call->arrays.size())))];
  };
  Array &from = any(), &to = any();
  if (&from == &to || !from.block || !to.block || from.bytes <= 0 || to.bytes <= 0) return;
  const int64_t room = static_cast<int64_t>(to.block->size) - from.bytes;
  if (room < 0) return;
  int64_t offset = in->below(static_cast<uint32_t>(std::min<int64_t>(room, 65535)) + 1);
  if (!in->one_in(4)) offset -= offset % from.element;
  from.block = to.block;
  from.offset = offset;
  set_pointer(from, to.block->data.get() + offset);
  const auto written = [](const Array& a) {
    return a.forward == Role::kOutput ||
           (a.backward != Role::kInput && a.backward != Role::kUnused);
  };
  call->outputs_alias = call->outputs_alias || written(from) || written(to);
}

}  // namespace

Kind draw_kind(Input* in) {
  return in->pick({Kind::kUsual, Kind::kUsual, Kind::kMixed, Kind::kHostile});
}

flashattn_tensor draw_strides(Input* in, const Array& array) {
  flashattn_tensor tensor{nullptr, -1, -1, -1};
  int64_t* const strides[3] = {&tensor.stride_batch, &tensor.stride_head, &tensor.stride_seq};
  const bool written = array.forward == Role::kOutput || array.backward == Role::kOutput;
  const int kind = in->below(8);
  if (kind == 6) {  // any order of the indices, and gaps
    const int orders[6][3] = {{2, 1, 0}, {1, 2, 0}, {0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {2, 0, 1}};
    int64_t step = std::max<int64_t>(array.extent[3], 1) + in->below(4);
    for (const int d : orders[in->below(6)]) {
      *strides[d] = step;
      if (array.extent[d] < 1 || array.extent[d] > 65536 || step > kMostBytes) break;
      step = step * array.extent[d] + in->below(4);
    }
  }
  if (kind == 7 && !written) {
    for (int64_t* stride : strides) *stride = in->one_in(2) ? 0 : -1;
  }
  if (in->mistake(24)) *strides[in->below(3)] = in->wild();
  return tensor;
}

void place(Input* in, Array* array, Memory* memory) {
  measure(array);
  array->block = nullptr;
  array->offset = 0;
  void* address = nullptr;
  if (array->bytes > 0 || (array->bytes == 0 && in->one_in(2))) {
    array->block = &memory->make(static_cast<size_t>(array->bytes), array->name);
    address = array->block->data.get();
  }
  set_pointer(*array, address);
}

void draw_sizes(Input* in, const Request& request, flashattn_args* args) {
  const Sizes& s = request.sizes;
  std::memset(args, 0, sizeof *args);
  args->struct_size = sizeof *args;
  args->batch = s.batch;
  args->seqlen_q = s.seqlen_q;
  args->seqlen_kv = s.seqlen_kv;
  args->total_q = s.total_q;
  args->total_kv = s.total_kv;
  if (request.desc.layout & FLASHATTN_LAYOUT_PAGED_KV) args->pages = 1 + in->below(12);
  if (!in->mistake(6)) return;
  const int64_t value = in->wild();
  switch (in->below(6)) {
    case 0: args->batch = static_cast<int32_t>(value); break;
    case 1: args->seqlen_q = static_cast<int32_t>(value); break;
    case 2: args->seqlen_kv = static_cast<int32_t>(value); break;
    case 3: args->total_q = value; break;
    case 4: args->total_kv = value; break;
    default: args->pages = value; break;
  }
}

void draw_call(Input* in, const Request& request, const Facts& facts, Memory* memory, Call* call) {
  call->facts = facts;
  call->outputs_alias = false;
  flashattn_args* const args = &call->args;
  draw_sizes(in, request, args);
  args->rng_seed = in->word();
  args->rng_offset = in->word();
  if (facts.has(facts.desc.mask, FLASHATTN_MASK_BLOCK_LISTS)) {
    args->block_entries = in->mistake(24) ? in->wild() : in->below(20);
  }
  call->arrays = list_arrays(facts, args);
  const uint64_t seed = in->word();
  Numbers numbers(seed);
  for (Array& array : call->arrays) {
    if (array.tensor) *array.tensor = draw_strides(in, array);
    measure(&array);
    if (!wants(in, array)) continue;
    place(in, &array, memory);
    if (array.dtype != 0) fill(array, draw_kind(in), &numbers);
  }
  const auto side = [&](int64_t seqlen, int64_t total, const char* cu, const char* lens,
                        const char* starts) {
    const int32_t batch = std::clamp(args->batch, 0, 1 << 16);
    const auto values = [&](const char* name) {
      return name ? ints(&call->arrays, name) : nullptr;
    };
    draw_lengths(in, batch, seqlen, total, values(cu), values(lens), values(starts));
  };
  side(args->seqlen_q, args->total_q, "cu_seqlens_q", "lens_q", nullptr);
  side(args->seqlen_kv, args->total_kv, "cu_seqlens_kv", "lens_kv", "starts_kv");
  draw_pages(in, *args, facts.has(facts.desc.mask, FLASHATTN_MASK_PAGES),
             find(&call->arrays, "page_table"));
  draw_blocks(in, &call->arrays);
  while (in->mistake(8)) move_somewhere(in, call);
}

}  // namespace fuzz
