# Every option against the formula. Query i (from 1) stands at key position i + keys - queries.

@testset "masks" begin
    q, k, v = (normal(Float32, 8, 2, n, 2) for n in (9, 14, 14))
    same(visible; options...) =
        near(attention(q, k, v; options...), reference(q, k, v; visible = visible)[1], 1e-5)
    @test same((j, i) -> j <= i + 5; causal = true)
    @test same((j, i) -> j <= i; causal = true, top_left = true)
    @test same((j, i) -> i + 5 - 3 <= j <= i + 5 + 2; window = (3, 2))
    @test same((j, i) -> abs(i + 5 - j) <= 3; window = 3)
    @test same((j, i) -> i + 5 - 4 <= j; window = (4, nothing))
    @test same((j, i) -> (i + 4) ÷ 4 == (j - 1) ÷ 4; chunk = 4)
    blocks = rand(Bool, 4, 3, 1, 1)
    @test same((j, i) -> blocks[cld(j, 4), cld(i, 3), 1, 1]; block_mask = blocks, block_q = 3, block_kv = 4)
    @test same((j, i) -> j in (12, 14) || j <= min(i + 5, 11); causal = true, tree = 3,
               tree_bits = fill(UInt32(5), 1, 9, 2))
    hidden = [j <= i for j in 1:14, i in 1:9]
    @test same((j, i) -> j <= i; bias = hidden)
    @test same((j, i) -> j <= i; bias = BitArray(hidden))
    lens = reference(q[:, :, :, 1:1], k[:, :, 1:6, 1:1], v[:, :, 1:6, 1:1])[1]
    @test near(attention(q, k, v; lens_kv = [6, 14])[:, :, :, 1:1], lens, 1e-5)
    @test all(iszero, attention(q, k, v; lens_q = Int32[4, 9])[:, :, 5:9, 1])
    # One row of blocks for all queries.
    row = rand(Bool, 4, 1)
    @test same((j, i) -> row[cld(j, 4)]; block_mask = row, block_q = 3, block_kv = 4)
end

@testset "lists and lengths of blocks" begin
    # Of 3 queries and 4 keys a block: 3 by 4. Query blocks see key blocks 1 and 4, none, 2 to 4.
    q, k, v = (normal(Float32, 8, 2, n, 2) for n in (9, 14, 14))
    on = BitArray([1 0 0; 0 0 1; 0 0 1; 1 0 1])
    index = [4 0 3; 1 -1 2; 0 99 4]
    sizes = (block_q = 3, block_kv = 4, causal = true)
    wanted = attention(q, k, v; block_mask = on, sizes...)
    same(; options...) = attention(q, k, v; sizes..., options...) == wanted
    @test near(wanted, reference(q, k, v; visible = (j, i) -> j <= i + 5 && on[cld(j, 4), cld(i, 3)])[1], 1e-5)
    from_0 = Int32.(index .- 1)
    @test same(block_index = index) && same(block_index = UInt32.(max.(index, 0)))
    @test same(block_index = repeat(index, 1, 1, 2, 2)) && same(block_index = from_0, first_block = 0)
    inputs(index; more...) = FlashAttention.Inputs(q, k, v; block_index = index, block_q = 3, block_kv = 4, more...)
    given = inputs(from_0; first_block = 0)
    @test given.args[].block_index.data == pointer(from_0) && isempty(given.made)
    @test given.args[].block_entries == 3 && !isempty(inputs(index).made)
    @test same(block_index = [1 3 3; 4 1 2; 2 2 4], block_end = [2, 0, 3])
    # Of a sparse matrix: one list for all columns.
    rowval, colptr = [1, 4, 2, 3, 4], [1, 3, 3, 6]
    @test same(block_index = reshape(rowval, :, 1), block_begin = colptr[1:3] .- 1, block_end = colptr[2:4] .- 1)
    @test all(iszero, attention(q, k, v; block_index = zeros(Int, 0, 3), sizes...))
    lens = [4, 2, 0, 1]
    visible(j, i) = j <= i + 5 && on[cld(j, 4), cld(i, 3)] && (j - 1) % 4 < lens[cld(j, 4)]
    o, lse = reference(q, k, v; visible = visible)
    for lists in ((block_mask = on,), (block_index = index,))
        options = (block_lens = lens, lists..., sizes...)
        ours = attention(q, k, v; return_lse = true, options...)
        @test near(ours[1], o, 1e-5) && near(ours[2], lse, 1e-5)
        hidden = [visible(j, i) for j in 1:14, i in 1:9]
        grads(; more...) = attention_backward(one.(q), q, k, v, ours...; more...)
        given, expected = grads(; options...), grads(bias = hidden)
        @test all(name -> near(given[name], expected[name], 1e-5), (:dq, :dk, :dv))
    end
    plan = Plan(Float32; heads_q = 2, dim_qk = 8, block_lists = true, block_lens = true, sizes...)
    @test attention(plan, q, k, v; block_index = index, block_lens = lens, block_q = 3, block_kv = 4) ==
          attention(q, k, v; block_index = index, block_lens = lens, sizes...)
end

@testset "scores" begin
    q, k, v = normal(Float32, 8, 4, 9, 2), normal(Float32, 8, 2, 14, 2), normal(Float32, 8, 2, 14, 2)
    same(known; options...) =
        near(attention(q, k, v; options...), reference(q, k, v; known...)[1], 1e-5)
    @test same((softcap = 2.0,); softcap = 2)
    @test same((scale = 0.7,); scale = 0.7)
    slopes = rand(Float32, 4)
    @test same((bias = (j, i, h, b) -> -slopes[h] * abs(i + 5 - j),); alibi_slopes = slopes)
    each = rand(4, 2)  # converted to Float32
    @test same((bias = (j, i, h, b) -> -each[h, b] * abs(i + 5 - j),); alibi_slopes = each)
    sink = randn(Float32, 4)
    @test same((sink = sink,); sink = sink)
    for dims in ((14, 9, 4, 2), (14, 1, 4, 1), (14, 9), (14, 1, 1, 2)), T in (Float32, Float32)
        bias = normal(T, dims...)
        at(x, d) = size(bias, d) == 1 ? 1 : x
        @test same((bias = (j, i, h, b) -> bias[j, at(i, 2), at(h, 3), at(b, 4)],); bias = bias)
    end
    keep = dropout_mask(2, 4, 9, 14; dropout = 0.3, rng_seed = 5, rng_offset = 2^40)
    @test same((keep = keep, dropout = 0.3); dropout = 0.3, rng_seed = 5, rng_offset = 2^40)
    @test eltype(keep) === Bool && size(keep) == (14, 9, 4, 2)
    @test any(keep) && !all(keep)
end

@testset "left padding" begin
    # Keys before starts_kv do not exist: what lies there is not looked at.
    q, k, v = (normal(Float32, 8, 2, n, 2) for n in (9, 14, 14))
    starts = [3, 0]
    for x in (k, v)
        x[:, :, 1:3, 1] .= NaN32
    end
    o, lse = attention(q, k, v; causal = true, starts_kv = starts, return_lse = true)
    dout = normal(Float32, 8, 2, 9, 2)
    grads = attention_backward(dout, q, k, v, o, lse; causal = true, starts_kv = starts)
    one(x, r, b) = x[:, :, r, b:b]
    for (b, keys) in ((1, 4:14), (2, 1:14))
        alone, alone_lse = attention(one(q, 1:9, b), one(k, keys, b), one(v, keys, b); causal = true,
                                     return_lse = true)
        @test near(one(o, 1:9, b), alone, 1e-6) && near(lse[:, :, b:b], alone_lse, 1e-6)
        wanted = attention_backward(one(dout, 1:9, b), one(q, 1:9, b), one(k, keys, b),
                                    one(v, keys, b), alone, alone_lse; causal = true)
        @test near(one(grads.dq, 1:9, b), wanted.dq, 1e-5)
        @test near(one(grads.dk, keys, b), wanted.dk, 1e-5)
        @test near(one(grads.dv, keys, b), wanted.dv, 1e-5)
    end
    @test all(iszero, grads.dk[:, :, 1:3, 1]) && all(iszero, grads.dv[:, :, 1:3, 1])
end

@testset "varlen" begin
    cu_q, cu_k = [0, 5, 5, 17], [0, 8, 20, 33]
    q, k, v = normal(Float32, 8, 4, 20), normal(Float32, 8, 2, 35), normal(Float32, 8, 2, 35)
    out, lse = attention_varlen(q, k, v, cu_q, cu_k; causal = true, return_lse = true)
    dout = normal(Float32, 8, 4, 20)
    grads = attention_backward(dout, q, k, v, out, lse; cu_seqlens_q = cu_q, cu_seqlens_kv = cu_k,
                               causal = true)
    @test size(lse) == (20, 4)
    for b in (1, 3)
        r, s = cu_q[b] + 1:cu_q[b + 1], cu_k[b] + 1:cu_k[b + 1]
        one(x, r) = reshape(x[:, :, r], size(x, 1), size(x, 2), length(r), 1)
        alone, alone_lse = attention(one(q, r), one(k, s), one(v, s); causal = true, return_lse = true)
        @test near(one(out, r), alone, 1e-6)
        @test near(lse[r, :], alone_lse[:, :, 1], 1e-6)
        wanted = attention_backward(one(dout, r), one(q, r), one(k, s), one(v, s), alone, alone_lse;
                                    causal = true)
        @test near(one(grads.dq, r), wanted.dq, 1e-5) && near(one(grads.dv, s), wanted.dv, 1e-5)
        @test near(one(grads.dk, s), wanted.dk, 1e-5)
    end
    @test all(iszero, out[:, :, 18:20]) && all(iszero, grads.dk[:, :, 34:35])
    swapped(x) = permutedims(x, (1, 3, 2))
    @test swapped(attention_varlen(swapped(q), swapped(k), swapped(v), cu_q, cu_k; causal = true,
                                   layout = :dsh)) == out
    written = fill(NaN32, 8, 4, 20)
    attention_varlen!(written, q, k, v, cu_q, cu_k; causal = true, max_seqlen_q = 12,
                      max_seqlen_kv = 13)
    @test written[:, :, 1:17] == out[:, :, 1:17] && all(isnan, written[:, :, 18:20])
end

@testset "paged" begin
    q, k, v = (normal(Float32, 8, 2, n, 2) for n in (3, 12, 12))
    table = [7 2; 3 5; 1 8]  # (pages of a sequence, batch), from 1
    pool() = fill(NaN32, 8, 2, 4, 9)
    k_pages, v_pages = pool(), pool()
    for b in 1:2, page in 1:3
        k_pages[:, :, :, table[page, b]] = k[:, :, 4page - 3:4page, b]
        v_pages[:, :, :, table[page, b]] = v[:, :, 4page - 3:4page, b]
    end
    wanted = attention(q, k, v; causal = true)
    @test near(attention_paged(q, k_pages, v_pages, table, nothing; causal = true), wanted, 1e-6)
    @test near(attention_paged(q, swap(k_pages), swap(v_pages), table, [12, 12]; causal = true,
                               page_layout = :dshp), wanted, 1e-6)
    # Page numbers as the library counts them are not copied.
    from_0 = Int32.(table .- 1)
    @test near(attention_paged(q, k_pages, v_pages, from_0, nothing; causal = true, first_page = 0),
               wanted, 1e-6)
    inputs(table; more...) = FlashAttention.Inputs(q, k_pages, v_pages; page_table = table, more...)
    given = inputs(from_0; first_page = 0)
    @test given.args[].page_table.data == pointer(from_0) && isempty(given.made)
    @test inputs(table; first_page = 1).made == [from_0] == inputs(Int32.(table)).made
    short = attention(q, k, v; causal = true, lens_kv = [12, 7])
    @test near(attention_paged!(similar(q), q, k_pages, v_pages, table, [12, 7]; causal = true),
               short, 1e-6)
    flat = reshape(q, 8, 2, 6)
    @test near(attention_paged(flat, k_pages, v_pages, table, [12, 12]; cu_seqlens_q = [0, 3, 6],
                               causal = true), reshape(wanted, 8, 2, 6), 1e-6)
end

@testset "merge" begin
    q, k, v = (normal(Float32, 8, 2, n, 2) for n in (5, 30, 30))
    whole, lse = attention(q, k, v; return_lse = true)
    parts = [attention(q, k[:, :, r, :], v[:, :, r, :]; return_lse = true) for r in (1:7, 8:21, 22:30)]
    out, merged = FlashAttention.merge(first.(parts), last.(parts))
    @test near(out, whole, 1e-6) && near(merged, lse, 1e-5)
    out, merged = FlashAttention.merge(swap.(first.(parts)), last.(parts); layout = :dshb)
    @test near(swap(out), whole, 1e-6)
    flat = FlashAttention.merge([reshape(p[1][:, :, :, 1], 8, 2, 5) for p in parts],
                                [p[2][:, :, 1] for p in parts])
    @test near(flat[1], whole[:, :, :, 1], 1e-6)
    @test eltype(FlashAttention.merge(first.(parts), last.(parts); dtype_o = Float16)[1]) === Float16
end
