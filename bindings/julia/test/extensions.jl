# The extensions, loaded by hand: Julia before 1.9 has none. Where a package is not installed, the few
# names that the extension uses stand in for it.

const STUBS = Dict(
    "ChainRulesCore" => """
        module ChainRulesCore
        abstract type AbstractZero end
        struct NoTangent <: AbstractZero end
        struct ZeroTangent <: AbstractZero end
        struct Tangent{P,T<:NamedTuple}; backing::T; end
        Tangent{P}(; fields...) where {P} = Tangent{P,typeof(values(fields))}(values(fields))
        Base.getproperty(x::Tangent, name::Symbol) = getfield(x, :backing)[name]
        unthunk(x) = x
        function rrule end
        end
        """,
    "EnzymeCore" => """
        module EnzymeCore
        abstract type Annotation{T} end
        struct Const{T} <: Annotation{T}; val::T; end
        struct Duplicated{T} <: Annotation{T}; val::T; dval::T; end
        struct BatchDuplicated{T,N} <: Annotation{T}; val::T; dval::NTuple{N,T}; end
        module EnzymeRules
        struct RevConfig{NeedsPrimal,NeedsShadow,Width,Overwritten,RuntimeActivity,StrongZero} end
        needs_primal(::RevConfig{P}) where {P} = P
        needs_shadow(::RevConfig{P,S}) where {P,S} = S
        width(::RevConfig{P,S,W}) where {P,S,W} = W
        overwritten(::RevConfig{P,S,W,O}) where {P,S,W,O} = O
        struct AugmentedReturn{P,S,T}; primal::P; shadow::S; tape::T; end
        function augmented_primal end
        function reverse end
        end
        end
        """,
    # The methods of NNlib, by their signatures.
    "NNlib" => """
        module NNlib
        function dot_product_attention(q::AbstractArray{<:Any,N}, k::AbstractArray{<:Any,N},
                                       v::AbstractArray{<:Any,N}, more...; options...) where {N}
            return :any
        end
        function dot_product_attention(q::AbstractArray{<:Any,3}, k::AbstractArray{<:Any,3},
                                       v::AbstractArray{<:Any,3}, bias = nothing;
                                       fdrop = identity, mask = nothing, nheads = 1)
            return :three
        end
        within_gradient(x) = false
        end
        """,
    "Flux" => """
        module Flux
        import NNlib, Random
        mutable struct Dropout; p::Float64; dims; active::Union{Bool,Nothing}; rng; end
        Dropout(p; active = nothing, dims = :) = Dropout(p, dims, active, Random.GLOBAL_RNG)
        end
        """,
    # Host memory under a foreign name: the library is asked for a GPU, and says what is missing.
    "CUDA" => """
        module CUDA
        struct CuArray{T,N} <: DenseArray{T,N}; data::Array{T,N}; end
        Base.size(x::CuArray) = size(x.data)
        Base.strides(x::CuArray) = strides(x.data)
        Base.pointer(x::CuArray) = pointer(x.data)
        Base.similar(::CuArray, ::Type{T}, dims::Dims) where {T} = CuArray(Array{T}(undef, dims))
        Base.getindex(x::CuArray, i::Int...) = error("scalar indexing")
        device(::CuArray) = nothing
        deviceid(::Nothing) = 0
        stream() = (handle = C_NULL,)
        context() = nothing
        activate(::Nothing) = nothing
        const FREED = Any[]
        unsafe_free!(x) = push!(FREED, x)
        end
        """)

"Whether the package is there, really or as a stub."
function load(name)
    real = Base.find_package(name) !== nothing
    if !real
        folder = mktempdir()
        write(joinpath(folder, name * ".jl"), STUBS[name])
        push!(LOAD_PATH, folder)
    end
    extension = Symbol("FlashAttention", name, "Ext")
    @eval Main import $(Symbol(name))
    # From Julia 1.9 on the extension of an installed package is loaded already.
    real && isdefined(Base, :get_extension) &&
        Base.get_extension(FlashAttention, extension) !== nothing && return real
    Base.include(Main, joinpath(@__DIR__, "..", "ext", "$extension.jl"))
    return real
end

load("ChainRulesCore")
import ChainRulesCore: rrule, NoTangent, ZeroTangent

@testset "rrule" begin
    q, k, v = normal(Float32, 8, 2, 5, 2), normal(Float32, 8, 1, 7, 2), normal(Float32, 6, 1, 7, 2)
    dout, dlse = normal(Float32, 6, 2, 5, 2), normal(Float32, 5, 2, 2)
    out, lse = attention(q, k, v; causal = true, return_lse = true)
    wanted = attention_backward(dout, q, k, v, out, lse; causal = true)
    y, back = rrule(attention, q, k, v; causal = true)
    @test y == out
    @test back(dout) == (NoTangent(), wanted.dq, wanted.dk, wanted.dv)
    # Cotangents come in other types and orders.
    @test back(PermutedDimsArray(swap(dout), (1, 3, 2, 4))) == back(dout)
    @test back(Float64.(dout)) == back(dout)
    @test all(x -> x isa ChainRulesCore.AbstractZero, back(ZeroTangent()))
    both, back_both = rrule(attention, q, k, v; causal = true, return_lse = true)
    @test both == (out, lse)
    with = attention_backward(dout, q, k, v, out, lse; causal = true, dlse = dlse)
    @test back_both((dout, dlse)) == (NoTangent(), with.dq, with.dk, with.dv)
    @test back_both((dout, ZeroTangent())) == back(dout)
    zero_out = attention_backward(zero(dout), q, k, v, out, lse; causal = true, dlse = dlse)
    @test back_both((ZeroTangent(), dlse))[2] == zero_out.dq
    flat(x) = reshape(x, size(x, 1), size(x, 2), :)
    packed, back_packed = rrule(attention_varlen, flat(q), flat(k), flat(v), [0, 5, 10], [0, 7, 14];
                                causal = true)
    @test near(packed, flat(out), 1e-6)
    @test length(back_packed(flat(dout))) == 6
    @test near(back_packed(flat(dout))[2], flat(wanted.dq), 1e-5)
end

@testset "rrule of bias and sink" begin
    q, k, v = randn(6, 4, 5, 2), randn(6, 2, 7, 2), randn(3, 2, 7, 2)
    bias, sink = randn(7, 5, 4, 1), randn(4)
    dout, dlse = randn(3, 4, 5, 2), randn(5, 4, 2)
    function loss(q, k, v, bias, sink)
        o, l = reference(q, k, v; visible = (j, i) -> j <= i + 2, sink = sink,
                         bias = (j, i, h, b) -> bias[j, i, h, 1])
        return sum(o .* dout) + sum(l .* dlse)
    end
    given = (q, k, v, bias, sink)
    y, back = rrule(attention, map(x -> Float32.(x), given)...; causal = true, return_lse = true)
    grads = back((Float32.(dout), Float32.(dlse)))
    @test length(grads) == 6 && grads[1] isa NoTangent
    for (n, x) in enumerate(given)
        places = rand(eachindex(x), 6)
        moved(y) = loss(ntuple(m -> m == n ? y : given[m], 5)...)
        @test size(grads[n + 1]) == size(x)
        @test near(grads[n + 1][places], slopes(moved, x, places), 2e-4)
    end
    single = map(x -> Float32.(x), given)
    # A keyword is a constant, a mask of Bool has no gradient, and halves get halves.
    _, constant = rrule(attention, single[1:3]...; bias = single[4], sink = single[5], causal = true)
    _, both = rrule(attention, single...; causal = true)
    @test constant(Float32.(dout)) == both(Float32.(dout))[1:4]
    hidden = rand(Bool, 7, 5)
    @test rrule(attention, single[1:3]..., hidden)[2](Float32.(dout))[5] isa NoTangent
    half = map(x -> Float16.(x), given[1:4])
    @test eltype(rrule(attention, half...)[2](Float16.(dout))[5]) === Float16
    @test length(rrule(attention, single[1:4]...)[2](ZeroTangent())) == 5
    flat(x) = reshape(x[:, :, :, 1], size(x, 1), size(x, 2), :)
    cu = ([0, 5], [0, 7])
    _, packed = rrule(attention_varlen, map(flat, single[1:3])..., cu..., single[4], single[5]; causal = true)
    alone = map(x -> x[:, :, :, 1:1], single[1:3])
    _, dense = rrule(attention, alone..., single[4], single[5]; causal = true)
    mine, wanted = packed(flat(Float32.(dout))), dense(Float32.(dout)[:, :, :, 1:1])
    @test length(mine) == 8 && near(mine[7], wanted[5], 1e-5) && near(mine[8], wanted[6], 1e-5)
    @test occursin("give bias and sink there",
                   said(() -> attention(single...; sink = single[5]), ArgumentError))
    @test occursin("give both there", said(() -> rrule(attention, single...; sink = single[5]), ArgumentError))
end

"Gradients of (q, k, v, bias) of attention whose scores are divided by 2."
function attention_rule(arrays, bias, dout)
    o, lse = attention(arrays...; bias = bias, scale = 0.5, return_lse = true)
    grads = attention_backward(dout, arrays..., o, lse; bias = bias, scale = 0.5, return_dbias = true)
    return (grads.dq, grads.dk, grads.dv, grads.dbias)
end

@testset "rrules of NNlib's and LuxLib's calls" begin
    q, k, v = randn(12, 5, 2), randn(12, 7, 2), randn(6, 7, 2)
    mask = [j <= i + 2 for j in 1:7, i in 1:5]
    drop = FlashAttention.Dropout(0.3; rng_seed = 5)
    dout = randn(6, 5, 2)
    single(x) = Float32.(x)
    for bias in (randn(7, 5), randn(1, 5, 3, 1), randn(7, 1, 1, 2)), options in
        ((mask = mask, fdrop = drop, nheads = 3), (mask = nothing, fdrop = identity, nheads = 3))
        given = (q, k, v, bias)
        y, back = rrule(NNLIB, map(single, given)...; options...)
        @test y == NNLIB(map(single, given)...; options...)
        grads = back((single(dout), nothing))
        for (n, x) in enumerate(given)
            places = rand(eachindex(x), 5)
            moved(z) = sum(nnlib_reference(ntuple(m -> m == n ? z : given[m], 4)...; options...)[1] .* dout)
            @test size(grads[n + 1]) == size(x)
            @test near(grads[n + 1][places], slopes(moved, x, places), 2e-4)
        end
    end
    given, sink = map(single, (q, k, v)), randn(Float32, 3)
    fused = FlashAttention.Fused(randn(Float32, 7, 5), sink; causal = true)
    _, back = rrule(NNLIB, given..., fused; nheads = 3)
    _, plain = rrule(NNLIB, given..., fused.bias, sink; nheads = 3, causal = true)
    mine, wanted = back((single(dout), nothing)), plain((single(dout), ZeroTangent()))
    @test mine[1:4] == wanted[1:4] && mine[5].bias == wanted[5] && mine[5].sink == wanted[6]
    @test back(ZeroTangent())[5] isa NoTangent
    _, bare = rrule(NNLIB, given..., FlashAttention.Fused(); nheads = 3, mask = mask)
    @test bare((single(dout), nothing))[5] isa NoTangent
    _, weighed = rrule(NNLIB, given...; nheads = 3, return_scores = true)
    @test occursin("no gradient here", said(() -> weighed((single(dout), dout)), ArgumentError))
    @test length(weighed((single(dout), ZeroTangent()))) == 4

    # (dim, heads, tokens, batch), and turned: the gradients come in the order of the arrays.
    four = map(x -> reshape(x, :, 3, size(x, 2), 2), given)
    bias = randn(Float32, 7, 5)
    y, back = rrule(LUXLIB, four..., bias; scale = 2)
    @test y == LUXLIB(four..., bias; scale = 2)
    upstream = reshape(single(dout), 2, 3, 5, 2)
    grads = back((upstream, nothing))
    known = attention_rule(four, bias, upstream)
    @test all(near(mine, theirs, 1e-6) for (mine, theirs) in zip(grads[2:5], known))
    for order in ((1, 3, 2, 4), (2, 3, 1, 4))
        place(letter) = findfirst(==(letter), order)
        turned = map(x -> permutedims(x, order), four)
        _, other = rrule(LUXLIB, turned..., bias; scale = 2, head_dim = place(1), token_dim = place(3))
        @test all(near(mine, permutedims(theirs, order), 1e-6)
                  for (mine, theirs) in zip(other((upstream, nothing))[2:4], known[1:3]))
    end
    _, constant = rrule(LUXLIB, four...; bias = bias, scale = 2)
    @test near(constant((upstream, nothing))[2], known[1], 1e-6)
end

load("EnzymeCore")
import EnzymeCore: BatchDuplicated, Const, Duplicated, EnzymeRules

"The rules' result and gradients, of arrays that are overwritten between the passes."
function by_enzyme(arrays, annotations, douts; needed = true, options...)
    arrays = map(copy, arrays)
    width = length(douts)
    arguments = map((x, annotate) -> annotate(x), arrays, annotations)
    config = EnzymeRules.RevConfig{needed,true,width,ntuple(_ -> true, 1 + length(arrays)),false,false}()
    R = (width == 1 ? Duplicated : BatchDuplicated){Array{Float32,4}}
    f = Const(attention)
    augmented = EnzymeRules.augmented_primal(config, f, R, arguments...; options...)
    y = needed ? deepcopy(augmented.primal) : nothing
    shadows = width == 1 ? (augmented.shadow,) : augmented.shadow
    set(to::Tuple, from) = foreach(set, to, from)
    set(to, from) = (@assert(all(iszero, to)); to .= from)
    foreach(set, shadows, douts)
    needed && foreach(x -> fill!(x, NaN), augmented.primal isa Tuple ? augmented.primal : (augmented.primal,))
    foreach(x -> eltype(x) <: AbstractFloat && fill!(x, NaN), arrays)
    none = EnzymeRules.reverse(config, f, R, augmented.tape, arguments...; options...)
    @test none == map(_ -> nothing, arguments)
    clear(x) = x isa Tuple ? all(clear, x) : all(iszero, x)
    @test all(clear, shadows)
    return y, map(x -> x isa Const ? nothing : x.dval, arguments)
end

@testset "Enzyme" begin
    q, k, v = normal(Float32, 8, 4, 5, 2), normal(Float32, 8, 2, 7, 2), normal(Float32, 6, 2, 7, 2)
    bias, sink = normal(Float32, 7, 5, 4, 1), normal(Float32, 4)
    dout, dlse = normal(Float32, 6, 4, 5, 2), normal(Float32, 5, 4, 2)
    given = (q, k, v, bias, sink)
    out, lse = attention(given...; causal = true, return_lse = true)
    wanted(dout; more...) = values(attention_backward(dout, q, k, v, out, lse; bias = bias, sink = sink,
        return_dbias = true, return_dsink = true, causal = true, more...))
    ones_beside(x) = Duplicated(x, fill!(similar(x), 1))  # gradients are added
    y, grads = by_enzyme(given, map(_ -> ones_beside, given), (dout,); causal = true)
    @test y == out
    @test all(near(mine .- 1, theirs, 1e-5) for (mine, theirs) in zip(grads, wanted(dout)))
    _, unneeded = by_enzyme(given, map(_ -> ones_beside, given), (dout,); needed = false, causal = true)
    @test unneeded == grads
    both, grads = by_enzyme(given, map(_ -> ones_beside, given), ((dout, dlse),); causal = true,
                            return_lse = true)
    @test both == (out, lse)
    @test all(near(mine .- 1, theirs, 1e-5)
              for (mine, theirs) in zip(grads, wanted(dout; dlse = dlse)))
    # Two cotangents at once; a constant; keywords; a mask.
    twice(x) = BatchDuplicated(x, (zero(x), zero(x)))
    _, grads = by_enzyme(given, (twice, Const, twice, twice, Const), (dout, 2 .* dout); causal = true)
    @test grads[2] === grads[5] === nothing
    for n in (1, 3, 4)
        @test near(grads[n][1], wanted(dout)[n], 1e-5) && near(grads[n][2], 2 .* wanted(dout)[n], 1e-5)
    end
    zeros_beside(x) = Duplicated(x, zero(x))
    _, grads = by_enzyme(given[1:3], ntuple(_ -> zeros_beside, 3), (dout,); causal = true, bias = bias,
                         sink = sink)
    @test all(near(mine, theirs, 1e-5) for (mine, theirs) in zip(grads, wanted(dout)))
    hidden = rand(Bool, 7, 5)
    _, masked = by_enzyme((q, k, v, hidden), ntuple(_ -> zeros_beside, 4), (dout,))
    _, known = by_enzyme((q, k, v), ntuple(_ -> zeros_beside, 3), (dout,); bias = hidden)
    @test masked[1:3] == known && !any(masked[4])
end

const REAL_NNLIB = load("NNlib")
load("Flux")

@testset "NNlib and Flux" begin
    q, k, v = normal(Float32, 12, 5, 2), normal(Float32, 12, 7, 2), normal(Float32, 6, 7, 2)
    fused = FlashAttention.Fused(normal(Float32, 7, 5); causal = true)
    nnlib = Main.NNlib.dot_product_attention
    layer(p; options...) = Main.Flux.Dropout(p; options...)
    wanted = NNLIB(q, k, v, fused; nheads = 3)
    @test nnlib(q, k, v, fused; nheads = 3) == wanted
    if REAL_NNLIB  # the formula of these tests, and the library, against NNlib's own
        mask, bias = rand(Bool, 7, 5), normal(Float32, 7, 5, 3)
        mask[1, :] .= true
        theirs = nnlib(q, k, v, bias; nheads = 3, mask = mask)
        known = nnlib_reference(q, k, v, bias; nheads = 3, mask = mask)
        ours = NNLIB(q, k, v, bias; nheads = 3, mask = mask, return_scores = true)
        @test all(near(a, b, 1e-5) && near(a, c, 1e-5) for (a, b, c) in zip(theirs, known, ours))
    end
    four(x) = reshape(x, size(x)..., 1)
    @test vec(nnlib(four(q), four(k), four(v), fused; nheads = 3)[1]) == vec(wanted[1])
    # Flux.MultiHeadAttention always gives its layer for dropout: idle at first.
    @test nnlib(q, k, v, fused; nheads = 3, fdrop = layer(0.0)) == wanted
    @test nnlib(q, k, v, fused; nheads = 3, fdrop = layer(0.5)) == wanted
    @test nnlib(q, k, v, fused; nheads = 3, fdrop = layer(0.5; active = false)) == wanted
    dropped() = nnlib(q, k, v, fused; nheads = 3, fdrop = layer(0.5; active = true))
    @test dropped() != wanted && dropped() != dropped()
    trained, back = rrule(NNLIB, q, k, v, fused; nheads = 3, fdrop = layer(0.5))
    @test trained != wanted
    # Forward and backward drop the same weights: with v along dv, the loss is linear.
    dout = normal(Float32, size(trained[1])...)
    @test sum(trained[1] .* dout) ≈ sum(back((dout, nothing))[4] .* v) rtol = 1e-4
    @test occursin("dims = 1", said(ArgumentError) do
        nnlib(q, k, v, fused; nheads = 3, fdrop = layer(0.5; active = true, dims = 1))
    end)
end

# A statement of its own: what it defines is seen by the next one only.
const REAL_CUDA = load("CUDA")
# What CUDA.jl's broadcasting does.
REAL_CUDA ||
    @eval FlashAttention.int32(x::Main.CUDA.CuArray{Int64}) = Main.CUDA.CuArray(Int32.(x.data))
if !REAL_CUDA
    @testset "CUDA, without a GPU" begin
        x = Main.CUDA.CuArray(normal(Float32, 8, 2, 5, 2))
        refused(f) = occursin("UNSUPPORTED", said(f, FlashAttentionError))
        @test refused(() -> attention(x, x, x))
        @test refused(() -> attention(view(x, :, :, 1:3, :), x, x))
        @test refused(() -> attention_backward(x, x, x, x, x, x))
        @test FlashAttention.address(view(x, :, 2:2, :, :)) == FlashAttention.address(x) + 32
        @test occursin("different devices", said(() -> attention(x.data, x, x), FlashAttentionError))
        @test occursin("lies on another device",
                       said(() -> attention(x, x, x; lens_kv = [1, 2]), FlashAttentionError))
        # The gradients' arrays, too, before a kernel gets them.
        plan = Plan(Float32; heads_q = 2, dim_qk = 8, backward = true, return_lse = true)
        inputs = FlashAttention.Inputs(x, x, x)
        on_gpu, on_host = Main.CUDA.CuArray(zeros(Float32, 5, 2, 2)), zeros(Float32, 5, 2, 2)
        run_forward(plan, inputs, o, lse) =
            FlashAttention.run_forward(plan, inputs, o, Dict{Symbol,Any}(:lse => lse))
        gradients(; more...) = merge((dq = x, dk = x, dv = x, dbias = nothing, dsink = nothing), more)
        backward(lse; dlse = nothing, more...) = said(FlashAttentionError) do
            FlashAttention.run_backward(plan, inputs, gradients(; more...), x, x, lse, dlse)
        end
        elsewhere(name, sentence) = occursin("$name lies on another device than the call", sentence)
        @test elsewhere("lse", said(() -> run_forward(plan, inputs, x, on_host),
                                    FlashAttentionError))
        @test elsewhere("lse", backward(on_host))
        @test elsewhere("dlse", backward(on_gpu; dlse = on_host))
        @test elsewhere("dsink", backward(on_gpu; dsink = zeros(Float32, 2)))
        @test elsewhere("dbias", backward(on_gpu; dbias = zeros(Float32, 5, 5)))
        @test elsewhere("part_o", said(() -> FlashAttention.merge((x, x.data), (on_gpu, on_gpu)),
                                       FlashAttentionError))
        @test elsewhere("part_lse", said(() -> FlashAttention.merge((x,), (on_host,)),
                                             FlashAttentionError))
        # What a call made for itself is freed behind it, and nothing else.
        given, made = Main.CUDA.CuArray([4, 5]), [Int32[4, 5]]
        out, lse = Main.CUDA.CuArray(similar(x.data)), Main.CUDA.CuArray(zeros(Float32, 5, 2, 2))
        both = Plan(Float32; heads_q = 2, dim_qk = 8, return_lse = true, backward = true)
        freed(run) = (empty!(Main.CUDA.FREED); run(); map(x -> x.data, Main.CUDA.FREED))
        numbers(; more...) = FlashAttention.Inputs(x, x, x; more...)
        for inputs in (() -> numbers(lens_kv = given), () -> numbers(lens_kv = Main.CUDA.CuArray(made[1])))
            copies = isempty(inputs().made) ? [] : made
            gone = freed(() -> run_forward(both, inputs(), out, lse))
            @test eltype(gone[1]) === UInt8 && gone[2:end] == copies
            grads = gradients(dq = Main.CUDA.CuArray(similar(x.data)), dk = Main.CUDA.CuArray(similar(x.data)),
                              dv = Main.CUDA.CuArray(similar(x.data)))
            gone = freed(() -> FlashAttention.run_backward(both, inputs(), grads, x, out, lse, nothing))
            @test eltype(gone[1]) === UInt8 && gone[2:end] == copies
        end
        # Where the call fails, too.
        gone = freed(() -> said(() -> run_forward(plan, numbers(), x, nothing),
                                FlashAttentionError))
        @test length(gone) == 1
        flat = Main.CUDA.CuArray(normal(Float32, 8, 2, 5))
        cu = Main.CUDA.CuArray(Int32[0, 5])
        @test occursin("max_seqlen_q is needed",
                       said(() -> attention_varlen(flat, flat, flat, cu, cu), FlashAttentionError))
    end
end
