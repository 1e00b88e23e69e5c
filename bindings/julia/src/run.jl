# From arrays and options to a call of the library.

"Inputs, and the plan for them."
function prepare(q, k, v; layout = :dhsb, cu_seqlens_q = nothing, cu_seqlens_k = nothing,
                 max_seqlen_q = nothing, max_seqlen_k = nothing, q_lens = nothing,
                 kv_lens = nothing, page_table = nothing, page_layout = :dhsp, first_page = 1,
                 bias = nothing, alibi_slopes = nothing, sink = nothing, block_mask = nothing,
                 block_size = nothing, seed = nothing, offset = 0, dropout = 0, options...)
    inputs = Inputs(q, k, v; layout = layout, cu_seqlens_q = cu_seqlens_q,
                    cu_seqlens_k = cu_seqlens_k, max_seqlen_q = max_seqlen_q,
                    max_seqlen_k = max_seqlen_k, q_lens = q_lens, kv_lens = kv_lens,
                    page_table = page_table, page_layout = page_layout, first_page = first_page,
                    bias = bias, alibi_slopes = alibi_slopes, sink = sink, block_mask = block_mask,
                    block_size = block_size, seed = seed, offset = offset)
    known = facts(inputs)
    for name in keys(options)
        haskey(known, name) && throw(ArgumentError(
            "$name = $(options[name]) is given, but follows from the arrays; leave it out"))
    end
    plan = cached_plan(describe(eltype(q); dropout = dropout, known..., options...))
    check_seed(dropout, seed)
    return plan, inputs
end

"Arrays for a plan of the caller's: they must be what it was made for."
function prepare(plan::Plan, q, k, v; seed = nothing, arrays...)
    check_seed(plan.desc.dropout, seed)
    inputs = Inputs(q, k, v; seed = seed, arrays...)
    mine, given = plan.desc, describe(eltype(q); facts(inputs)...)
    function same(field, default)
        x = getfield(mine, field)
        return (x == 0 ? default : x) == getfield(given, field)
    end
    for (field, default) in ((:device, 0), (:device_index, 0), (:dtype, 0), (:heads_q, 0),
                             (:heads_kv, mine.heads_q), (:dim_qk, 0), (:dim_v, mine.dim_qk),
                             (:layout, 0), (:page_size, 0), (:block_q, 0), (:block_kv, 0),
                             (:bias, 0), (:bias_dtype, mine.bias & C.FLASHATTN_BIAS_DENSE == 0 ?
                                                       0 : mine.dtype))
        same(field, default) || throw(ArgumentError(
            "$field = $(getfield(given, field)) by the arrays given, but the plan is made for " *
            "$(getfield(mine, field)); give such arrays, or make another plan"))
    end
    return inputs
end

has(plan::Plan, feature::UInt32) = plan.desc.features & feature != 0
output_type(plan::Plan) = plan.desc.dtype_o == 0 ? plan.desc.dtype : plan.desc.dtype_o

"An array to be written: rows that belong to no sequence must not hold what was there."
function fresh(inputs::Inputs, T::Type, dims::Dims)
    x = similar(storage(inputs.q.array), T, dims)
    return inputs.ragged ? fill!(x, reinterpret(T, zero(bits_of(T)))) : x
end
bits_of(T::Type) = sizeof(T) == 2 ? UInt16 : UInt32

lse_size(x::Inputs) = x.varlen_q ? (x.q.rows, x.q.heads) :
                      (Int(x.shape.seqlen_q), x.q.heads, x.q.batch)

"o, dout and the gradients: the array of a given size and code, as the library sees it."
function tensor_like(x::AbstractArray, model::Tensor, dim::Int, code::Integer, layout::Symbol,
                     name::String)
    dtype(eltype(x)) == code || throw(ArgumentError(
        "$name has elements $(eltype(x)); expected $(name_of(C.flashattn_dtype, code))"))
    check_size(x, like(model, dim), name)
    t = Tensor(x, layout, ndims(x), name)
    check_device(x, model, name)
    return t.c
end

"Calls the library with a workspace of its own. What args point to is kept alive by the caller."
function execute(f::F, plan::Plan, op::UInt32, args, shape::C.flashattn_shape,
                 memory::AbstractArray) where {F}
    needed = workspace_bytes(plan, op, Ref(shape))
    workspace = scratch(memory, needed)
    try
        GC.@preserve workspace begin
            check(f(plan, args, address(workspace), needed, stream(memory)))
        end
    finally
        release(workspace)
    end
end

function run_forward(plan::Plan, inputs::Inputs, out::AbstractArray, lse)
    o = tensor_like(out, inputs.q, inputs.v.dim, output_type(plan), inputs.layout, "out")
    lse === nothing || check_packed(lse, inputs.q, lse_size(inputs), "lse")
    args = Ref(C.flashattn_forward_args(
        shape = inputs.shape, inputs = inputs.c, o = o,
        lse = lse === nothing ? C_NULL : address(lse)))
    GC.@preserve inputs out lse begin
        execute(C.flashattn_forward, plan, C.FLASHATTN_OP_FORWARD, args, inputs.shape,
                storage(inputs.q.array))
    end
    foreach(release, inputs.made)
    return out
end

"The sizes of dbias as strides: 0 sums over an index."
function dbias_strides(dbias::AbstractArray, inputs::Inputs)
    shape = inputs.shape
    wanted = (Int(shape.seqlen_kv), Int(shape.seqlen_q), inputs.q.heads, Int(shape.batch))
    eltype(dbias) === Float32 ||
        throw(ArgumentError("dbias has elements $(eltype(dbias)); expected Float32"))
    check_device(dbias, inputs.q, "dbias")
    return broadcast_of(dbias, wanted, "dbias", "(keys, queries, heads, batch)")
end

function run_backward(plan::Plan, inputs::Inputs, grads::NamedTuple, dout, out, lse, dlse)
    q, k, v, code = inputs.q, inputs.k, inputs.v, output_type(plan)
    check_packed(lse, q, lse_size(inputs), "lse")
    dlse === nothing || check_packed(dlse, q, lse_size(inputs), "dlse")
    dq, dk, dv, dbias, dsink = grads
    dsink === nothing || check_packed(dsink, q, (q.heads,), "dsink")
    strides = dbias === nothing ? (0, 0, 0) : dbias_strides(dbias, inputs)
    at(x) = x === nothing ? C_NULL : address(x)
    seen(x, model, dim, code, name) = tensor_like(x, model, dim, code, inputs.layout, name)
    args = Ref(C.flashattn_backward_args(
        shape = inputs.shape, inputs = inputs.c, lse = at(lse), dlse = at(dlse),
        o = seen(out, q, v.dim, code, "out"), dout = seen(dout, q, v.dim, code, "dout"),
        dq = seen(dq, q, q.dim, plan.desc.dtype, "dq"),
        dk = seen(dk, k, q.dim, plan.desc.dtype, "dk"),
        dv = seen(dv, v, v.dim, plan.desc.dtype, "dv"),
        dbias = at(dbias), dbias_stride_row = strides[1], dbias_stride_head = strides[2],
        dbias_stride_batch = strides[3], dsink = at(dsink)))
    GC.@preserve inputs grads dout out lse dlse begin
        execute(C.flashattn_backward, plan, C.FLASHATTN_OP_BACKWARD, args, inputs.shape,
                storage(q.array))
    end
    foreach(release, inputs.made)
    return grads
end
