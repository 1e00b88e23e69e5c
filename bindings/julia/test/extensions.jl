# The extensions, loaded by hand: Julia before 1.9 has none. Where a package is not installed, the few
# names that the extension uses stand in for it.

const STUBS = Dict(
    "ChainRulesCore" => """
        module ChainRulesCore
        abstract type AbstractZero end
        struct NoTangent <: AbstractZero end
        struct ZeroTangent <: AbstractZero end
        unthunk(x) = x
        function rrule end
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
        gradients(; more...) = merge((dq = x, dk = x, dv = x, dbias = nothing, dsink = nothing), more)
        backward(lse; dlse = nothing, more...) = said(FlashAttentionError) do
            FlashAttention.run_backward(plan, inputs, gradients(; more...), x, x, lse, dlse)
        end
        elsewhere(name, sentence) = occursin("$name lies on another device than the call", sentence)
        @test elsewhere("lse", said(() -> FlashAttention.run_forward(plan, inputs, x, on_host),
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
            gone = freed(() -> FlashAttention.run_forward(both, inputs(), out, lse))
            @test eltype(gone[1]) === UInt8 && gone[2:end] == copies
            grads = gradients(dq = Main.CUDA.CuArray(similar(x.data)), dk = Main.CUDA.CuArray(similar(x.data)),
                              dv = Main.CUDA.CuArray(similar(x.data)))
            gone = freed(() -> FlashAttention.run_backward(both, inputs(), grads, x, out, lse, nothing))
            @test eltype(gone[1]) === UInt8 && gone[2:end] == copies
        end
        # Where the call fails, too.
        gone = freed(() -> said(() -> FlashAttention.run_forward(plan, numbers(), x, nothing),
                                FlashAttentionError))
        @test length(gone) == 1
        flat = Main.CUDA.CuArray(normal(Float32, 8, 2, 5))
        cu = Main.CUDA.CuArray(Int32[0, 5])
        @test occursin("max_seqlen_q is needed",
                       said(() -> attention_varlen(flat, flat, flat, cu, cu), FlashAttentionError))
    end
end
