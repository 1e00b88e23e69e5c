# Beside attention: merging, dropout masks, questions to the library.

"""
    FlashAttention.merge(parts, lses; layout = :dhsb, dtype_o = eltype(first(parts)),
                         parallel = false)

Attention over disjoint sets of keys, merged into the whole: for ring or cascade attention and split
caches. Returns `(o, lse)`: `lse = log(sum(exp(lse_p)))`, `o = sum(exp(lse_p - lse) · o_p)`.

- `parts`: the partial o, each as `attention` returned it, with 4 dimensions or, packed, with 3
- `lses`: their lse
- `parallel`: as in [`attention`](@ref)

Parts with lse = -Inf count nothing. A sink must be in one part only. Errors as in
[`attention`](@ref). Not exported, for `Base` has a function of this name.
"""
function merge(parts, lses; layout::Symbol = :dhsb, dtype_o::Type = eltype(first(parts)),
               parallel = false)
    length(parts) == length(lses) && !isempty(parts) || refuse(:SIZE, "parts",
        "$(length(parts)) parts and $(length(lses)) lses; expected as many, and at least one")
    model = first(parts)
    varlen = ndims(model) == 3
    tensors = map(parts) do part
        eltype(part) === eltype(model) ||
            refuse(:DTYPE, "part_o", "part_o: parts differ in their elements; convert them to one")
        Tensor(check_size(part, size(model), "part_o"), layout, ndims(model), "part_o")
    end
    first_part = first(tensors)
    foreach(part -> check_device(part, first_part, "part_o"), parts)
    heads, rows, batch = first_part.heads, first_part.rows, first_part.batch
    sizes = Dict{Symbol,Int}(:heads_q => heads, :batch => size32(batch, "batch"),
                             :seqlen_q => size32(rows, "seqlen_q"), :total_q => rows)
    field = field_of(:lse, C.ARRAYS.flashattn_merge_args)
    dims = full_size(field, sizes, varlen)
    for lse in lses
        eltype(lse) === Float32 ||
            refuse(:DTYPE, "part_lse", "part_lse has elements $(eltype(lse)); expected Float32")
        check_device(lse, first_part, "part_lse")
        about(() -> isdense(check_size(lse, dims, "part_lse")), "part_lse") ||
            refuse(:STRIDE, "part_lse", "part_lse has gaps; copy it")
    end
    o = similar(storage(model), dtype_o, size(model))
    lse = similar(storage(model), Float32, dims)
    plan = cached_plan(describe(dtype_o; heads_q = heads, dim_qk = first_part.dim,
                                varlen_q = varlen, device_of(model)...))
    seen = C.flashattn_tensor[part.c for part in tensors]
    pointers = Ptr{Cfloat}[address(x) for x in lses]
    GC.@preserve parts lses o lse seen pointers begin
        args = Ref(C.flashattn_merge_args(
            parts = length(parts), part_o = pointer(seen), part_lse = pointer(pointers),
            dtype_part = dtype(eltype(model), "parts"), o = Tensor(o, layout, ndims(o), "o").c,
            batch = varlen ? 0 : batch, seqlen_q = varlen ? 0 : rows, total_q = varlen ? rows : 0))
        place!(args, field, lse, sizes, first_part, varlen)
        run_on(C.flashattn_merge, args, parallel) do f
            checked(() -> f(plan, args, stream(storage(model))), args)
        end
    end
    return o, lse
end

function device_of(x::AbstractArray)
    kind, index = device(storage(x))
    return (device = kind == C.FLASHATTN_DEVICE_CPU ? :cpu : :cuda, device_index = index)
end

"""
    dropout_mask(batch, heads_q, seqlen_q, seqlen_kv; dropout, rng_seed, rng_offset = 0,
                 parallel = false)

Which weights dropout keeps: `Array{Bool}` (keys, queries, heads, batch), true = kept.

The same numbers as `attention(...; dropout, rng_seed, rng_offset)` uses on every device: a function
of (seed, offset, batch index, head, i, j) only; i and j count from a sequence's start, in varlen
calls too. Philox4x32-7 (Salmon et al. 2011). `parallel`: as in [`attention`](@ref).
"""
function dropout_mask(batch::Integer, heads_q::Integer, seqlen_q::Integer, seqlen_kv::Integer;
                      dropout::Real, rng_seed::Union{Nothing,Integer} = nothing,
                      rng_offset::Integer = 0, parallel = false)
    plan = cached_plan(describe(Float32; heads_q = heads_q, dim_qk = 64, dropout = dropout))
    args = sizes_of(batch = batch, seqlen_q = seqlen_q, seqlen_kv = seqlen_kv)
    set!(args, :rng_seed, word(something(rng_seed, 0), "rng_seed"))
    set!(args, :rng_offset, word(rng_offset, "rng_offset"))
    check_seed(dropout, rng_seed !== nothing)
    keep = Array{Bool}(undef, seqlen_kv, seqlen_q, heads_q, batch)
    GC.@preserve keep begin
        run_on(C.flashattn_dropout_mask, args, parallel) do f
            checked(() -> f(plan, args, Ptr{UInt8}(pointer(keep)), C_NULL), args)
        end
    end
    return keep
end

"""
    FlashAttention.devices()

The devices of this machine that the library can use, as named tuples: `kind` (`:cpu`, `:cuda`),
`index` (from 0), `multiprocessors` (of a GPU), `threads` (of a CPU), `compute_capability`, `name`,
`isa` (the best kernels for it), `shared_memory`, `l2_cache` and `memory` (bytes).
"""
function devices()
    found = []
    for (kind, code) in ((:cpu, C.FLASHATTN_DEVICE_CPU), (:cuda, C.FLASHATTN_DEVICE_CUDA))
        count = Ref{Int32}(0)
        check(C.flashattn_device_count(code, count))
        for index in 0:(count[] - 1)
            out = Ref(C.flashattn_device_properties())
            check(C.flashattn_device_info(code, index, out))
            push!(found, (kind = kind, index = Int(index), properties(out[])...))
        end
    end
    return found
end
