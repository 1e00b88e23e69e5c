"""
    attention_backward(dout, q, k, v, o, lse; options...)
    attention_backward(plan, dout, q, k, v, o, lse; arrays...)

Gradients of [`attention`](@ref) or, with `cu_seqlens_q` and `cu_seqlens_kv`, of
[`attention_varlen`](@ref) (Dao et al. 2022), as a named tuple `(dq, dk, dv, dbias, dsink)`.

- `dout`: the gradient that arrives at o: its size and elements
- `q`, `k`, `v`, and every option: as in the forward call
- `o`, `lse`: what the forward call returned
- `dlse`: the gradient that arrives at lse, Float32, sized like it
- `dtype_grad`: elements of dq, dk and dv beside `F8E4M3`; else those of q, or of o where q has 8 bits
- `return_dbias = false`, `return_dsink = false`: whether dbias (Float32, of the size of bias,
  summed where bias is repeated) and dsink (Float32 (heads,)) are wanted; else they are `nothing`

Errors as in attention.
"""
function attention_backward(dout::AbstractArray, q::AbstractArray, k::AbstractArray,
                            v::AbstractArray, o::AbstractArray, lse::AbstractArray;
                            dlse = nothing, return_dbias = false, return_dsink = false,
                            options...)
    plan, inputs = prepare_backward(q, k, v, o; dlse = dlse !== nothing,
                                    return_dbias = return_dbias, return_dsink = return_dsink,
                                    options...)
    return run_backward(plan, inputs, fresh_gradients(plan, inputs), dout, o, lse, dlse)
end

function attention_backward(plan::Plan, dout::AbstractArray, q::AbstractArray, k::AbstractArray,
                            v::AbstractArray, o::AbstractArray, lse::AbstractArray;
                            dlse = nothing, arrays...)
    inputs = prepare(plan, q, k, v; arrays...)
    return run_backward(plan, inputs, fresh_gradients(plan, inputs), dout, o, lse, dlse)
end

"""
    attention_backward!(dq, dk, dv, dout, q, k, v, o, lse; dlse, dbias, dsink, options...)

[`attention_backward`](@ref) into arrays of the caller's; they are written, not added to. `dbias`
and `dsink` are computed where given. Sizes of 1 in `dbias` (keys, queries, heads, batch), except
in the first dimension, sum over that index. Returns the named tuple.
"""
function attention_backward!(dq::AbstractArray, dk::AbstractArray, dv::AbstractArray,
                             dout::AbstractArray, q::AbstractArray, k::AbstractArray,
                             v::AbstractArray, o::AbstractArray, lse::AbstractArray;
                             dlse = nothing, dbias = nothing, dsink = nothing, options...)
    plan, inputs = prepare_backward(q, k, v, o; dlse = dlse !== nothing,
                                    return_dbias = dbias !== nothing,
                                    return_dsink = dsink !== nothing, options...)
    grads = (dq = dq, dk = dk, dv = dv, dbias = dbias, dsink = dsink)
    return run_backward(plan, inputs, grads, dout, o, lse, dlse)
end

function prepare_backward(q, k, v, o; options...)
    dtype(eltype(o), "o")
    return prepare(q, k, v; dtype_o = eltype(o), forward = false, backward = true, options...)
end

function fresh_gradients(plan::Plan, inputs::Inputs)
    new(x::Tensor) = fresh(inputs, element(gradient_code(plan)), size(x.array))
    dbias = dsink = nothing
    if has(plan, C.FLASHATTN_FEATURE_DBIAS)
        haskey(inputs.arrays, :bias) ||
            refuse(:NULL_POINTER, :bias, "the gradient of the bias needs bias; give it")
        bias = inputs.arrays[:bias]
        dbias = fill!(similar(storage(bias), Float32, size(bias)), 0)
    end
    if has(plan, C.FLASHATTN_FEATURE_DSINK)
        dsink = fill!(similar(storage(inputs.q.array), Float32, (inputs.q.heads,)), 0)
    end
    return (dq = new(inputs.q), dk = new(inputs.k), dv = new(inputs.v), dbias = dbias,
            dsink = dsink)
end
