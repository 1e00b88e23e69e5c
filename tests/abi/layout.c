/* Written by bindings/generate.py from include/flashattn.h. Do not edit.
 *
 * Every binding relies on these sizes, offsets and values. A wrong one stops the compiler. */
#include "flashattn.h"

#define CHECK(name, condition) typedef char check_##name[(condition) ? 1 : -1]

CHECK(pointer, sizeof(void *) == 8);

CHECK(flashattn_desc, sizeof(flashattn_desc) == 184);
CHECK(flashattn_desc_struct_size,
      offsetof(flashattn_desc, struct_size) == 0);
CHECK(flashattn_desc_device,
      offsetof(flashattn_desc, device) == 4);
CHECK(flashattn_desc_device_index,
      offsetof(flashattn_desc, device_index) == 8);
CHECK(flashattn_desc_ops,
      offsetof(flashattn_desc, ops) == 12);
CHECK(flashattn_desc_dtype,
      offsetof(flashattn_desc, dtype) == 16);
CHECK(flashattn_desc_dtype_o,
      offsetof(flashattn_desc, dtype_o) == 20);
CHECK(flashattn_desc_heads_q,
      offsetof(flashattn_desc, heads_q) == 24);
CHECK(flashattn_desc_heads_kv,
      offsetof(flashattn_desc, heads_kv) == 28);
CHECK(flashattn_desc_dim_qk,
      offsetof(flashattn_desc, dim_qk) == 32);
CHECK(flashattn_desc_dim_v,
      offsetof(flashattn_desc, dim_v) == 36);
CHECK(flashattn_desc_layout,
      offsetof(flashattn_desc, layout) == 40);
CHECK(flashattn_desc_page_size,
      offsetof(flashattn_desc, page_size) == 44);
CHECK(flashattn_desc_mask,
      offsetof(flashattn_desc, mask) == 48);
CHECK(flashattn_desc_window_left,
      offsetof(flashattn_desc, window_left) == 52);
CHECK(flashattn_desc_window_right,
      offsetof(flashattn_desc, window_right) == 56);
CHECK(flashattn_desc_chunk,
      offsetof(flashattn_desc, chunk) == 60);
CHECK(flashattn_desc_block_q,
      offsetof(flashattn_desc, block_q) == 64);
CHECK(flashattn_desc_block_kv,
      offsetof(flashattn_desc, block_kv) == 68);
CHECK(flashattn_desc_bias,
      offsetof(flashattn_desc, bias) == 72);
CHECK(flashattn_desc_bias_dtype,
      offsetof(flashattn_desc, bias_dtype) == 76);
CHECK(flashattn_desc_features,
      offsetof(flashattn_desc, features) == 80);
CHECK(flashattn_desc_determinism,
      offsetof(flashattn_desc, determinism) == 84);
CHECK(flashattn_desc_scale,
      offsetof(flashattn_desc, scale) == 88);
CHECK(flashattn_desc_softcap,
      offsetof(flashattn_desc, softcap) == 92);
CHECK(flashattn_desc_dropout,
      offsetof(flashattn_desc, dropout) == 96);
CHECK(flashattn_desc_splits,
      offsetof(flashattn_desc, splits) == 100);
CHECK(flashattn_desc_max_batch,
      offsetof(flashattn_desc, max_batch) == 104);
CHECK(flashattn_desc_max_seqlen_q,
      offsetof(flashattn_desc, max_seqlen_q) == 108);
CHECK(flashattn_desc_max_seqlen_kv,
      offsetof(flashattn_desc, max_seqlen_kv) == 112);
CHECK(flashattn_desc_sm_limit,
      offsetof(flashattn_desc, sm_limit) == 116);
CHECK(flashattn_desc_threads,
      offsetof(flashattn_desc, threads) == 120);
CHECK(flashattn_desc_reserved0,
      offsetof(flashattn_desc, reserved0) == 124);
CHECK(flashattn_desc_max_total_q,
      offsetof(flashattn_desc, max_total_q) == 128);
CHECK(flashattn_desc_max_total_kv,
      offsetof(flashattn_desc, max_total_kv) == 136);
CHECK(flashattn_desc_workspace_limit,
      offsetof(flashattn_desc, workspace_limit) == 144);
CHECK(flashattn_desc_reserved,
      offsetof(flashattn_desc, reserved) == 152);

CHECK(flashattn_shape, sizeof(flashattn_shape) == 32);
CHECK(flashattn_shape_batch,
      offsetof(flashattn_shape, batch) == 0);
CHECK(flashattn_shape_seqlen_q,
      offsetof(flashattn_shape, seqlen_q) == 4);
CHECK(flashattn_shape_seqlen_kv,
      offsetof(flashattn_shape, seqlen_kv) == 8);
CHECK(flashattn_shape_reserved,
      offsetof(flashattn_shape, reserved) == 12);
CHECK(flashattn_shape_total_q,
      offsetof(flashattn_shape, total_q) == 16);
CHECK(flashattn_shape_total_kv,
      offsetof(flashattn_shape, total_kv) == 24);

CHECK(flashattn_tensor, sizeof(flashattn_tensor) == 32);
CHECK(flashattn_tensor_data,
      offsetof(flashattn_tensor, data) == 0);
CHECK(flashattn_tensor_stride_batch,
      offsetof(flashattn_tensor, stride_batch) == 8);
CHECK(flashattn_tensor_stride_head,
      offsetof(flashattn_tensor, stride_head) == 16);
CHECK(flashattn_tensor_stride_seq,
      offsetof(flashattn_tensor, stride_seq) == 24);

CHECK(flashattn_inputs, sizeof(flashattn_inputs) == 320);
CHECK(flashattn_inputs_q,
      offsetof(flashattn_inputs, q) == 0);
CHECK(flashattn_inputs_k,
      offsetof(flashattn_inputs, k) == 32);
CHECK(flashattn_inputs_v,
      offsetof(flashattn_inputs, v) == 64);
CHECK(flashattn_inputs_cu_seqlens_q,
      offsetof(flashattn_inputs, cu_seqlens_q) == 96);
CHECK(flashattn_inputs_cu_seqlens_kv,
      offsetof(flashattn_inputs, cu_seqlens_kv) == 104);
CHECK(flashattn_inputs_lens_q,
      offsetof(flashattn_inputs, lens_q) == 112);
CHECK(flashattn_inputs_lens_kv,
      offsetof(flashattn_inputs, lens_kv) == 120);
CHECK(flashattn_inputs_page_table,
      offsetof(flashattn_inputs, page_table) == 128);
CHECK(flashattn_inputs_page_table_stride,
      offsetof(flashattn_inputs, page_table_stride) == 136);
CHECK(flashattn_inputs_pages,
      offsetof(flashattn_inputs, pages) == 144);
CHECK(flashattn_inputs_bias,
      offsetof(flashattn_inputs, bias) == 152);
CHECK(flashattn_inputs_bias_stride_batch,
      offsetof(flashattn_inputs, bias_stride_batch) == 160);
CHECK(flashattn_inputs_bias_stride_head,
      offsetof(flashattn_inputs, bias_stride_head) == 168);
CHECK(flashattn_inputs_bias_stride_row,
      offsetof(flashattn_inputs, bias_stride_row) == 176);
CHECK(flashattn_inputs_alibi_slopes,
      offsetof(flashattn_inputs, alibi_slopes) == 184);
CHECK(flashattn_inputs_alibi_stride_batch,
      offsetof(flashattn_inputs, alibi_stride_batch) == 192);
CHECK(flashattn_inputs_sink,
      offsetof(flashattn_inputs, sink) == 200);
CHECK(flashattn_inputs_block_mask,
      offsetof(flashattn_inputs, block_mask) == 208);
CHECK(flashattn_inputs_block_mask_stride_batch,
      offsetof(flashattn_inputs, block_mask_stride_batch) == 216);
CHECK(flashattn_inputs_block_mask_stride_head,
      offsetof(flashattn_inputs, block_mask_stride_head) == 224);
CHECK(flashattn_inputs_block_mask_stride_row,
      offsetof(flashattn_inputs, block_mask_stride_row) == 232);
CHECK(flashattn_inputs_descale_q,
      offsetof(flashattn_inputs, descale_q) == 240);
CHECK(flashattn_inputs_descale_k,
      offsetof(flashattn_inputs, descale_k) == 248);
CHECK(flashattn_inputs_descale_v,
      offsetof(flashattn_inputs, descale_v) == 256);
CHECK(flashattn_inputs_rng_seed,
      offsetof(flashattn_inputs, rng_seed) == 264);
CHECK(flashattn_inputs_rng_offset,
      offsetof(flashattn_inputs, rng_offset) == 272);
CHECK(flashattn_inputs_rng_device,
      offsetof(flashattn_inputs, rng_device) == 280);
CHECK(flashattn_inputs_reserved,
      offsetof(flashattn_inputs, reserved) == 288);

CHECK(flashattn_forward_args, sizeof(flashattn_forward_args) == 432);
CHECK(flashattn_forward_args_struct_size,
      offsetof(flashattn_forward_args, struct_size) == 0);
CHECK(flashattn_forward_args_reserved0,
      offsetof(flashattn_forward_args, reserved0) == 4);
CHECK(flashattn_forward_args_shape,
      offsetof(flashattn_forward_args, shape) == 8);
CHECK(flashattn_forward_args_inputs,
      offsetof(flashattn_forward_args, inputs) == 40);
CHECK(flashattn_forward_args_o,
      offsetof(flashattn_forward_args, o) == 360);
CHECK(flashattn_forward_args_lse,
      offsetof(flashattn_forward_args, lse) == 392);
CHECK(flashattn_forward_args_reserved,
      offsetof(flashattn_forward_args, reserved) == 400);

CHECK(flashattn_backward_args, sizeof(flashattn_backward_args) == 608);
CHECK(flashattn_backward_args_struct_size,
      offsetof(flashattn_backward_args, struct_size) == 0);
CHECK(flashattn_backward_args_reserved0,
      offsetof(flashattn_backward_args, reserved0) == 4);
CHECK(flashattn_backward_args_shape,
      offsetof(flashattn_backward_args, shape) == 8);
CHECK(flashattn_backward_args_inputs,
      offsetof(flashattn_backward_args, inputs) == 40);
CHECK(flashattn_backward_args_o,
      offsetof(flashattn_backward_args, o) == 360);
CHECK(flashattn_backward_args_dout,
      offsetof(flashattn_backward_args, dout) == 392);
CHECK(flashattn_backward_args_lse,
      offsetof(flashattn_backward_args, lse) == 424);
CHECK(flashattn_backward_args_dlse,
      offsetof(flashattn_backward_args, dlse) == 432);
CHECK(flashattn_backward_args_dq,
      offsetof(flashattn_backward_args, dq) == 440);
CHECK(flashattn_backward_args_dk,
      offsetof(flashattn_backward_args, dk) == 472);
CHECK(flashattn_backward_args_dv,
      offsetof(flashattn_backward_args, dv) == 504);
CHECK(flashattn_backward_args_dbias,
      offsetof(flashattn_backward_args, dbias) == 536);
CHECK(flashattn_backward_args_dbias_stride_batch,
      offsetof(flashattn_backward_args, dbias_stride_batch) == 544);
CHECK(flashattn_backward_args_dbias_stride_head,
      offsetof(flashattn_backward_args, dbias_stride_head) == 552);
CHECK(flashattn_backward_args_dbias_stride_row,
      offsetof(flashattn_backward_args, dbias_stride_row) == 560);
CHECK(flashattn_backward_args_dsink,
      offsetof(flashattn_backward_args, dsink) == 568);
CHECK(flashattn_backward_args_reserved,
      offsetof(flashattn_backward_args, reserved) == 576);

CHECK(flashattn_merge_args, sizeof(flashattn_merge_args) == 136);
CHECK(flashattn_merge_args_struct_size,
      offsetof(flashattn_merge_args, struct_size) == 0);
CHECK(flashattn_merge_args_parts,
      offsetof(flashattn_merge_args, parts) == 4);
CHECK(flashattn_merge_args_shape,
      offsetof(flashattn_merge_args, shape) == 8);
CHECK(flashattn_merge_args_part_o,
      offsetof(flashattn_merge_args, part_o) == 40);
CHECK(flashattn_merge_args_part_lse,
      offsetof(flashattn_merge_args, part_lse) == 48);
CHECK(flashattn_merge_args_part_dtype,
      offsetof(flashattn_merge_args, part_dtype) == 56);
CHECK(flashattn_merge_args_reserved0,
      offsetof(flashattn_merge_args, reserved0) == 60);
CHECK(flashattn_merge_args_o,
      offsetof(flashattn_merge_args, o) == 64);
CHECK(flashattn_merge_args_lse,
      offsetof(flashattn_merge_args, lse) == 96);
CHECK(flashattn_merge_args_reserved,
      offsetof(flashattn_merge_args, reserved) == 104);

CHECK(flashattn_device_properties, sizeof(flashattn_device_properties) == 40);
CHECK(flashattn_device_properties_struct_size,
      offsetof(flashattn_device_properties, struct_size) == 0);
CHECK(flashattn_device_properties_units,
      offsetof(flashattn_device_properties, units) == 4);
CHECK(flashattn_device_properties_name,
      offsetof(flashattn_device_properties, name) == 8);
CHECK(flashattn_device_properties_isa,
      offsetof(flashattn_device_properties, isa) == 16);
CHECK(flashattn_device_properties_compute_capability,
      offsetof(flashattn_device_properties, compute_capability) == 24);
CHECK(flashattn_device_properties_local_memory,
      offsetof(flashattn_device_properties, local_memory) == 28);
CHECK(flashattn_device_properties_memory,
      offsetof(flashattn_device_properties, memory) == 32);

CHECK(flashattn_plan_properties, sizeof(flashattn_plan_properties) == 88);
CHECK(flashattn_plan_properties_struct_size,
      offsetof(flashattn_plan_properties, struct_size) == 0);
CHECK(flashattn_plan_properties_tile_q,
      offsetof(flashattn_plan_properties, tile_q) == 4);
CHECK(flashattn_plan_properties_tile_kv,
      offsetof(flashattn_plan_properties, tile_kv) == 8);
CHECK(flashattn_plan_properties_stages,
      offsetof(flashattn_plan_properties, stages) == 12);
CHECK(flashattn_plan_properties_threads,
      offsetof(flashattn_plan_properties, threads) == 16);
CHECK(flashattn_plan_properties_registers,
      offsetof(flashattn_plan_properties, registers) == 20);
CHECK(flashattn_plan_properties_local_memory,
      offsetof(flashattn_plan_properties, local_memory) == 24);
CHECK(flashattn_plan_properties_splits,
      offsetof(flashattn_plan_properties, splits) == 28);
CHECK(flashattn_plan_properties_family,
      offsetof(flashattn_plan_properties, family) == 32);
CHECK(flashattn_plan_properties_kernel,
      offsetof(flashattn_plan_properties, kernel) == 40);
CHECK(flashattn_plan_properties_isa,
      offsetof(flashattn_plan_properties, isa) == 48);
CHECK(flashattn_plan_properties_why,
      offsetof(flashattn_plan_properties, why) == 56);
CHECK(flashattn_plan_properties_flops,
      offsetof(flashattn_plan_properties, flops) == 64);
CHECK(flashattn_plan_properties_bytes,
      offsetof(flashattn_plan_properties, bytes) == 72);
CHECK(flashattn_plan_properties_workspace,
      offsetof(flashattn_plan_properties, workspace) == 80);

CHECK(FLASHATTN_OK_, FLASHATTN_OK == 0);
CHECK(FLASHATTN_ERROR_INVALID_ARGUMENT_, FLASHATTN_ERROR_INVALID_ARGUMENT == 1);
CHECK(FLASHATTN_ERROR_UNSUPPORTED_, FLASHATTN_ERROR_UNSUPPORTED == 2);
CHECK(FLASHATTN_ERROR_WORKSPACE_, FLASHATTN_ERROR_WORKSPACE == 3);
CHECK(FLASHATTN_ERROR_OUT_OF_MEMORY_, FLASHATTN_ERROR_OUT_OF_MEMORY == 4);
CHECK(FLASHATTN_ERROR_DEVICE_, FLASHATTN_ERROR_DEVICE == 5);
CHECK(FLASHATTN_ERROR_VERSION_, FLASHATTN_ERROR_VERSION == 6);
CHECK(FLASHATTN_ERROR_INTERNAL_, FLASHATTN_ERROR_INTERNAL == 7);

CHECK(FLASHATTN_REASON_NONE_, FLASHATTN_REASON_NONE == 0);
CHECK(FLASHATTN_REASON_NO_CUDA_BUILD_, FLASHATTN_REASON_NO_CUDA_BUILD == 1);
CHECK(FLASHATTN_REASON_NO_DEVICE_, FLASHATTN_REASON_NO_DEVICE == 2);
CHECK(FLASHATTN_REASON_DRIVER_TOO_OLD_, FLASHATTN_REASON_DRIVER_TOO_OLD == 3);
CHECK(FLASHATTN_REASON_ARCH_, FLASHATTN_REASON_ARCH == 4);
CHECK(FLASHATTN_REASON_DTYPE_, FLASHATTN_REASON_DTYPE == 5);
CHECK(FLASHATTN_REASON_DTYPE_MIX_, FLASHATTN_REASON_DTYPE_MIX == 6);
CHECK(FLASHATTN_REASON_HEAD_DIM_MULTIPLE_, FLASHATTN_REASON_HEAD_DIM_MULTIPLE == 7);
CHECK(FLASHATTN_REASON_HEAD_DIM_MAX_, FLASHATTN_REASON_HEAD_DIM_MAX == 8);
CHECK(FLASHATTN_REASON_HEAD_DIM_PAIR_, FLASHATTN_REASON_HEAD_DIM_PAIR == 9);
CHECK(FLASHATTN_REASON_HEAD_RATIO_, FLASHATTN_REASON_HEAD_RATIO == 10);
CHECK(FLASHATTN_REASON_LAYOUT_, FLASHATTN_REASON_LAYOUT == 11);
CHECK(FLASHATTN_REASON_PAGE_SIZE_, FLASHATTN_REASON_PAGE_SIZE == 12);
CHECK(FLASHATTN_REASON_MASK_COMBINATION_, FLASHATTN_REASON_MASK_COMBINATION == 13);
CHECK(FLASHATTN_REASON_BIAS_, FLASHATTN_REASON_BIAS == 14);
CHECK(FLASHATTN_REASON_DROPOUT_, FLASHATTN_REASON_DROPOUT == 15);
CHECK(FLASHATTN_REASON_SINK_, FLASHATTN_REASON_SINK == 16);
CHECK(FLASHATTN_REASON_SOFTCAP_, FLASHATTN_REASON_SOFTCAP == 17);
CHECK(FLASHATTN_REASON_DETERMINISM_, FLASHATTN_REASON_DETERMINISM == 18);
CHECK(FLASHATTN_REASON_WORKSPACE_LIMIT_, FLASHATTN_REASON_WORKSPACE_LIMIT == 19);
CHECK(FLASHATTN_REASON_SHARED_MEMORY_, FLASHATTN_REASON_SHARED_MEMORY == 20);
CHECK(FLASHATTN_REASON_CPU_ISA_, FLASHATTN_REASON_CPU_ISA == 21);
CHECK(FLASHATTN_REASON_NOT_IN_THIS_BUILD_, FLASHATTN_REASON_NOT_IN_THIS_BUILD == 22);
CHECK(FLASHATTN_REASON_OP_, FLASHATTN_REASON_OP == 23);
CHECK(FLASHATTN_REASON_NULL_POINTER_, FLASHATTN_REASON_NULL_POINTER == 24);
CHECK(FLASHATTN_REASON_MISALIGNED_, FLASHATTN_REASON_MISALIGNED == 25);
CHECK(FLASHATTN_REASON_OVERLAP_, FLASHATTN_REASON_OVERLAP == 26);
CHECK(FLASHATTN_REASON_SIZE_, FLASHATTN_REASON_SIZE == 27);
CHECK(FLASHATTN_REASON_STRIDE_, FLASHATTN_REASON_STRIDE == 28);
CHECK(FLASHATTN_REASON_VALUE_, FLASHATTN_REASON_VALUE == 29);
CHECK(FLASHATTN_REASON_RESERVED_, FLASHATTN_REASON_RESERVED == 30);
CHECK(FLASHATTN_REASON_STRUCT_SIZE_, FLASHATTN_REASON_STRUCT_SIZE == 31);
CHECK(FLASHATTN_REASON_LENGTHS_, FLASHATTN_REASON_LENGTHS == 32);
CHECK(FLASHATTN_REASON_STREAM_, FLASHATTN_REASON_STREAM == 33);

CHECK(FLASHATTN_DEVICE_CPU_, FLASHATTN_DEVICE_CPU == 0);
CHECK(FLASHATTN_DEVICE_CUDA_, FLASHATTN_DEVICE_CUDA == 1);

CHECK(FLASHATTN_OP_FORWARD_, FLASHATTN_OP_FORWARD == 1);
CHECK(FLASHATTN_OP_BACKWARD_, FLASHATTN_OP_BACKWARD == 2);

CHECK(FLASHATTN_DTYPE_DEFAULT_, FLASHATTN_DTYPE_DEFAULT == 0);
CHECK(FLASHATTN_DTYPE_F32_, FLASHATTN_DTYPE_F32 == 1);
CHECK(FLASHATTN_DTYPE_F16_, FLASHATTN_DTYPE_F16 == 2);
CHECK(FLASHATTN_DTYPE_BF16_, FLASHATTN_DTYPE_BF16 == 3);
CHECK(FLASHATTN_DTYPE_F8E4M3_, FLASHATTN_DTYPE_F8E4M3 == 4);
CHECK(FLASHATTN_DTYPE_U8_, FLASHATTN_DTYPE_U8 == 5);

CHECK(FLASHATTN_LAYOUT_VARLEN_Q_, FLASHATTN_LAYOUT_VARLEN_Q == 1);
CHECK(FLASHATTN_LAYOUT_VARLEN_KV_, FLASHATTN_LAYOUT_VARLEN_KV == 2);
CHECK(FLASHATTN_LAYOUT_PAGED_KV_, FLASHATTN_LAYOUT_PAGED_KV == 4);

CHECK(FLASHATTN_MASK_CAUSAL_, FLASHATTN_MASK_CAUSAL == 1);
CHECK(FLASHATTN_MASK_WINDOW_, FLASHATTN_MASK_WINDOW == 2);
CHECK(FLASHATTN_MASK_CHUNK_, FLASHATTN_MASK_CHUNK == 4);
CHECK(FLASHATTN_MASK_TOP_LEFT_, FLASHATTN_MASK_TOP_LEFT == 8);
CHECK(FLASHATTN_MASK_BLOCKS_, FLASHATTN_MASK_BLOCKS == 16);

CHECK(FLASHATTN_BIAS_ALIBI_, FLASHATTN_BIAS_ALIBI == 1);
CHECK(FLASHATTN_BIAS_DENSE_, FLASHATTN_BIAS_DENSE == 2);

CHECK(FLASHATTN_FEATURE_LSE_, FLASHATTN_FEATURE_LSE == 1);
CHECK(FLASHATTN_FEATURE_SINK_, FLASHATTN_FEATURE_SINK == 2);
CHECK(FLASHATTN_FEATURE_DLSE_, FLASHATTN_FEATURE_DLSE == 4);
CHECK(FLASHATTN_FEATURE_DBIAS_, FLASHATTN_FEATURE_DBIAS == 8);
CHECK(FLASHATTN_FEATURE_DSINK_, FLASHATTN_FEATURE_DSINK == 16);

CHECK(FLASHATTN_DETERMINISM_DEFAULT_, FLASHATTN_DETERMINISM_DEFAULT == 0);
CHECK(FLASHATTN_DETERMINISM_RUN_TO_RUN_, FLASHATTN_DETERMINISM_RUN_TO_RUN == 1);
CHECK(FLASHATTN_DETERMINISM_BATCH_INVARIANT_, FLASHATTN_DETERMINISM_BATCH_INVARIANT == 2);

CHECK(FLASHATTN_LOG_OFF_, FLASHATTN_LOG_OFF == 0);
CHECK(FLASHATTN_LOG_ERROR_, FLASHATTN_LOG_ERROR == 1);
CHECK(FLASHATTN_LOG_INFO_, FLASHATTN_LOG_INFO == 2);
CHECK(FLASHATTN_LOG_DEBUG_, FLASHATTN_LOG_DEBUG == 3);

int main(void) { return 0; }
