# Reverse-mode rules for Enzyme: of q, k and v, and of a bias and a sink that are given as arguments.
# Keywords are constants. Enzyme passes an array with its shadow, to which the gradient is added.
module FlashAttentionEnzymeCoreExt

import EnzymeCore
using EnzymeCore: Annotation, BatchDuplicated, Const, Duplicated, EnzymeRules
using FlashAttention
using FlashAttention: beside, floats

"The shadows of an argument or a result; none: it is a constant."
shadows(::Const) = ()
shadows(x::Duplicated) = (x.dval,)
shadows(x::BatchDuplicated) = x.dval

zeros_like(x::AbstractArray) = fill!(similar(x), 0)
zeros_like(x::Tuple) = map(zeros_like, x)
clear(x::AbstractArray) = fill!(x, 0)
clear(x::Tuple) = foreach(clear, x)
kept(x::AbstractArray) = copy(x)
kept(x::Tuple) = map(kept, x)

function EnzymeRules.augmented_primal(config::EnzymeRules.RevConfig, ::Const{typeof(attention)},
                                      RT::Type{<:Annotation}, q::Annotation, k::Annotation,
                                      v::Annotation, scores::Annotation...;
                                      return_lse::Bool = false, options...)
    arrays = map(x -> x.val, (q, k, v, scores...))
    o, lse = attention(arrays...; return_lse = true, options...)
    y = return_lse ? (o, lse) : o
    primal = EnzymeRules.needs_primal(config) ? y : nothing
    shadow = nothing
    if EnzymeRules.needs_shadow(config)
        each = ntuple(_ -> zeros_like(y), EnzymeRules.width(config))
        shadow = EnzymeRules.width(config) == 1 ? each[1] : each
    end
    # The caller may overwrite its arrays and the result before the reverse pass.
    changed = EnzymeRules.overwritten(config)[2:end]
    inputs = map((x, change) -> change && x isa AbstractArray ? kept(x) : x, arrays, changed)
    result = primal === nothing ? (o, lse) : kept((o, lse))
    return EnzymeRules.AugmentedReturn(primal, shadow, (inputs, result, shadow))
end

function EnzymeRules.reverse(config::EnzymeRules.RevConfig, ::Const{typeof(attention)}, ::Any, tape,
                             q::Annotation, k::Annotation, v::Annotation, scores::Annotation...;
                             return_lse::Bool = false, dtype_o::Type = Any, bias = nothing,
                             sink = nothing, options...)
    arguments = (q, k, v, scores...)
    inputs, (o, lse), shadow = tape
    bias, sink = beside(inputs[4:end], bias, sink)
    active(n) = n <= length(arguments) && !isempty(shadows(arguments[n])) && floats(inputs[n])
    given = shadow === nothing ? () : EnzymeRules.width(config) == 1 ? (shadow,) : shadow
    for (n, dy) in enumerate(given)
        dout, dlse = return_lse ? dy : (dy, nothing)
        grads = attention_backward(dout, inputs[1:3]..., o, lse; dlse = dlse, bias = bias, sink = sink,
                                   return_dbias = active(4), return_dsink = active(5), options...)
        for m in 1:length(arguments)
            active(m) || continue
            dx = shadows(arguments[m])[n]
            dx .+= grads[m]
        end
        clear(dy)
    end
    return map(_ -> nothing, arguments)
end

end
