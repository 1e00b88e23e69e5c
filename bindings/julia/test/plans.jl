@testset "plans" begin
    q, k = normal(Float32, 8, 4, 5, 2), normal(Float32, 8, 2, 7, 2)
    plan = Plan(Float32; heads = 4, kv_heads = 2, dim = 8, causal = true, return_lse = true)
    out, lse = attention(plan, q, k, k)
    @test (out, lse) == attention(q, k, k; causal = true, return_lse = true)
    @test attention!(plan, similar(q), q, k, k; lse = similar(lse)) == out
    both = Plan(Float32; heads = 4, kv_heads = 2, dim = 8, causal = true, backward = true)
    @test attention_backward(both, q, q, k, k, out, lse).dq ==
          attention_backward(q, q, k, k, out, lse; causal = true).dq
    @test occursin("4 heads on 2, dim 8/8", sprint(show, plan))
    @test occursin("heads_q = 2 by the arrays given", said(() -> attention(plan, k, k, k), ArgumentError))
    @test occursin("bias = 2 by", said(() -> attention(plan, q, k, k; bias = zeros(Float32, 7, 5)),
                                       ArgumentError))
    @test_throws FlashAttentionError attention_backward(plan, q, q, k, k, out, lse)
    raw = Plan(LibFlashAttn.flashattn_desc(dtype = 1, heads_q = 4, heads_kv = 2, dim_qk = 8, mask = 1))
    @test attention(raw, q, k, k) == out

    info = FlashAttention.info(plan; batch = 2, seqlen_q = 5, seqlen_k = 7)
    @test info.family == "cpu" && info.flops == 2 * 4 * 25 * 2 * 16 && !isempty(info.why)
    @test info.workspace == FlashAttention.workspace_size(plan; batch = 2, seqlen_q = 5, seqlen_k = 7)
    @test_throws FlashAttentionError FlashAttention.workspace_size(plan)
    @test_throws ArgumentError FlashAttention.info(plan, :sideways)
    @test FlashAttention.supported(Float32; heads = 4, dim = 8)
    @test_throws FlashAttentionError FlashAttention.supported(Float32; heads = 0, dim = 8)
    @test occursin("libflashattn", FlashAttention.build_info())
    @test first(FlashAttention.devices()).kind === :cpu

    # Plans are kept, and given back.
    FlashAttention.clear_cache()
    foreach(_ -> attention(q, k, k), 1:3)
    @test length(FlashAttention.CACHE) == 1
    foreach(n -> attention(q, k, k; window = n), 1:FlashAttention.CACHE_LIMIT + 10)
    @test length(FlashAttention.CACHE) <= FlashAttention.CACHE_LIMIT
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
