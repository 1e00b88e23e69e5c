// The C functions that compute.
#include <cstddef>
#include <cstring>

#include "api/guard.h"
#include "core/copy_in.h"
#include "core/plan.h"

using namespace flashattn;

namespace {

// Sets the strides of the tensors at these offsets to -1 (packed), as far as the caller's structure
// has them.
template <size_t kCount>
void pack_strides(void* given, uint32_t struct_size, const size_t (&offsets)[kCount]) {
  const flashattn_tensor packed{nullptr, -1, -1, -1};
  for (const size_t offset : offsets) {
    if (offset + sizeof packed > struct_size) continue;
    std::memcpy(static_cast<char*>(given) + offset, &packed, sizeof packed);
  }
}

}  // namespace

int32_t flashattn_args_init(flashattn_args* args, uint32_t struct_size) {
  return guard("flashattn_args_init", [&](ErrorOut&) {
    using Args = flashattn_args;
    init_struct(args, "args", struct_size);
    pack_strides(args, struct_size, {offsetof(Args, q),           offsetof(Args, k),
                                     offsetof(Args, v),           offsetof(Args, page_table),
                                     offsetof(Args, bias),        offsetof(Args, alibi_slopes),
                                     offsetof(Args, block_mask),  offsetof(Args, tree_bits),
                                     offsetof(Args, descale_q),   offsetof(Args, descale_k),
                                     offsetof(Args, descale_v),   offsetof(Args, o),
                                     offsetof(Args, dout),        offsetof(Args, dq),
                                     offsetof(Args, dk),          offsetof(Args, dv),
                                     offsetof(Args, dbias),       offsetof(Args, scale_o),
                                     offsetof(Args, amax_o),      offsetof(Args, descale_latent),
                                     offsetof(Args, block_index), offsetof(Args, block_begin),
                                     offsetof(Args, block_end),   offsetof(Args, block_lens)});
    return FLASHATTN_OK;
  });
}

int32_t flashattn_merge_args_init(flashattn_merge_args* args, uint32_t struct_size) {
  return guard("flashattn_merge_args_init", [&](ErrorOut&) {
    init_struct(args, "args", struct_size);
    pack_strides(args, struct_size, {offsetof(flashattn_merge_args, o)});
    return FLASHATTN_OK;
  });
}

int32_t flashattn_quantize_args_init(flashattn_quantize_args* args, uint32_t struct_size) {
  return guard("flashattn_quantize_args_init", [&](ErrorOut&) {
    using Args = flashattn_quantize_args;
    init_struct(args, "args", struct_size);
    pack_strides(args, struct_size,
                 {offsetof(Args, q), offsetof(Args, k), offsetof(Args, v), offsetof(Args, q_out),
                  offsetof(Args, k_out), offsetof(Args, v_out), offsetof(Args, descale_q),
                  offsetof(Args, descale_k), offsetof(Args, descale_v), offsetof(Args, k_mean)});
    return FLASHATTN_OK;
  });
}

int32_t flashattn_append_kv_args_init(flashattn_append_kv_args* args, uint32_t struct_size) {
  return guard("flashattn_append_kv_args_init", [&](ErrorOut&) {
    using Args = flashattn_append_kv_args;
    init_struct(args, "args", struct_size);
    pack_strides(args, struct_size,
                 {offsetof(Args, page_table), offsetof(Args, q), offsetof(Args, k),
                  offsetof(Args, v), offsetof(Args, q_out), offsetof(Args, k_cache),
                  offsetof(Args, v_cache), offsetof(Args, descale_k), offsetof(Args, descale_v),
                  offsetof(Args, rotary_cos), offsetof(Args, rotary_sin)});
    return FLASHATTN_OK;
  });
}

int32_t flashattn_forward(const flashattn_plan* plan, const flashattn_args* args, void* workspace,
                          int64_t workspace_bytes, void* stream) {
  return guard("flashattn_forward", [&](ErrorOut& out) {
    const flashattn_args own = copy_in(args, "args");
    out.set(own.error);
    return run_forward(plan, own, workspace, workspace_bytes, stream);
  });
}

int32_t flashattn_backward(const flashattn_plan* plan, const flashattn_args* args, void* workspace,
                           int64_t workspace_bytes, void* stream) {
  return guard("flashattn_backward", [&](ErrorOut& out) {
    const flashattn_args own = copy_in(args, "args");
    out.set(own.error);
    return run_backward(plan, own, workspace, workspace_bytes, stream);
  });
}

int32_t flashattn_merge(const flashattn_plan* plan, const flashattn_merge_args* args,
                        void* stream) {
  return guard("flashattn_merge", [&](ErrorOut& out) {
    const flashattn_merge_args own = copy_in(args, "args");
    out.set(own.error);
    return run_merge(plan, own, stream);
  });
}

int32_t flashattn_quantize(const flashattn_plan* plan, const flashattn_quantize_args* args,
                           void* stream) {
  return guard("flashattn_quantize", [&](ErrorOut& out) {
    const flashattn_quantize_args own = copy_in(args, "args");
    out.set(own.error);
    return run_quantize(plan, own, stream);
  });
}

int32_t flashattn_append_kv(const flashattn_plan* plan, const flashattn_append_kv_args* args,
                            void* stream) {
  return guard("flashattn_append_kv", [&](ErrorOut& out) {
    const flashattn_append_kv_args own = copy_in(args, "args");
    out.set(own.error);
    return run_append_kv(plan, own, stream);
  });
}

int32_t flashattn_dropout_mask(const flashattn_plan* plan, const flashattn_args* args,
                               uint8_t* keep, void* stream) {
  return guard("flashattn_dropout_mask", [&](ErrorOut& out) {
    const flashattn_args own = copy_in(args, "args");
    out.set(own.error);
    return run_dropout_mask(plan, own, keep, stream);
  });
}
