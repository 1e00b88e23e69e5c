# Gradients for Zygote and other users of ChainRules: of q, k and v, and of a bias and a sink that are
# given as arguments. Keywords are constants to ChainRules.
module FlashAttentionChainRulesCoreExt

import ChainRulesCore
using ChainRulesCore: AbstractZero, NoTangent, Tangent, unthunk
using FlashAttention
using FlashAttention: Fused, as_elements, beside, dot_product_attention, floats, luxlib_call,
    nnlib_call, output, restore, scaled_dot_product_attention, unmasked

"A cotangent as the library takes it: the elements and the order of the array it belongs to."
dense(dy::AbstractArray, y::AbstractArray) = copyto!(similar(y), dy)
dense(dy::DenseArray{T}, y::AbstractArray{T}) where {T} = dy
dense(::AbstractZero, y::AbstractArray) = fill!(similar(y), 0)

"f of the dense cotangent; a copy that was made for it is given back."
function with_dense(f, dy, y::AbstractArray)
    x = dense(dy, y)
    try
        return f(x)
    finally
        x === dy || FlashAttention.release(x)
    end
end
with_dense(f, ::Union{Nothing,AbstractZero}, ::Nothing) = f(nothing)

tangent(::Nothing, x) = NoTangent()
tangent(dx::AbstractArray, x::AbstractArray) = as_elements(eltype(x), dx)

"Gradients of (q, k, v, bias, sink)."
function pullback(q, k, v, bias, sink, o, lse, dout, dlse, options)
    dout isa AbstractZero && dlse isa Union{Nothing,AbstractZero} && return ntuple(_ -> dout, 5)
    grads = with_dense(dout, o) do dout
        with_dense(dlse, dlse isa Union{Nothing,AbstractZero} ? nothing : lse) do dlse
            attention_backward(dout, q, k, v, o, lse; dlse = dlse, bias = bias, sink = sink,
                               return_dbias = floats(bias), return_dsink = floats(sink), options...)
        end
    end
    return (grads.dq, grads.dk, grads.dv, tangent(grads.dbias, bias), tangent(grads.dsink, sink))
end

"The result of attention, and the gradients of (q, k, v, bias, sink) as a function of its cotangent."
function differentiate(q, k, v, bias, sink; return_lse::Bool = false, dtype_o::Type = eltype(q),
                       options...)
    o, lse = attention(q, k, v, bias, sink; return_lse = true, dtype_o = dtype_o, options...)
    function back(dy)
        dy = unthunk(dy)
        dy isa AbstractZero && return ntuple(_ -> dy, 5)
        dout, dlse = return_lse ? (unthunk(dy[1]), unthunk(dy[2])) : (dy, nothing)
        return pullback(q, k, v, bias, sink, o, lse, dout, dlse, options)
    end
    return return_lse ? (o, lse) : o, back
end

function ChainRulesCore.rrule(::typeof(attention), q::AbstractArray, k::AbstractArray,
                              v::AbstractArray, scores...; bias = nothing, sink = nothing, options...)
    given = beside(scores, bias, sink)
    y, back = differentiate(q, k, v, given...; options...)
    return y, dy -> (NoTangent(), back(dy)[1:(3 + length(scores))]...)
end

function ChainRulesCore.rrule(::typeof(attention_varlen), q::AbstractArray, k::AbstractArray,
                              v::AbstractArray, cu_seqlens_q, cu_seqlens_kv, scores...;
                              bias = nothing, sink = nothing, options...)
    given = beside(scores, bias, sink)
    y, back = differentiate(q, k, v, given...; cu_seqlens_q = cu_seqlens_q,
                            cu_seqlens_kv = cu_seqlens_kv, options...)
    function packed_back(dy)
        grads = back(dy)
        return (NoTangent(), grads[1:3]..., NoTangent(), NoTangent(),
                grads[4:(3 + length(scores))]...)
    end
    return y, packed_back
end

# The calls in other packages' shapes.
for (f, shape) in ((dot_product_attention, nnlib_call), (scaled_dot_product_attention, luxlib_call))
    @eval function ChainRulesCore.rrule(::typeof($f), q::AbstractArray, k::AbstractArray,
                                        v::AbstractArray, scores...; options...)
        return shaped_rule($shape, q, k, v, scores...; options...)
    end
end

function ChainRulesCore.rrule(::typeof(dot_product_attention), q::AbstractArray, k::AbstractArray,
                              v::AbstractArray, fused::Fused; options...)
    y, back = shaped_rule(nnlib_call, q, k, v, fused.bias, fused.sink; fused.options..., options...)
    function fused_back(dy)
        grads = back(dy)
        grads[5] isa AbstractZero && grads[6] isa AbstractZero && return (grads[1:4]..., NoTangent())
        return (grads[1:4]..., Tangent{typeof(fused)}(; bias = grads[5], sink = grads[6]))
    end
    return y, fused_back
end

function shaped_rule(shape, q, k, v, scores...; options...)
    bias, sink = beside(scores, nothing, nothing)
    call = shape(q, k, v, bias, sink; training = true, options...)
    o, back = differentiate(call.q, call.k, call.v, call.bias, call.sink; call.options...)
    weights = call.return_scores ? FlashAttention.scores(call) : nothing
    function shaped_back(dy)
        dy = unthunk(dy)
        none = (NoTangent(), ntuple(_ -> NoTangent(), 3 + length(scores))...)
        dy isa AbstractZero && return none
        dout, dweights = unthunk(dy[1]), unthunk(dy[2])
        dweights isa Union{Nothing,AbstractZero} || throw(ArgumentError(
            "the scores are part of the loss, but they have no gradient here; use NNlib's or " *
            "LuxLib's function where they are needed"))
        dout isa Union{Nothing,AbstractZero} && return none
        dq, dk, dv, dbias, dsink = back(reshape(dout, size(o)))
        if !floats(bias)  # scores were hidden by a mask alone
            dbias = NoTangent()
        elseif !(dbias isa AbstractZero)
            dbias = unmasked(dbias, bias)
        end
        return (NoTangent(), restore(call, dq, q), restore(call, dk, k), restore(call, dv, v),
                (dbias, dsink)[1:length(scores)]...)
    end
    return (output(call, o), weights), shaped_back
end

end
