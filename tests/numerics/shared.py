"""The small cases that every language runs: one or two for each feature, and combinations. Sizes
are odd; a few pass the edge of a tile. make_cases.py writes them to tests/data."""
import zlib

from .case import Case

SMALL = dict(batch=2, seqlen_q=11, seqlen_kv=17, heads_q=2, dim_qk=8, backward=True)
SQUARE = dict(SMALL, seqlen_q=15, seqlen_kv=15)
DECODE = dict(batch=2, seqlen_q=1, seqlen_kv=150, heads_q=4, heads_kv=2, dim_qk=8)
VARLEN = dict(heads_q=2, heads_kv=1, dim_qk=8, backward=True)
ALL = dict(SMALL, heads_q=4, heads_kv=2, softcap=10.0, alibi="bh", dbias="hr", sink=True,
           dsink=True, dropout=0.1, dlse=True, causal=True, window=(12, 0), blocks=(4, 4),
           density=0.8)

SHARED = {
    # Number formats and dimensions.
    "dense_f32": Case(**SMALL),
    "dense_f16": Case(dtype="f16", **SMALL),
    "dense_bf16": Case(dtype="bf16", **SMALL),
    "bf16_with_o_f32": Case(dtype="bf16", dtype_o="f32", causal=True, **SMALL),
    "dim_1": Case(**dict(SMALL, dim_qk=1)),
    "dims_odd": Case(**dict(SMALL, dim_qk=13, dim_v=5)),
    "dim_v_wider": Case(dtype="f16", **dict(SMALL, dim_qk=6, dim_v=20)),
    "dims_large": Case(dtype="bf16", causal=True,
                       **dict(SMALL, batch=1, seqlen_q=5, seqlen_kv=9, dim_qk=136, dim_v=65)),
    "tile_edge_f32": Case(causal=True, **dict(SMALL, batch=1, seqlen_q=65, seqlen_kv=71)),
    "tile_edge_bf16": Case(causal=True, dtype="bf16",
                           **dict(SMALL, batch=1, seqlen_q=71, seqlen_kv=65)),
    "scale_negative": Case(scale=-0.25, causal=True, **SMALL),

    # Heads.
    "heads_3_to_1": Case(causal=True, **dict(SMALL, heads_q=3, heads_kv=1)),
    "heads_6_to_2_f16": Case(dtype="f16", **dict(SMALL, heads_q=6, heads_kv=2)),

    # Masks.
    "causal": Case(causal=True, **SMALL),
    "causal_top_left": Case(causal=True, top_left=True, **SMALL),
    "causal_rows_without_keys": Case(causal=True, **dict(SMALL, seqlen_q=19, seqlen_kv=7)),
    "window": Case(window=(3, 2), **SMALL),
    "window_left_only": Case(window=(4, -1), **SQUARE),
    "window_right_only": Case(window=(-1, 3), dtype="f16", **SMALL),
    "window_diagonal_top_left": Case(window=(0, 0), top_left=True, **SMALL),
    "chunk": Case(chunk=4, causal=True, **SMALL),
    "chunk_top_left": Case(chunk=5, top_left=True, **SQUARE),
    "blocks": Case(blocks=(4, 3), **SMALL),
    "blocks_same_for_all": Case(blocks=(1, 1), block_dims="", dtype="bf16", **SMALL),

    # Layouts and lengths.
    "varlen": Case(cu_q=[3, 16, 1], cu_kv=[7, 18, 4], causal=True, **VARLEN),
    "varlen_empty_sequences": Case(cu_q=[0, 5, 3, 0], cu_kv=[2, 0, 9, 0], dtype="f16", **VARLEN),
    "varlen_q_only": Case(cu_q=[4, 9], seqlen_kv=12, window=(6, 0), **VARLEN),
    "varlen_kv_only": Case(cu_kv=[13, 0, 6], seqlen_q=5, dtype="bf16", **VARLEN),
    "varlen_with_lens": Case(cu_q=[6, 9], cu_kv=[11, 8], lens_q=[4, 0], lens_kv=[9, 8],
                             causal=True, **VARLEN),
    "lens": Case(batch=3, seqlen_q=9, seqlen_kv=14, lens_q=[9, 0, 5], lens_kv=[3, 14, 0],
                 **VARLEN),
    "starts": Case(starts_kv=[5, 0], lens_kv=[17, 9], causal=True, **SMALL),
    "starts_varlen_f16": Case(cu_q=[3, 16, 1], cu_kv=[7, 18, 4], starts_kv=[2, 18, 0], dtype="f16",
                              window=(5, 2), **VARLEN),
    "starts_scores": Case(starts_kv=[3, 6], lens_kv=[11, 17], alibi="h", bias="f32", dbias="bhr",
                          dropout=0.3, blocks=(4, 4), density=0.8, **SMALL),
    "starts_decode": Case(starts_kv=[70, 0], lens_kv=[150, 77], **DECODE),
    "no_keys": Case(**dict(SMALL, seqlen_kv=0)),
    "paged": Case(page_size=4, lens_kv=[17, 6], causal=True, **dict(SMALL, backward=False)),
    "paged_without_lens": Case(page_size=3, sink=True, dtype="bf16",
                               **dict(SMALL, backward=False)),
    "paged_varlen_q": Case(cu_q=[3, 0, 8], seqlen_kv=21, lens_kv=[21, 5, 16], page_size=16,
                           window=(9, 0), **dict(VARLEN, backward=False)),

    # Scores.
    "softcap": Case(softcap=20.0, causal=True, **SMALL),
    "softcap_small_f16": Case(softcap=1.0, window=(7, 3), dtype="f16", **SMALL),
    "alibi": Case(alibi="h", causal=True, **SMALL),
    "alibi_per_sequence": Case(alibi="bh", **SMALL),
    "alibi_top_left_bf16": Case(alibi="h", top_left=True, dtype="bf16", **SMALL),
    "bias_and_dbias": Case(bias="f32", dbias="bhr", **SMALL),
    "bias_per_sequence_f16": Case(bias="f16", bias_dims="br", dbias="br", dtype="f16", **SMALL),
    "bias_of_keys": Case(bias="f32", bias_dims="", dbias="", causal=True, **SMALL),
    "bias_rows_bf16": Case(bias="bf16", bias_dims="r", dbias="bh", dtype="bf16", **SMALL),
    "bias_other_dtype": Case(bias="f32", bias_dims="h", dbias="r", dtype="f16", **SMALL),
    "bias_hides_rows": Case(bias="f32", bias_empty=0.3, dbias="bhr", **SMALL),
    "bias_varlen": Case(cu_q=[5, 0, 9], cu_kv=[8, 3, 13], bias="bf16", dtype="bf16", dbias="hr",
                        bias_dims="hr", **VARLEN),
    "boolean_mask_hides_rows": Case(bias="u8", bias_dims="br", bias_empty=0.3, dtype="bf16",
                                    **SMALL),

    # Further inputs and outputs.
    "without_lse": Case(lse=False, causal=True, **dict(SMALL, backward=False)),
    "dlse": Case(dlse=True, **SMALL),
    "sink": Case(sink=True, dsink=True, dlse=True, **SMALL),
    "sink_rows_without_keys": Case(sink=True, dsink=True, causal=True,
                                   **dict(SMALL, seqlen_q=13, seqlen_kv=6)),
    "dropout_tiles_bf16": Case(dropout=0.5, causal=True, dtype="bf16",
                               **dict(SMALL, batch=1, seqlen_q=35, seqlen_kv=67)),
    "dropout_varlen": Case(cu_q=[9, 1, 18], cu_kv=[12, 9, 17], dropout=0.25, causal=True,
                           **VARLEN),

    # Short queries with many keys, and how they are split.
    "decode": Case(lens_kv=[150, 77], **DECODE),
    "decode_three_splits": Case(splits=3, sink=True, lens_kv=[150, 0], **DECODE),
    "decode_never_split_bf16": Case(splits=1, dtype="bf16", dtype_o="f32", **DECODE),
    "decode_paged_splits": Case(splits=5, page_size=16, lens_kv=[101, 64], dtype="f16",
                                causal=True, **dict(DECODE, seqlen_q=3)),

    # Everything at once.
    "all_f32": Case(bias="f32", **ALL),
    "all_f16": Case(bias="f16", dtype="f16", **ALL),
    "all_bf16": Case(bias="bf16", dtype="bf16", dtype_o="f32", **ALL),
}
for _name, _case in SHARED.items():
    # Of the name, so that a new case leaves the numbers of the others alone.
    _case.seed = zlib.crc32(_name.encode())
