# From arrays and options to a call of the library.

"Inputs, and the plan for them."
prepare(q, k, v; options...) = prepare(q, k, v, Dict{Symbol,Any}(options))

function prepare(q, k, v, options::Dict{Symbol,Any})
    taken, described = Dict{Symbol,Any}(), Dict{Symbol,Any}()
    for (name, value) in options
        (name in TAKEN ? taken : described)[name] = value
    end
    inputs = Inputs(q, k, v, taken)
    key = plan_key(inputs)
    for (name, value) in described
        haskey(key, name) && throw(ArgumentError(
            "$name = $value is given, but follows from the arrays; leave it out"))
    end
    plan = cached_plan(describe(eltype(q), merge!(key, described)))
    check_seed(get(options, :dropout, 0), seeded(taken))
    return plan, inputs
end

seeded(options) = any(name -> get(options, name, nothing) !== nothing, (:rng_seed, :rng_device))

"Arrays for a plan of the caller's: they must be what it was made for."
function prepare(plan::Plan, q, k, v; arrays...)
    check_seed(plan.desc.dropout, seeded(arrays))
    inputs = Inputs(q, k, v; arrays...)
    mine, given = plan.desc, describe(eltype(q), plan_key(inputs))
    for field in (:device, :device_index, :dtype, :dtype_kv, :heads_q, :heads_kv, :dim_qk, :dim_v, :layout,
                  :page_size, NUMBERS..., :bias, :dtype_bias)
        field === :dtype_bias && !haskey(inputs.arrays, :bias) && continue
        getfield(mine, field) == getfield(given, field) || refuse(:VALUE, field,
            "$field = $(getfield(given, field)) by the arrays given, but the plan is made for " *
            "$(getfield(mine, field)); give such arrays, or make another plan")
    end
    return inputs
end

has(plan::Plan, feature::UInt32) = plan.desc.features & feature != 0

"An array to be written: padding rows must not hold what was there."
function fresh(inputs::Inputs, T::Type, dims::Dims)
    x = similar(storage(inputs.q.array), T, dims)
    return inputs.ragged ? fill!(x, reinterpret(T, zero(bits_of(T)))) : x
end
bits_of(T::Type) = (UInt8, UInt16, UInt16, UInt32)[sizeof(T)]

"o, dout and the gradients: the array of a given size and code, as the library sees it."
function tensor_like(x::AbstractArray, model::Tensor, dim::Int, code::Integer, layout::Symbol,
                     name::Symbol)
    dtype(eltype(x)) == code || refuse(:DTYPE, name,
        "$name has elements $(eltype(x)); expected $(name_of(C.flashattn_dtype, code))")
    check_size(x, like(model, dim), String(name))
    t = Tensor(x, layout, ndims(x), String(name))
    check_device(x, model, String(name))
    return t.c
end

"Runs f, a call of the library with args, which get an error of this call's own."
function checked(f::F, args) where {F}
    error = ErrorMemory()
    GC.@preserve error begin
        set!(args, :error, Base.unsafe_convert(Ptr{C.flashattn_error}, error))
        check(f(), error)
    end
end

"Calls the library with a workspace. What args point to is kept alive by the caller."
function execute(f::F, plan::Plan, op::UInt32, args, memory::AbstractArray,
                 parallel::Bool) where {F}
    needed = workspace_bytes(plan, op, args)
    workspace = scratch(memory, needed)
    try
        GC.@preserve workspace begin
            call(run) = checked(args) do
                run(plan, args, address(workspace), needed, stream(memory))
            end
            run_on(call, f, args, parallel)
        end
    finally
        release(workspace)
    end
end

"The array of the header's table."
field_of(name::Symbol, table = C.ARRAYS.flashattn_args) =
    table[findfirst(field -> field.name === name, table)]

"Writes those arrays of the table that are given."
function place_all!(args, inputs::Inputs, arrays)
    for (name, x) in pairs(arrays)
        x === nothing || place!(args, field_of(name), x, inputs)
    end
    return args
end

"results: those beside o, by name."
function run_forward(plan::Plan, inputs::Inputs, o::AbstractArray, results::Dict{Symbol,Any})
    args = Ref(inputs.args[])
    set!(args, :o, tensor_like(o, inputs.q, inputs.v.dim, plan.desc.dtype_o, inputs.layout, :o))
    place_all!(args, inputs, results)
    GC.@preserve inputs o results begin
        execute(C.flashattn_forward, plan, C.FLASHATTN_OP_FORWARD, args, storage(inputs.q.array),
                inputs.parallel)
    end
    foreach(release, inputs.made)
    return o
end

# A plan without backward has none; the library refuses the call.
gradient_code(plan::Plan) = plan.desc.dtype_grad == C.FLASHATTN_DTYPE_DEFAULT ? plan.desc.dtype :
                            plan.desc.dtype_grad

function run_backward(plan::Plan, inputs::Inputs, grads::NamedTuple, dout, o, lse, dlse)
    q, k, v = inputs.q, inputs.k, inputs.v
    args = Ref(inputs.args[])
    grad = gradient_code(plan)
    for (name, x, model, dim, code) in (
            (:o, o, q, v.dim, plan.desc.dtype_o), (:dout, dout, q, v.dim, plan.desc.dtype_o),
            (:dq, grads.dq, q, q.dim, grad), (:dk, grads.dk, k, q.dim, grad),
            (:dv, grads.dv, v, v.dim, grad))
        set!(args, name, tensor_like(x, model, dim, code, inputs.layout, name))
    end
    place_all!(args, inputs, (lse = lse, dlse = dlse, dbias = grads.dbias, dsink = grads.dsink))
    GC.@preserve inputs grads dout o lse dlse begin
        execute(C.flashattn_backward, plan, C.FLASHATTN_OP_BACKWARD, args, storage(q.array),
                inputs.parallel)
    end
    foreach(release, inputs.made)
    return grads
end
