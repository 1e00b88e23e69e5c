// The C functions that compute.
#include "api/guard.h"
#include "core/plan.h"

using namespace flashattn;

int32_t flashattn_forward(const flashattn_plan* plan, const flashattn_forward_args* args,
                          void* workspace, int64_t workspace_bytes, void* stream) {
  return guard("flashattn_forward",
               [&] { return run_forward(plan, args, workspace, workspace_bytes, stream); });
}

int32_t flashattn_backward(const flashattn_plan* plan, const flashattn_backward_args* args,
                           void* workspace, int64_t workspace_bytes, void* stream) {
  return guard("flashattn_backward",
               [&] { return run_backward(plan, args, workspace, workspace_bytes, stream); });
}

int32_t flashattn_merge(const flashattn_plan* plan, const flashattn_merge_args* args,
                        void* stream) {
  return guard("flashattn_merge", [&] { return run_merge(plan, args, stream); });
}

int32_t flashattn_dropout_mask(const flashattn_plan* plan, const flashattn_forward_args* args,
                               uint8_t* keep, void* stream) {
  return guard("flashattn_dropout_mask",
               [&] { return run_dropout_mask(plan, args, keep, stream); });
}
