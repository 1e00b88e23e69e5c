# Plans, and the cache that attention and its relatives keep them in.

"""
    FlashAttention.Plan(T; heads, dim, options...)
    FlashAttention.Plan(desc::LibFlashAttn.flashattn_desc)

A checked descriptor with a kernel chosen, for many calls; keywords as in
[`describe`](@ref FlashAttention.describe). `attention(plan, q, k, v)`, `attention!(plan, out, q, k,
v)` and `attention_backward(plan, ...)` run it; any number of tasks may do so at once. The functions
without a plan make and keep plans by themselves: a plan of one's own shows what will run, and fails
early. Throws a [`FlashAttentionError`](@ref) where the library refuses.
"""
mutable struct Plan
    handle::Ptr{C.flashattn_plan}
    desc::C.flashattn_desc

    function Plan(desc::C.flashattn_desc)
        handle = Ref{Ptr{C.flashattn_plan}}(C_NULL)
        check(C.flashattn_plan_create(Ref(desc), handle))
        # The library frees a plan from any thread, without a lock that a call could hold.
        return finalizer(plan -> C.flashattn_plan_destroy(plan.handle), new(handle[], desc))
    end
end

Plan(T::Type; options...) = Plan(describe(T; options...))

# A plan given to a call is kept alive by it.
Base.unsafe_convert(::Type{Ptr{C.flashattn_plan}}, plan::Plan) = plan.handle

function Base.show(io::IO, plan::Plan)
    d = plan.desc
    print(io, "FlashAttention.Plan(", name_of(C.flashattn_dtype, d.dtype), ", ", d.heads_q,
          " heads on ", d.heads_kv == 0 ? d.heads_q : d.heads_kv, ", dim ", d.dim_qk, "/",
          d.dim_v == 0 ? d.dim_qk : d.dim_v, ")")
end

"A plan that is kept, and the number of the call that used it last."
mutable struct Kept
    plan::Plan
    used::Int
end

const CACHE = Dict{C.flashattn_desc,Kept}()
const CALLS = Ref(0)
const CACHE_LOCK = ReentrantLock()
const CACHE_LIMIT = 256

"""
The plan of a descriptor, made at its first use. Refusals are not kept. In a full cache the plan that
was unused for the longest makes room.
"""
function cached_plan(desc::C.flashattn_desc)
    lock(CACHE_LOCK) do
        kept = get(CACHE, desc, nothing)
        if kept === nothing
            kept = Kept(Plan(desc), 0)
            length(CACHE) < CACHE_LIMIT ||
                delete!(CACHE, reduce((a, b) -> CACHE[a].used < CACHE[b].used ? a : b, keys(CACHE)))
            CACHE[desc] = kept
        end
        kept.used = CALLS[] += 1
        return kept.plan
    end
end

"""
    FlashAttention.clear_cache()

Lets go of all plans that were kept. Those in use stay until their calls are done.
"""
function clear_cache()
    lock(() -> empty!(CACHE), CACHE_LOCK)
    return nothing
end

"""
    FlashAttention.check_supported(T; heads, dim, options...)
    FlashAttention.supported(T; heads, dim, options...)

Whether `Plan(T; ...)` would succeed. The first throws what `Plan` would throw; the second is
`false` where no kernel of this build does it on this device.
"""
check_supported(T::Type; options...) = check(C.flashattn_check(Ref(describe(T; options...))))

function supported(T::Type; options...)
    status = C.flashattn_check(Ref(describe(T; options...)))
    status == C.FLASHATTN_ERROR_UNSUPPORTED && return false
    check(status)
    return true
end

operation(op::Symbol) =
    op === :forward ? C.FLASHATTN_OP_FORWARD :
    op === :backward ? C.FLASHATTN_OP_BACKWARD :
    throw(ArgumentError("op = :$op; expected :forward or :backward"))

"A shape for the questions below; `nothing`: the promised maxima."
shape_of(::Nothing; sizes...) = isempty(sizes) ? C_NULL :
    throw(ArgumentError("sizes without batch; give batch, or no size at all"))
function shape_of(batch::Integer; seqlen_q = 0, seqlen_k = 0, total_q = 0, total_k = 0,
                  unknown...)
    sizes = (:batch, :seqlen_q, :seqlen_k, :total_q, :total_k)
    for name in keys(unknown)
        throw(ArgumentError("there is no size $name; give some of $(join(sizes, ", "))"))
    end
    return Ref(C.flashattn_shape(
        batch = size32(batch, "batch"), seqlen_q = size32(seqlen_q, "seqlen_q"),
        seqlen_kv = size32(seqlen_k, "seqlen_k"), total_q = total_q, total_kv = total_k))
end

"""
    FlashAttention.workspace_size(plan, op = :forward; batch, seqlen_q, seqlen_k, total_q, total_k)

Bytes of scratch memory that an operation needs. Without sizes: for the promised maxima.
"""
function workspace_size(plan::Plan, op::Symbol = :forward; batch = nothing, sizes...)
    return workspace_bytes(plan, operation(op), shape_of(batch; sizes...))
end

function workspace_bytes(plan::Plan, op::UInt32, shape)
    needed = Ref{Int64}(0)
    check(C.flashattn_workspace_size(plan, op, shape, needed))
    return needed[]
end

"""
    FlashAttention.info(plan, op = :forward; batch, seqlen_q, seqlen_k, total_q, total_k)

The kernel that an operation uses and its cost, as a named tuple: `family`, `kernel`, `isa`, `why`
(one sentence), `tile_q`, `tile_kv`, `stages`, `threads`, `registers`, `local_memory` (bytes),
`splits`, `flops`, `bytes` (the least to move), `workspace` (bytes). Without sizes: for the promised
maxima.
"""
function info(plan::Plan, op::Symbol = :forward; batch = nothing, sizes...)
    out = Ref(C.flashattn_plan_properties())
    # The strings live as long as the plan.
    GC.@preserve plan begin
        check(C.flashattn_plan_info(plan, operation(op), shape_of(batch; sizes...), out))
        return properties(out[])
    end
end

"A structure of the library as a named tuple, its strings copied."
function properties(x)
    names = filter(name -> name !== :struct_size, fieldnames(typeof(x)))
    return NamedTuple{names}(map(names) do name
        value = getfield(x, name)
        value isa Cstring ? unsafe_string(value) : value
    end)
end
