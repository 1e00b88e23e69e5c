# Beside attention: merging, dropout masks, questions to the library.

"""
    FlashAttention.merge(outs, lses; layout = :dhsb, out_type = eltype(first(outs)))

Attention over disjoint sets of keys, merged into the whole: for ring or cascade attention and split
caches. Returns `(out, lse)`: `lse = log(sum(exp(lse_p)))`, `out = sum(exp(lse_p - lse) · out_p)`.

- `outs`: the parts, each as `attention` returned it, with 4 dimensions or, packed, with 3
- `lses`: their lse

Parts with lse = -Inf count nothing. A sink must be in one part only. Errors as in
[`attention`](@ref). Not exported, for `Base` has a function of this name.
"""
function merge(outs, lses; layout::Symbol = :dhsb, out_type::Type = eltype(first(outs)))
    length(outs) == length(lses) && !isempty(outs) || throw(ArgumentError(
        "$(length(outs)) outs and $(length(lses)) lses; expected as many, and at least one"))
    model = first(outs)
    varlen = ndims(model) == 3
    parts = map(outs) do part
        eltype(part) === eltype(model) || throw(ArgumentError("outs differ in their elements"))
        Tensor(check_size(part, size(model), "a part"), layout, ndims(model), "a part")
    end
    first_part = first(parts)
    foreach(part -> check_device(part, first_part, "a part"), outs)
    heads, rows = first_part.heads, first_part.rows
    dims = varlen ? (rows, heads) : (rows, heads, first_part.batch)
    foreach(lse -> check_packed(lse, first_part, dims, "a part's lse"), lses)
    out = similar(storage(model), out_type, size(model))
    lse = similar(storage(model), Float32, dims)
    desc = describe(out_type; heads = heads, dim = first_part.dim, varlen_q = varlen,
                    device_of(model)...)
    plan = cached_plan(desc)
    tensors = C.flashattn_tensor[part.c for part in parts]
    pointers = Ptr{Cfloat}[address(x) for x in lses]
    GC.@preserve outs lses out lse tensors pointers begin
        args = Ref(C.flashattn_merge_args(
            parts = length(parts), part_o = pointer(tensors), part_lse = pointer(pointers),
            part_dtype = dtype(eltype(model), "outs"), o = Tensor(out, layout, ndims(out), "out").c,
            lse = address(lse),
            shape = C.flashattn_shape(batch = varlen ? 1 : size32(first_part.batch, "batch"),
                                      seqlen_q = size32(rows, "queries"),
                                      total_q = varlen ? rows : 0)))
        check(C.flashattn_merge(plan, args, stream(storage(model))))
    end
    return out, lse
end

function device_of(x::AbstractArray)
    kind, index = device(storage(x))
    return (device = kind == C.FLASHATTN_DEVICE_CPU ? :cpu : :cuda, device_index = index)
end

"""
    dropout_mask(batch, heads, seqlen_q, seqlen_k; dropout, seed, offset = 0)

Which weights dropout keeps: `Array{Bool}` (keys, queries, heads, batch), true = kept.

The same numbers as `attention(...; dropout, seed, offset)` uses on every device: a function of
(seed, offset, batch index, head, i, j) only; i and j count from a sequence's start, in varlen calls
too. Philox4x32-10 (Salmon et al. 2011).
"""
function dropout_mask(batch::Integer, heads::Integer, seqlen_q::Integer, seqlen_k::Integer;
                      dropout::Real, seed::Union{Nothing,Integer} = nothing,
                      offset::Integer = 0)
    plan = cached_plan(describe(Float32; heads = heads, dim = 64, dropout = dropout))
    args = Ref(C.flashattn_forward_args(
        shape = C.flashattn_shape(batch = size32(batch, "batch"),
                                  seqlen_q = size32(seqlen_q, "seqlen_q"),
                                  seqlen_kv = size32(seqlen_k, "seqlen_k")),
        inputs = C.flashattn_inputs(rng_seed = word(something(seed, 0), "seed"),
                                    rng_offset = word(offset, "offset"))))
    check_seed(dropout, seed)
    keep = Array{Bool}(undef, seqlen_k, seqlen_q, heads, batch)
    GC.@preserve keep check(C.flashattn_dropout_mask(plan, args, Ptr{UInt8}(pointer(keep)), C_NULL))
    return keep
end

"""
    FlashAttention.devices()

The devices of this machine that the library can use, as named tuples: `kind` (`:cpu`, `:cuda`),
`index` (from 0), `units` (threads; multiprocessors), `name`, `isa` (the best kernels for it),
`compute_capability`, `local_memory` and `memory` (bytes).
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
