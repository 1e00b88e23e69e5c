@testset "$T, $heads heads on $heads_kv" for T in (Float32, Float16, BFloat16),
                                            (heads, heads_kv) in ((2, 2), (6, 2), (3, 1))
    q, k = normal(T, 24, heads, 13, 2), normal(T, 24, heads_kv, 29, 2)
    v = normal(T, 17, heads_kv, 29, 2)
    wanted, wanted_lse = reference(q, k, v)
    out, lse = attention(q, k, v; return_lse = true)
    @test eltype(out) === T && eltype(lse) === Float32
    @test near(out, wanted, TOLERANCE[T])
    @test near(lse, wanted_lse, 1e-4)
    wide = attention(q, k, v; dtype_o = Float32)
    @test eltype(wide) === Float32
    @test near(wide, wanted, TOLERANCE[T])
end

@testset "layouts agree" begin
    q, k, v = (normal(Float32, 16, 4, n, 3) for n in (11, 19, 19))
    out, lse = attention(q, k, v; causal = true, return_lse = true)
    other, other_lse = attention(swap(q), swap(k), swap(v); causal = true, return_lse = true,
                                 layout = :dshb)
    @test swap(other) == out
    @test other_lse == lse
    order(x) = permutedims(x, (1, 2, 4, 3))
    @test order(attention(order(q), order(k), order(v); causal = true, layout = :dhbs)) == out
    # The same through views: nothing is copied, and nothing differs.
    permuted(x) = PermutedDimsArray(swap(x), (1, 3, 2, 4))
    @test attention(permuted(q), permuted(k), permuted(v); causal = true) == out
    written = fill(NaN32, 16, 11, 4, 3)
    @test attention!(PermutedDimsArray(written, (1, 3, 2, 4)), q, k, v; causal = true) == out
    @test swap(written) == out
    dout = normal(Float32, size(out)...)
    one = attention_backward(dout, q, k, v, out, lse; causal = true)
    two = attention_backward(swap(dout), swap(q), swap(k), swap(v), swap(out), lse; causal = true,
                             layout = :dshb)
    @test all(swap(two[name]) == one[name] for name in (:dq, :dk, :dv))
end

@testset "views" begin
    # Packed QKV: q, k, v are slices of one array.
    qkv = normal(Float32, 16, 9, 21, 2)
    parts = [view(qkv, :, r, :, :) for r in (1:3, 4:6, 7:9)]
    whole = attention(collect.(parts)...)
    @test attention(parts...) == whole
    five = reshape(qkv, 16, 3, 3, 21, 2)
    @test attention((view(five, :, :, i, :, :) for i in 1:3)...) == whole
    # Steps, a view of a view, of a permuted array, of a reinterpreted one.
    q = view(normal(Float32, 16, 3, 42, 4), :, :, 2:2:42, 1:3:4)
    @test attention(q, parts[2], parts[3]) == attention(collect(q), parts[2], parts[3])
    deep = view(view(qkv, :, 2:8, 3:20, :), :, 2:4, 4:10, 2:2)
    k, v = (parts[i][:, :, :, 2:2] for i in 2:3)
    @test attention(deep, k, v) == attention(collect(deep), k, v)
    mixed = view(PermutedDimsArray(normal(Float32, 16, 30, 3, 2), (1, 3, 2, 4)), :, :, 7:11, :)
    @test attention(mixed, parts[2], parts[3]) == attention(collect(mixed), parts[2], parts[3])
    half = normal(BFloat16, 16, 3, 5, 2)
    raw = reinterpret(UInt16, half)
    @test attention(reinterpret(BFloat16, collect(raw)), half, half) == attention(half, half, half)
    dims = reshape(view(vec(qkv), 17:(16 + 16 * 3 * 5 * 2)), 16, 3, 5, 2)
    @test attention(dims, parts[2], parts[3]) == attention(collect(dims), parts[2], parts[3])
    # Results are written through views, and only there.
    store = fill(NaN32, 16, 5, 25, 2)
    attention!(view(store, :, 2:4, 3:23, :), parts...)
    @test store[:, 2:4, 3:23, :] == whole
    @test all(isnan, store[:, [1, 5], :, :]) && all(isnan, store[:, :, [1, 2, 24, 25], :])
    lse = fill(NaN32, 21, 3, 2)
    attention!(similar(whole), parts...; lse = lse)
    @test lse == attention(parts...; return_lse = true)[2]
end

@testset "sizes of 0 and 1" begin
    q, k = normal(Float32, 8, 1, 1, 1), normal(Float32, 8, 1, 1, 1)
    @test attention(q, k, k) ≈ k
    @test attention(view(normal(Float32, 8, 3, 4, 5), :, 2:2, 3:3, 4:4), k, k) ≈ k
    none = attention(normal(Float32, 8, 2, 3, 2), zeros(Float32, 8, 2, 0, 2),
                     zeros(Float32, 8, 2, 0, 2); return_lse = true)
    @test all(iszero, none[1]) && all(==(-Inf32), none[2])
    @test size(attention(zeros(Float32, 8, 2, 0, 2), k[:, [1, 1], :, [1, 1]],
                         k[:, [1, 1], :, [1, 1]])) == (8, 2, 0, 2)
    @test size(attention(zeros(Float32, 8, 2, 3, 0), zeros(Float32, 8, 2, 4, 0),
                         zeros(Float32, 8, 2, 4, 0))) == (8, 2, 3, 0)
end
