# Dropout layers of Flux as fdrop.
module FlashAttentionFluxExt

import Flux
using FlashAttention: FlashAttention

function FlashAttention.dropout_of(layer::Flux.Dropout, q, training::Bool)
    active = layer.active === nothing ? training || Flux.NNlib.within_gradient(q) : layer.active
    (active && layer.p > 0) || return nothing
    layer.dims === (:) || throw(ArgumentError(
        "fdrop is a Dropout over dims = $(layer.dims); expected dims = :"))
    return FlashAttention.Dropout(layer.p; rng_seed = rand(layer.rng, UInt64))
end

end
