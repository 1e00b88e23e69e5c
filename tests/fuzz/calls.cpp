#include "calls.h"

#include <algorithm>

namespace fuzz {
namespace {

// Has a size that can be, so that all of it is memory.
bool has_size(const flashattn_error* error) {
  return error && error->struct_size >= sizeof *error && error->struct_size <= 4096;
}

bool usable(const flashattn_error* error) {
  if (!has_size(error)) return false;
  const auto* const bytes = reinterpret_cast<const uint8_t*>(error);
  return std::all_of(bytes + sizeof *error, bytes + error->struct_size,
                     [](uint8_t byte) { return byte == 0; });
}

void check_text(const char* function, const Answer& answer) {
  FUZZ_CHECK(answer.status >= FLASHATTN_ERROR_INVALID_ARGUMENT &&
                 answer.status <= FLASHATTN_ERROR_VERSION &&
                 answer.status != FLASHATTN_ERROR_OUT_OF_MEMORY,
             "%s: status %d", function, answer.status);
  FUZZ_CHECK(answer.reason > FLASHATTN_REASON_NONE && answer.reason <= FLASHATTN_REASON_STREAM,
             "%s: reason %d", function, answer.reason);
  FUZZ_CHECK(!answer.field.empty() && answer.field.size() < 63, "%s: field %s", function,
             answer.field.c_str());
  FUZZ_CHECK(answer.message.size() > 20 && answer.message.size() < 639, "%s: %zu bytes", function,
             answer.message.size());
  // "part_o.stride_seq" is "part_o[1].stride_seq" in the message.
  const std::string name = answer.field.substr(0, answer.field.find('.'));
  FUZZ_CHECK(answer.message.find(name) != std::string::npos, "%s: the message does not name %s",
             function, name.c_str());
  const bool version = answer.status == FLASHATTN_ERROR_VERSION;
  FUZZ_CHECK(version == (answer.reason == FLASHATTN_REASON_STRUCT_SIZE), "%s: status %d, reason %d",
             function, answer.status, answer.reason);
  FUZZ_CHECK(answer.status != FLASHATTN_ERROR_WORKSPACE || answer.field.find("workspace") == 0,
             "%s: field %s", function, answer.field.c_str());
}

void run_forwards(void*, int32_t count, flashattn_task_fn task, void* context) {
  for (int32_t i = 0; i < count; ++i) task(context, i);
}

void run_backwards(void* user, int32_t count, flashattn_task_fn task, void* context) {
  if (user) *static_cast<int64_t*>(user) += count;
  for (int32_t i = count - 1; i >= 0; --i) task(context, i);
}

// Sizes that are no smaller, within what the library takes.
flashattn_args larger(Input* in, const flashattn_args& args, const Facts& facts) {
  flashattn_args more = args;
  const auto grow = [&](auto* size) {
    if (in->one_in(2) && *size >= 0 && *size < 1 << 24) *size += in->below(300);
  };
  grow(&more.batch);
  grow(&more.seqlen_q);
  grow(&more.seqlen_kv);
  if (facts.varlen_q()) grow(&more.total_q);
  if (facts.varlen_kv()) grow(&more.total_kv);
  return more;
}

// workspace_size and plan_info, which must agree. -1: refused.
int64_t question_sizes(Round* round, uint32_t op, const flashattn_args* args, bool good) {
  Memory memory;
  Input* const in = round->in;
  flashattn_args* given = nullptr;
  flashattn_error* error = nullptr;
  if (args) {
    flashattn_args own = *args;
    error = own.error = draw_error(in, &round->structs);
    given = draw_sized(in, own, &memory, "args");
  }
  Block& bytes = memory.make(sizeof(int64_t), "bytes");
  flashattn_plan_properties properties{};
  properties.struct_size = sizeof properties;
  flashattn_plan_properties* const out = draw_sized(in, properties, &memory, "properties");
  const bool mine = given && is_taken(given);
  const flashattn_error* const told = mine ? error : nullptr;
  memory.remember();
  const Answer size = ask("workspace_size", told, [&] {
    return flashattn_workspace_size(round->plan, op, given,
                                    reinterpret_cast<int64_t*>(bytes.data.get()));
  });
  bytes.writable.assign(bytes.size, 1);
  memory.check("workspace_size", size.status != FLASHATTN_OK);
  memory.forbid_writing();
  memory.remember();
  const Answer info =
      ask("plan_info", told, [&] { return flashattn_plan_info(round->plan, op, given, out); });
  if (info.status != FLASHATTN_OK) memory.check("plan_info", true);
  if (good) {
    const bool maxima_matter = !args && size.status == FLASHATTN_ERROR_INVALID_ARGUMENT;
    FUZZ_CHECK(size.status == FLASHATTN_OK || maxima_matter, "workspace_size of good sizes");
    FUZZ_CHECK(info.status == FLASHATTN_OK, "plan_info of good sizes");
  }
  int64_t needed = -1;
  if (size.status == FLASHATTN_OK) {
    std::memcpy(&needed, bytes.data.get(), sizeof needed);
    FUZZ_CHECK(needed >= 0, "%lld bytes of workspace", static_cast<long long>(needed));
  }
  if (info.status == FLASHATTN_OK) {
    FUZZ_CHECK(out->flops >= 0 && out->bytes >= 0 && out->splits >= 0 && out->tile_q > 0 &&
                   out->tile_kv > 0 && out->threads > 0,
               "plan_info: flops %lld, bytes %lld", static_cast<long long>(out->flops),
               static_cast<long long>(out->bytes));
    FUZZ_CHECK(std::string(out->backend) == "cpu" && *out->kernel && *out->isa && *out->why,
               "plan_info: texts");
    FUZZ_CHECK(needed < 0 || out->workspace == needed, "plan_info: %lld, workspace_size: %lld",
               static_cast<long long>(out->workspace), static_cast<long long>(needed));
  }
  return needed;
}

}  // namespace

std::vector<uint8_t> bytes_of_error(const flashattn_error* error) {
  if (!error) return {};
  const size_t size = has_size(error) ? error->struct_size : sizeof error->struct_size;
  const uint8_t* const bytes = reinterpret_cast<const uint8_t*>(error);
  return {bytes, bytes + size};
}

Answer answer_of(const char* function, int32_t status, const std::string& before,
                 const flashattn_error* error, const std::vector<uint8_t>& error_before) {
  Answer answer;
  answer.status = status;
  const char* field = nullptr;
  const std::string message = flashattn_last_error(&answer.reason, &field);
  answer.field = field;
  const std::vector<uint8_t> error_after = bytes_of_error(error);
  if (status == FLASHATTN_OK) {
    FUZZ_CHECK(message == before, "%s succeeded and changed the message", function);
    FUZZ_CHECK(error_after == error_before, "%s succeeded and wrote the error", function);
    return {};
  }
  answer.message = message;
  check_text(function, answer);
  if (!usable(error)) {
    FUZZ_CHECK(error_after == error_before, "%s wrote an error of no version", function);
    return answer;
  }
  // What refuses the call before the error's address is known says so in last_error only.
  if (error_after == error_before && answer.status == FLASHATTN_ERROR_VERSION) return answer;
  FUZZ_CHECK(error->status == status && error->reason == answer.reason &&
                 answer.field == error->field && answer.message == error->message &&
                 error->reserved == 0,
             "%s: another error in the caller's structure: %s", function, error->message);
  FUZZ_CHECK(std::equal(error_before.begin() + sizeof *error, error_before.end(),
                        error_after.begin() + sizeof *error),
             "%s wrote behind the error", function);
  return answer;
}

flashattn_error* draw_error(Input* in, Memory* memory) {
  if (!in->one_in(2)) return nullptr;
  flashattn_error error;
  std::memset(&error, 0x5a, sizeof error);
  error.struct_size = sizeof error;
  if (in->mistake(32)) {
    const uint32_t sizes[] = {0, 4, 712, 4097, 0xffffffff};
    return Sized<flashattn_error>(sizes[in->below(5)], memory, "error").get();
  }
  const size_t size = sizeof error + static_cast<size_t>(in->below(3)) * 8;
  const uint8_t tail = in->mistake(16) ? 1 : 0;
  return Sized<flashattn_error>(error, size, tail, memory, "error").get();
}

void draw_parallel(Input* in, flashattn_parallel_fn* parallel, void** user) {
  *parallel = in->pick<flashattn_parallel_fn>({nullptr, nullptr, run_forwards, run_backwards});
  *user = nullptr;
}

bool is_small(const Facts& facts, const flashattn_args& args) {
  const double d = facts.desc.dim_qk + static_cast<double>(facts.desc.dim_v);
  const double q = std::max(args.seqlen_q, 1), kv = std::max(args.seqlen_kv, 1);
  return std::max(args.batch, 1) * q * kv * facts.desc.heads_q * d < 5e6;
}

void question_plan(Round* round) {
  Input* const in = round->in;
  // The resolved descriptor makes the same plan.
  flashattn_desc desc{}, again{};
  desc.struct_size = again.struct_size = sizeof desc;
  const Answer first =
      ask("plan_desc", nullptr, [&] { return flashattn_plan_desc(round->plan, &desc); });
  FUZZ_CHECK(first.status == FLASHATTN_OK, "plan_desc");
  flashattn_plan* same = nullptr;
  const Answer made =
      ask("plan_create", nullptr, [&] { return flashattn_plan_create(&desc, &same, nullptr); });
  FUZZ_CHECK(made.status == FLASHATTN_OK, "plan_create of what plan_desc says");
  flashattn_plan_desc(same, &again);
  flashattn_plan_destroy(same);
  FUZZ_CHECK(std::memcmp(&desc, &again, sizeof desc) == 0, "plan_desc changed");
  round->facts.desc = desc;

  const uint32_t ops = desc.ops;
  for (const uint32_t op : {1u, 2u, in->pick<uint32_t>({1, 0, 3, 4, 0xffffffff})}) {
    const bool good = (op == 1 || op == 2) && (ops & op);
    flashattn_args args;
    draw_sizes(in, round->request, &args);
    const int64_t least = question_sizes(round, op, &args, good && !in->careless);
    const int64_t most = question_sizes(round, op, nullptr, good && !in->careless);
    FUZZ_CHECK(good || (least < 0 && most < 0), "workspace_size of no operation of the plan");
    FUZZ_CHECK(least < 0 || most < 0 || least <= most, "%lld bytes, %lld for the maxima",
               static_cast<long long>(least), static_cast<long long>(most));
    const flashattn_args more = larger(in, args, round->facts);
    const int64_t bytes = question_sizes(round, op, &more, false);
    FUZZ_CHECK(least < 0 || bytes < 0 || least <= bytes, "%lld bytes, %lld for larger sizes",
               static_cast<long long>(least), static_cast<long long>(bytes));
    FUZZ_CHECK(most < 0 || bytes < 0 || bytes <= most, "%lld bytes, %lld for the maxima",
               static_cast<long long>(bytes), static_cast<long long>(most));
  }
}

}  // namespace fuzz
