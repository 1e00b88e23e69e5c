@testset "plans" begin
    q, k = normal(Float32, 8, 4, 5, 2), normal(Float32, 8, 2, 7, 2)
    plan = Plan(Float32; heads_q = 4, heads_kv = 2, dim_qk = 8, causal = true, return_lse = true)
    out, lse = attention(plan, q, k, k)
    @test (out, lse) == attention(q, k, k; causal = true, return_lse = true)
    @test attention!(plan, similar(q), q, k, k; lse = similar(lse)) == out
    both = Plan(Float32; heads_q = 4, heads_kv = 2, dim_qk = 8, causal = true, backward = true)
    @test attention_backward(both, q, q, k, k, out, lse).dq ==
          attention_backward(q, q, k, k, out, lse; causal = true).dq
    @test occursin("4 heads on 2, dim 8/8", sprint(show, plan))
    @test occursin("heads_q = 2 by the arrays given", said(() -> attention(plan, k, k, k), FlashAttentionError))
    @test occursin("bias = 2 by", said(() -> attention(plan, q, k, k; bias = zeros(Float32, 7, 5)),
                                       FlashAttentionError))
    blocked = Plan(Float32; heads_q = 4, heads_kv = 2, dim_qk = 8, block_q = 5, block_kv = 7)
    @test attention(blocked, q, k, k; block_mask = trues(1, 1), block_q = 5, block_kv = 7) == attention(q, k, k)
    @test_throws FlashAttentionError attention_backward(plan, q, q, k, k, out, lse)
    raw = Plan(LibFlashAttn.flashattn_desc(dtype = 1, heads_q = 4, heads_kv = 2, dim_qk = 8, mask = 1))
    @test attention(raw, q, k, k) == out

    info = FlashAttention.info(plan; batch = 2, seqlen_q = 5, seqlen_kv = 7)
    @test info.backend == "cpu" && info.flops == 2 * 4 * 25 * 2 * 16 && !isempty(info.why)
    @test info.workspace == FlashAttention.workspace_size(plan; batch = 2, seqlen_q = 5, seqlen_kv = 7)
    @test_throws FlashAttentionError FlashAttention.workspace_size(plan)
    @test_throws FlashAttentionError FlashAttention.info(plan, :sideways)
    @test FlashAttention.supported(Float32; heads_q = 4, dim_qk = 8)
    # An exception of C++ passes frames with destructors here: see library.jl.
    @test !FlashAttention.supported(Float32; heads_q = 4, dim_qk = 100_000)
    # Defaults are resolved by the library.
    @test plan.desc.scale == Float32(1 / sqrt(8)) && plan.desc.dim_v == 8 && plan.desc.dtype_kv == 1
    @test_throws FlashAttentionError FlashAttention.supported(Float32; heads_q = 0, dim_qk = 8)
    @test occursin("libflashattn", FlashAttention.build_info())
    @test first(FlashAttention.devices()).kind === :cpu

    # Plans are kept, and given back.
    FlashAttention.clear_cache()
    foreach(_ -> attention(q, k, k), 1:3)
    @test length(FlashAttention.CACHE) == 1
    # Past the limit those go that were unused for the longest, and no others.
    kept(; options...) = FlashAttention.cached_plan(FlashAttention.describe(Float32; heads_q = 4, dim_qk = 8,
                                                                            options...))
    often = kept()
    for n in 1:FlashAttention.CACHE_LIMIT + 10
        kept(window = n)
        @test kept() === often
    end
    @test length(FlashAttention.CACHE) == FlashAttention.CACHE_LIMIT
    last = FlashAttention.CACHE_LIMIT + 10
    present(n) = haskey(FlashAttention.CACHE, FlashAttention.describe(Float32; heads_q = 4, dim_qk = 8, window = n))
    @test findall(present, 1:last) == 12:last
    FlashAttention.clear_cache()
    # Orders and spellings of the same are one plan.
    attention(q, k, k; causal = true, softcap = 3)
    attention(q, k, k; softcap = 3.0f0, causal = true)
    for options in ((scale = 1 / sqrt(8),), (scale = 1 / sqrt(8.0f0),), (scale = nothing,),
                    (window = (nothing, -1),), (window = nothing,), (dropout = 0.0,), (dropout = -0.0,),
                    (splits = 0,), (determinism = false,), (dtype_o = Float32,), (top_left = false,))
        attention(q, k, k; causal = true, softcap = 3, options...)
    end
    @test length(FlashAttention.CACHE) == 1
    attention(q, k, k)
    attention(q, k, k; softcap = 0)
    attention(q, k, k; softcap = -0.0)
    @test length(FlashAttention.CACHE) == 2
    FlashAttention.clear_cache()
    GC.gc()
    @test attention(plan, q, k, k)[1] == out
end

@testset "tasks" begin
    # One plan, many tasks, the collector running: every result is the same.
    q, k = normal(Float32, 16, 4, 33, 2), normal(Float32, 16, 2, 47, 2)
    wanted = attention(q, k, k; causal = true)
    same = map(1:4) do _
        Threads.@spawn all(1:50) do n
            n % 10 == 0 && (GC.gc(false); FlashAttention.clear_cache())
            attention(q, k, k; causal = true, threads = 1) == wanted
        end
    end
    @test all(fetch, same)
end

@testset "the collector" begin
    if Threads.nthreads() == 1
        println("the collector: skipped, as Julia has one thread; set JULIA_NUM_THREADS to 2")
    else
        # It runs while another thread is inside the library: some rows are written, some are not yet.
        q, out = ones(Float32, 64, 8, 4096, 1), fill(NaN32, 64, 8, 4096, 1)
        attention(q[:, :, 1:1, :], q, q; threads = 1)  # compiles
        call = Threads.@spawn attention!(out, q, q, q; threads = 1)
        rows = view(out, 1, :, :, 1)
        while all(isnan, rows) && !istaskdone(call)
            GC.safepoint()
        end
        GC.gc(false)
        @test any(isnan, rows)
        @test fetch(call) === out && out ≈ q
    end
end
