#include "arrays.h"

#include <algorithm>
#include <map>

namespace fuzz {
namespace {

__extension__ typedef __int128 Wide;  // sums and products that 64 bits do not hold

constexpr int32_t kIntegers = 0;

int64_t blocks_of(int64_t n, int64_t size) { return size > 0 ? (n + size - 1) / size : 0; }

// One number, of some bits.
uint64_t number(int32_t dtype, int32_t element, Kind kind, uint64_t bits) {
  const bool hostile = kind == Kind::kHostile || (kind == Kind::kMixed && bits >> 56 < 8);
  if (hostile || dtype == FLASHATTN_DTYPE_U8 || element == 8) return bits;
  const uint32_t sign = static_cast<uint32_t>(bits >> 40) & 1;
  if (dtype == FLASHATTN_DTYPE_F16) return sign << 15 | 0x3800 | (bits & 0x3ff);
  if (dtype == FLASHATTN_DTYPE_BF16) return sign << 15 | 0x3f00 | (bits & 0x7f);
  return sign << 31 | 0x3f000000 | (bits & 0x7fffff);
}

}  // namespace

int32_t bytes_of(int32_t dtype) {
  const bool narrow = dtype == FLASHATTN_DTYPE_F16 || dtype == FLASHATTN_DTYPE_BF16;
  return dtype == FLASHATTN_DTYPE_F32 ? 4 : narrow ? 2 : 1;
}

std::vector<Array> list_arrays(const Facts& facts, flashattn_args* args) {
  const flashattn_desc& d = facts.desc;
  const int64_t batch = args->batch, sq = args->seqlen_q, sk = args->seqlen_kv;
  const bool varlen_q = facts.varlen_q(), varlen_kv = facts.varlen_kv(), paged = facts.paged();
  const int64_t pages = batch > 0 && sk > 0 ? args->pages : 0;
  const int64_t q[2] = {varlen_q ? 1 : batch, varlen_q ? args->total_q : sq};
  const int64_t kv[2] = {paged       ? pages
                         : varlen_kv ? 1
                                     : batch,
                         paged       ? d.page_size
                         : varlen_kv ? args->total_kv
                                     : sk};
  const bool backward = facts.has(d.ops, FLASHATTN_OP_BACKWARD);
  const auto feature = [&](uint32_t bit) { return facts.has(d.features, bit); };
  const bool work = batch > 0 && (sq > 0 || sk > 0);
  const int64_t heads = d.heads_q;
  constexpr int32_t kF32 = FLASHATTN_DTYPE_F32;

  std::vector<Array> list;
  const auto add = [&](const char* name, const void* pointer, flashattn_tensor* tensor,
                       Role forward, Role back, int32_t dtype, bool heads_first, int64_t b,
                       int64_t h, int64_t s, int64_t c) {
    Array a{};
    a.name = name;
    a.pointer = tensor ? &tensor->data : static_cast<void**>(const_cast<void*>(pointer));
    a.tensor = tensor;
    a.forward = forward;
    a.backward = back;
    a.dtype = dtype;
    a.element = dtype == kIntegers ? 4 : bytes_of(dtype);
    a.heads_first = heads_first;
    const int64_t extent[4] = {b, h, s, c};
    std::copy(extent, extent + 4, a.extent);
    list.push_back(a);
  };
  const auto used = [](bool wanted, Role role) { return wanted ? role : Role::kUnused; };
  const Role none = Role::kUnused, input = Role::kInput, output = Role::kOutput;
  const auto add_tensor = [&](const char* name, flashattn_tensor* tensor, Role forward, Role back,
                              int32_t dtype, const int64_t (&rows)[2], int64_t h, int64_t c) {
    add(name, nullptr, tensor, forward, back, dtype, false, rows[0], h, rows[1], c);
  };
  const auto add_flat = [&](const char* name, const void* pointer, Role forward, Role back,
                            int32_t dtype, int64_t b, int64_t h, int64_t s) {
    add(name, pointer, nullptr, forward, back, dtype, true, b, h, s, 1);
  };
  const auto add_ints = [&](const char* name, const int32_t** pointer, bool wanted, int64_t n) {
    add_flat(name, pointer, used(wanted, input), used(wanted && backward, input), kIntegers, 1, 1,
             n);
  };
  add_ints("cu_seqlens_q", &args->cu_seqlens_q, varlen_q, batch > 0 ? batch + 1 : 0);
  add_ints("cu_seqlens_kv", &args->cu_seqlens_kv, varlen_kv, batch > 0 ? batch + 1 : 0);
  add_ints("lens_q", &args->lens_q, true, batch);
  add_ints("lens_kv", &args->lens_kv, true, batch);
  add_ints("starts_kv", &args->starts_kv, !paged, batch);
  const Role in_back = used(backward, input), out_back = used(backward, output);
  add_tensor("q", &args->q, input, in_back, d.dtype, q, heads, d.dim_qk);
  const bool latent = facts.has(d.layout, FLASHATTN_LAYOUT_LATENT_KV);
  add_tensor("k", &args->k, input, in_back, latent ? d.dtype : d.dtype_kv, kv, d.heads_kv,
             latent ? d.dim_qk - d.dim_v : d.dim_qk);
  add_tensor("v", &args->v, input, in_back, d.dtype_kv, kv, d.heads_kv, d.dim_v);
  const auto add_heads = [&](const char* name, flashattn_tensor* tensor, bool wanted, int32_t dtype,
                             int64_t h, int64_t s, int64_t c) {
    add(name, nullptr, tensor, used(wanted, input), used(wanted && backward, input), dtype, true,
        batch, h, s, c);
  };
  add_heads("page_table", &args->page_table, paged, kIntegers, 1, 1, blocks_of(sk, d.page_size));
  add_heads("bias", &args->bias, facts.has(d.bias, FLASHATTN_BIAS_DENSE), d.dtype_bias, heads, sq,
            sk);
  add_heads("alibi_slopes", &args->alibi_slopes, facts.has(d.bias, FLASHATTN_BIAS_ALIBI), kF32,
            work ? heads : 0, 1, 1);
  const bool lists = facts.has(d.mask, FLASHATTN_MASK_BLOCK_LISTS);
  const int64_t rows = blocks_of(sq, d.block_q), columns = blocks_of(sk, d.block_kv);
  add_heads("block_mask", &args->block_mask, facts.has(d.mask, FLASHATTN_MASK_BLOCKS) && !lists,
            FLASHATTN_DTYPE_U8, heads, rows, columns);
  // Listed only where they are used, so that other inputs keep their meaning.
  if (lists) {
    add_heads("block_index", &args->block_index, true, kIntegers, heads, rows, args->block_entries);
    add_heads("block_begin", &args->block_begin, true, kIntegers, heads, rows, 1);
    add_heads("block_end", &args->block_end, true, kIntegers, heads, rows, 1);
  }
  if (facts.has(d.mask, FLASHATTN_MASK_BLOCK_LENS)) {
    add_heads("block_lens", &args->block_lens, true, kIntegers, heads, columns, 1);
  }
  // A row of bits for each query, also where q is packed.
  const bool tree = facts.has(d.mask, FLASHATTN_MASK_TREE);
  add("tree_bits", nullptr, &args->tree_bits, used(tree, input), none, FLASHATTN_DTYPE_U8, false,
      batch, 1, sq, blocks_of(d.tree, 32));
  list.back().element = 4;
  const auto add_descales = [&](const char* name, flashattn_tensor* tensor, int32_t dtype,
                                int64_t tokens) {
    const bool narrow = dtype == FLASHATTN_DTYPE_F8E4M3 || dtype == FLASHATTN_DTYPE_I8;
    add_heads(name, tensor, narrow && !latent, kF32, d.heads_kv,
              d.descale_block > 0 ? blocks_of(tokens, d.descale_block) : tokens > 0, 1);
  };
  add_descales("descale_q", &args->descale_q, d.dtype, sq);
  add_descales("descale_k", &args->descale_k, d.dtype_kv, sk);
  add_descales("descale_v", &args->descale_v, d.dtype_kv, sk);
  add_heads("scale_o", &args->scale_o, d.dtype_o == FLASHATTN_DTYPE_F8E4M3, kF32, work ? heads : 0,
            1, 1);
  const bool narrow = bytes_of(d.dtype) == 1 || bytes_of(d.dtype_kv) == 1;
  add("amax_o", nullptr, &args->amax_o, used(narrow && !latent, output), none, kF32, true, batch,
      heads, 1, 1);
  const bool sink = feature(FLASHATTN_FEATURE_SINK);
  add_flat("sink", &args->sink, used(sink, input), used(sink && backward, input), kF32, 1,
           work ? heads : 0, 1);
  add_flat("rng_device", &args->rng_device, used(d.dropout > 0, input),
           used(d.dropout > 0 && backward, input), FLASHATTN_DTYPE_U8, 1, 1, 2);
  list.back().element = 8;
  add_tensor("o", &args->o, output, in_back, d.dtype_o, q, heads, d.dim_v);
  add_flat("lse", &args->lse, used(feature(FLASHATTN_FEATURE_LSE), output), in_back, kF32, q[0],
           heads, q[1]);
  add_tensor("dout", &args->dout, none, in_back, d.dtype_o, q, heads, d.dim_v);
  add_flat("dlse", &args->dlse, none, used(feature(FLASHATTN_FEATURE_DLSE), input), kF32, q[0],
           heads, q[1]);
  const int32_t grad = d.dtype_grad ? d.dtype_grad : d.dtype;
  add_tensor("dq", &args->dq, none, out_back, grad, q, heads, d.dim_qk);
  add_tensor("dk", &args->dk, none, out_back, grad, kv, d.heads_kv, d.dim_qk);
  add_tensor("dv", &args->dv, none, out_back, grad, kv, d.heads_kv, d.dim_v);
  add("dbias", nullptr, &args->dbias, none, used(feature(FLASHATTN_FEATURE_DBIAS), Role::kSum),
      kF32, true, batch, heads, sq, sk);
  add_flat("dsink", &args->dsink, none, used(feature(FLASHATTN_FEATURE_DSINK), output), kF32, 1,
           batch > 0 ? heads : 0, 1);
  if (latent) {
    add_tensor("descale_latent", &args->descale_latent, input, none, kF32, kv, d.heads_kv,
               blocks_of(d.dim_v, d.descale_dim));
  }
  return list;
}

void measure(Array* array) {
  // A sum over queries has elements even where there is no query.
  const bool sum = array->backward == Role::kSum;
  if (sum && array->tensor->stride_seq == 0) array->extent[2] = 1;
  bool empty = false, good = true;
  for (const int64_t extent : array->extent) {
    good = good && extent >= 0;
    empty = empty || extent == 0;
  }
  const int64_t packed = -1;
  const int64_t given[3] = {array->tensor ? array->tensor->stride_batch : packed,
                            array->tensor ? array->tensor->stride_head : packed,
                            array->tensor ? array->tensor->stride_seq : packed};
  const int order_of[2][3] = {{1, 2, 0}, {2, 1, 0}};
  Wide step = array->extent[3], last = array->extent[3] - 1;
  array->stride[3] = 1;
  for (const int d : order_of[array->heads_first]) {
    array->stride[d] = 0;
    if (given[d] == 0) continue;
    const Wide stride = given[d] == -1 ? step : given[d];
    if (array->extent[d] > 1 && !empty) {
      good = good && stride >= 0 && stride < Wide{1} << 62;
      array->stride[d] = static_cast<int64_t>(stride);
      last += stride * (array->extent[d] - 1);
      good = good && last < Wide{1} << 62;
    }
    if (good) step *= array->extent[d];
    good = good && step < Wide{1} << 62;
  }
  const Wide bytes = (last + 1) * array->element;
  array->bytes = good && empty ? 0 : good && bytes <= kMostBytes ? static_cast<int64_t>(bytes) : -1;
}

void fill(const Array& array, Kind kind, Numbers* numbers) {
  if (!array.block || array.bytes <= 0) return;
  uint8_t* const data = array.block->data.get() + array.offset;
  const int64_t size = array.element;
  for (int64_t i = 0; i + size <= array.bytes; i += size) {
    const uint64_t bits = number(array.dtype, array.element, kind, numbers->next());
    std::memcpy(data + i, &bits, static_cast<size_t>(size));
  }
}

bool sequences_of(const Facts& facts, const flashattn_args& args, std::vector<Rows>* rows) {
  struct Side {
    const int32_t *cu, *lens;
    int64_t seqlen, total;
  } const sides[2] = {{args.cu_seqlens_q, args.lens_q, args.seqlen_q, args.total_q},
                      {args.cu_seqlens_kv, args.lens_kv, args.seqlen_kv, args.total_kv}};
  rows->clear();
  for (int32_t b = 0; b < args.batch; ++b) {
    int64_t first[2], len[2];
    for (int s = 0; s < 2; ++s) {
      const Side& side = sides[s];
      const bool varlen = s == 0 ? facts.varlen_q() : facts.varlen_kv();
      first[s] = varlen ? side.cu[b] : 0;
      const int64_t room = varlen ? int64_t{side.cu[b + 1]} - first[s] : side.seqlen;
      if (varlen && (first[s] < 0 || room < 0 || first[s] + room > side.total)) return false;
      len[s] = side.lens ? side.lens[b] : room;
      if (len[s] < 0 || len[s] > room || len[s] > side.seqlen) return false;
    }
    const int64_t start = args.starts_kv ? args.starts_kv[b] : 0;
    if (start < 0 || start > len[1]) return false;
    const int64_t used = facts.paged() ? blocks_of(len[1], facts.desc.page_size) : 0;
    for (int64_t n = 0; n < used; ++n) {
      const int64_t stride = args.page_table.stride_batch == -1
                                 ? blocks_of(args.seqlen_kv, facts.desc.page_size)
                                 : args.page_table.stride_batch;
      const int64_t row = args.batch > 1 ? b * stride : 0;
      const int32_t page = static_cast<const int32_t*>(args.page_table.data)[row + n];
      const bool hidden = page < 0 && facts.has(facts.desc.mask, FLASHATTN_MASK_PAGES);
      if (!hidden && (page < 0 || page >= args.pages)) return false;
    }
    rows->push_back({first[0], len[0], first[1] + start, len[1] - start});
  }
  return true;
}

void allow(const Array& a) {
  if (a.forward != Role::kOutput || !a.block || a.bytes <= 0) return;
  for (int64_t b = 0; b < a.extent[0]; ++b) {
    for (int64_t h = 0; h < a.extent[1]; ++h) {
      for (int64_t s = 0; s < a.extent[2]; ++s) {
        std::fill_n(a.block->writable.begin() + a.at(b, h, s, 0), a.extent[3] * a.element,
                    uint8_t{1});
      }
    }
  }
}

bool share_bytes(const Array& x, const Array& y) {
  if (!x.block || x.block != y.block || x.bytes <= 0 || y.bytes <= 0) return false;
  std::vector<uint8_t> seen(x.block->size);
  const auto visit = [&](const Array& a, bool mark) {
    const int64_t* n = a.extent;
    const int64_t run = n[3] * a.element;
    for (int64_t b = 0; b < (a.stride[0] ? n[0] : 1); ++b) {
      for (int64_t h = 0; h < (a.stride[1] ? n[1] : 1); ++h) {
        for (int64_t s = 0; s < (a.stride[2] ? n[2] : 1); ++s) {
          for (int64_t i = 0; i < run; ++i) {
            uint8_t& byte = seen[static_cast<size_t>(a.at(b, h, s, 0) + i)];
            if (mark) byte = 1;
            if (!mark && byte) return true;
          }
        }
      }
    }
    return false;
  };
  visit(x, true);
  return visit(y, false);
}

}  // namespace fuzz
