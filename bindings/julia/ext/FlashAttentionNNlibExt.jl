# NNlib.dot_product_attention, and so Flux.MultiHeadAttention, on this library: where the bias is a
# FlashAttention.Fused. No call without one is changed.
module FlashAttentionNNlibExt

import NNlib
using FlashAttention: FlashAttention, Fused

const A{N} = AbstractArray{<:Any,N}

# NNlib has a method for three dimensions and one for any number: both need one that is more specific.
NNlib.dot_product_attention(q::A{3}, k::A{3}, v::A{3}, fused::Fused; options...) =
    FlashAttention.dot_product_attention(q, k, v, fused; options...)
NNlib.dot_product_attention(q::A{N}, k::A{N}, v::A{N}, fused::Fused; options...) where {N} =
    FlashAttention.dot_product_attention(q, k, v, fused; options...)

end
