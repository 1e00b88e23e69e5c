// flashattn_append_kv: calls that fit are computed, those that do not are refused, and neither
// touches anything but the rows of new tokens.
#include <algorithm>

#include "calls.h"

namespace fuzz {
namespace {

using Args = flashattn_append_kv_args;

// What the arrays of a call are made of, and whether its lengths, pages and positions make sense.
class Append {
 public:
  Append(Round* round, Memory* memory) : in_(round->in), facts_(round->facts), memory_(memory) {
    flashattn_append_kv_args_init(&args, sizeof args);
    flashattn_args sizes;
    draw_sizes(in_, round->request, &sizes);
    args.batch = sizes.batch;
    args.seqlen_q = sizes.seqlen_q;
    args.seqlen_kv = sizes.seqlen_kv;
    args.total_q = sizes.total_q;
    args.total_kv = sizes.total_kv;
    args.pages = sizes.pages;
    const flashattn_desc& d = facts_.desc;
    const auto wide =
        in_->pick<int32_t>({FLASHATTN_DTYPE_F32, FLASHATTN_DTYPE_F16, FLASHATTN_DTYPE_BF16});
    args.dtype = d.dtype == FLASHATTN_DTYPE_F8E4M3 || in_->mistake(16) ? wide : 0;
    dtype_ = args.dtype ? args.dtype : d.dtype;
  }

  bool is_small() const {
    const auto below = [](int64_t n) { return n >= 0 && n <= 4096; };
    return below(args.batch) && below(args.seqlen_q) && below(args.seqlen_kv) &&
           below(args.total_q) && below(args.total_kv) && below(args.pages);
  }

  void draw() {
    const flashattn_desc& d = facts_.desc;
    fits = !facts_.has(d.layout, FLASHATTN_LAYOUT_LATENT_KV);
    Numbers numbers(in_->word());
    const uint32_t given = in_->byte();
    draw_rotary(&numbers);
    const int64_t new_batch = facts_.varlen_q() ? 1 : args.batch;
    const int64_t tokens = facts_.varlen_q() ? args.total_q : args.seqlen_q;
    const bool pages = facts_.paged() && args.batch > 0 && args.seqlen_kv > 0;
    const int64_t batch = facts_.varlen_kv() ? 1 : facts_.paged() ? pages * args.pages : args.batch;
    const int64_t rows = facts_.varlen_kv() ? args.total_kv
                         : facts_.paged()   ? d.page_size
                                            : args.seqlen_kv;
    if (args.rotary_dim > 0 && given & 1) {
      const bool in_place = in_->one_in(3);
      add("q", &args.q, in_place ? Role::kOutput : Role::kInput, dtype_,
          {new_batch, d.heads_q, tokens, d.dim_qk}, &numbers);
      if (in_place) {
        args.q_out = args.q;
      } else {
        add("q_out", &args.q_out, Role::kOutput, dtype_, {new_batch, d.heads_q, tokens, d.dim_qk},
            &numbers);
      }
    }
    const int64_t blocks = d.descale_block > 0
                               ? (args.seqlen_kv + d.descale_block - 1) / d.descale_block
                               : args.seqlen_kv > 0;
    const auto add_side = [&](flashattn_tensor* from, flashattn_tensor* cache,
                              flashattn_tensor* descale, int32_t dim) {
      add("new tokens", from, Role::kInput, dtype_, {new_batch, d.heads_kv, tokens, dim}, &numbers);
      add("cache", cache, Role::kOutput, d.dtype_kv, {batch, d.heads_kv, rows, dim}, &numbers);
      if (args.update_descales || (bytes_of(d.dtype_kv) == 1 && in_->one_in(2))) {
        add("descales", descale, args.update_descales ? Role::kOutput : Role::kInput,
            FLASHATTN_DTYPE_F32, {args.batch, d.heads_kv, blocks, 1}, &numbers, true);
      }
    };
    args.update_descales =
        bytes_of(d.dtype_kv) == 1 && d.descale_block > 0 && given & 6 && in_->one_in(2);
    if (given & 2) add_side(&args.k, &args.k_cache, &args.descale_k, d.dim_qk);
    if (given & 4) add_side(&args.v, &args.v_cache, &args.descale_v, d.dim_v);
    draw_lengths(given & 6, rows);
  }

  Args args;
  std::vector<Array> arrays;
  bool fits = true;
  Block* lens_block = nullptr;  // of lens_out

 private:
  void add(const char* name, flashattn_tensor* tensor, Role role, int32_t dtype,
           const int64_t (&extent)[4], Numbers* numbers, bool heads_first = false) {
    Array a{};
    a.name = name;
    a.tensor = tensor;
    a.pointer = &tensor->data;
    a.forward = a.backward = role;
    a.dtype = dtype;
    a.element = bytes_of(dtype);
    a.heads_first = heads_first;
    std::copy(extent, extent + 4, a.extent);
    *tensor = draw_strides(in_, a);
    place(in_, &a, memory_);
    fill(a, draw_kind(in_), numbers);
    arrays.push_back(a);
  }

  int32_t* ints(const char* name, int64_t count, Block** its = nullptr) {
    Block& block = memory_->make(static_cast<size_t>(std::max<int64_t>(count, 0)) * 4, name);
    if (its) *its = &block;
    return reinterpret_cast<int32_t*>(block.data.get());
  }

  static constexpr int32_t kMostPairs = 256;  // that the library takes

  void draw_rotary(Numbers* numbers) {
    const int32_t pairs = std::min(in_->below(3) * facts_.desc.dim_qk / 4, kMostPairs);
    args.rotary_dim = 2 * pairs;
    args.rotary = pairs > 0 || in_->mistake(8) ? in_->below(2) : 0;
    if (in_->mistake(16)) args.rotary_dim = static_cast<int32_t>(in_->wild());
    if (args.rotary_dim < 1 || args.rotary_dim > 4096) return;
    if (in_->one_in(2)) {
      args.rotary_base = 1.0f + static_cast<float>(in_->byte()) * 100;
      return;
    }
    args.rotary_positions = 1 + in_->byte();
    args.dtype_rotary = in_->pick<int32_t>({0, FLASHATTN_DTYPE_F16, FLASHATTN_DTYPE_BF16});
    const int32_t dtype = args.dtype_rotary ? args.dtype_rotary : FLASHATTN_DTYPE_F32;
    for (flashattn_tensor* table : {&args.rotary_cos, &args.rotary_sin}) {
      add("table", table, Role::kInput, dtype, {1, 1, args.rotary_positions, args.rotary_dim / 2},
          numbers);
    }
  }

  // Starts of sequences, one behind another, each with at most `longest` rows.
  int32_t* starts_of(const char* name, int64_t total, int64_t longest) {
    int32_t* const cu = ints(name, args.batch + 1);
    for (int32_t b = 0; b < args.batch; ++b) {
      const int64_t room = std::min(longest, total - cu[b]) * in_->byte() / 255;
      cu[b + 1] = static_cast<int32_t>(cu[b] + room);
    }
    return cu;
  }

  void draw_lengths(bool stores, int64_t rows) {
    const bool packs_q = facts_.varlen_q(), packs_kv = facts_.varlen_kv();
    int32_t* const cu_q =
        packs_q ? starts_of("cu_seqlens_q", args.total_q, args.seqlen_q) : nullptr;
    int32_t* const cu_kv =
        packs_kv ? starts_of("cu_seqlens_kv", args.total_kv, args.seqlen_kv) : nullptr;
    int32_t* const lens_q = in_->one_in(3) ? ints("lens_q", args.batch) : nullptr;
    int32_t* const lens = ints("lens_kv", args.batch, &lens_block);
    int32_t* const positions =
        args.rotary_dim > 0 && in_->one_in(3) ? ints("positions", args.batch) : nullptr;
    int32_t* table = nullptr;
    const int64_t columns = facts_.paged() ? (args.seqlen_kv + rows - 1) / rows : 0;
    if (facts_.paged()) {
      table = ints("page_table", args.batch * columns);
      args.page_table = {table, -1, 0, 0};
    }
    for (int32_t b = 0; b < args.batch; ++b) {
      int64_t tokens = cu_q ? cu_q[b + 1] - cu_q[b] : args.seqlen_q;
      const int64_t room = cu_kv ? cu_kv[b + 1] - cu_kv[b] : args.seqlen_kv;
      if (lens_q) lens_q[b] = static_cast<int32_t>(tokens = tokens * in_->byte() / 255);
      lens[b] = static_cast<int32_t>(std::max<int64_t>(room - tokens, 0) * in_->byte() / 255);
      if (in_->mistake(6)) lens[b] = static_cast<int32_t>(in_->wild());
      if (positions)
        positions[b] = in_->mistake(6) ? static_cast<int32_t>(in_->wild()) : in_->byte();
      fits &= lens[b] >= 0 && lens[b] <= room && (!stores || lens[b] + tokens <= room);
      const int64_t first = positions ? positions[b] : lens[b];
      if (args.rotary_dim > 0 && tokens > 0) {
        fits &=
            first >= 0 && (args.rotary_positions == 0 || first + tokens <= args.rotary_positions);
      }
      for (int64_t n = 0; n < columns; ++n) {
        int32_t& page = table[b * columns + n];
        // No two tokens of a call lie in one row.
        page = static_cast<int32_t>(b * columns + n);
        if (in_->mistake(12)) page = static_cast<int32_t>(in_->wild());
        // The block of the first new token may begin on an earlier page.
        const int64_t touched =
            args.update_descales ? lens[b] - lens[b] % facts_.desc.descale_block : lens[b];
        const bool used = tokens > 0 && n >= touched / rows && n <= (lens[b] + tokens - 1) / rows;
        fits &= !stores || !used || (page >= 0 && page < args.pages);
      }
    }
    args.cu_seqlens_q = cu_q;
    args.cu_seqlens_kv = cu_kv;
    args.lens_q = lens_q;
    args.lens_kv = lens;
    args.positions = positions;
    if (!stores || in_->one_in(3)) return;
    const bool in_place = in_->one_in(2);
    args.lens_out = in_place ? lens : ints("lens_out", args.batch, &lens_block);
  }

  Input* const in_;
  const Facts& facts_;
  Memory* const memory_;
  int32_t dtype_;
};

}  // namespace

void run_append(Round* round) {
  Input* const in = round->in;
  Memory memory;
  Append call(round, &memory);
  if (!call.is_small()) return;
  call.draw();
  Args& args = call.args;
  draw_parallel(in, &args.parallel, &args.parallel_user);
  flashattn_error* const error = args.error = draw_error(in, &round->structs);
  const Args* const own = draw_sized(in, args, &round->structs, "append args");
  memory.remember();
  const Answer answer = ask("append_kv", is_taken(own) ? error : nullptr,
                            [&] { return flashattn_append_kv(round->plan, own, nullptr); });
  const bool passed = answer.status == FLASHATTN_OK;
  FUZZ_CHECK(in->careless || passed == call.fits || args.batch == 0, "an append that %s",
             call.fits ? "fits" : "does not fit");
  FUZZ_CHECK(call.fits || !passed || args.batch == 0, "an append without room passed");
  round->deeds |= passed ? kAppend : kRefusedCall;
  for (const Array& a : call.arrays) allow(a);
  if (args.lens_out) std::fill_n(call.lens_block->writable.begin(), call.lens_block->size, 1);
  memory.check("append_kv", !passed);
}

}  // namespace fuzz
