# Before all other tests: none has started the library's threads yet.

"The threads of this process, and the time that each has computed, in the system's ticks."
function thread_times()
    folder = "/proc/self/task"
    return Dict(map(readdir(folder)) do id
        text = read("$folder/$id/stat", String)  # "ID (name) S ...": utime and stime come 12th behind
        id => sum(parse.(Int, split(text[findlast(==(')'), text) + 1:end])[12:13]))
    end)
end

@testset "Julia's threads" begin
    q, k = normal(Float32, 64, 4, 700, 2), normal(Float32, 64, 2, 700, 2)
    call(; options...) = attention(q, k, k; causal = true, return_lse = true, options...)
    back(o, lse; options...) = attention_backward(q, q, k, k, o, lse; causal = true, options...)
    before = thread_times()
    o, lse = call(parallel = true)
    grads = back(o, lse; parallel = true)
    merged(; options...) = FlashAttention.merge([o, o], [lse, lse]; options...)
    mask(; options...) = dropout_mask(2, 4, 700, 700; dropout = 0.3, rng_seed = 5, options...)
    whole, keep = merged(parallel = true), mask(parallel = true)
    # No thread of the library's is started, and Julia's others take part.
    if Threads.nthreads() > 1
        own = string(ccall(:getpid, Cint, ()))
        @test any(1:200) do _
            call(parallel = true)
            times = thread_times()
            any(id -> id != own && times[id] > before[id] + 2, keys(before))
        end
    end
    @test keys(thread_times()) == keys(before)
    @test (o, lse) == call(threads = 1)
    @test grads == back(o, lse; threads = 1)
    @test whole == merged() && keep == mask()
    # As it does without the option: the test above would see it.
    @test (o, lse) == call()
    first(FlashAttention.devices()).threads > 1 && @test length(thread_times()) > length(before)

    # From tasks of the same threads, with the collector at work, and refused calls among them.
    same = map(1:4) do n
        Threads.@spawn all(1:20) do turn
            turn % 5 == 0 && GC.gc(false)
            turn % 7 == 0 && said(() -> call(parallel = true, dropout = 2), FlashAttentionError)
            call(parallel = true, threads = n) == (o, lse)
        end
    end
    @test all(fetch, same)
    plan = Plan(Float32; heads_q = 4, heads_kv = 2, dim_qk = 64)
    @test attention(plan, q, k, k; parallel = true) == attention(q, k, k)
end
