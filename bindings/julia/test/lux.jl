# The layer of Lux, beside the real one where it is installed, or else a stand-in: Lux's layers and their
# interface, as they are documented.

STUBS["Lux"] = """
module Lux
import Random
abstract type AbstractLuxLayer end
abstract type AbstractLuxContainerLayer{layers} <: AbstractLuxLayer end
initialparameters(rng, ::AbstractLuxLayer) = NamedTuple()
initialstates(rng, ::AbstractLuxLayer) = NamedTuple()
for f in (:initialparameters, :initialstates)
    @eval \$f(rng, layer::AbstractLuxContainerLayer{names}) where {names} =
        NamedTuple{names}(map(name -> \$f(rng, getfield(layer, name)), names))
end
setup(rng, layer) = (initialparameters(rng, layer), initialstates(rng, layer))
module LuxCore
replicate(rng) = copy(rng)
end
struct NoOpLayer <: AbstractLuxLayer end
struct Dense <: AbstractLuxLayer; in_dims::Int; out_dims::Int; use_bias::Bool; end
Dense(in, out; use_bias = true) = Dense(in, out, use_bias)
function initialparameters(rng, d::Dense)
    weight = randn(rng, Float32, d.out_dims, d.in_dims) ./ Float32(sqrt(d.in_dims))
    return d.use_bias ? (weight = weight, bias = randn(rng, Float32, d.out_dims)) : (weight = weight,)
end
function (d::Dense)(x, ps, st)
    y = reshape(ps.weight * reshape(x, size(x, 1), :), :, size(x)[2:end]...)
    return d.use_bias ? y .+ ps.bias : y, st
end
struct Dropout <: AbstractLuxLayer; p::Float32; dims; end
Dropout(p; dims = :) = iszero(p) ? NoOpLayer() : Dropout(p, dims)
initialstates(rng, ::Dropout) = (rng = copy(rng), training = Val(true))
struct MultiHeadAttention{D} <: AbstractLuxContainerLayer{
        (:q_proj, :k_proj, :v_proj, :attention_dropout, :out_proj)}
    nheads::Int; q_proj::Dense; k_proj::Dense; v_proj::Dense; attention_dropout::D
    out_proj::Dense; is_causal::Union{Nothing,Bool}
end
function MultiHeadAttention(dims::Int; nheads = 1, dense_kwargs = (use_bias = false,),
                            attention_dropout_probability = 0f0, is_causal = nothing)
    dense() = Dense(dims, dims; dense_kwargs...)
    return MultiHeadAttention(nheads, dense(), dense(), dense(),
                              Dropout(attention_dropout_probability), dense(), is_causal)
end
end
"""

load("Lux")
import Lux

@testset "Lux's layer" begin
    rng, x, kv = Random.MersenneTwister(3), randn(Float32, 12, 5, 2), randn(Float32, 12, 7, 2)
    lux = Lux.MultiHeadAttention(12; nheads = 3, dense_kwargs = (use_bias = true,))
    layer = FlashAttention.MultiHeadAttention(lux)
    ps, st = Lux.setup(rng, lux)
    @test map(keys, Lux.setup(rng, layer)) == map(keys, (ps, st))
    dense(name, x) = getproperty(lux, name)(x, getproperty(ps, name), getproperty(st, name))[1]
    function wanted(q, k, v; options...)
        heads, weights = nnlib_reference(dense(:q_proj, q), dense(:k_proj, k), dense(:v_proj, v);
                                         nheads = 3, options...)
        return dense(:out_proj, heads), weights
    end
    same(given, known) = near(given, known, 1e-5 * maximum(abs, known))
    (y, none), after = layer(x, ps, st)
    @test none === nothing && after == st && same(y, wanted(x, x, x)[1])
    @test same(layer((x, kv), ps, st)[1][1], wanted(x, kv, kv)[1])
    mask = [j <= i + 2 for j in 1:7, i in 1:5]
    weighed = FlashAttention.MultiHeadAttention(lux; return_scores = true)
    (y, scores), _ = weighed((x, kv, 2kv, mask), ps, st)
    known = wanted(x, kv, 2kv; mask = mask)
    @test same(y, known[1]) && near(scores, known[2], 1e-5)
    # By Lux's arguments; causal from the first query and key.
    causal = FlashAttention.MultiHeadAttention(12; nheads = 3, is_causal = true, dense_kwargs = (use_bias = true,))
    @test same(causal((x, kv), ps, st)[1][1], wanted(x, kv, kv; mask = [j <= i for j in 1:7, i in 1:5])[1])
    @test occursin("there is no option window_size",
                   said(() -> FlashAttention.MultiHeadAttention(lux; window_size = 3)(x, ps, st), ArgumentError))
    # Dropout: another one in each call of a training, none in a test.
    dropped = FlashAttention.MultiHeadAttention(12; nheads = 3, attention_dropout_probability = 0.5f0,
                                                dense_kwargs = (use_bias = true,))
    start = Lux.setup(rng, dropped)[2]
    (first_y, _), next = dropped(x, ps, start)
    seed = rand(copy(start.attention_dropout.rng), UInt64)
    known, _ = wanted(x, x, x; fdrop = FlashAttention.Dropout(0.5; rng_seed = seed))
    @test same(first_y, known) && dropped(x, ps, start)[1][1] == first_y
    @test dropped(x, ps, next)[1][1] != first_y
    testing = merge(start, (attention_dropout = merge(start.attention_dropout, (training = Val(false),)),))
    @test dropped(x, ps, testing)[1][1] == layer(x, ps, st)[1][1]
end
