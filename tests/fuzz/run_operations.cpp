// Forward and backward: what they write, and that it does not depend on who computes it.
#include <algorithm>
#include <string>

#include "calls.h"

namespace fuzz {
namespace {

using Bytes = std::pair<int64_t, int64_t>;  // of a block: first, number

bool is_written(Role role) { return role == Role::kOutput || role == Role::kSum; }

// The bytes of an output that a call writes. Of dbias that is said of all for sums over sequences
// only: `all` asks for what may be written, else for what must be.
std::vector<Bytes> written_by(const Array& a, const Facts& facts, const std::vector<Rows>& rows,
                              bool all) {
  std::vector<Bytes> runs;
  if (!a.block || a.bytes <= 0) return runs;
  const auto add = [&](int64_t b, int64_t h, int64_t s, int64_t n) {
    if (n > 0) runs.emplace_back(a.at(b, h, s, 0), n * a.element);
  };
  const std::string name = a.name;
  const bool sum = a.backward == Role::kSum;
  if (name == "dsink" || name == "amax_o" || (sum && (all || a.tensor->stride_batch == 0))) {
    for (int64_t b = 0; b < a.extent[0]; ++b) {
      for (int64_t h = 0; h < a.extent[1]; ++h) {
        for (int64_t s = 0; s < a.extent[2]; ++s) add(b, h, s, a.extent[3]);
      }
    }
    return runs;
  }
  const bool keys = name == "dk" || name == "dv";
  const bool varlen = keys ? facts.varlen_kv() : facts.varlen_q();
  for (size_t i = 0; i < rows.size(); ++i) {
    const int64_t b = varlen && !sum ? 0 : static_cast<int64_t>(i);
    const int64_t first = sum ? 0 : keys ? rows[i].first_kv : rows[i].first_q;
    const int64_t n = keys ? rows[i].len_kv : rows[i].len_q;
    for (int64_t h = 0; h < a.extent[1]; ++h) {
      for (int64_t s = 0; s < n; ++s) {
        add(b, h, first + s, sum ? std::min(rows[i].len_kv, a.extent[3]) : a.extent[3]);
      }
    }
  }
  return runs;
}

void allow_writing(const Call& call, uint32_t op, const std::vector<Rows>& rows) {
  for (const Array& a : call.arrays) {
    if (!is_written(a.role(op))) continue;
    for (const Bytes& run : written_by(a, call.facts, rows, true)) {
      std::fill_n(a.block->writable.begin() + run.first, run.second, uint8_t{1});
    }
  }
}

// Each NaN becomes the same one: which NaN it is depends on the order of a sum's operands.
void unify_nan(int32_t dtype, std::vector<uint8_t>* bytes, size_t first) {
  const auto unify = [&](auto bits, uint32_t infinity) {
    for (size_t at = first; at < bytes->size(); at += sizeof bits) {
      std::memcpy(&bits, bytes->data() + at, sizeof bits);
      const uint32_t magnitude = static_cast<decltype(bits)>(bits << 1) >> 1;
      if (magnitude > infinity) std::memset(bytes->data() + at, 0xff, sizeof bits);
    }
  };
  if (dtype == FLASHATTN_DTYPE_F32) unify(uint32_t{}, 0x7f800000);
  if (dtype == FLASHATTN_DTYPE_F16) unify(uint16_t{}, 0x7c00);
  if (dtype == FLASHATTN_DTYPE_BF16) unify(uint16_t{}, 0x7f80);
  if (dtype == FLASHATTN_DTYPE_F8E4M3) unify(uint8_t{}, 0x7e);
}

std::vector<uint8_t> results(const Call& call, uint32_t op, const std::vector<Rows>& rows) {
  std::vector<uint8_t> bytes;
  for (const Array& a : call.arrays) {
    if (!is_written(a.role(op))) continue;
    const size_t begin = bytes.size();
    for (const Bytes& run : written_by(a, call.facts, rows, false)) {
      const uint8_t* const first = a.block->data.get() + run.first;
      bytes.insert(bytes.end(), first, first + run.second);
    }
    unify_nan(a.dtype, &bytes, begin);
  }
  return bytes;
}

bool same_steps(const Array& x, const Array& y) {
  return x.element == y.element && std::equal(x.extent, x.extent + 4, y.extent) &&
         std::equal(x.stride, x.stride + 4, y.stride);
}

bool has_no_gaps(const Array& a) {
  return a.bytes == a.extent[0] * a.extent[1] * a.extent[2] * a.extent[3] * a.element;
}

// Overlaps that were found are there, and those that the header promises to find were found.
void check_overlaps(const Call& call, uint32_t op, const Answer& answer) {
  bool real = false;
  for (const Array& x : call.arrays) {
    if (!is_written(x.role(op))) continue;
    for (const Array& y : call.arrays) {
      if (&x == &y || y.role(op) == Role::kUnused || !share_bytes(x, y)) continue;
      real = real || answer.field.find(x.name) == 0 || answer.field.find(y.name) == 0;
      const bool easy = same_steps(x, y) || has_no_gaps(x) || has_no_gaps(y);
      FUZZ_CHECK(answer.status != FLASHATTN_OK || !easy, "%s overlaps %s", x.name, y.name);
    }
  }
  FUZZ_CHECK(answer.reason != FLASHATTN_REASON_OVERLAP || real, "nothing overlaps %s",
             answer.field.c_str());
}

class Operation {
 public:
  Operation(Round* round, Call* call, Memory* memory, uint32_t op)
      : round_(*round), call_(*call), memory_(*memory), op_(op) {}

  void run() {
    Input* const in = round_.in;
    const bool planned = round_.facts.desc.ops & op_;
    // Without LSE forward refuses memory for it, which backward would read unwritten.
    const bool lse = round_.facts.desc.features & FLASHATTN_FEATURE_LSE;
    without_lse_ = op_ == FLASHATTN_OP_FORWARD && !lse && !in->mistake(16);
    int64_t bytes = -1;
    flashattn_workspace_size(round_.plan, op_, &call_.args, &bytes);
    if (bytes > kMostBytes || !is_small(round_.facts, call_.args)) return;
    const int64_t less = in->mistake(16) ? 1 + in->below(16) : 0;
    const int64_t given = in->mistake(64) ? in->wild() : std::max<int64_t>(bytes, 0) - less;
    const int64_t room = std::clamp<int64_t>(given, 0, kMostBytes);
    const bool none = in->mistake(32);
    void* const stream = in->mistake(64) ? &stream_ : nullptr;
    const Answer answer = call(round_.plan, none ? -1 : room, given, stream);
    if (!in->careless && planned) {
      FUZZ_CHECK(answer.status == FLASHATTN_OK, "a good call of operation %u", op_);
    }
    check_overlaps(call_, op_, answer);
    if (answer.status != FLASHATTN_OK) {
      round_.deeds |= kRefusedCall;
      memory_.check(name(), true);
      workspace_.check(name(), true);
      return;
    }
    FUZZ_CHECK(planned && given >= bytes && !stream && (bytes == 0 || !none), "a bad call passed");
    std::vector<Rows> rows;
    FUZZ_CHECK(sequences_of(call_.facts, call_.args, &rows), "impossible lengths passed");
    allow_writing(call_, op_, rows);
    memory_.check(name(), false);
    workspace_.check(name(), false);
    memory_.forbid_writing();
    round_.deeds |= op_ == FLASHATTN_OP_FORWARD ? kForward : kBackward;
    round_.last = call_.args;
    if (call_.outputs_alias) return;
    const std::vector<uint8_t> once = results(call_, op_, rows);
    spoil(rows);
    // Other threads need another workspace.
    flashattn_workspace_size(round_.twin, op_, &call_.args, &bytes);
    const Answer again = call(round_.twin, bytes, bytes, nullptr);
    if (again.status == FLASHATTN_ERROR_VERSION && in->careless) return;
    FUZZ_CHECK(again.status == FLASHATTN_OK, "a call that passed before");
    FUZZ_CHECK(once == results(call_, op_, rows), "results depend on threads, or are not written");
  }

 private:
  const char* name() const { return op_ == FLASHATTN_OP_FORWARD ? "forward" : "backward"; }

  // room: of the workspace; -1: NULL.
  Answer call(const flashattn_plan* plan, int64_t room, int64_t given, void* stream) {
    Input* const in = round_.in;
    flashattn_args args = call_.args;
    if (without_lse_) args.lse = nullptr;
    draw_parallel(in, &args.parallel, &args.parallel_user);
    flashattn_error* const error = args.error = draw_error(in, &round_.structs);
    if (in->one_in(4)) spoil_ignored(&args);
    const flashattn_args* const own = draw_sized(in, args, &round_.structs, "args");
    const bool mine = is_taken(own);
    // Neither aligned nor cleared.
    const size_t off = room > 0 ? static_cast<size_t>(in->below(64)) : 0;
    uint8_t* const workspace = workspace_.make(static_cast<size_t>(std::max<int64_t>(room, 0)), off,
                                               static_cast<uint8_t>(in->byte() - 1));
    void* const address = room < 0 ? nullptr : workspace;
    memory_.remember();
    return ask(name(), mine ? error : nullptr, [&] {
      const bool forward = op_ == FLASHATTN_OP_FORWARD;
      return (forward ? flashattn_forward : flashattn_backward)(plan, own, address, given, stream);
    });
  }

  // Arrays that the operation has no use for, though the plan has, may be anything.
  void spoil_ignored(flashattn_args* args) const {
    const void* const lse = &call_.args.lse;
    for (const Array& a : call_.arrays) {
      if (a.role(op_) != Role::kUnused || !a.wanted() || a.pointer == lse) continue;
      const auto at =
          reinterpret_cast<const char*>(a.pointer) - reinterpret_cast<const char*>(&call_.args);
      void* const nowhere = reinterpret_cast<void*>(uintptr_t{1});
      std::memcpy(reinterpret_cast<char*>(args) + at, &nowhere, sizeof nowhere);
    }
  }

  // Other contents for what is written: they must not matter.
  void spoil(const std::vector<Rows>& rows) {
    for (const Array& a : call_.arrays) {
      if (!is_written(a.role(op_))) continue;
      for (const Bytes& run : written_by(a, call_.facts, rows, true)) {
        std::fill_n(a.block->data.get() + run.first, run.second, uint8_t{0x7e});
      }
    }
  }

  Round& round_;
  Call& call_;
  Memory& memory_;
  Workspace workspace_;
  uint32_t op_;
  bool without_lse_ = false;
  char stream_ = 0;
};

}  // namespace

void run_operations(Round* round) {
  Memory memory;
  Call call;
  draw_call(round->in, round->request, round->facts, &memory, &call);
  for (const uint32_t op : {FLASHATTN_OP_FORWARD, FLASHATTN_OP_BACKWARD}) {
    if ((round->facts.desc.ops & op) || round->in->one_in(8)) {
      Operation(round, &call, &memory, op).run();
    }
  }
}

}  // namespace fuzz
