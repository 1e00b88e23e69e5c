# What most programs need.

"""
    attention(q, k, v; options...)
    attention(plan, q, k, v; arrays...)

softmax(scale · qᵀk + bias) v, exactly, without storing the scores (Dao et al. 2022). Returns the
output; with `return_lse = true` the tuple `(out, lse)`.

Arrays are `Array`s or views of them (`view`, `PermutedDimsArray`, `reshape`, `reinterpret`) with
elements Float32, Float16 or BFloat16. None is copied; the first dimension must be contiguous.

- `q`: (dim, heads, queries, batch), in the order that `layout` says
- `k`, `v`: `(dim, kv_heads, keys, batch)`, `(dim_v, kv_heads, keys, batch)`; kv_heads divides heads
- `layout = :dhsb`: the order of q, k, v and the output; `:dshb` is (dim, sequence, head, batch)
- `q_lens`, `kv_lens`: (batch,) integers, how many leading tokens of each sequence are in use
- `out_type`: elements of the output, those of q or Float32
- `return_lse = false`: lse is Float32 (queries, heads, batch), natural logarithms of the sums

Which keys a query sees; all that are given must agree. Query i stands at key position
i + (keys - queries) of its sequence, with `top_left = true` at i.

- `causal = false`: keys up to the query's own position
- `window`: (left, right) keys to each side of it, `nothing` or -1: open; n: (n, n)
- `chunk`: keys of the same chunk of so many tokens
- `block_mask`: Bool or UInt8 (key blocks, query blocks, heads, batch), with
  `block_size = (queries, keys)` a block
- `bias`: added to the scores, (keys, queries, heads, batch) of floats; or of Bool, true = visible.
  Sizes of 1 repeat it, except in the first dimension
- `alibi_slopes`: (heads,) or (heads, batch); the score loses slope · |distance| (Press et al. 2022)

Further:

- `softcap`: scores become softcap · tanh(score / softcap)
- `scale`: factor of the scores; `nothing`: 1 / √dim
- `sink`: (heads,) logits that take part in the softmax and have no value
- `dropout = 0`: probability with which a weight is dropped. It needs a `seed`, which with
  `offset = 0` chooses the numbers, see [`dropout_mask`](@ref): the same ones drop the same weights,
  so each layer and step has a seed or an offset of its own, and the backward call those of its
  forward call
- `splits = 0`: parts into which the keys of a short query are split; 0: the library chooses
- `deterministic`: `true`: the same call gives the same bits; `:batch_invariant`: also whatever else
  is in the batch. On the CPU this always holds
- `threads = 0`: of the CPU at the most; 0: all

With a `plan`, only what is an array, `layout`, `block_size`, the maximal lengths, `seed` and
`offset` are given; all else is the plan's.

A query that sees no key gives 0, and lse = -Inf. Throws `DimensionMismatch` for sizes,
`ArgumentError` for types, strides and values, and [`FlashAttentionError`](@ref) with the library's
sentence for what it refuses.
"""
function attention(q::AbstractArray, k::AbstractArray, v::AbstractArray;
                   out_type::Type = eltype(q), return_lse = false, options...)
    plan, inputs = prepare_forward(q, k, v; out_type = out_type, return_lse = return_lse,
                                   options...)
    return forward(plan, inputs, out_type)
end

# Those below take (total) rows or pages; see attention_varlen and attention_paged.
function attention(plan::Plan, q::AbstractArray, k::AbstractArray, v::AbstractArray; arrays...)
    T = (Float32, Float16, BFloat16)[output_type(plan)]
    return forward(plan, prepare(plan, q, k, v; arrays...), T)
end

function prepare_forward(q, k, v; options...)
    for name in (:forward, :backward, :dlse, :return_dbias, :return_dsink)
        haskey(options, name) &&
            throw(ArgumentError("$name is an option of attention_backward or Plan, not of this"))
    end
    return prepare(q, k, v; options...)
end

function forward(plan::Plan, inputs::Inputs, T::Type)
    out = fresh(inputs, T, like(inputs.q, inputs.v.dim))
    has(plan, C.FLASHATTN_FEATURE_LSE) || return run_forward(plan, inputs, out, nothing)
    lse = fresh(inputs, Float32, lse_size(inputs))
    return run_forward(plan, inputs, out, lse), lse
end

"""
    attention!(out, q, k, v; lse = nothing, options...)
    attention!(plan, out, q, k, v; lse = nothing, arrays...)

[`attention`](@ref) into arrays of the caller's: `out`, of the size of q with v's first dimension,
and `lse`, a Float32 array of attention's size without gaps. Rows of no sequence are left alone.
Returns `out`. With `cu_seqlens_q` and its like or `page_table` it is `attention_varlen!` or
`attention_paged!`.
"""
function attention!(out::AbstractArray, q::AbstractArray, k::AbstractArray, v::AbstractArray;
                    lse = nothing, options...)
    plan, inputs = prepare_forward(q, k, v; out_type = eltype(out), return_lse = lse !== nothing,
                                   options...)
    return run_forward(plan, inputs, out, lse)
end

function attention!(plan::Plan, out::AbstractArray, q::AbstractArray, k::AbstractArray,
                    v::AbstractArray; lse = nothing, arrays...)
    return run_forward(plan, prepare(plan, q, k, v; arrays...), out, lse)
end

"""
    attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k; max_seqlen_q, max_seqlen_k, options...)
    attention_varlen!(out, q, k, v, cu_seqlens_q, cu_seqlens_k; lse = nothing, options...)

[`attention`](@ref) for sequences of different lengths, packed without padding.

- `q`: `(dim, heads, total_q)`; sequence b holds the tokens
  `cu_seqlens_q[b] + 1 : cu_seqlens_q[b + 1]`
- `k`, `v`: `(dim, kv_heads, total_k)`, `(dim_v, kv_heads, total_k)`, likewise with `cu_seqlens_k`
- `cu_seqlens_q`, `cu_seqlens_k`: (batch + 1,) integers from 0. `nothing`: that side is dense
- `max_seqlen_q`, `max_seqlen_k`: tokens of the longest sequences; found from the offsets if not
  given. Not for a dense side
- `layout = :dhs`, or `:dsh`
- lse is `(total_q, heads)`

Sizes (keys, queries) of bias and `block_mask` are those of the longest sequences; i and j count
from a sequence's start. Rows of no sequence are 0 in a result that is made here. Errors as in
attention.
"""
attention_varlen(q::AbstractArray, k::AbstractArray, v::AbstractArray, cu_seqlens_q, cu_seqlens_k;
                 options...) =
    attention(q, k, v; cu_seqlens_q = cu_seqlens_q, cu_seqlens_k = cu_seqlens_k, options...)

@doc (@doc attention_varlen)
attention_varlen!(out::AbstractArray, q::AbstractArray, k::AbstractArray, v::AbstractArray,
                  cu_seqlens_q, cu_seqlens_k; options...) =
    attention!(out, q, k, v; cu_seqlens_q = cu_seqlens_q, cu_seqlens_k = cu_seqlens_k, options...)

"""
    attention_paged(q, k_pages, v_pages, page_table, kv_lens; options...)
    attention_paged!(out, q, k_pages, v_pages, page_table, kv_lens; lse = nothing, options...)

[`attention`](@ref) on a paged KV cache (Kwon et al. 2023).

- `q`: (dim, heads, queries, batch), or with `cu_seqlens_q` `(dim, heads, total_q)`
- `k_pages`: `(dim, kv_heads, page_size, pages)`, in the order of `page_layout = :dhsp`; `v_pages`
  likewise
- `page_table`: (pages of a sequence, batch) integers. Token j of sequence b, both from 1, lies in
  page `page_table[cld(j, page_size), b]`. Entries past `kv_lens` are not read
- `first_page = 1`: the number of the first page. With 0, a table of Int32 is what the library
  reads, and nothing is copied; from 1, a call makes itself a copy
- `kv_lens`: (batch,) integers, keys in use of each sequence; `nothing`: all
- `max_seqlen_k`: a bound of `kv_lens`, at most size(page_table, 1) · page_size tokens; else that

Forward only. Errors as in attention.
"""
attention_paged(q::AbstractArray, k_pages::AbstractArray, v_pages::AbstractArray, page_table,
                kv_lens; options...) =
    attention(q, k_pages, v_pages; page_table = page_table, kv_lens = kv_lens, options...)

@doc (@doc attention_paged)
attention_paged!(out::AbstractArray, q::AbstractArray, k_pages::AbstractArray,
                 v_pages::AbstractArray, page_table, kv_lens; options...) =
    attention!(out, q, k_pages, v_pages; page_table = page_table, kv_lens = kv_lens, options...)
