# Gradients for Zygote and other users of ChainRules: of q, k and v. Keywords (bias, sink) are
# constants to ChainRules; attention_backward gives their gradients.
module FlashAttentionChainRulesCoreExt

import ChainRulesCore
using ChainRulesCore: AbstractZero, NoTangent, unthunk
using FlashAttention

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

function pullback(q, k, v, o, lse, dout, dlse, options)
    dout isa AbstractZero && dlse isa Union{Nothing,AbstractZero} &&
        return (NoTangent(), dout, dout, dout)
    grads = with_dense(dout, o) do dout
        with_dense(dlse, dlse isa Union{Nothing,AbstractZero} ? nothing : lse) do dlse
            attention_backward(dout, q, k, v, o, lse; dlse = dlse, options...)
        end
    end
    return (NoTangent(), grads.dq, grads.dk, grads.dv)
end

function ChainRulesCore.rrule(::typeof(attention), q::AbstractArray, k::AbstractArray,
                              v::AbstractArray; return_lse::Bool = false,
                              dtype_o::Type = eltype(q), options...)
    o, lse = attention(q, k, v; return_lse = true, dtype_o = dtype_o, options...)
    function back(dy)
        dy = unthunk(dy)
        dy isa AbstractZero && return (NoTangent(), dy, dy, dy)
        dout, dlse = return_lse ? (unthunk(dy[1]), unthunk(dy[2])) : (dy, nothing)
        return pullback(q, k, v, o, lse, dout, dlse, options)
    end
    return return_lse ? (o, lse) : o, back
end

function ChainRulesCore.rrule(::typeof(attention_varlen), q::AbstractArray, k::AbstractArray,
                              v::AbstractArray, cu_seqlens_q, cu_seqlens_kv; options...)
    y, back = ChainRulesCore.rrule(attention, q, k, v; cu_seqlens_q = cu_seqlens_q,
                                   cu_seqlens_kv = cu_seqlens_kv, options...)
    return y, dy -> (back(dy)..., NoTangent(), NoTangent())
end

end
