@testset "elements of 8 bits" begin
    codes = reinterpret(F8E4M3, collect(0x00:0xff))
    for code in codes
        isnan(code) || @test reinterpret(UInt8, F8E4M3(float32(code))) == reinterpret(UInt8, code)
    end
    @test count(isnan, codes) == 2
    @test float32.(F8E4M3.([1e9, -500, 17, 19, 0.0009765625])) == [448, -448, 16, 20, 0]

    narrow(x) = F8E4M3.(x)
    q, k, v = (narrow(normal(Float32, 16, heads, rows, 2)) for (heads, rows) in
               ((4, 9), (2, 70), (2, 70)))
    descale = 0.5f0 .+ rand(Float32, 2, 2, 2)  # (block, head, batch)
    rows = repeat(descale; inner = (64, 1, 1))[1:70, :, :]
    meant(x) = float32.(x) .* reshape(permutedims(rows, (2, 1, 3)), 1, 2, 70, 2)
    o, lse = attention(q, k, v; dtype_o = Float32, return_lse = true, descale_k = descale,
                       descale_v = descale, descale_block = 64)
    wide = (float32.(q), meant(k), meant(v))
    same, same_lse = attention(wide...; return_lse = true)
    @test o ≈ same rtol = 1e-5
    @test lse ≈ same_lse rtol = 1e-5

    # A cache beside wider queries, and results of 8 bits.
    half = Float16.(float32.(q))
    @test attention(half, k, v; dtype_o = Float32) ≈ attention(float32.(half), float32.(k), float32.(v)) rtol = 1e-4
    integers(x) = round.(Int8, clamp.(40 .* float32.(x), -127, 127))
    steps = fill(0.025f0, 70, 2, 2)  # (token, head, batch)
    @test attention(half, integers(k), integers(v); dtype_o = Float32, descale_k = steps, descale_v = steps,
                    descale_block = 1) ≈
          attention(float32.(half), integers(k) .* 0.025f0, integers(v) .* 0.025f0) rtol = 1e-4
    scaled = attention(q, k, v; scale_o = fill(64.0f0, 4, 2))
    @test eltype(scaled) === F8E4M3
    @test float32.(scaled) ./ 64 ≈ attention(q, k, v; dtype_o = Float32) rtol = 0.05
    largest = maximum(abs, attention(q, k, v; dtype_o = Float32); dims = (1, 3))
    amax = zeros(Float32, 4, 2)
    attention(q, k, v; amax_o = amax)
    @test amax ≈ dropdims(largest; dims = (1, 3)) rtol = 1e-5
    all = zeros(Float32, 4, 1)
    attention!(similar(q), q, k, v; scale_o = fill(64.0f0, 4, 2), amax_o = all)
    @test all ≈ maximum(amax; dims = 2) rtol = 1e-5
    @test occursin("amax_o has size (3, 2)", said(() -> attention(q, k, v; amax_o = zeros(Float32, 3, 2)),
                                                  FlashAttentionError))
    plan = Plan(F8E4M3; heads_q = 4, heads_kv = 2, dim_qk = 16)
    @test eltype(attention(plan, q, k, v)) === F8E4M3
    @test occursin("dtype_kv", said(() -> attention(Plan(Float16; heads_q = 4, heads_kv = 2, dim_qk = 16), half, k, v),
                                    FlashAttentionError))

    o, lse = attention(q, k, v; dtype_o = Float32, return_lse = true)
    dout = normal(Float32, size(o)...)
    grads = attention_backward(dout, q, k, v, o, lse)
    wanted = attention_backward(dout, float32.(q), float32.(k), float32.(v), o, lse)
    for name in (:dq, :dk, :dv)
        @test eltype(grads[name]) === Float32
        @test grads[name] ≈ wanted[name] rtol = 1e-4
    end
    @test eltype(attention_backward(dout, q, k, v, o, lse; dtype_grad = Float16).dk) === Float16
    @test_throws FlashAttentionError attention_backward!(copy(q), copy(k), copy(v), dout, q, k, v, o, lse)
    @test_throws FlashAttentionError attention(half, k, Float16.(float32.(v)))
end

@testset "the quantised cache of latent attention" begin
    q, k = Float16.(normal(Float32, 24, 4, 3, 2)), Float16.(normal(Float32, 8, 2, 70, 2))
    v, descale = F8E4M3.(normal(Float32, 16, 2, 70, 2)), 0.5f0 .+ rand(Float32, 2, 2, 70, 2)
    meant = float32.(v) .* repeat(descale; inner = (8, 1, 1, 1))
    o = attention(q, k, v; dtype_o = Float32, descale_latent = descale, descale_dim = 8, causal = true)
    @test o ≈ attention(float32.(q), cat(meant, float32.(k); dims = 1), meant; causal = true) rtol = 1e-4
    plan = Plan(Float16; dtype_kv = F8E4M3, heads_q = 4, heads_kv = 2, dim_qk = 24, dim_v = 16,
                latent_kv = true, descale_dim = 8, dtype_o = Float32, causal = true)
    @test attention(plan, q, k, v; descale_latent = descale, descale_dim = 8) == o
    refuses(words; options...) =
        occursin(words, said(() -> attention(q, k, v; options...), FlashAttentionError))
    @test refuses("must be the same"; descale_dim = 8)
    @test refuses("descale_dim = 0"; descale_latent = descale)
    @test refuses("expected (4, 2, 70, 2)"; descale_latent = descale, descale_dim = 4)
    @test occursin("add up", said(() -> attention(q, q, v; descale_latent = descale, descale_dim = 8),
                                  FlashAttentionError))
end
