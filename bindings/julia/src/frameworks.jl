# The calls of NNlib (and so of Flux) and of LuxLib, in their shapes.

"Whether there is a gradient: of floats, which a Bool mask is not."
floats(x) = x isa AbstractArray && eltype(x) <: AbstractFloat

"(bias, sink), given as arguments or as keywords."
function beside(scores::Tuple, bias, sink)
    isempty(scores) && return (bias, sink)
    length(scores) <= 2 ||
        throw(ArgumentError("$(length(scores)) arguments behind v; expected bias and sink"))
    bias === sink === nothing || throw(ArgumentError(
        "bias or sink is given as a keyword beside arguments behind v; give both there"))
    return (scores..., nothing, nothing)[1:2]
end

"""
    FlashAttention.Dropout(p; rng_seed, rng_offset = 0)

Dropout of attention weights, for `fdrop`: weights are dropped with probability `p`, those that
[`dropout_mask`](@ref) names. Each layer and step needs a seed or an offset of its own. As a function
of weights (keys, queries, heads, batch) it does to them what the library does.
"""
struct Dropout
    p::Float64
    rng_seed::UInt64
    rng_offset::UInt64
    Dropout(p::Real; rng_seed::Integer, rng_offset::Integer = 0) =
        new(p, word(rng_seed, "rng_seed"), word(rng_offset, "rng_offset"))
end

function (drop::Dropout)(weights::AbstractArray{T,4}) where {T}
    drop.p == 0 && return weights
    keep = dropout_mask(reverse(size(weights))...; dropout = drop.p, rng_seed = drop.rng_seed,
                        rng_offset = drop.rng_offset)
    return weights .* keep .* T(65536 / (65536 - round(65536 * drop.p)))
end

"""
What `fdrop` drops: a `Dropout`, or `nothing`. Extensions add methods for layers. `training`: a
gradient is being taken.
"""
dropout_of(::typeof(identity), q, training::Bool) = nothing
dropout_of(drop::Dropout, q, training::Bool) = drop.p == 0 ? nothing : drop
dropout_of(fdrop, q, training::Bool) = throw(ArgumentError(
    "fdrop is a $(typeof(fdrop)), but the weights that it is a function of are never stored; give " *
    "identity or FlashAttention.Dropout(p; rng_seed)"))

"""
    FlashAttention.Fused(bias = nothing, sink = nothing; options...)

In place of the bias of `NNlib.dot_product_attention`, it has that function computed by this library:

    mha = Flux.MultiHeadAttention(64; nheads = 8)
    y, _ = mha(x, x, x, FlashAttention.Fused(; causal = true))

Arguments and keywords are those of [`dot_product_attention`](@ref FlashAttention.dot_product_attention)
that NNlib's function lacks. NNlib calls this when it is loaded on Julia 1.9 or newer.
"""
struct Fused{B,S,O<:NamedTuple}
    bias::B
    sink::S
    options::O
end
Fused(bias = nothing, sink = nothing; options...) = Fused(bias, sink, (; options...))

"""
    FlashAttention.dot_product_attention(q, k, v, bias = nothing, sink = nothing; fdrop = identity,
                                         mask = nothing, nheads = 1, options...)

[`attention`](@ref) as NNlib's function of this name is called. Returns `(y, scores)`: y is
(dim_v, queries, batch...), scores are `nothing`, or with `return_scores = true` the attention weights
(keys, queries, nheads, batch...), for which there is no gradient.

- `q`, `k`: (dim, queries, batch...), (dim, keys, batch...), `v`: (dim_v, keys, batch...), with `nheads`
  heads in the first dimension; any number of batch dimensions, or none
- `bias`: added to the scores, floats that broadcast to (keys, queries, nheads, batch)
- `mask`: Bool, which broadcasts likewise, true = visible, as of `NNlib.make_causal_mask`. For that,
  `causal = true, top_left = true` is faster and needs no array
- `fdrop`: `identity`, or [`FlashAttention.Dropout`](@ref); a `Flux.Dropout` where Flux is loaded
- `nheads_kv = nheads`: heads of k and v, where they have fewer
- `sink`, as in `attention`; and its other options, but for `layout` and what is not for dense sequences

A query that sees no key gives 0, in NNlib NaN. Beside a mask, a bias is copied. Throws an
`ArgumentError` or a [`FlashAttentionError`](@ref). Not exported, for NNlib exports this name.
"""
function dot_product_attention(q::AbstractArray, k::AbstractArray, v::AbstractArray, bias = nothing,
                               sink = nothing; options...)
    return compute(nnlib_call(q, k, v, bias, sink; options...))
end
dot_product_attention(q::AbstractArray, k::AbstractArray, v::AbstractArray, fused::Fused;
                      options...) =
    dot_product_attention(q, k, v, fused.bias, fused.sink; fused.options..., options...)

"""
    FlashAttention.scaled_dot_product_attention(q, k, v, bias = nothing, sink = nothing;
        head_dim = 1, token_dim = 3, scale = nothing, mask = nothing, is_causal = nothing,
        fdrop = identity, options...)

[`attention`](@ref) as LuxLib's function of this name is called. Returns `(y, weights)`: y is (dim_v,
heads, queries, batch...) whatever the order of q, weights are `nothing`, or with `return_scores =
true` (keys, queries, heads, batch...), for which there is no gradient.

- `q`, `k`, `v`: four dimensions or more; among the first three `head_dim` is the one of a head's
  elements and `token_dim` that of tokens. k and v may have fewer heads. With `head_dim` = 1 none is
  copied
- `scale`: divides the scores, as in LuxLib; `nothing`: √dim
- `is_causal`: query i sees keys up to the i-th. Not beside a mask
- `bias`: as an argument it has a gradient; as a keyword, as in LuxLib, too, it is a constant
- `sink`, `mask`, `fdrop`, other options, errors: as in
  [`dot_product_attention`](@ref FlashAttention.dot_product_attention)
"""
scaled_dot_product_attention(q::AbstractArray, k::AbstractArray, v::AbstractArray, bias = nothing,
                             sink = nothing; options...) =
    compute(luxlib_call(q, k, v, bias, sink; options...))

"""
    FlashAttention.MultiHeadAttention(layer::Lux.MultiHeadAttention; options...)
    FlashAttention.MultiHeadAttention(dims; nheads = 1, dense_kwargs, attention_dropout_probability,
                                      is_causal, options...)

A layer of Lux with the parts of `Lux.MultiHeadAttention`, whose attention is this library's: parameters
and states have the same names, so that those of either layer serve the other.

- arguments and the four keywords: Lux's
- other `options`: of [`dot_product_attention`](@ref FlashAttention.dot_product_attention)

Called as Lux's layer, with (x, ps, st), where x is an array (dim, sequence, batch...), or (q, kv), (q, k,
v) or (q, k, v, mask). Returns ((y, scores), st); scores are `nothing`, or with `return_scores = true`
(keys, queries, nheads, batch...). In training mode each call draws a seed for its dropout from the
state. There is this function when Lux is loaded, on Julia 1.9 or newer.
"""
function MultiHeadAttention end

"A call of another package's shape, as one of attention; what is needed to give its results back."
struct Shaped
    q::AbstractArray  # (dim, heads, sequence, batch)
    k::AbstractArray
    v::AbstractArray
    bias::Any  # with the mask in it
    sink::Any
    options::NamedTuple
    order::NTuple{4,Int}  # of the dimensions given
    batch::Dims
    joined::Bool  # heads are part of the first dimension
    return_scores::Bool
end

function compute(call::Shaped)
    o = attention(call.q, call.k, call.v, call.bias, call.sink; call.options...)
    return output(call, o), call.return_scores ? scores(call) : nothing
end

function output(call::Shaped, o::AbstractArray)
    dim, heads, queries, _ = size(o)
    return call.joined ? reshape(o, dim * heads, queries, call.batch...) :
           reshape(o, dim, heads, queries, call.batch...)
end

"A gradient of q, k or v in the shape that the array was given in."
restore(call::Shaped, dx::AbstractArray, x::AbstractArray) =
    reshape(call.order == (1, 2, 3, 4) ? dx : permutedims(dx, invperm(call.order)), size(x))

function nnlib_call(q, k, v, bias, sink; nheads = 1, nheads_kv = nheads, mask = nothing,
                    fdrop = identity, return_scores = false, training::Bool = false, options...)
    check_shape_options("dot_product_attention", options)
    batch = size(q)[3:end]
    for (name, x, heads) in (("q", q, nheads), ("k", k, nheads_kv), ("v", v, nheads_kv))
        ndims(x) >= 2 && size(x)[3:end] == batch || refuse(:SIZE, name,
            "$name has size $(size(x)), q $(size(q)); expected (dim, sequence, batch...), of equal batches")
        heads isa Integer && heads > 0 && size(x, 1) % heads == 0 || refuse(:HEAD_RATIO, name,
            "$name has a first dimension of $(size(x, 1)), which is no multiple of its $heads heads; " *
            "give nheads that divide it")
    end
    apart(x, heads) = reshape(x, size(x, 1) ÷ heads, Int(heads), size(x, 2), prod(batch))
    arrays = (apart(q, nheads), apart(k, nheads_kv), apart(v, nheads_kv))
    return Shaped(arrays..., masked(bias, mask, arrays[1], arrays[2]), sink,
                  with_dropout(options, fdrop, q, training), (1, 2, 3, 4), batch, true, return_scores)
end

function luxlib_call(q, k, v, bias, sink; head_dim = 1, token_dim = 3, scale = nothing,
                     mask = nothing, is_causal = nothing, fdrop = identity, return_scores = false,
                     training::Bool = false, options...)
    if haskey(options, :bias)
        bias === nothing || throw(ArgumentError("bias is given twice, as an argument and as a keyword"))
        bias, options = options[:bias], Base.structdiff((; options...), (bias = nothing,))
    end
    check_shape_options("scaled_dot_product_attention", options)
    head_dim in 1:3 && token_dim in 1:3 && head_dim != token_dim || refuse(:LAYOUT, "layout",
        "head_dim = $head_dim, token_dim = $token_dim, of which layout is made; expected two of 1:3")
    batch = size(q)[4:end]
    for (name, x) in (("q", q), ("k", k), ("v", v))
        ndims(x) >= 4 && size(x)[4:end] == batch || refuse(:SIZE, name,
            "$name has size $(size(x)), q $(size(q)); expected four dimensions or more, of which those " *
            "behind the third are equal")
    end
    order = (head_dim, 6 - head_dim - token_dim, token_dim, 4)
    function turn(x)
        four = reshape(x, size(x)[1:3]..., prod(batch))
        order == (1, 2, 3, 4) && return four
        return head_dim == 1 ? PermutedDimsArray(four, order) : permutedims(four, order)
    end
    arrays = map(turn, (q, k, v))
    if is_causal === true
        mask === nothing || throw(ArgumentError("is_causal and mask are both given; give one"))
        any(name -> haskey(options, name), (:causal, :top_left)) &&
            throw(ArgumentError("causal or top_left is given beside is_causal, which is both; give one"))
        options = (; causal = true, top_left = true, options...)
    elseif !(is_causal in (nothing, false))
        refuse(:DTYPE, :mask, "is_causal = $(repr(is_causal)), of which a causal mask is made; expected " *
                              "true, false or nothing")
    end
    if scale !== nothing
        scale isa Real && scale != 0 || refuse(:VALUE, :scale, "scale = $(repr(scale)); expected a " *
            "number other than 0, by which scores are divided, or nothing")
        options = (; scale = inv(Float64(scale)), options...)
    end
    return Shaped(arrays..., masked(bias, mask, arrays[1], arrays[2]), sink,
                  with_dropout(options, fdrop, q, training), order, batch, false, return_scores)
end

function check_shape_options(caller::String, options)
    for name in (:layout, :page_layout, :bias, :sink, :return_lse, :cu_seqlens_q, :cu_seqlens_kv, :page_table)
        haskey(options, name) && throw(ArgumentError(
            "$name is an option of attention or an argument behind v, not an option of $caller"))
    end
end

function with_dropout(options, fdrop, q, training::Bool)
    drop = dropout_of(fdrop, q, training)
    drop === nothing && return (; options...)
    for name in (:dropout, :rng_seed, :rng_offset)
        haskey(options, name) &&
            throw(ArgumentError("$name is given beside fdrop, which says it; leave one out"))
    end
    return (; dropout = drop.p, rng_seed = drop.rng_seed, rng_offset = drop.rng_offset, options...)
end

"One bias of a bias and a mask, either of them `nothing`, whose first dimension is not repeated."
function masked(bias, mask, q::AbstractArray, k::AbstractArray)
    bias === nothing || bias isa AbstractArray && eltype(bias) <: AbstractFloat ||
        refuse(:DTYPE, :bias, "bias is a $(typeof(bias)); expected an array of floats, or nothing. An " *
                              "array of Bool is for mask")
    mask === nothing || mask isa AbstractArray{Bool} || refuse(:DTYPE, :bias,
        "mask is a $(typeof(mask)), of which bias is made; expected an array of Bool, true = visible, " *
        "or nothing")
    bias === nothing && mask === nothing && return nothing
    extents = (size(k, 3), size(q, 3), size(q, 2), size(q, 4))
    for (name, x) in (("bias", bias), ("mask", mask))
        x === nothing || all(map((n, whole) -> n in (1, whole), four_sizes(x), extents)) ||
            refuse(:BIAS, "bias",
                "$name has size $(size(x)); expected (keys, queries, heads, batch) = $extents, as a " *
                "bias has, 1 in any place to repeat it")
    end
    bias === nothing || (bias = reshape(bias, four_sizes(bias)))
    mask === nothing || (mask = reshape(bytes(mask), four_sizes(mask)))
    both = mask === nothing ? bias : bias === nothing ? mask :
           ifelse.(mask, bias, as_element(eltype(bias), -Inf32))
    return size(both, 1) == extents[1] ? both : repeat(both, extents[1], 1, 1, 1)
end

"Sizes with all batch dimensions in one."
four_sizes(x::AbstractArray) = (size(x, 1), size(x, 2), size(x, 3), prod(size(x)[4:end]))

"The gradient of a bias by that of the array which `masked` made of it."
function unmasked(dbias::AbstractArray, bias::AbstractArray)
    repeated = filter(d -> four_sizes(bias)[d] == 1 && size(dbias, d) > 1, 1:4)
    whole = isempty(repeated) ? dbias : sum(dbias; dims = Tuple(repeated))
    return as_elements(eltype(bias), reshape(whole, size(bias)))
end

"Numbers as elements of a type; those of BFloat16 need no other package."
as_elements(T::Type, x::AbstractArray) = eltype(x) === T ? x : as_element.(T, x)
as_element(T::Type, x::Real) = T === BFloat16 ? bfloat16(x) : T(x)

"""
The attention weights, as attention with rows of the unit matrix for values: 128 keys at a time, so
that every kernel can do it. A multiple of 8 of them, the last ones 0.
"""
function scores(call::Shaped)
    q, k = call.q, call.k
    keys, queries, heads = size(k, 3), size(q, 3), size(q, 2)
    weights = similar(storage(q), eltype(q), (keys, queries, heads, size(q, 4)))
    for first_key in 1:128:keys
        some = first_key:min(first_key + 127, keys)
        unit = zeros(UInt8, 8 * cld(length(some), 8), size(k, 2), keys, size(k, 4))
        for (n, key) in enumerate(some)
            unit[n, :, key, :] .= 1
        end
        v = similar(storage(k), eltype(k), size(unit))
        copyto!(v, as_elements(eltype(k), unit))
        part = attention(q, k, v, call.bias, call.sink; call.options...)
        weights[some, :, :, :] .= permutedims(part, (1, 3, 2, 4))[1:length(some), :, :, :]
    end
    return reshape(weights, keys, queries, heads, call.batch...)
end
