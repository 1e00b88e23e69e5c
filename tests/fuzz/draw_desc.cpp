#include <algorithm>

#include "draw.h"

namespace fuzz {
namespace {

void draw_heads(Input* in, flashattn_desc* d) {
  d->heads_kv = 1 + in->below(3);
  d->heads_q = d->heads_kv * in->pick({1, 2, 1, 3, 4, 1, 8});
  if (d->heads_q == d->heads_kv && in->one_in(2)) d->heads_kv = 0;
  const auto dim = [&] { return in->pick({8, 16, 1, 3, 7, 15, 17, 24, 32, 33, 64, 80, 128, 200}); };
  d->dim_qk = in->one_in(64) ? 1024 : dim();
  if (in->one_in(3)) d->dim_v = dim();
}

void draw_types(Input* in, flashattn_desc* d) {
  d->dtype = in->pick<int32_t>({FLASHATTN_DTYPE_F32, FLASHATTN_DTYPE_F16, FLASHATTN_DTYPE_BF16});
  const int32_t cache =
      in->pick({d->dtype, d->dtype, +FLASHATTN_DTYPE_I8, +FLASHATTN_DTYPE_F8E4M3});
  d->dtype_kv = in->one_in(3) ? cache : 0;
  if (cache != d->dtype && d->dtype_kv == cache) d->descale_block = in->pick({0, 1, 7, 64});
  d->dtype_o = in->pick<int32_t>({0, d->dtype, FLASHATTN_DTYPE_F32});
}

void draw_masks(Input* in, flashattn_desc* d) {
  constexpr int32_t kLong = 2147483647;
  d->mask = in->bits(31);
  if (d->mask & FLASHATTN_MASK_WINDOW) {
    d->window_left = in->pick({0, -1, 1, 5, 17, 64, kLong});
    d->window_right = in->pick({0, -1, 1, 5, 17, 64, kLong});
  }
  if (d->mask & FLASHATTN_MASK_CHUNK) d->chunk = in->pick({16, 1, 3, 64, 100, kLong});
  if (d->mask & FLASHATTN_MASK_BLOCKS) {
    d->block_q = in->pick({16, 1, 3, 64, 128, kLong});
    d->block_kv = in->pick({16, 1, 3, 64, 128, kLong});
  }
}

void draw_features(Input* in, flashattn_desc* d) {
  const bool backward = d->ops & FLASHATTN_OP_BACKWARD;
  d->bias = in->bits(3);
  const bool dense = d->bias & FLASHATTN_BIAS_DENSE;
  if (dense) {
    d->dtype_bias = in->pick<int32_t>(
        {0, FLASHATTN_DTYPE_F32, FLASHATTN_DTYPE_F16, FLASHATTN_DTYPE_BF16, FLASHATTN_DTYPE_U8});
  }
  d->features = in->bits(31);
  if (!backward) d->features &= FLASHATTN_FEATURE_LSE | FLASHATTN_FEATURE_SINK;
  if (!dense || d->dtype_bias == FLASHATTN_DTYPE_U8) d->features &= ~FLASHATTN_FEATURE_DBIAS;
  if (!(d->features & FLASHATTN_FEATURE_SINK)) d->features &= ~FLASHATTN_FEATURE_DSINK;
  d->determinism = in->below(3);
  d->scale = in->pick({0.0f, 1.0f, -0.5f, 1e-30f, 1e30f, -0.0f});
  d->softcap = in->pick({0.0f, 0.0f, 0.0f, 20.0f, 1e-3f});
  d->dropout = in->pick({0.0f, 0.0f, 0.0f, 0.1f, 0.5f, 0.999f, 1 / 65536.0f});
  d->splits = in->pick({0, 0, 1, 2, 7, 4096});
  d->threads = 1 + in->below(3);
}

Sizes draw_sizes_of_plan(Input* in, flashattn_desc* d) {
  Sizes s{};
  s.batch = in->pick({1, 2, 3, 1, 2, 0, 5});
  const auto tokens = [&] { return in->one_in(4) ? in->below(400) : 1 + in->below(24); };
  s.seqlen_q = tokens();
  s.seqlen_kv = tokens();
  const auto cost = [&] {
    const int64_t longest = std::max(s.seqlen_q, s.seqlen_kv);
    const int64_t pairs = std::max(int64_t{s.seqlen_q} * s.seqlen_kv, 4 * longest);
    return s.batch * pairs * d->heads_q * (d->dim_qk + std::max(d->dim_v, 16));
  };
  const int64_t most = in->one_in(8) ? 3000000 : 100000;
  while (cost() > most) {
    s.seqlen_q /= 2;
    s.seqlen_kv /= 2;
  }
  // More sequences than fit, if all are long: lens decide.
  if (d->layout & FLASHATTN_LAYOUT_VARLEN_Q) s.total_q = int64_t{s.batch} * s.seqlen_q;
  if (d->layout & FLASHATTN_LAYOUT_VARLEN_KV) s.total_kv = int64_t{s.batch} * s.seqlen_kv;
  if (s.total_q > 0) s.total_q = std::max<int64_t>(s.total_q - in->below(8), 0);
  if (s.total_kv > 0) s.total_kv += in->below(8);
  return s;
}

void draw_maxima(Input* in, const Sizes& s, flashattn_desc* d) {
  const auto maximum = [&](auto size) -> decltype(size) {
    return size == 0 ? 1 : in->one_in(2) ? size + 1 + in->below(40) : size;
  };
  const bool all = in->one_in(4);
  const auto wanted = [&] { return all || in->one_in(6); };
  if (wanted()) d->max_batch = maximum(s.batch);
  if (wanted()) d->max_seqlen_q = maximum(s.seqlen_q);
  if (wanted()) d->max_seqlen_kv = maximum(s.seqlen_kv);
  const bool varlen_q = d->layout & FLASHATTN_LAYOUT_VARLEN_Q;
  const bool varlen_kv = d->layout & FLASHATTN_LAYOUT_VARLEN_KV;
  if (varlen_q && wanted()) d->max_total_q = maximum(s.total_q);
  if (varlen_kv && wanted()) d->max_total_kv = maximum(s.total_kv);
  if (all && in->one_in(2)) d->workspace_limit = int64_t{1} << 50;
}

// Only where a cache of 8 bits allows it, so that other inputs keep their meaning.
void draw_latent(Input* in, flashattn_desc* d) {
  const bool cache = d->dtype_kv == FLASHATTN_DTYPE_I8 || d->dtype_kv == FLASHATTN_DTYPE_F8E4M3;
  if ((d->ops & FLASHATTN_OP_BACKWARD) || !cache || d->dim_v == 0 || d->dim_v >= d->dim_qk) return;
  if (in->one_in(2)) return;
  d->layout |= FLASHATTN_LAYOUT_LATENT_KV;
  d->descale_block = 0;
  d->descale_dim = in->pick({1, 3, 16, 128});
}

// Trees, hidden pages, q and o of 8 bits, lists of blocks. Behind all else, likewise.
void draw_later(Input* in, flashattn_desc* d) {
  const bool backward = d->ops & FLASHATTN_OP_BACKWARD;
  if (!backward && in->one_in(6)) {
    d->mask |= FLASHATTN_MASK_TREE;
    d->tree = in->pick({4, 1, 31, 32, 33, 100, 256});
  }
  if ((d->layout & FLASHATTN_LAYOUT_PAGED_KV) && in->one_in(4)) d->mask |= FLASHATTN_MASK_PAGES;
  if (!(d->layout & FLASHATTN_LAYOUT_LATENT_KV) && in->one_in(6)) {
    d->dtype = FLASHATTN_DTYPE_F8E4M3;
    d->dtype_kv = 0;
    d->dtype_o =
        in->pick<int32_t>({FLASHATTN_DTYPE_F32, FLASHATTN_DTYPE_F16, FLASHATTN_DTYPE_BF16});
    d->descale_block = in->pick({0, 1, 7, 64});
    const bool dense = d->bias & FLASHATTN_BIAS_DENSE;
    if (dense && d->dtype_bias == 0) d->dtype_bias = FLASHATTN_DTYPE_F32;
    if (backward) {
      d->dtype_grad =
          in->pick<int32_t>({0, FLASHATTN_DTYPE_F32, FLASHATTN_DTYPE_F16, FLASHATTN_DTYPE_BF16});
    }
  }
  const bool narrow = d->dtype == FLASHATTN_DTYPE_F8E4M3 || d->dtype_kv == FLASHATTN_DTYPE_I8 ||
                      d->dtype_kv == FLASHATTN_DTYPE_F8E4M3;
  if (narrow && !backward && in->one_in(3)) d->dtype_o = FLASHATTN_DTYPE_F8E4M3;
  if (d->mask & FLASHATTN_MASK_BLOCKS) {
    if (in->one_in(3)) d->mask |= FLASHATTN_MASK_BLOCK_LISTS;
    if (in->one_in(3)) d->mask |= FLASHATTN_MASK_BLOCK_LENS;
  }
}

// A word of the descriptor, whichever it is, becomes something else.
void damage(Input* in, flashattn_desc* d) {
  constexpr size_t kWords = sizeof *d / 4;
  const size_t at = 1 + static_cast<size_t>(in->below(kWords - 1));
  const int32_t value = static_cast<int32_t>(in->wild());
  std::memcpy(reinterpret_cast<char*>(d) + 4 * at, &value, sizeof value);
  // So many threads take long to start.
  if (d->threads > 4 || d->threads == 0) d->threads = 4;
}

}  // namespace

Request draw_request(Input* in) {
  Request request{};
  flashattn_desc* const d = &request.desc;
  d->struct_size = sizeof *d;
  d->layout = in->pick<uint32_t>({0, 0, 3, 1, 2, 4, 5});
  d->ops = static_cast<uint32_t>(in->below(4));
  if (d->layout & FLASHATTN_LAYOUT_PAGED_KV) {
    d->ops &= FLASHATTN_OP_FORWARD;
    d->page_size = in->pick({16, 1, 3, 64, 100});
  }
  draw_heads(in, d);
  draw_types(in, d);
  draw_masks(in, d);
  draw_features(in, d);
  request.sizes = draw_sizes_of_plan(in, d);
  draw_maxima(in, request.sizes, d);
  draw_latent(in, d);
  draw_later(in, d);
  while (in->mistake(3)) damage(in, d);
  return request;
}

}  // namespace fuzz
