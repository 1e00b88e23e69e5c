# Plans, and the cache that attention and its relatives keep them in.

"""
    FlashAttention.Plan(T; heads_q, dim_qk, options...)
    FlashAttention.Plan(desc::LibFlashAttn.flashattn_desc)

A checked descriptor with a kernel chosen, for many calls; keywords as in
[`describe`](@ref FlashAttention.describe). `attention(plan, q, k, v)`, `attention!(plan, out, q, k,
v)` and `attention_backward(plan, ...)` run it; any number of tasks may do so at once. The functions
without a plan make and keep plans by themselves: a plan of one's own shows what will run, and fails
early. Throws a [`FlashAttentionError`](@ref) where the library refuses.
"""
mutable struct Plan
    handle::Ptr{C.flashattn_plan}
    desc::C.flashattn_desc  # with every default resolved

    function Plan(desc::C.flashattn_desc)
        handle = Ref{Ptr{C.flashattn_plan}}(C_NULL)
        error = ErrorMemory()
        check(C.flashattn_plan_create(Ref(desc), handle, error), error)
        # The library frees a plan from any thread, without a lock that a call could hold.
        plan = finalizer(plan -> C.flashattn_plan_destroy(plan.handle), new(handle[], desc))
        resolved = Ref(C.flashattn_desc())
        check(C.flashattn_plan_desc(plan, resolved))
        plan.desc = resolved[]
        return plan
    end
end

Plan(T::Type; options...) = Plan(describe(T; options...))

# A plan given to a call is kept alive by it.
Base.unsafe_convert(::Type{Ptr{C.flashattn_plan}}, plan::Plan) = plan.handle

function Base.show(io::IO, plan::Plan)
    d = plan.desc
    print(io, "FlashAttention.Plan(", name_of(C.flashattn_dtype, d.dtype), ", ", d.heads_q,
          " heads on ", d.heads_kv, ", dim ", d.dim_qk, "/", d.dim_v, ")")
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
    FlashAttention.check_supported(T; heads_q, dim_qk, options...)
    FlashAttention.supported(T; heads_q, dim_qk, options...)

Whether `Plan(T; ...)` would succeed. The first throws what `Plan` would throw; the second is
`false` where no kernel of this build does it on this device.
"""
function check_supported(T::Type; options...)
    error = ErrorMemory()
    return check(C.flashattn_check(Ref(describe(T; options...)), error), error)
end

function supported(T::Type; options...)
    error = ErrorMemory()
    status = C.flashattn_check(Ref(describe(T; options...)), error)
    status == C.FLASHATTN_ERROR_UNSUPPORTED && return false
    check(status, error)
    return true
end

operation(op::Symbol) =
    op === :forward ? C.FLASHATTN_OP_FORWARD :
    op === :backward ? C.FLASHATTN_OP_BACKWARD :
    refuse(:OP, "op", "op = :$op; expected :forward or :backward")

const SIZES = (:batch, :seqlen_q, :seqlen_kv, :total_q, :total_kv)

"Arguments with sizes only, for the questions below; `C_NULL`: the plan's maxima."
function sizes_of(; sizes...)
    isempty(sizes) && return C_NULL
    for name in keys(sizes)
        name in SIZES ||
            throw(ArgumentError("there is no size $name; give some of $(join(SIZES, ", "))"))
    end
    haskey(sizes, :batch) ||
        refuse(:SIZE, "batch", "sizes without batch; give batch, or no size at all")
    args = Ref(C.flashattn_args())
    foreach(((name, n),) -> set_size!(args, name, n), pairs(sizes))
    return args
end

function set_size!(args, name::Symbol, n::Integer)
    set!(args, name, startswith(String(name), "total") ? n : size32(n, String(name)))
end

"""
    FlashAttention.workspace_size(plan, op = :forward; batch, seqlen_q, seqlen_kv, total_q, total_kv)

Bytes of scratch memory that an operation needs. Without sizes: for the plan's maxima.
"""
workspace_size(plan::Plan, op::Symbol = :forward; sizes...) =
    workspace_bytes(plan, operation(op), sizes_of(; sizes...))

function workspace_bytes(plan::Plan, op::UInt32, args)
    needed = Ref{Int64}(0)
    check(C.flashattn_workspace_size(plan, op, args, needed))
    return needed[]
end

"""
    FlashAttention.info(plan, op = :forward; batch, seqlen_q, seqlen_kv, total_q, total_kv)

The kernel that an operation uses and its cost, as a named tuple: `backend`, `kernel`, `isa`, `why`
(a message), `tile_q`, `tile_kv`, `stages`, `threads`, `registers`, `shared_memory`,
`scratch` (bytes), `splits`, `flops`, `bytes` (the least to move), `workspace` (bytes). Without sizes:
for the plan's maxima.
"""
function info(plan::Plan, op::Symbol = :forward; sizes...)
    out = Ref(C.flashattn_plan_properties())
    # The strings live as long as the plan.
    GC.@preserve plan begin
        check(C.flashattn_plan_info(plan, operation(op), sizes_of(; sizes...), out))
        return properties(out[])
    end
end

"A structure of the library as a named tuple, its strings copied."
function properties(x)
    names = filter(name -> !(name in (:struct_size, :reserved)), fieldnames(typeof(x)))
    return NamedTuple{names}(map(names) do name
        value = getfield(x, name)
        value isa Cstring ? unsafe_string(value) : value
    end)
end
