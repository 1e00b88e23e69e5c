// Calls of the library, and what the header promises of every call.
#pragma once

#include <string>

#include "draw.h"

namespace fuzz {

// What a call answered, as flashattn_last_error has it.
struct Answer {
  int32_t status = FLASHATTN_OK, reason = FLASHATTN_REASON_NONE;
  std::string field, message;
  bool operator==(const Answer& other) const {
    return status == other.status && reason == other.reason && field == other.field &&
           message == other.message;
  }
};

// Says of a call that returned `status` whether its error is complete and the same in both places.
// before: the message before the call; error: the caller's own, before the call in error_before.
Answer answer_of(const char* function, int32_t status, const std::string& before,
                 const flashattn_error* error, const std::vector<uint8_t>& error_before);

std::vector<uint8_t> bytes_of_error(const flashattn_error* error);

template <typename Function>
Answer ask(const char* name, const flashattn_error* error, const Function& function) {
  const std::string before = flashattn_last_error(nullptr, nullptr);
  const std::vector<uint8_t> error_before = bytes_of_error(error);
  return answer_of(name, function(), before, error, error_before);
}

// The caller's error structure: none, one of this version, a longer one, or, by mistake, none that
// any version has.
flashattn_error* draw_error(Input* in, Memory* memory);

// What a round did, as bits: what the seed corpus is made of.
enum Deed : uint32_t {
  kForward = 1,
  kBackward = 2,
  kMerge = 4,
  kDropoutMask = 8,
  kRefusedPlan = 16,
  kRefusedCall = 32,
  kAppend = 64,
  kQuantize = 128
};

struct Round {
  Input* in;
  Request request;
  Facts facts;                                            // of the plan, resolved
  const flashattn_plan *plan = nullptr, *twin = nullptr;  // the same with other threads
  Memory structs;                                         // what is no device memory
  uint32_t deeds = 0;
  flashattn_desc seen = {};  // the descriptor, where the plan was made
  flashattn_args last = {};  // of the last call that was computed
};

void question_plan(Round* round);   // plan_desc, workspace_size, plan_info
void run_operations(Round* round);  // forward, backward
void run_merge(Round* round);
void run_dropout_mask(Round* round);
void run_append(Round* round);
void run_quantize(Round* round);

// Whether a call with these arguments is small enough to be computed here.
bool is_small(const Facts& facts, const flashattn_args& args);

// One of the ways to run tasks: the library's threads, or a pool of the caller's.
void draw_parallel(Input* in, flashattn_parallel_fn* parallel, void** user);

}  // namespace fuzz
