"The exception that f throws, as text."
function said(f, T)
    try
        f()
    catch error
        error isa T || rethrow()
        return sprint(showerror, error)
    end
    return "nothing was thrown"
end

@testset "errors" begin
    q, k = normal(Float32, 8, 2, 5, 2), normal(Float32, 8, 2, 7, 2)
    says(text, T, f) = @test occursin(text, said(f, T))

    says("k has head dimension 4, q has 8", DimensionMismatch, () -> attention(q, k[1:4, :, :, :], k))
    says("only their first may differ", DimensionMismatch, () -> attention(q, k, k[:, :, 1:3, :]))
    says("k and v hold 1 sequences, q holds 2", DimensionMismatch,
         () -> attention(q, k[:, :, :, 1:1], k[:, :, :, 1:1]))
    says("expected 4 dimensions", DimensionMismatch, () -> attention(q[:, :, :, 1], k, k))
    says("bias has size (5, 7)", DimensionMismatch, () -> attention(q, k, k; bias = zeros(Float32, 5, 7)))
    says("o has size", DimensionMismatch, () -> attention!(similar(k), q, k, k))
    says("lse has size", DimensionMismatch, () -> attention!(similar(q), q, k, k; lse = zeros(Float32, 5)))
    says("alibi_slopes has size (3,); expected (2, 2)", DimensionMismatch,
         () -> attention(q, k, k; alibi_slopes = zeros(3)))
    says("lens_kv has size", DimensionMismatch, () -> attention(q, k, k; lens_kv = [1]))

    says("Float64 of q is none of Float32", ArgumentError, () -> attention(Float64.(q), Float64.(k), Float64.(k)))
    says("they must be the same", ArgumentError, () -> attention(q, Float16.(k), k))
    says("first dimension", ArgumentError, () -> attention(view(zeros(Float32, 16, 2, 5, 2), 1:2:16, :, :, :), k, k))
    says("negative stride", ArgumentError, () -> attention(view(q, :, :, 5:-1:1, :), k, k))
    says("has no strides", ArgumentError, () -> attention(view(q, :, [1, 2], :, :), k, k))
    says("out of reach", ArgumentError, () -> attention(reshape(1.0f0:160.0f0, 8, 2, 5, 2), k, k))
    says("layout = :bshd", ArgumentError, () -> attention(q, k, k; layout = :bshd))
    says("scale = 0", ArgumentError, () -> attention(q, k, k; scale = 0))
    says("scale = 1.0e-50 is 0 in Float32", ArgumentError, () -> attention(q, k, k; scale = 1e-50))
    says("softcap = 1.0e-50 is 0 in Float32", ArgumentError, () -> attention(q, k, k; softcap = 1e-50))
    @test attention(q, k, k; softcap = 0) == attention(q, k, k)
    says("block_q = 2 is given without block_mask", ArgumentError,
         () -> attention(q, k, k; block_q = 2, block_kv = 2))
    says("max_seqlen_q = 5 is given without cu_seqlens_q", ArgumentError,
         () -> attention(q, k, k; max_seqlen_q = 5))
    says("max_seqlen_kv = 9 is given without cu_seqlens_kv or page_table", ArgumentError,
         () -> attention_varlen(q, k, k, nothing, nothing; max_seqlen_kv = 9))
    says("seqlen_kv = $(2^31) is past the range", ArgumentError,
         () -> dropout_mask(1, 1, 1, 2^31; dropout = 0.5))
    says("window = \"all\"", ArgumentError, () -> attention(q, k, k; window = "all"))
    says("block_kv = 0; block_mask needs it", ArgumentError,
         () -> attention(q, k, k; block_mask = trues(1, 1), block_q = 5))
    says("rng_seed = -1", ArgumentError, () -> attention(q, k, k; dropout = 0.5, rng_seed = -1))
    says("chunk = $(2^40) is past the range", ArgumentError, () -> attention(q, k, k; chunk = 2^40))
    says("window_left = $(2^40) is past", ArgumentError, () -> attention(q, k, k; window = 2^40))
    says("splits = 1.5; expected an integer", ArgumentError, () -> attention(q, k, k; splits = 1.5))
    says("Float64 of o is none of", ArgumentError, () -> attention!(Float64.(q), q, k, k))
    says("dout has elements Float16; expected F32", ArgumentError,
         () -> attention_backward(Float16.(q), q, k, k, q, zeros(Float32, 5, 2, 2)))
    says("gaps", ArgumentError,
         () -> attention!(similar(q), q, k, k; lse = view(zeros(Float32, 10, 2, 2), 1:2:10, :, :)))
    says("Int64 of bias is none of Float32, Float16, BFloat16, Bool", ArgumentError,
         () -> attention(q, k, k; bias = ones(Int, 7, 5)))
    says("starts_kv = 3; expected an array", ArgumentError, () -> attention(q, k, k; starts_kv = 3))
    says("rng_device has elements Int64; expected UInt64", ArgumentError,
         () -> attention(q, k, k; dropout = 0.5, rng_device = [1, 2]))
    says("page numbers are integers", ArgumentError, () -> attention_paged(q, k, k, [1.0 2.0], nothing))
    says("first_page = 2", ArgumentError,
         () -> attention_paged(q, k, k, [1 2], nothing; first_page = 2))

    # Options that there are not, that are another's, or no such value.
    plan = Plan(Float32; heads_q = 2, dim_qk = 8)
    for call in ((; options...) -> attention(q, k, k; options...),
                 (; options...) -> attention!(similar(q), q, k, k; options...),
                 (; options...) -> attention_backward(q, q, k, k, q, zeros(Float32, 5, 2, 2); options...),
                 (; options...) -> attention(plan, q, k, k; options...),
                 (; options...) -> Plan(Float32; heads_q = 2, dim_qk = 8, options...),
                 (; options...) -> FlashAttention.supported(Float32; heads_q = 2, dim_qk = 8, options...))
        says("there is no option casual: did you mean causal?", ArgumentError, () -> call(casual = true))
        says("there is no option softmax_scale: did you mean scale?", ArgumentError,
             () -> call(softmax_scale = 1))
        says("there is no option attn_mask (?attention", ArgumentError, () -> call(attn_mask = 1))
    end
    says("causal = \"yes\"; expected true or false", ArgumentError, () -> attention(q, k, k; causal = "yes"))
    says("dim_qk = 16 is given, but follows from the arrays", ArgumentError,
         () -> attention(q, k, k; dim_qk = 16))
    says("return_dsink is an option of attention_backward", ArgumentError,
         () -> attention(q, k, k; return_dsink = true))
    says("causal = true is for the plan to say", ArgumentError, () -> attention(plan, q, k, k; causal = true))
    says("there is no size seqlen;", ArgumentError,
         () -> FlashAttention.workspace_size(plan; batch = 1, seqlen = 2))

    # The same numbers in every call must be asked for.
    lse, dropping = zeros(Float32, 5, 2, 2), Plan(Float32; heads_q = 2, dim_qk = 8, dropout = 0.5)
    for call in ((; seed...) -> attention(q, k, k; dropout = 0.5, seed...),
                 (; seed...) -> attention(dropping, q, k, k; seed...),
                 (; seed...) -> attention_backward(q, q, k, k, q, lse; dropout = 0.5, seed...),
                 (; seed...) -> dropout_mask(1, 2, 3, 4; dropout = 0.5, seed...))
        says("dropout = 0.5 without a seed", ArgumentError, call)
        says("dropout = 0.5 without a seed", ArgumentError, () -> call(rng_offset = 1))
        @test said(() -> call(rng_seed = 0), ArgumentError) == "nothing was thrown"
    end

    error = try
        attention(q, k, k; dropout = 1.5)
    catch error
        error
    end
    @test error isa FlashAttentionError
    @test error.status === :ERROR_INVALID_ARGUMENT && error.reason === :DROPOUT
    @test error.field == "dropout" && occursin("dropout = 1.5", error.message)
    @test occursin("DROPOUT", sprint(showerror, error))
    says("heads_q = 3 is no multiple of heads_kv = 2", FlashAttentionError,
         () -> Plan(Float32; heads_q = 3, heads_kv = 2, dim_qk = 8))
    # PyTorch's order, turned around.
    says("layout = :dshb", DimensionMismatch, () -> attention(swap(q), swap(k), swap(k)))
    says("lens_kv[1] = 8 is not within 0 and 7", FlashAttentionError,
         () -> attention(q, k, k; lens_kv = [3, 8]))
    says("LENGTHS", FlashAttentionError, () -> attention(q, k, k; lens_kv = [3, 8]))
    says("OVERLAP", FlashAttentionError, () -> attention!(q, q, k, k))
    says("LENGTHS", FlashAttentionError,
         () -> attention_varlen(q[:, :, :, 1], k[:, :, :, 1], k[:, :, :, 1], [0, 4, 2, 5], [0, 3, 5, 7]))
    says("max_seqlen_kv = 15, but page_table has 2 pages of 7 tokens for a sequence, 14 in all",
         ArgumentError, () -> attention_paged(q, k, k, [1 2; 2 1], nothing; max_seqlen_kv = 15))
    @test size(attention_paged(q, k, k, [1 2; 2 1], nothing; max_seqlen_kv = 14)) == size(q)
    # The pages of the table count from 1.
    says("page_table", FlashAttentionError, () -> attention_paged(q, k, k, [0 1], nothing))
    # The library refuses a feature that no kernel has yet, by its name in the header.
    says("descale_k.data is set", FlashAttentionError, () -> attention(q, k, k; descale_k = ones(1, 2, 2)))
    says("mask has TREE, with tree = 3", FlashAttentionError,
         () -> attention(q, k, k; tree_bits = zeros(UInt32, 1, 5, 2), tree = 3))
    # Errors in one task leave the others' alone.
    sentences = map(fetch, [Threads.@spawn(said(() -> attention(q, k, k; dropout = n), FlashAttentionError))
                            for n in 2:9])
    @test all(occursin("dropout = $n ", sentences[n - 1]) for n in 2:9)
end
