/* Written by bindings/generate.py from include/flashattn.h. Do not edit.
 *
 * Every binding relies on these sizes, offsets and values. A wrong one stops the compiler. */
#include "flashattn.h"

#define CHECK(name, condition) typedef char check_##name[(condition) ? 1 : -1]

CHECK(pointer, sizeof(void *) == 8);

CHECK(flashattn_error, sizeof(flashattn_error) == 720);
CHECK(flashattn_error_struct_size,
      offsetof(flashattn_error, struct_size) == 0);
CHECK(flashattn_error_status,
      offsetof(flashattn_error, status) == 4);
CHECK(flashattn_error_reason,
      offsetof(flashattn_error, reason) == 8);
CHECK(flashattn_error_reserved,
      offsetof(flashattn_error, reserved) == 12);
CHECK(flashattn_error_field,
      offsetof(flashattn_error, field) == 16);
CHECK(flashattn_error_message,
      offsetof(flashattn_error, message) == 80);

CHECK(flashattn_desc, sizeof(flashattn_desc) == 168);
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
CHECK(flashattn_desc_dtype_kv,
      offsetof(flashattn_desc, dtype_kv) == 20);
CHECK(flashattn_desc_dtype_o,
      offsetof(flashattn_desc, dtype_o) == 24);
CHECK(flashattn_desc_heads_q,
      offsetof(flashattn_desc, heads_q) == 28);
CHECK(flashattn_desc_heads_kv,
      offsetof(flashattn_desc, heads_kv) == 32);
CHECK(flashattn_desc_dim_qk,
      offsetof(flashattn_desc, dim_qk) == 36);
CHECK(flashattn_desc_dim_v,
      offsetof(flashattn_desc, dim_v) == 40);
CHECK(flashattn_desc_layout,
      offsetof(flashattn_desc, layout) == 44);
CHECK(flashattn_desc_page_size,
      offsetof(flashattn_desc, page_size) == 48);
CHECK(flashattn_desc_mask,
      offsetof(flashattn_desc, mask) == 52);
CHECK(flashattn_desc_window_left,
      offsetof(flashattn_desc, window_left) == 56);
CHECK(flashattn_desc_window_right,
      offsetof(flashattn_desc, window_right) == 60);
CHECK(flashattn_desc_chunk,
      offsetof(flashattn_desc, chunk) == 64);
CHECK(flashattn_desc_block_q,
      offsetof(flashattn_desc, block_q) == 68);
CHECK(flashattn_desc_block_kv,
      offsetof(flashattn_desc, block_kv) == 72);
CHECK(flashattn_desc_tree,
      offsetof(flashattn_desc, tree) == 76);
CHECK(flashattn_desc_bias,
      offsetof(flashattn_desc, bias) == 80);
CHECK(flashattn_desc_dtype_bias,
      offsetof(flashattn_desc, dtype_bias) == 84);
CHECK(flashattn_desc_features,
      offsetof(flashattn_desc, features) == 88);
CHECK(flashattn_desc_determinism,
      offsetof(flashattn_desc, determinism) == 92);
CHECK(flashattn_desc_scale,
      offsetof(flashattn_desc, scale) == 96);
CHECK(flashattn_desc_softcap,
      offsetof(flashattn_desc, softcap) == 100);
CHECK(flashattn_desc_dropout,
      offsetof(flashattn_desc, dropout) == 104);
CHECK(flashattn_desc_descale_block,
      offsetof(flashattn_desc, descale_block) == 108);
CHECK(flashattn_desc_splits,
      offsetof(flashattn_desc, splits) == 112);
CHECK(flashattn_desc_max_batch,
      offsetof(flashattn_desc, max_batch) == 116);
CHECK(flashattn_desc_max_seqlen_q,
      offsetof(flashattn_desc, max_seqlen_q) == 120);
CHECK(flashattn_desc_max_seqlen_kv,
      offsetof(flashattn_desc, max_seqlen_kv) == 124);
CHECK(flashattn_desc_multiprocessors,
      offsetof(flashattn_desc, multiprocessors) == 128);
CHECK(flashattn_desc_threads,
      offsetof(flashattn_desc, threads) == 132);
CHECK(flashattn_desc_max_total_q,
      offsetof(flashattn_desc, max_total_q) == 136);
CHECK(flashattn_desc_max_total_kv,
      offsetof(flashattn_desc, max_total_kv) == 144);
CHECK(flashattn_desc_workspace_limit,
      offsetof(flashattn_desc, workspace_limit) == 152);
CHECK(flashattn_desc_dtype_grad,
      offsetof(flashattn_desc, dtype_grad) == 160);
CHECK(flashattn_desc_descale_dim,
      offsetof(flashattn_desc, descale_dim) == 164);

CHECK(flashattn_tensor, sizeof(flashattn_tensor) == 32);
CHECK(flashattn_tensor_data,
      offsetof(flashattn_tensor, data) == 0);
CHECK(flashattn_tensor_stride_batch,
      offsetof(flashattn_tensor, stride_batch) == 8);
CHECK(flashattn_tensor_stride_head,
      offsetof(flashattn_tensor, stride_head) == 16);
CHECK(flashattn_tensor_stride_seq,
      offsetof(flashattn_tensor, stride_seq) == 24);

CHECK(flashattn_args, sizeof(flashattn_args) == 936);
CHECK(flashattn_args_struct_size,
      offsetof(flashattn_args, struct_size) == 0);
CHECK(flashattn_args_batch,
      offsetof(flashattn_args, batch) == 4);
CHECK(flashattn_args_seqlen_q,
      offsetof(flashattn_args, seqlen_q) == 8);
CHECK(flashattn_args_seqlen_kv,
      offsetof(flashattn_args, seqlen_kv) == 12);
CHECK(flashattn_args_total_q,
      offsetof(flashattn_args, total_q) == 16);
CHECK(flashattn_args_total_kv,
      offsetof(flashattn_args, total_kv) == 24);
CHECK(flashattn_args_q,
      offsetof(flashattn_args, q) == 32);
CHECK(flashattn_args_k,
      offsetof(flashattn_args, k) == 64);
CHECK(flashattn_args_v,
      offsetof(flashattn_args, v) == 96);
CHECK(flashattn_args_cu_seqlens_q,
      offsetof(flashattn_args, cu_seqlens_q) == 128);
CHECK(flashattn_args_cu_seqlens_kv,
      offsetof(flashattn_args, cu_seqlens_kv) == 136);
CHECK(flashattn_args_lens_q,
      offsetof(flashattn_args, lens_q) == 144);
CHECK(flashattn_args_lens_kv,
      offsetof(flashattn_args, lens_kv) == 152);
CHECK(flashattn_args_starts_kv,
      offsetof(flashattn_args, starts_kv) == 160);
CHECK(flashattn_args_page_table,
      offsetof(flashattn_args, page_table) == 168);
CHECK(flashattn_args_pages,
      offsetof(flashattn_args, pages) == 200);
CHECK(flashattn_args_bias,
      offsetof(flashattn_args, bias) == 208);
CHECK(flashattn_args_alibi_slopes,
      offsetof(flashattn_args, alibi_slopes) == 240);
CHECK(flashattn_args_sink,
      offsetof(flashattn_args, sink) == 272);
CHECK(flashattn_args_block_mask,
      offsetof(flashattn_args, block_mask) == 280);
CHECK(flashattn_args_tree_bits,
      offsetof(flashattn_args, tree_bits) == 312);
CHECK(flashattn_args_descale_q,
      offsetof(flashattn_args, descale_q) == 344);
CHECK(flashattn_args_descale_k,
      offsetof(flashattn_args, descale_k) == 376);
CHECK(flashattn_args_descale_v,
      offsetof(flashattn_args, descale_v) == 408);
CHECK(flashattn_args_rng_seed,
      offsetof(flashattn_args, rng_seed) == 440);
CHECK(flashattn_args_rng_offset,
      offsetof(flashattn_args, rng_offset) == 448);
CHECK(flashattn_args_rng_device,
      offsetof(flashattn_args, rng_device) == 456);
CHECK(flashattn_args_o,
      offsetof(flashattn_args, o) == 464);
CHECK(flashattn_args_lse,
      offsetof(flashattn_args, lse) == 496);
CHECK(flashattn_args_dout,
      offsetof(flashattn_args, dout) == 504);
CHECK(flashattn_args_dlse,
      offsetof(flashattn_args, dlse) == 536);
CHECK(flashattn_args_dq,
      offsetof(flashattn_args, dq) == 544);
CHECK(flashattn_args_dk,
      offsetof(flashattn_args, dk) == 576);
CHECK(flashattn_args_dv,
      offsetof(flashattn_args, dv) == 608);
CHECK(flashattn_args_dbias,
      offsetof(flashattn_args, dbias) == 640);
CHECK(flashattn_args_dsink,
      offsetof(flashattn_args, dsink) == 672);
CHECK(flashattn_args_parallel,
      offsetof(flashattn_args, parallel) == 680);
CHECK(flashattn_args_parallel_user,
      offsetof(flashattn_args, parallel_user) == 688);
CHECK(flashattn_args_error,
      offsetof(flashattn_args, error) == 696);
CHECK(flashattn_args_scale_o,
      offsetof(flashattn_args, scale_o) == 704);
CHECK(flashattn_args_amax_o,
      offsetof(flashattn_args, amax_o) == 736);
CHECK(flashattn_args_descale_latent,
      offsetof(flashattn_args, descale_latent) == 768);
CHECK(flashattn_args_block_index,
      offsetof(flashattn_args, block_index) == 800);
CHECK(flashattn_args_block_begin,
      offsetof(flashattn_args, block_begin) == 832);
CHECK(flashattn_args_block_end,
      offsetof(flashattn_args, block_end) == 864);
CHECK(flashattn_args_block_entries,
      offsetof(flashattn_args, block_entries) == 896);
CHECK(flashattn_args_block_lens,
      offsetof(flashattn_args, block_lens) == 904);

CHECK(flashattn_merge_args, sizeof(flashattn_merge_args) == 112);
CHECK(flashattn_merge_args_struct_size,
      offsetof(flashattn_merge_args, struct_size) == 0);
CHECK(flashattn_merge_args_parts,
      offsetof(flashattn_merge_args, parts) == 4);
CHECK(flashattn_merge_args_batch,
      offsetof(flashattn_merge_args, batch) == 8);
CHECK(flashattn_merge_args_seqlen_q,
      offsetof(flashattn_merge_args, seqlen_q) == 12);
CHECK(flashattn_merge_args_total_q,
      offsetof(flashattn_merge_args, total_q) == 16);
CHECK(flashattn_merge_args_part_o,
      offsetof(flashattn_merge_args, part_o) == 24);
CHECK(flashattn_merge_args_part_lse,
      offsetof(flashattn_merge_args, part_lse) == 32);
CHECK(flashattn_merge_args_dtype_part,
      offsetof(flashattn_merge_args, dtype_part) == 40);
CHECK(flashattn_merge_args_reserved,
      offsetof(flashattn_merge_args, reserved) == 44);
CHECK(flashattn_merge_args_o,
      offsetof(flashattn_merge_args, o) == 48);
CHECK(flashattn_merge_args_lse,
      offsetof(flashattn_merge_args, lse) == 80);
CHECK(flashattn_merge_args_parallel,
      offsetof(flashattn_merge_args, parallel) == 88);
CHECK(flashattn_merge_args_parallel_user,
      offsetof(flashattn_merge_args, parallel_user) == 96);
CHECK(flashattn_merge_args_error,
      offsetof(flashattn_merge_args, error) == 104);

CHECK(flashattn_quantize_args, sizeof(flashattn_quantize_args) == 440);
CHECK(flashattn_quantize_args_struct_size,
      offsetof(flashattn_quantize_args, struct_size) == 0);
CHECK(flashattn_quantize_args_batch,
      offsetof(flashattn_quantize_args, batch) == 4);
CHECK(flashattn_quantize_args_seqlen_q,
      offsetof(flashattn_quantize_args, seqlen_q) == 8);
CHECK(flashattn_quantize_args_seqlen_kv,
      offsetof(flashattn_quantize_args, seqlen_kv) == 12);
CHECK(flashattn_quantize_args_total_q,
      offsetof(flashattn_quantize_args, total_q) == 16);
CHECK(flashattn_quantize_args_total_kv,
      offsetof(flashattn_quantize_args, total_kv) == 24);
CHECK(flashattn_quantize_args_dtype,
      offsetof(flashattn_quantize_args, dtype) == 32);
CHECK(flashattn_quantize_args_transform,
      offsetof(flashattn_quantize_args, transform) == 36);
CHECK(flashattn_quantize_args_rotation_seed,
      offsetof(flashattn_quantize_args, rotation_seed) == 40);
CHECK(flashattn_quantize_args_cu_seqlens_q,
      offsetof(flashattn_quantize_args, cu_seqlens_q) == 48);
CHECK(flashattn_quantize_args_cu_seqlens_kv,
      offsetof(flashattn_quantize_args, cu_seqlens_kv) == 56);
CHECK(flashattn_quantize_args_lens_q,
      offsetof(flashattn_quantize_args, lens_q) == 64);
CHECK(flashattn_quantize_args_lens_kv,
      offsetof(flashattn_quantize_args, lens_kv) == 72);
CHECK(flashattn_quantize_args_starts_kv,
      offsetof(flashattn_quantize_args, starts_kv) == 80);
CHECK(flashattn_quantize_args_q,
      offsetof(flashattn_quantize_args, q) == 88);
CHECK(flashattn_quantize_args_k,
      offsetof(flashattn_quantize_args, k) == 120);
CHECK(flashattn_quantize_args_v,
      offsetof(flashattn_quantize_args, v) == 152);
CHECK(flashattn_quantize_args_q_out,
      offsetof(flashattn_quantize_args, q_out) == 184);
CHECK(flashattn_quantize_args_k_out,
      offsetof(flashattn_quantize_args, k_out) == 216);
CHECK(flashattn_quantize_args_v_out,
      offsetof(flashattn_quantize_args, v_out) == 248);
CHECK(flashattn_quantize_args_descale_q,
      offsetof(flashattn_quantize_args, descale_q) == 280);
CHECK(flashattn_quantize_args_descale_k,
      offsetof(flashattn_quantize_args, descale_k) == 312);
CHECK(flashattn_quantize_args_descale_v,
      offsetof(flashattn_quantize_args, descale_v) == 344);
CHECK(flashattn_quantize_args_k_mean,
      offsetof(flashattn_quantize_args, k_mean) == 376);
CHECK(flashattn_quantize_args_lse_shift,
      offsetof(flashattn_quantize_args, lse_shift) == 408);
CHECK(flashattn_quantize_args_parallel,
      offsetof(flashattn_quantize_args, parallel) == 416);
CHECK(flashattn_quantize_args_parallel_user,
      offsetof(flashattn_quantize_args, parallel_user) == 424);
CHECK(flashattn_quantize_args_error,
      offsetof(flashattn_quantize_args, error) == 432);

CHECK(flashattn_append_kv_args, sizeof(flashattn_append_kv_args) == 504);
CHECK(flashattn_append_kv_args_struct_size,
      offsetof(flashattn_append_kv_args, struct_size) == 0);
CHECK(flashattn_append_kv_args_batch,
      offsetof(flashattn_append_kv_args, batch) == 4);
CHECK(flashattn_append_kv_args_seqlen_q,
      offsetof(flashattn_append_kv_args, seqlen_q) == 8);
CHECK(flashattn_append_kv_args_seqlen_kv,
      offsetof(flashattn_append_kv_args, seqlen_kv) == 12);
CHECK(flashattn_append_kv_args_total_q,
      offsetof(flashattn_append_kv_args, total_q) == 16);
CHECK(flashattn_append_kv_args_total_kv,
      offsetof(flashattn_append_kv_args, total_kv) == 24);
CHECK(flashattn_append_kv_args_dtype,
      offsetof(flashattn_append_kv_args, dtype) == 32);
CHECK(flashattn_append_kv_args_rotary,
      offsetof(flashattn_append_kv_args, rotary) == 36);
CHECK(flashattn_append_kv_args_rotary_dim,
      offsetof(flashattn_append_kv_args, rotary_dim) == 40);
CHECK(flashattn_append_kv_args_rotary_positions,
      offsetof(flashattn_append_kv_args, rotary_positions) == 44);
CHECK(flashattn_append_kv_args_dtype_rotary,
      offsetof(flashattn_append_kv_args, dtype_rotary) == 48);
CHECK(flashattn_append_kv_args_rotary_base,
      offsetof(flashattn_append_kv_args, rotary_base) == 52);
CHECK(flashattn_append_kv_args_cu_seqlens_q,
      offsetof(flashattn_append_kv_args, cu_seqlens_q) == 56);
CHECK(flashattn_append_kv_args_cu_seqlens_kv,
      offsetof(flashattn_append_kv_args, cu_seqlens_kv) == 64);
CHECK(flashattn_append_kv_args_lens_q,
      offsetof(flashattn_append_kv_args, lens_q) == 72);
CHECK(flashattn_append_kv_args_lens_kv,
      offsetof(flashattn_append_kv_args, lens_kv) == 80);
CHECK(flashattn_append_kv_args_starts_kv,
      offsetof(flashattn_append_kv_args, starts_kv) == 88);
CHECK(flashattn_append_kv_args_positions,
      offsetof(flashattn_append_kv_args, positions) == 96);
CHECK(flashattn_append_kv_args_lens_out,
      offsetof(flashattn_append_kv_args, lens_out) == 104);
CHECK(flashattn_append_kv_args_page_table,
      offsetof(flashattn_append_kv_args, page_table) == 112);
CHECK(flashattn_append_kv_args_pages,
      offsetof(flashattn_append_kv_args, pages) == 144);
CHECK(flashattn_append_kv_args_q,
      offsetof(flashattn_append_kv_args, q) == 152);
CHECK(flashattn_append_kv_args_k,
      offsetof(flashattn_append_kv_args, k) == 184);
CHECK(flashattn_append_kv_args_v,
      offsetof(flashattn_append_kv_args, v) == 216);
CHECK(flashattn_append_kv_args_q_out,
      offsetof(flashattn_append_kv_args, q_out) == 248);
CHECK(flashattn_append_kv_args_k_cache,
      offsetof(flashattn_append_kv_args, k_cache) == 280);
CHECK(flashattn_append_kv_args_v_cache,
      offsetof(flashattn_append_kv_args, v_cache) == 312);
CHECK(flashattn_append_kv_args_descale_k,
      offsetof(flashattn_append_kv_args, descale_k) == 344);
CHECK(flashattn_append_kv_args_descale_v,
      offsetof(flashattn_append_kv_args, descale_v) == 376);
CHECK(flashattn_append_kv_args_rotary_cos,
      offsetof(flashattn_append_kv_args, rotary_cos) == 408);
CHECK(flashattn_append_kv_args_rotary_sin,
      offsetof(flashattn_append_kv_args, rotary_sin) == 440);
CHECK(flashattn_append_kv_args_parallel,
      offsetof(flashattn_append_kv_args, parallel) == 472);
CHECK(flashattn_append_kv_args_parallel_user,
      offsetof(flashattn_append_kv_args, parallel_user) == 480);
CHECK(flashattn_append_kv_args_error,
      offsetof(flashattn_append_kv_args, error) == 488);
CHECK(flashattn_append_kv_args_update_descales,
      offsetof(flashattn_append_kv_args, update_descales) == 496);
CHECK(flashattn_append_kv_args_reserved,
      offsetof(flashattn_append_kv_args, reserved) == 500);

CHECK(flashattn_device_properties, sizeof(flashattn_device_properties) == 48);
CHECK(flashattn_device_properties_struct_size,
      offsetof(flashattn_device_properties, struct_size) == 0);
CHECK(flashattn_device_properties_multiprocessors,
      offsetof(flashattn_device_properties, multiprocessors) == 4);
CHECK(flashattn_device_properties_threads,
      offsetof(flashattn_device_properties, threads) == 8);
CHECK(flashattn_device_properties_compute_capability,
      offsetof(flashattn_device_properties, compute_capability) == 12);
CHECK(flashattn_device_properties_name,
      offsetof(flashattn_device_properties, name) == 16);
CHECK(flashattn_device_properties_isa,
      offsetof(flashattn_device_properties, isa) == 24);
CHECK(flashattn_device_properties_shared_memory,
      offsetof(flashattn_device_properties, shared_memory) == 32);
CHECK(flashattn_device_properties_l2_cache,
      offsetof(flashattn_device_properties, l2_cache) == 36);
CHECK(flashattn_device_properties_memory,
      offsetof(flashattn_device_properties, memory) == 40);

CHECK(flashattn_plan_properties, sizeof(flashattn_plan_properties) == 96);
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
CHECK(flashattn_plan_properties_shared_memory,
      offsetof(flashattn_plan_properties, shared_memory) == 24);
CHECK(flashattn_plan_properties_scratch,
      offsetof(flashattn_plan_properties, scratch) == 28);
CHECK(flashattn_plan_properties_splits,
      offsetof(flashattn_plan_properties, splits) == 32);
CHECK(flashattn_plan_properties_reserved,
      offsetof(flashattn_plan_properties, reserved) == 36);
CHECK(flashattn_plan_properties_backend,
      offsetof(flashattn_plan_properties, backend) == 40);
CHECK(flashattn_plan_properties_kernel,
      offsetof(flashattn_plan_properties, kernel) == 48);
CHECK(flashattn_plan_properties_isa,
      offsetof(flashattn_plan_properties, isa) == 56);
CHECK(flashattn_plan_properties_why,
      offsetof(flashattn_plan_properties, why) == 64);
CHECK(flashattn_plan_properties_flops,
      offsetof(flashattn_plan_properties, flops) == 72);
CHECK(flashattn_plan_properties_bytes,
      offsetof(flashattn_plan_properties, bytes) == 80);
CHECK(flashattn_plan_properties_workspace,
      offsetof(flashattn_plan_properties, workspace) == 88);

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
CHECK(FLASHATTN_DTYPE_I8_, FLASHATTN_DTYPE_I8 == 6);

CHECK(FLASHATTN_LAYOUT_VARLEN_Q_, FLASHATTN_LAYOUT_VARLEN_Q == 1);
CHECK(FLASHATTN_LAYOUT_VARLEN_KV_, FLASHATTN_LAYOUT_VARLEN_KV == 2);
CHECK(FLASHATTN_LAYOUT_PAGED_KV_, FLASHATTN_LAYOUT_PAGED_KV == 4);
CHECK(FLASHATTN_LAYOUT_LATENT_KV_, FLASHATTN_LAYOUT_LATENT_KV == 8);

CHECK(FLASHATTN_MASK_CAUSAL_, FLASHATTN_MASK_CAUSAL == 1);
CHECK(FLASHATTN_MASK_WINDOW_, FLASHATTN_MASK_WINDOW == 2);
CHECK(FLASHATTN_MASK_CHUNK_, FLASHATTN_MASK_CHUNK == 4);
CHECK(FLASHATTN_MASK_TOP_LEFT_, FLASHATTN_MASK_TOP_LEFT == 8);
CHECK(FLASHATTN_MASK_BLOCKS_, FLASHATTN_MASK_BLOCKS == 16);
CHECK(FLASHATTN_MASK_TREE_, FLASHATTN_MASK_TREE == 32);
CHECK(FLASHATTN_MASK_PAGES_, FLASHATTN_MASK_PAGES == 64);
CHECK(FLASHATTN_MASK_BLOCK_LISTS_, FLASHATTN_MASK_BLOCK_LISTS == 128);
CHECK(FLASHATTN_MASK_BLOCK_LENS_, FLASHATTN_MASK_BLOCK_LENS == 256);

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

CHECK(FLASHATTN_TRANSFORM_SMOOTH_K_, FLASHATTN_TRANSFORM_SMOOTH_K == 1);
CHECK(FLASHATTN_TRANSFORM_ROTATE_, FLASHATTN_TRANSFORM_ROTATE == 2);

CHECK(FLASHATTN_ROTARY_HALVES_, FLASHATTN_ROTARY_HALVES == 0);
CHECK(FLASHATTN_ROTARY_INTERLEAVED_, FLASHATTN_ROTARY_INTERLEAVED == 1);

CHECK(FLASHATTN_LOG_OFF_, FLASHATTN_LOG_OFF == 0);
CHECK(FLASHATTN_LOG_ERROR_, FLASHATTN_LOG_ERROR == 1);
CHECK(FLASHATTN_LOG_INFO_, FLASHATTN_LOG_INFO == 2);
CHECK(FLASHATTN_LOG_DEBUG_, FLASHATTN_LOG_DEBUG == 3);

int main(void) { return 0; }
