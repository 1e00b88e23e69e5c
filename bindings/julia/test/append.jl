"x (dim, heads, tokens, batch) rotated in Float64: token i of sequence b stands at first[b] + i - 1."
function rotated(x, first; base = 10000.0, dim = size(x, 1), interleaved = false)
    out = Float64.(x)
    for c in 1:(dim ÷ 2), i in 1:size(x, 3), b in 1:size(x, 4)
        one, two = interleaved ? (2c - 1, 2c) : (c, c + dim ÷ 2)
        angle = (first[b] + i - 1) * base^(-2 * (c - 1) / dim)
        s, t = Float64.(x[one, :, i, b]), Float64.(x[two, :, i, b])
        out[one, :, i, b] = s .* cos(angle) .- t .* sin(angle)
        out[two, :, i, b] = s .* sin(angle) .+ t .* cos(angle)
    end
    return out
end

@testset "append_kv!" begin
    lens = [3, 0, 15]
    caches() = (normal(Float32, 16, 2, 20, 3), normal(Float32, 16, 2, 20, 3))
    q = normal(Float32, 16, 4, 2, 3)
    k, v = normal(Float32, 16, 2, 2, 3), normal(Float32, 16, 2, 2, 3)
    for interleaved in (false, true)
        k_cache, v_cache = caches()
        before = copy(k_cache)
        turned, held = append_kv!(k_cache, v_cache, lens, k, v, q; rotary_base = 10000,
                                  rotary_dim = 8, rotary_interleaved = interleaved)
        turn = (dim = 8, interleaved = interleaved)
        @test held == [5, 2, 17] && eltype(held) === Int32
        @test near(turned, rotated(q, lens; turn...), 1e-5)
        wanted = rotated(k, lens; turn...)
        o = attention(turned, k_cache, v_cache; lens_kv = held, causal = true)
        for (b, n) in enumerate(lens)
            @test near(k_cache[:, :, n + 1:n + 2, b], wanted[:, :, :, b], 1e-5)
            @test v_cache[:, :, n + 1:n + 2, b] == v[:, :, :, b]
            rest = setdiff(1:20, n + 1:n + 2)
            @test k_cache[:, :, rest, b] == before[:, :, rest, b]
            whole = map(x -> x[:, :, 1:n + 2, b:b], (k_cache, v_cache))
            @test o[:, :, :, b:b] == attention(turned[:, :, :, b:b], whole...; causal = true)
        end
    end

    # Tables, positions, left padding; other layouts, and views.
    angles = 10000.0 .^ (-(0:7) ./ 8) .* (0:39)'
    tables = (rotary_cos = Float32.(cos.(angles)), rotary_sin = Float32.(sin.(angles)))
    for (more, from) in ((NamedTuple(), lens), ((positions = [7, 1, 30],), [7, 1, 30]),
                         ((starts_kv = [2, 0, 5],), [1, 0, 10]))
        k_cache, _ = caches()
        @test append_kv!(k_cache, nothing, lens, k; tables..., more...).q === nothing
        wanted = rotated(k, from)
        @test all(near(k_cache[:, :, n + 1:n + 2, b], wanted[:, :, :, b], 1e-5)
                  for (b, n) in enumerate(lens))
        other = fill!(swap(k_cache), 0)
        append_kv!(other, nothing, lens, swap(k); layout = :dshb, tables..., more...)
        @test all(swap(other)[:, :, n + 1:n + 2, b] == k_cache[:, :, n + 1:n + 2, b]
                  for (b, n) in enumerate(lens))
    end
    only_q = append_kv!(first(caches()), nothing, lens, nothing, nothing, q; tables...)
    @test only_q.lens_kv === nothing && near(only_q.q, rotated(q, lens), 1e-5)

    # Packed tokens into pages, lengths in place, on Julia's threads.
    pool() = fill(NaN32, 16, 2, 4, 9)
    table = [7 2; 3 5; 1 8]
    flat(x) = reshape(x, size(x, 1), size(x, 2), :)
    packed = map(x -> flat(x)[:, :, 1:5], (k, v, q))
    k_pages, v_pages, held = pool(), pool(), Int32[3, 6]
    lens_before = copy(held)
    turned = copy(packed[3])
    made = append_kv!(k_pages, v_pages, held, packed[1], packed[2], turned; page_table = table,
                      cu_seqlens_q = [0, 3, 5], q_out = turned, lens_out = held, parallel = true,
                      rotary_base = 10000)
    @test made.lens_kv === held && held == [6, 8] && made.q === turned
    for (b, rows) in ((1, 1:3), (2, 4:5)), (i, row) in enumerate(rows)
        at = lens_before[b] + i
        page, slot = table[cld(at, 4), b], mod1(at, 4)
        @test v_pages[:, :, slot, page] == packed[2][:, :, row]
        one(x) = rotated(reshape(x[:, :, row], 16, :, 1, 1), [at - 1])[:, :, 1, 1]
        @test near(k_pages[:, :, slot, page], one(packed[1]), 1e-5)
        @test near(turned[:, :, row], one(packed[3]), 1e-5)
    end
    @test count(!isnan, v_pages) == 5 * 32

    # Eight bits, with a descale for each block.
    narrow = reinterpret(F8E4M3, zeros(UInt8, 16, 2, 20, 3))
    k8, v8 = collect(narrow), collect(narrow)
    descale = 0.25f0 .+ rand(Float32, 5, 2, 3)
    append_kv!(k8, v8, lens, k, v; descale_k = descale, descale_block = 4)
    for (b, n) in enumerate(lens), i in 1:2, h in 1:2
        scaled = k[:, h, i, b] .* inv(descale[cld(n + i, 4), h, b])
        @test float32.(k8[:, h, n + i, b]) == float32.(F8E4M3.(scaled))
        @test float32.(v8[:, h, n + i, b]) == float32.(F8E4M3.(v[:, h, i, b]))
    end
    k8, v8 = zeros(Int8, size(k8)), zeros(Int8, size(v8))
    append_kv!(k8, v8, lens, k, v; descale_k = descale ./ 16, descale_block = 4)
    for (b, n) in enumerate(lens), i in 1:2, h in 1:2
        scaled = k[:, h, i, b] .* inv(descale[cld(n + i, 4), h, b] / 16)
        @test k8[:, h, n + i, b] == round.(Int8, clamp.(scaled, -127, 127))
        @test v8[:, h, n + i, b] == round.(Int8, v[:, h, i, b])
    end
    # And made for the new tokens: blocks of 4, of which the first may hold some.
    made = fill(1.0f-3, 5, 2, 3)
    append_kv!(k8, nothing, lens, k; descale_k = made, descale_block = 4, update_descales = true)
    for (b, n) in enumerate(lens), i in 1:2, h in 1:2
        scale = made[cld(n + i, 4), h, b]
        @test scale == exp2(round(log2(scale)))
        @test k8[:, h, n + i, b] == round.(Int8, k[:, h, i, b] .* inv(scale))
    end
    # Sequences of a packed cache: tokens 1 to 10 and 11 to 60.
    flat_k, flat_v = flat(normal(Float32, 16, 2, 20, 3)), flat(normal(Float32, 16, 2, 20, 3))
    before = copy(flat_k)
    there = append_kv!(flat_k, flat_v, [4, 0], packed[1], packed[2]; cu_seqlens_q = [0, 3, 5],
                      cu_seqlens_kv = [0, 10, 60])
    @test there.lens_kv == [7, 2] && flat_k[:, :, 5:7] == packed[1][:, :, 1:3]
    @test flat_v[:, :, 11:12] == packed[2][:, :, 4:5]
    @test flat_k[:, :, [1:4; 8:10; 13:60]] == before[:, :, [1:4; 8:10; 13:60]]

    half = append_kv!(BFloat16.(first(caches())), nothing, lens, BFloat16.(k); lens_q = [1, 2, 0])
    @test half.lens_kv == [4, 2, 15]

    # Calls are refused before anything is written.
    k_cache, v_cache = caches()
    before = copy(k_cache)
    refused(text, reason, field, f) = check_refusal(f, :ERROR_INVALID_ARGUMENT, reason, field, text)
    refused("k, v and q are nothing", :NULL_POINTER, "k", () -> append_kv!(k_cache, v_cache, lens))
    refused("k_cache and v_cache are nothing", :NULL_POINTER, "k_cache",
            () -> append_kv!(nothing, nothing, lens, k))
    refused("v is given without v_cache", :NULL_POINTER, "v_cache",
            () -> append_kv!(k_cache, nothing, lens, k, v))
    refused("lens_kv is nothing", :NULL_POINTER, "lens_kv", () -> append_kv!(k_cache, nothing, nothing, k))
    refused("v has elements Float16, k Float32", :DTYPE, "v",
            () -> append_kv!(k_cache, v_cache, lens, k, Float16.(v)))
    refused("k_cache has elements Float16, new tokens Float32", :DTYPE, "k_cache",
            () -> append_kv!(Float16.(k_cache), v_cache, lens, k))
    refused("v_cache has size", :SIZE, "v_cache", () -> append_kv!(k_cache, v_cache[:, :, 1:9, :], lens, k, v))
    refused("k has size (16, 1, 2, 3); expected 2 tokens of 3 sequences by layout = :dhsb, with 2 heads",
            :SIZE, "k", () -> append_kv!(k_cache, v_cache, lens, k[:, 1:1, :, :]))
    refused("k_cache holds 3 sequences, the new tokens are of 2", :SIZE, "k_cache",
            () -> append_kv!(k_cache, v_cache, lens[1:2], k[:, :, :, 1:2]))
    refused("lens_kv has size (2,); expected (3,)", :SIZE, "lens_kv",
            () -> append_kv!(k_cache, v_cache, lens[1:2], k))
    refused("positions has size", :SIZE, "positions",
            () -> append_kv!(k_cache, v_cache, lens, k; positions = [1], rotary_base = 10000))
    refused("lens_out has elements Int64; expected Int32", :DTYPE, "lens_out",
            () -> append_kv!(k_cache, v_cache, lens, k; lens_out = lens))
    refused("rotary_cos and rotary_sin go together", :NULL_POINTER, "rotary_cos",
            () -> append_kv!(k_cache, v_cache, lens, k; rotary_cos = tables.rotary_cos))
    refused("and would be ignored", :VALUE, "rotary_base",
            () -> append_kv!(k_cache, v_cache, lens, k; rotary_dim = 8))
    refused("q_out is given without q", :NULL_POINTER, "q_out",
            () -> append_kv!(k_cache, v_cache, lens, k; q_out = q))
    refused("max_seqlen_q = 4 is given without cu_seqlens_q", :VALUE, "max_seqlen_q",
            () -> append_kv!(k_cache, v_cache, lens, k; max_seqlen_q = 4))
    refused("update_descales = 1 has a meaning only with a cache of F8E4M3 or I8", :DTYPE,
            "update_descales", () -> append_kv!(k_cache, v_cache, lens, k, v; update_descales = true))
    refused("of which a copy would be written", :DTYPE, "descale_k",
            () -> append_kv!(k8, nothing, lens, k; descale_k = Float64.(made), descale_block = 4,
                             update_descales = true))
    refused("descale_block = 4 is given without descale_k", :VALUE, "descale_block",
            () -> append_kv!(k_cache, v_cache, lens, k; descale_block = 4))
    # By the library: no room for the third sequence.
    full = said(() -> append_kv!(k_cache, v_cache, [3, 0, 19], k, v), FlashAttentionError)
    @test occursin("lens_kv", full) && occursin("LENGTHS", full)
    @test occursin("there is no option cache_seqlens (?append_kv! names all)",
                   said(() -> append_kv!(k_cache, v_cache, lens, k; cache_seqlens = lens), ArgumentError))
    @test occursin("there is no option block_table; here it is page_table",
                   said(() -> append_kv!(k_cache, v_cache, lens, k; block_table = table), ArgumentError))
    @test k_cache == before
end
