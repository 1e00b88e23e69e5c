# What most programs need.

"""
    attention(q, k, v; options...)
    attention(q, k, v, bias, sink = nothing; options...)
    attention(plan, q, k, v; arrays...)

softmax(scale · qᵀk + bias) v, exactly, without storing the scores (Dao et al. 2022). Returns the
output; with `return_lse = true` the tuple `(o, lse)`.

Arrays are `Array`s or views of them (`view`, `PermutedDimsArray`, `reshape`, `reinterpret`) with
elements Float32, Float16 or BFloat16. None is copied; the first dimension must be contiguous.

- `q`: (dim, heads, queries, batch), in the order that `layout` says
- `k`, `v`: `(dim, heads_kv, keys, batch)`, `(dim_v, heads_kv, keys, batch)`; heads_kv divides the
  heads of q
- `layout = :dhsb`: the order of q, k, v and the output; `:dshb` is (dim, sequence, head, batch)
- `lens_q`, `lens_kv`: (batch,) integers, how many leading tokens of each sequence are in use
- `starts_kv`: (batch,) integers, left padding: the first so many keys of a sequence do not exist.
  Key positions, of masks, ALiBi, bias and dropout, count from there
- `dtype_o`: elements of the output, those of q or Float32; any beside `F8E4M3`, with `scale_o` for
  an output of that type
- `return_lse = false`: lse is Float32 (queries, heads, batch), natural logarithms of the sums

Which keys a query sees; all that are given must agree. Query i stands at key position
i + (keys - queries) of its sequence, with `top_left = true` at i.

- `causal = false`: keys up to the query's own position
- `window`: (left, right) keys to each side of it, `nothing` or -1: open; n: (n, n)
- `chunk`: keys of the same chunk of so many tokens
- `block_mask`: Bool or UInt8 (key blocks, query blocks, heads, batch), of `block_q` queries and
  `block_kv` keys a block
- `block_index`: in its place, (entries, query blocks, heads, batch) integers: the numbers of the key
  blocks that each query block sees, in any order. What is no number of a block counts for nothing
- `first_block = 1`: the number of the first block; below it there is none. With 0, an array of Int32
  is what the library reads, and nothing is copied
- `block_begin`, `block_end`: (query blocks, heads, batch) integers: of a column of `block_index` the
  entries `block_begin + 1 : block_end` count, else all. With `block_index` of size (entries, 1) they
  share one list: of a sparse matrix of blocks `rowval`, `colptr[1:end-1] .- 1`, `colptr[2:end] .- 1`
- `block_lens`: (key blocks, heads, batch) integers: keys of a block that count, from its first on
- `tree_bits`, `tree`: see `LibFlashAttn.flashattn_args`
- `bias`: added to the scores, (keys, queries, heads, batch) of floats; or of Bool, true = visible.
  Sizes of 1 repeat it, except in the first dimension, as they do what is said of blocks
- `alibi_slopes`: (heads,) or (heads, batch); the score loses slope · |distance| (Press et al. 2022)

Further:

- `softcap`: scores become softcap · tanh(score / softcap)
- `scale`: factor of the scores; `nothing`: 1 / √dim
- `sink`: (heads,) logits that take part in the softmax and have no value
- `dropout = 0`: probability with which a weight is dropped. It needs an `rng_seed`, which with
  `rng_offset = 0` chooses the numbers, see [`dropout_mask`](@ref): the same ones drop the same
  weights, so each layer and step has a seed or an offset of its own, and the backward call those of
  its forward call. `rng_device`: 2 UInt64 where the arrays lie, in place of both or to be added
- `splits = 0`: parts into which the keys of a short query are split; 0: the library chooses
- `determinism`: `true`: the same call gives the same bits; `:batch_invariant`: also whatever else
  is in the batch. On the CPU this always holds
- `threads = 0`, `multiprocessors = 0`: of the CPU, of a GPU, at the most; 0: all
- `parallel = false`: on the CPU, `true`: Julia's threads compute, in place of the library's own.
  The bits are the same. An interrupt waits for the call to return
- `descale_q`, `descale_k`, `descale_v`, `descale_block`: see `LibFlashAttn.flashattn_args`
- `amax_o`: written with 8 bits, Float32 (heads, batch) or (heads, 1): the largest |o| before `scale_o`
- `descale_latent`, `descale_dim`: of the quantised cache of latent attention, see `LATENT_KV` of
  `LibFlashAttn.flashattn_layout`; k holds only what keys have behind their values

`bias` and `sink` may be given behind v instead, or `nothing`: there automatic differentiation finds
their gradients, while keywords are constants to it.

With a `plan`, only what is an array, `layout`, the sizes of blocks, the maximal lengths, `rng_seed`,
`rng_offset` and `parallel` are given; all else is the plan's.

A query that sees no key gives 0, and lse = -Inf. Throws a [`FlashAttentionError`](@ref), whose
`field` is named as here and in the header, and an `ArgumentError` for an option that there is not.
"""
function attention(q::AbstractArray, k::AbstractArray, v::AbstractArray;
                   dtype_o::Type = eltype(q), return_lse = false, options...)
    results, others = split_results(options)
    plan, inputs = prepare_forward(q, k, v; dtype_o = dtype_o, return_lse = return_lse, others...)
    return forward(plan, inputs, dtype_o, results)
end

"Results of forward that are given, and all other options."
function split_results(options)
    given, others = Dict{Symbol,Any}(), Dict{Symbol,Any}()
    for (name, x) in options
        (name in OUTPUTS ? given : others)[name] = x
    end
    return given, others
end

attention(q::AbstractArray, k::AbstractArray, v::AbstractArray, bias, sink = nothing; options...) =
    attention(q, k, v; scored(bias, sink, options)...)

"Options with bias and sink, which were given as arguments."
function scored(bias, sink, options)
    for name in (:bias, :sink)
        haskey(options, name) && throw(ArgumentError(
            "$name is given as a keyword beside arguments behind v; give bias and sink there, or " *
            "both as keywords"))
    end
    return (; bias = bias, sink = sink, options...)
end

# Those below take (total) rows or pages; see attention_varlen and attention_paged.
function attention(plan::Plan, q::AbstractArray, k::AbstractArray, v::AbstractArray; arrays...)
    results, others = split_results(arrays)
    return forward(plan, prepare(plan, q, k, v; others...), element(plan.desc.dtype_o), results)
end

function prepare_forward(q, k, v; options...)
    for name in (:forward, :backward, :dlse, :return_dbias, :return_dsink)
        haskey(options, name) &&
            throw(ArgumentError("$name is an option of attention_backward or Plan, not of this"))
    end
    return prepare(q, k, v; options...)
end

function forward(plan::Plan, inputs::Inputs, T::Type, results = Dict{Symbol,Any}())
    o = fresh(inputs, T, like(inputs.q, inputs.v.dim))
    made = filter(field -> has(plan, field.bit), RESULTS)
    for field in made
        results[field.name] = fresh(inputs, Float32, full_size(
            field, inputs.sizes, haskey(inputs.arrays, :cu_seqlens_q)))
    end
    run_forward(plan, inputs, o, results)
    return isempty(made) ? o : (o, (results[field.name] for field in made)...)
end

"""
    attention!(o, q, k, v; lse = nothing, amax_o = nothing, options...)
    attention!(plan, o, q, k, v; lse = nothing, amax_o = nothing, arrays...)

[`attention`](@ref) into arrays of the caller's: `o`, of the size of q with v's first dimension,
and `lse`, a Float32 array of attention's size without gaps. Rows of no sequence are left alone.
Returns `o`. With `cu_seqlens_q` and its like or `page_table` it is `attention_varlen!` or
`attention_paged!`.
"""
function attention!(o::AbstractArray, q::AbstractArray, k::AbstractArray, v::AbstractArray;
                    lse = nothing, options...)
    dtype(eltype(o), "o")
    results, others = split_results(options)
    plan, inputs = prepare_forward(q, k, v; dtype_o = eltype(o), return_lse = lse !== nothing,
                                   others...)
    results[:lse] = lse
    return run_forward(plan, inputs, o, results)
end

function attention!(plan::Plan, o::AbstractArray, q::AbstractArray, k::AbstractArray,
                    v::AbstractArray; lse = nothing, arrays...)
    results, others = split_results(arrays)
    results[:lse] = lse
    return run_forward(plan, prepare(plan, q, k, v; others...), o, results)
end

"""
    attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_kv; max_seqlen_q, max_seqlen_kv, options...)
    attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_kv, bias, sink = nothing; options...)
    attention_varlen!(o, q, k, v, cu_seqlens_q, cu_seqlens_kv; lse = nothing, options...)

[`attention`](@ref) for sequences of different lengths, packed without padding.

- `q`: `(dim, heads, total_q)`; sequence b holds the tokens
  `cu_seqlens_q[b] + 1 : cu_seqlens_q[b + 1]`
- `k`, `v`: `(dim, heads_kv, total_kv)`, `(dim_v, heads_kv, total_kv)`, likewise with `cu_seqlens_kv`
- `cu_seqlens_q`, `cu_seqlens_kv`: (batch + 1,) integers from 0. `nothing`: that side is dense
- `max_seqlen_q`, `max_seqlen_kv`: tokens of the longest sequences; found from the offsets if not
  given. Not for a dense side
- `layout = :dhs`, or `:dsh`
- lse is `(total_q, heads)`

Sizes (keys, queries) of bias and `block_mask` are those of the longest sequences; i and j count
from a sequence's start. Rows of no sequence are 0 in a result that is made here. Errors as in
attention.
"""
attention_varlen(q::AbstractArray, k::AbstractArray, v::AbstractArray, cu_seqlens_q, cu_seqlens_kv;
                 options...) =
    attention(q, k, v; cu_seqlens_q = cu_seqlens_q, cu_seqlens_kv = cu_seqlens_kv, options...)

attention_varlen(q::AbstractArray, k::AbstractArray, v::AbstractArray, cu_seqlens_q, cu_seqlens_kv,
                 bias, sink = nothing; options...) =
    attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_kv; scored(bias, sink, options)...)

@doc (@doc attention_varlen)
attention_varlen!(o::AbstractArray, q::AbstractArray, k::AbstractArray, v::AbstractArray,
                  cu_seqlens_q, cu_seqlens_kv; options...) =
    attention!(o, q, k, v; cu_seqlens_q = cu_seqlens_q, cu_seqlens_kv = cu_seqlens_kv, options...)

"""
    attention_paged(q, k_pages, v_pages, page_table, lens_kv; options...)
    attention_paged!(o, q, k_pages, v_pages, page_table, lens_kv; lse = nothing, options...)

[`attention`](@ref) on a paged KV cache (Kwon et al. 2023).

- `q`: (dim, heads, queries, batch), or with `cu_seqlens_q` `(dim, heads, total_q)`
- `k_pages`: `(dim, heads_kv, page_size, pages)`, in the order of `page_layout = :dhsp`; `v_pages`
  likewise
- `page_table`: (pages of a sequence, batch) integers. Token j of sequence b, both from 1, lies in
  page `page_table[cld(j, page_size), b]`. Entries past `lens_kv` are not read. With
  `hidden_pages = true` a number below `first_page` hides the keys of its page
- `first_page = 1`: the number of the first page. With 0, a table of Int32 is what the library
  reads, and nothing is copied; from 1, a call makes itself a copy
- `lens_kv`: (batch,) integers, keys in use of each sequence; `nothing`: all
- `max_seqlen_kv`: a bound of `lens_kv`, at most size(page_table, 1) · page_size tokens; else that

Forward only. Errors as in attention.
"""
attention_paged(q::AbstractArray, k_pages::AbstractArray, v_pages::AbstractArray, page_table,
                lens_kv; options...) =
    attention(q, k_pages, v_pages; page_table = page_table, lens_kv = lens_kv, options...)

@doc (@doc attention_paged)
attention_paged!(o::AbstractArray, q::AbstractArray, k_pages::AbstractArray,
                 v_pages::AbstractArray, page_table, lens_kv; options...) =
    attention!(o, q, k_pages, v_pages; page_table = page_table, lens_kv = lens_kv, options...)
