# Arrays of 8 bits from wider ones: flashattn_quantize.

const QUANTIZE = C.ARRAYS.flashattn_quantize_args
"What quantize returns: q, k, v, and the other results of the header's table."
const QUANTIZED = Tuple(union([:q, :k, :v], [field.name for field in QUANTIZE if field.role === :output]))
"All keywords of quantize: the arrays of the header's table that are read, and others."
const QUANTIZING = union([:descale_block, :cache, :smooth_k, :rotation_seed, :scale, :layout,
                          :max_seqlen_q, :max_seqlen_kv, :dtype_kv, :threads, :multiprocessors,
                          :parallel], [field.name for field in QUANTIZE if field.role === :input])

"""
    quantize(q = nothing, k = nothing, v = nothing; options...)

`F8E4M3` with Float32 descales from Float32, Float16 or BFloat16: element = round(x · (1 / descale)),
with the largest magnitude of a head, or of `descale_block` tokens, at 448; `Int8`: at 127.

    made = quantize(q, k, v; descale_block = 64)
    o = attention(made.q, made.k, made.v; dtype_o = Float32, descale_block = 64,
                  descale_q = made.descale_q, descale_k = made.descale_k, descale_v = made.descale_v)

Returns the named tuple `(q, k, v, descale_q, descale_k, descale_v, k_mean, lse_shift)`, `nothing` for
what was not asked for. Descales are (blocks, heads_kv, batch); query heads share those of their KV
head.

- `q`, `k`, `v`: as for [`attention`](@ref), or with `cu_seqlens_q` and `cu_seqlens_kv` for
  [`attention_varlen`](@ref); each may be `nothing`. q and k of a call are to be quantised with the same
  options
- `cache = false`: `true`: k and v alone get 8 bits; q is only rotated
- `smooth_k = false`: `true`: k less its mean over the tokens of each sequence, which is `k_mean`
  (dim, heads_kv, batch). The softmax is the same, but not beside `softcap` or a sink. `lse_shift`,
  sized like lse, is made where q is given: it is to be added to the lse of attention, but for
  [`attention_backward`](@ref) (Zhang et al. 2024)
- `rotation_seed`: rotates q and k by a Hadamard matrix with random signs, so that outliers spread:
  scores stay. dim must be a power of two or a multiple of 32 (Shah et al. 2024)
- `scale`: of attention, for `lse_shift`
- `dtype_kv = F8E4M3`: elements of k and v; on a CPU also `Int8`
- `layout = :dhsb`, `lens_q`, `lens_kv`, `starts_kv`, `max_seqlen_q`, `max_seqlen_kv`, `threads`,
  `multiprocessors`, `parallel`: as in attention and its relatives

Throws as attention does.
"""
quantize(q = nothing, k = nothing, v = nothing; options...) =
    quantize_arrays(Dict{Symbol,Any}(:q => q, :k => k, :v => v), Dict{Symbol,Any}(options))

function quantize_arrays(given::Dict{Symbol,Any}, options::Dict{Symbol,Any})
    for name in keys(options)
        name in QUANTIZING || refuse_keyword(name, QUANTIZING, "quantize")
    end
    option(name, default = nothing) = get(options, name, default)
    flag(name) = option(name, false) isa Bool ? option(name, false) : refuse(:DTYPE, name,
        "$name = $(repr(option(name))); expected true or false")
    parallel = is_parallel(option(:parallel, false))
    smooths, seed, narrow = flag(:smooth_k), option(:rotation_seed), option(:dtype_kv, F8E4M3)
    narrow in CACHE_8BIT || refuse(:DTYPE, :dtype_kv,
        "dtype_kv = $(repr(narrow)) has more than 8 bits; give F8E4M3 or Int8")
    layout = option(:layout, :dhsb)
    packed = Dict(name => option(name === :q ? :cu_seqlens_q : :cu_seqlens_kv) !== nothing
                  for name in (:q, :k, :v))
    tensors = Dict{Symbol,Tensor}(name => Tensor(x, layout, packed[name] ? 3 : 4, String(name))
                                  for (name, x) in given if x !== nothing)
    isempty(tensors) && refuse(:NULL_POINTER, :q, "q, k and v are nothing; give one")
    sizes = sizes_quantized(tensors, packed, options)
    (first_name, model) = first(in_order(tensors))
    T, wide = eltype(model.array), flag(:cache) && haskey(tensors, :q)
    plan = cached_plan(describe(wide ? T : F8E4M3, Dict{Symbol,Any}(
        (name => sizes[name] for name in (:heads_q, :heads_kv, :dim_qk, :dim_v, :descale_block))...,
        :dtype_kv => narrow, :dtype_o => Float32, :scale => option(:scale), :varlen_q => packed[:q],
        :varlen_kv => packed[:k], :threads => option(:threads, 0),
        :multiprocessors => option(:multiprocessors, 0), pairs(device_of(model.array))...)))

    args = Ref(C.flashattn_quantize_args(
        batch = sizes[:batch], seqlen_q = sizes[:seqlen_q], seqlen_kv = sizes[:seqlen_kv],
        total_q = sizes[:total_q], total_kv = sizes[:total_kv], dtype = dtype(T),
        transform = (smooths ? C.FLASHATTN_TRANSFORM_SMOOTH_K : UInt32(0)) |
                    (seed === nothing ? UInt32(0) : C.FLASHATTN_TRANSFORM_ROTATE),
        rotation_seed = word(something(seed, 0), "rotation_seed")))
    made, results = Any[], Dict{Symbol,Any}()
    for field in QUANTIZE
        x = field.role === :input ? option(field.name) : nothing
        x === nothing && continue
        read = about(() -> readable(field, x), field.name)
        read === x || push!(made, read)
        options[field.name] = place!(args, field, read, sizes, model, packed[:q])
    end
    ragged = any(field -> field.role === :input && option(field.name) !== nothing, QUANTIZE)
    new(E, dims) = (x = similar(storage(model.array), E, dims);
                    ragged ? fill!(x, reinterpret(E, zero(bits_of(E)))) : x)
    # The words in the conditions of outputs that hold for this call.
    there = union(keys(tensors), wide ? Symbol[] : [:F8E4M3],
                  smooths && haskey(tensors, :k) ? [:SMOOTH_K] : Symbol[])
    for (name, t) in in_order(tensors)
        set!(args, name, t.c)
        if name === :q && wide && seed === nothing
            results[:q] = t.array  # it stays; for lse_shift it is read
            :SMOOTH_K in there || set!(args, :q, C.flashattn_tensor())
            continue
        end
        x = results[name] = new(name !== :q ? narrow : wide ? T : F8E4M3, size(t.array))
        set!(args, Symbol(name, "_out"), Tensor(x, layout, ndims(x), "$(name)_out").c)
    end
    for field in QUANTIZE
        asked = filter(in((:q, :k, :v, :SMOOTH_K, :F8E4M3)),
                       Symbol.(split(field.condition, r"\W+"; keepempty = false)))
        field.role === :output && asked ⊆ there || continue
        results[field.name] = new(Float32, full_size(field, sizes, packed[:q]))
        place!(args, field, results[field.name], sizes, model, packed[:q])
    end
    GC.@preserve tensors results options begin
        run_on(C.flashattn_quantize, args, parallel) do f
            checked(() -> f(plan, args, stream(storage(model.array))), args)
        end
    end
    foreach(release, made)
    return NamedTuple{QUANTIZED}(map(name -> get(results, name, nothing), QUANTIZED))
end

"Sizes, by the header's names: those of an array that is left out are as those of another."
function sizes_quantized(tensors::Dict{Symbol,Tensor}, packed, options::Dict{Symbol,Any})
    option(name) = get(options, name, nothing)
    (first_name, model) = first(in_order(tensors))
    kv = haskey(tensors, :k) || haskey(tensors, :v)
    (side, keys_) = kv ? first(in_order(tensors, (:k, :v))) : (first_name, model)
    for (name, t) in in_order(tensors)
        dtype(eltype(t.array), String(name))
        eltype(t.array) === eltype(model.array) && !(eltype(t.array) in CACHE_8BIT) || refuse(:DTYPE, name,
            "$name has elements $(eltype(t.array)), $first_name $(eltype(model.array)); give all of one " *
            "type: Float32, Float16 or BFloat16")
        check_device(t.array, model, String(name))
        name === :q || (t.heads, t.rows, t.batch) == (keys_.heads, keys_.rows, keys_.batch) ||
            refuse(:SIZE, name, "$name has size $(size(t.array)), $side $(size(keys_.array)); only their " *
                                "first may differ")
    end
    dims(names) = first(in_order(tensors, names))[2].dim
    haskey(tensors, :q) && haskey(tensors, :k) && tensors[:q].dim != tensors[:k].dim &&
        refuse(:HEAD_DIM_PAIR, "k", "k has head dimension $(tensors[:k].dim), q has $(tensors[:q].dim); " *
                                    "give both the same first dimension")
    sizes = Dict{Symbol,Int}(
        :heads_q => haskey(tensors, :q) ? tensors[:q].heads : keys_.heads, :heads_kv => keys_.heads,
        :dim_qk => dims((:q, :k, :v)), :dim_v => dims((:v, :k, :q)), :total_q => 0, :total_kv => 0,
        :descale_block => size32(get(options, :descale_block, 0), "descale_block"))
    batches = Pair{Symbol,Int}[]
    for (name, t, cu, longest, rows, total) in (
            (:q, get(tensors, :q, nothing), :cu_seqlens_q, :max_seqlen_q, :seqlen_q, :total_q),
            (side, kv ? keys_ : nothing, :cu_seqlens_kv, :max_seqlen_kv, :seqlen_kv, :total_kv))
        if option(cu) !== nothing
            batch, most = sequences(option(cu), option(longest), name === :q ? "_q" : "_kv")
            push!(batches, cu => batch)
            # Without an array as many tokens as there may be.
            sizes[total] = t === nothing ? batch * most : t.rows
        else
            unused(option(longest), String(longest), String(cu))
            most = t === nothing ? 0 : t.rows
            t === nothing || push!(batches, name => t.batch)
        end
        sizes[rows] = size32(most, String(rows))
    end
    (name, batch), (other, others) = first(batches), last(batches)
    batch == others || refuse(:SIZE, other,
        "$other holds $others sequences, $name is of $batch; give as many")
    sizes[:batch] = size32(batch, "batch")
    return sizes
end
