# Lux's layer of several heads, whose attention is this library's.
module FlashAttentionLuxExt

import Lux
using FlashAttention: FlashAttention

const PARTS = (:q_proj, :k_proj, :v_proj, :attention_dropout, :out_proj)

"The parts of a Lux.MultiHeadAttention by their names there, so that parameters and states are the same."
struct MultiHeadAttention{Q,K,V,D,O,N<:NamedTuple} <: Lux.AbstractLuxContainerLayer{PARTS}
    q_proj::Q
    k_proj::K
    v_proj::V
    attention_dropout::D
    out_proj::O
    options::N  # of FlashAttention.dot_product_attention
end

function FlashAttention.MultiHeadAttention(layer::Lux.MultiHeadAttention; options...)
    # Older versions of Lux have no is_causal.
    if hasproperty(layer, :is_causal) && layer.is_causal === true
        options = (; causal = true, top_left = true, options...)
    end
    return MultiHeadAttention(map(name -> getproperty(layer, name), PARTS)...,
                              (; nheads = Int(layer.nheads), options...))
end

function FlashAttention.MultiHeadAttention(dims; options...)
    names = (:nheads, :dense_kwargs, :attention_dropout_probability, :is_causal)
    of_lux = filter(option -> first(option) in names, pairs(options))
    others = filter(option -> !(first(option) in names), pairs(options))
    return FlashAttention.MultiHeadAttention(Lux.MultiHeadAttention(dims; of_lux...); others...)
end

(layer::MultiHeadAttention)(x, ps, st::NamedTuple) = compute(layer, ps, st, x, x, x)
(layer::MultiHeadAttention)(x::Tuple, ps, st::NamedTuple) = compute(layer, ps, st, x...)

compute(layer, ps, st, q, kv) = compute(layer, ps, st, q, kv, kv)
function compute(layer, ps, st, q, k, v, mask = nothing)
    q, q_st = layer.q_proj(q, ps.q_proj, st.q_proj)
    k, k_st = layer.k_proj(k, ps.k_proj, st.k_proj)
    v, v_st = layer.v_proj(v, ps.v_proj, st.v_proj)
    drop, drop_st = dropout(layer.attention_dropout, st.attention_dropout)
    y, scores = FlashAttention.dot_product_attention(q, k, v; mask = mask, fdrop = drop, layer.options...)
    y, out_st = layer.out_proj(y, ps.out_proj, st.out_proj)
    return (y, scores), (q_proj = q_st, k_proj = k_st, v_proj = v_st, attention_dropout = drop_st,
                         out_proj = out_st)
end

"What a layer of Lux drops, and its next state."
dropout(layer, st) = layer isa Lux.NoOpLayer ? (identity, st) : throw(ArgumentError(
    "attention_dropout is a $(typeof(layer)); expected a Lux.Dropout or a Lux.NoOpLayer"))
function dropout(layer::Lux.Dropout, st)
    st.training === Val(true) && layer.p > 0 || return identity, st
    layer.dims === (:) || throw(ArgumentError(
        "attention_dropout is a Dropout over dims = $(layer.dims); expected dims = :"))
    rng = Lux.LuxCore.replicate(st.rng)
    return FlashAttention.Dropout(layer.p; rng_seed = rand(rng, UInt64)), merge(st, (rng = rng,))
end

end
