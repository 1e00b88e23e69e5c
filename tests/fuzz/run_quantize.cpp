// flashattn_quantize: calls that the header allows are computed, others refused, and what is
// written is the rows of sequences, descales and means.
#include <algorithm>

#include "calls.h"

namespace fuzz {
namespace {

using Args = flashattn_quantize_args;

class Quantize {
 public:
  Quantize(Round* round, Memory* memory) : in_(round->in), facts_(round->facts), memory_(memory) {
    flashattn_quantize_args_init(&args, sizeof args);
    flashattn_args sizes;
    draw_sizes(in_, round->request, &sizes);
    args.batch = sizes.batch;
    args.seqlen_q = sizes.seqlen_q;
    args.seqlen_kv = sizes.seqlen_kv;
    args.total_q = sizes.total_q;
    args.total_kv = sizes.total_kv;
  }

  bool is_small() const {
    const auto below = [](int64_t n) { return n >= 0 && n <= 4096; };
    return below(args.batch) && below(args.seqlen_q) && below(args.seqlen_kv) &&
           below(args.total_q) && below(args.total_kv);
  }

  void draw() {
    const flashattn_desc& d = facts_.desc;
    fits = bytes_of(d.dtype_kv) == 1 && !facts_.paged() &&
           !facts_.has(d.layout, FLASHATTN_LAYOUT_LATENT_KV);
    args.dtype =
        in_->pick<int32_t>({FLASHATTN_DTYPE_F32, FLASHATTN_DTYPE_F16, FLASHATTN_DTYPE_BF16});
    Numbers numbers(in_->word());
    draw_transform();
    const bool rotates = args.transform & FLASHATTN_TRANSFORM_ROTATE;
    const bool smooths = args.transform & FLASHATTN_TRANSFORM_SMOOTH_K;
    const uint32_t given = ~in_->byte();
    const int64_t batch_q = facts_.varlen_q() ? 1 : args.batch;
    const int64_t rows_q = facts_.varlen_q() ? args.total_q : args.seqlen_q;
    const int64_t batch_kv = facts_.varlen_kv() ? 1 : args.batch;
    const int64_t rows_kv = facts_.varlen_kv() ? args.total_kv : args.seqlen_kv;
    // Without elements an input may be NULL, which leaves it out.
    const auto add_operand = [&](flashattn_tensor* from, flashattn_tensor* to,
                                 flashattn_tensor* descale, int32_t dtype, int64_t batch,
                                 int64_t rows, int32_t heads, int32_t dim, int64_t tokens) {
      add("input", from, Role::kInput, args.dtype, {batch, heads, rows, dim}, &numbers);
      if (!from->data) return false;
      add("output", to, Role::kOutput, dtype, {batch, heads, rows, dim}, &numbers);
      if (bytes_of(dtype) != 1) return true;
      const int64_t blocks =
          d.descale_block > 0 ? (tokens + d.descale_block - 1) / d.descale_block : tokens > 0;
      add("descales", descale, Role::kOutput, FLASHATTN_DTYPE_F32,
          {args.batch, d.heads_kv, blocks, 1}, &numbers, true);
      return true;
    };
    const bool has_q = given & 1 && (d.dtype == FLASHATTN_DTYPE_F8E4M3 || rotates) &&
                       add_operand(&args.q, &args.q_out, &args.descale_q, d.dtype, batch_q, rows_q,
                                   d.heads_q, d.dim_qk, args.seqlen_q);
    const bool has_k =
        given & 2 && add_operand(&args.k, &args.k_out, &args.descale_k, d.dtype_kv, batch_kv,
                                 rows_kv, d.heads_kv, d.dim_qk, args.seqlen_kv);
    if (given & 4) {
      add_operand(&args.v, &args.v_out, &args.descale_v, d.dtype_kv, batch_kv, rows_kv, d.heads_kv,
                  d.dim_v, args.seqlen_kv);
    }
    if (has_k && smooths) {
      add("means", &args.k_mean, Role::kOutput, FLASHATTN_DTYPE_F32,
          {args.batch, d.heads_kv, 1, d.dim_qk}, &numbers, true);
    }
    if (has_q && has_k && smooths && in_->one_in(2)) {
      flashattn_tensor flat{nullptr, -1, -1, -1};
      add("lse_shift", &flat, Role::kOutput, FLASHATTN_DTYPE_F32, {batch_q, d.heads_q, rows_q, 1},
          &numbers, true, false);
      args.lse_shift = static_cast<float*>(flat.data);
      arrays.back().tensor = nullptr;
    }
    draw_lengths();
  }

  Args args;
  std::vector<Array> arrays;
  bool fits = true;

 private:
  void draw_transform() {
    const flashattn_desc& d = facts_.desc;
    const uint32_t transform = in_->bits(3);
    const int32_t power = d.dim_qk & -d.dim_qk;
    if (transform & FLASHATTN_TRANSFORM_ROTATE && (power >= 32 || power == d.dim_qk)) {
      args.transform |= FLASHATTN_TRANSFORM_ROTATE;
      args.rotation_seed = in_->word();
    }
    const bool shifts = d.softcap == 0 && !facts_.has(d.features, FLASHATTN_FEATURE_SINK);
    if (transform & FLASHATTN_TRANSFORM_SMOOTH_K && shifts) {
      args.transform |= FLASHATTN_TRANSFORM_SMOOTH_K;
    }
    if (in_->mistake(16)) {
      args.transform = in_->below(8);
      fits = false;  // perhaps
    }
  }

  void add(const char* name, flashattn_tensor* tensor, Role role, int32_t dtype,
           const int64_t (&extent)[4], Numbers* numbers, bool heads_first = false,
           bool strides = true) {
    Array a{};
    a.name = name;
    a.tensor = tensor;
    a.pointer = &tensor->data;
    a.forward = a.backward = role;
    a.dtype = dtype;
    a.element = bytes_of(dtype);
    a.heads_first = heads_first;
    std::copy(extent, extent + 4, a.extent);
    if (strides) *tensor = draw_strides(in_, a);
    place(in_, &a, memory_);
    fits &= a.bytes >= 0;
    fill(a, draw_kind(in_), numbers);
    arrays.push_back(a);
  }

  int32_t* ints(const char* name, int64_t count) {
    Block& block = memory_->make(static_cast<size_t>(std::max<int64_t>(count, 0)) * 4, name);
    return reinterpret_cast<int32_t*>(block.data.get());
  }

  // Starts of sequences, one behind another, and tokens in use.
  void draw_side(bool packs, int64_t seqlen, int64_t total, const int32_t** cu_seqlens,
                 const int32_t** lens) {
    int32_t* const cu = packs ? ints("cu_seqlens", args.batch + 1) : nullptr;
    int32_t* const used = in_->one_in(3) ? ints("lens", args.batch) : nullptr;
    for (int32_t b = 0; b < args.batch; ++b) {
      int64_t room = seqlen;
      if (cu) {
        room = std::min(seqlen, total - cu[b]) * in_->byte() / 255;
        cu[b + 1] = static_cast<int32_t>(cu[b] + room);
      }
      if (!used) continue;
      used[b] = static_cast<int32_t>(room * in_->byte() / 255);
      if (!in_->mistake(8)) continue;
      used[b] = static_cast<int32_t>(in_->wild());
      fits &= used[b] >= 0 && used[b] <= room;
    }
    *cu_seqlens = cu;
    *lens = used;
  }

  void draw_lengths() {
    draw_side(facts_.varlen_q(), args.seqlen_q, args.total_q, &args.cu_seqlens_q, &args.lens_q);
    draw_side(facts_.varlen_kv(), args.seqlen_kv, args.total_kv, &args.cu_seqlens_kv,
              &args.lens_kv);
  }

  Input* const in_;
  const Facts& facts_;
  Memory* const memory_;
};

}  // namespace

void run_quantize(Round* round) {
  Input* const in = round->in;
  Memory memory;
  Quantize call(round, &memory);
  if (!call.is_small()) return;
  call.draw();
  Args& args = call.args;
  draw_parallel(in, &args.parallel, &args.parallel_user);
  flashattn_error* const error = args.error = draw_error(in, &round->structs);
  const Args* const own = draw_sized(in, args, &round->structs, "quantize args");
  memory.remember();
  const Answer answer = ask("quantize", is_taken(own) ? error : nullptr,
                            [&] { return flashattn_quantize(round->plan, own, nullptr); });
  const bool passed = answer.status == FLASHATTN_OK;
  FUZZ_CHECK(in->careless || passed == call.fits, "a quantize that %s: %s",
             call.fits ? "fits" : "does not fit", answer.message.c_str());
  round->deeds |= passed ? kQuantize : kRefusedCall;
  for (const Array& a : call.arrays) allow(a);
  memory.check("quantize", !passed);
}

}  // namespace fuzz
