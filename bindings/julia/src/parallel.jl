# Julia's threads in place of the library's: flashattn_args.parallel.
#
# The library calls run_pool on the thread of the call, inside it. This is safe because
# - such a call is an ordinary ccall, no @gc_safe one, so that the callback may run Julia code;
# - run_pool never yields: no other task runs on this thread between the frames of C;
# - run_pool waits for tasks that have begun, and takes those that have not. Julia threads that are
#   busy cost nothing, and a call inside a task of another call cannot wait for itself;
# - the collector waits for none of the library's tasks, and the waiting loop is a safepoint for it;
# - interrupts come when the call has returned, and no exception passes frames of C.

"What the callback found, for when the library has returned."
mutable struct Pool
    error::Any
end

"Calls a flashattn_task_fn. The collector does not wait for it."
function run_task(task::Ptr{Cvoid}, context::Ptr{Cvoid}, index::Int32)
    @static if VERSION >= v"1.12"
        @ccall gc_safe = true $task(context::Ptr{Cvoid}, index::Int32)::Cvoid
    else
        state = ccall(:jl_gc_safe_enter, Int8, ())
        ccall(task, Cvoid, (Ptr{Cvoid}, Int32), context, index)
        ccall(:jl_gc_safe_leave, Cvoid, (Int8,), state)
    end
    return nothing
end

"Runs tasks until none is left. Who comes after that touches nothing of the library's."
function take_part(count::Int32, task::Ptr{Cvoid}, context::Ptr{Cvoid}, begun, done)
    while true
        index = Threads.atomic_add!(begun, Int32(1))
        index < count || return nothing
        run_task(task, context, index)
        Threads.atomic_add!(done, Int32(1))
    end
end

"flashattn_parallel_fn."
function run_pool(user::Ptr{Cvoid}, count::Int32, task::Ptr{Cvoid}, context::Ptr{Cvoid})
    pool = unsafe_pointer_to_objref(user)::Pool
    begun, done = Threads.Atomic{Int32}(0), Threads.Atomic{Int32}(0)
    work() = take_part(count, task, context, begun, done)
    try
        for _ in 2:min(Int(count), Threads.nthreads())
            Threads.@spawn disable_sigint(work)
        end
    catch error
        pool.error = error
    end
    work()
    while done[] < count
        GC.safepoint()
        ccall(:jl_cpu_pause, Cvoid, ())
    end
    return nothing
end

# The library's functions, from which Julia code may be called; what they take behind plan and args.
for (name, args, more) in ((:flashattn_forward, :flashattn_args, (Ptr{Cvoid}, Int64, Ptr{Cvoid})),
                           (:flashattn_backward, :flashattn_args, (Ptr{Cvoid}, Int64, Ptr{Cvoid})),
                           (:flashattn_merge, :flashattn_merge_args, (Ptr{Cvoid},)),
                           (:flashattn_append_kv, :flashattn_append_kv_args, (Ptr{Cvoid},)),
                           (:flashattn_quantize, :flashattn_quantize_args, (Ptr{Cvoid},)),
                           (:flashattn_dropout_mask, :flashattn_args, (Ptr{UInt8}, Ptr{Cvoid})))
    rest = [Symbol(:rest, n) for n in 1:length(more)]
    @eval on_julia(::typeof(C.$name)) = (plan, args, $(rest...)) ->
        ccall(($(QuoteNode(name)), C.lib), Int32,
              (Ptr{C.flashattn_plan}, Ptr{C.$args}, $(more...)), plan, args, $(rest...))
end

"Runs call(f), which calls f, a function of the library, with args; on Julia's threads if so asked."
run_on(call, f, args, parallel) =
    is_parallel(parallel) ? with_pool(() -> call(on_julia(f)), args) : call(f)

function is_parallel(parallel)
    parallel isa Bool ||
        refuse(:DTYPE, :parallel, "parallel = $(repr(parallel)); expected true or false")
    return parallel
end

"Runs f, a call of the library with args, on Julia's threads."
with_pool(f, args) = with_pool(f, args, Pool(nothing))

# Not inlined: then the pool is a whole object on the heap, which the callback can find.
@noinline function with_pool(f::F, args, pool::Pool) where {F}
    run = @cfunction(run_pool, Cvoid, (Ptr{Cvoid}, Int32, Ptr{Cvoid}, Ptr{Cvoid}))
    GC.@preserve pool begin
        set!(args, :parallel, run)
        set!(args, :parallel_user, pointer_from_objref(pool))
        disable_sigint(f)
    end
    pool.error === nothing || throw(pool.error)
    return nothing
end
