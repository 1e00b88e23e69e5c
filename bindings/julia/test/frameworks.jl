# The calls of NNlib and LuxLib against their formulas in Float64, and their gradients against finite
# differences of these.

"NNlib's function as it is documented: y, weights. fdrop is a function of the weights."
function nnlib_reference(q, k, v, bias = nothing; fdrop = identity, mask = nothing, nheads = 1,
                         scale = sqrt(size(q, 1) / nheads))
    apart(x) = Float64.(reshape(x, size(x, 1) ÷ nheads, nheads, size(x, 2), :))
    qs, ks, vs = apart(q), apart(k), apart(v)
    scores = [sum(qs[:, h, i, b] .* ks[:, h, j, b]) / scale
              for j in 1:size(ks, 3), i in 1:size(qs, 3), h in 1:nheads, b in 1:size(qs, 4)]
    bias === nothing || (scores = scores .+ bias)
    mask === nothing || (scores = ifelse.(mask, scores, -Inf))
    weights = exp.(scores .- maximum(scores; dims = 1))
    weights = fdrop(weights ./ sum(weights; dims = 1))
    y = [sum(weights[:, i, h, b] .* vs[d, h, :, b])
         for d in 1:size(vs, 1), h in 1:nheads, i in 1:size(qs, 3), b in 1:size(qs, 4)]
    return reshape(y, size(v, 1), size(q)[2:end]...), weights
end

const NNLIB, LUXLIB = FlashAttention.dot_product_attention, FlashAttention.scaled_dot_product_attention

@testset "NNlib's call" begin
    q, k, v = randn(Float32, 12, 5, 2), randn(Float32, 12, 7, 2), randn(Float32, 6, 7, 2)
    drop = FlashAttention.Dropout(0.3; rng_seed = 5, rng_offset = 2)
    causal = [j <= i + 2 for j in 1:7, i in 1:5]
    padding = reshape(trues(7, 2), 7, 1, 1, 2)
    padding[6:7, 1, 1, 2] .= false
    for bias in (nothing, randn(Float32, 7, 5), randn(Float32, 7, 5, 3, 2), randn(Float32, 1, 5, 3),
                 randn(Float32, 7, 1, 1, 2)),
        mask in (nothing, causal, padding, trues(1, 5)), fdrop in (identity, drop)
        options = (mask = mask, fdrop = fdrop, nheads = 3)
        y, none = NNLIB(q, k, v, bias; options...)
        wanted, weights = nnlib_reference(q, k, v, bias; options...)
        @test none === nothing && near(y, wanted, 1e-5)
        same, scores = NNLIB(q, k, v, bias; return_scores = true, options...)
        @test same == y && near(scores, weights, 1e-5)
    end
    # Any number of batch dimensions; more keys than one call for weights takes.
    more(x) = reshape(x, size(x)[1:2]..., 1, 2, 1)
    y, scores = NNLIB(more(q), more(k), more(v); nheads = 3, return_scores = true)
    @test size(y) == (6, 5, 1, 2, 1) && size(scores) == (7, 5, 3, 1, 2, 1)
    @test vec(y) == vec(NNLIB(q, k, v; nheads = 3)[1])
    one = NNLIB(q[:, :, 1], k[:, :, 1], v[:, :, 1]; nheads = 3)[1]
    @test size(one) == (6, 5) && near(one, y[:, :, 1, 1, 1], 1e-6)
    long = randn(Float32, 12, 131, 1)
    @test near(NNLIB(q[:, :, 1:1], long, long; nheads = 2, return_scores = true)[2],
               nnlib_reference(q[:, :, 1:1], long, long; nheads = 2)[2], 1e-5)
    # NNlib has neither attention's options nor fewer heads of k and v.
    few = NNLIB(q, k[1:4, :, :], v[1:2, :, :]; nheads = 3, nheads_kv = 1, causal = true)[1]
    split(x, n) = reshape(x, :, n, size(x)[2:end]...)
    @test split(few, 3) == attention(split(q, 3), split(k[1:4, :, :], 1), split(v[1:2, :, :], 1);
                                     causal = true)
    fused = FlashAttention.Fused(randn(Float32, 7, 5), randn(Float32, 3); causal = true)
    @test NNLIB(q, k, v, fused; nheads = 3) ==
          NNLIB(q, k, v, fused.bias, fused.sink; causal = true, nheads = 3)

    refused(text, reason, field, f) = check_refusal(f, :ERROR_INVALID_ARGUMENT, reason, field, text)
    refused("k has size (12, 7, 1), q (12, 5, 2)", :SIZE, "k", () -> NNLIB(q, k[:, :, 1:1], v))
    refused("v has a first dimension of 6, which is no multiple of its 4 heads", :HEAD_RATIO, "v",
            () -> NNLIB(q, k, v; nheads = 4))
    refused("bias is a Array{Bool,2}", :DTYPE, "bias", () -> NNLIB(q, k, v, causal))
    refused("mask is a Array{Float32,2}", :DTYPE, "bias", () -> NNLIB(q, k, v; mask = Float32.(causal)))
    refused("mask has size (5, 7); expected (keys, queries, heads, batch) = (7, 5, 3, 2)", :BIAS, "bias",
            () -> NNLIB(q, k, v; mask = trues(5, 7), nheads = 3))
    wrong(text, f) = @test occursin(text, said(f, ArgumentError))
    wrong("never stored; give identity", () -> NNLIB(q, k, v; fdrop = x -> x))
    wrong("dropout is given beside fdrop", () -> NNLIB(q, k, v; fdrop = drop, dropout = 0.1))
    wrong("layout is an option of attention", () -> NNLIB(q, k, v; layout = :dshb))
    wrong("there is no option is_causal; here it is causal", () -> NNLIB(q, k, v; is_causal = true))
    refused("without a seed", :DROPOUT, "rng_seed", () -> NNLIB(q, k, v; dropout = 0.1))
end

@testset "LuxLib's call" begin
    q, k, v = randn(Float32, 4, 6, 5, 2), randn(Float32, 4, 3, 5, 2), randn(Float32, 2, 3, 5, 2)
    bias = randn(Float32, 5, 5)
    for (options, known) in ((NamedTuple(), NamedTuple()), ((scale = 3,), (scale = 1 / 3,)),
                             ((is_causal = true, bias = bias),
                              (visible = (j, i) -> j <= i, bias = (j, i, h, b) -> bias[j, i])),
                             ((mask = [j <= i for j in 1:5, i in 1:5],), (visible = (j, i) -> j <= i,)))
        wanted, _ = reference(q, k, v; known...)
        y, none = LUXLIB(q, k, v; options...)
        @test none === nothing && near(y, wanted, 1e-5)
        for (head_dim, token_dim) in ((1, 2), (2, 3), (3, 1))
            order = invperm((head_dim, 6 - head_dim - token_dim, token_dim, 4))
            turned = map(x -> permutedims(x, order), (q, k, v))
            other = LUXLIB(turned...; head_dim = head_dim, token_dim = token_dim, options...)[1]
            @test near(other, y, 1e-6)
        end
    end
    more(x) = reshape(x, size(x)[1:3]..., 1, 2)
    y, weights = LUXLIB(more(q), more(k), more(v); return_scores = true)
    @test size(y) == (2, 6, 5, 1, 2) && size(weights) == (5, 5, 6, 1, 2)
    @test near(sum(weights; dims = 1), ones(1, 5, 6, 1, 2), 1e-5)
    # Fewer queries than keys: causal counts from the first.
    short = LUXLIB(q[:, :, 1:3, :], k, v; is_causal = true)[1]
    @test near(short, LUXLIB(q, k, v; is_causal = true)[1][:, :, 1:3, :], 1e-6)
    wrong(text, f) = @test occursin(text, said(f, ArgumentError))
    check_refusal(() -> LUXLIB(q, k, v; is_causal = 1), :ERROR_INVALID_ARGUMENT, :DTYPE, "mask", "is_causal = 1")
    wrong("is_causal and mask are both given", () -> LUXLIB(q, k, v; is_causal = true, mask = trues(5, 5)))
    wrong("bias is given twice", () -> LUXLIB(q, k, v, bias; bias = bias))
    refused(text, reason, field, f) = check_refusal(f, :ERROR_INVALID_ARGUMENT, reason, field, text)
    refused("scale = 0", :VALUE, "scale", () -> LUXLIB(q, k, v; scale = 0))
    refused("head_dim = 1, token_dim = 1", :LAYOUT, "layout", () -> LUXLIB(q, k, v; token_dim = 1))
    refused("v has size (2, 3, 5)", :SIZE, "v", () -> LUXLIB(q, k, v[:, :, :, 1]))
end
