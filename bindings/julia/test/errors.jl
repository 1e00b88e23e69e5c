"Whoever refuses, this package or the library, says status, reason and field by the header's names."
function check_refusal(f, status, reason, field, text = field)
    error = try
        f()
        nothing
    catch error
        error
    end
    @test error isa FlashAttentionError
    error isa FlashAttentionError || return
    @test (error.status, error.reason, error.field) == (status, reason, field)
    @test occursin(text, error.message)
    @test occursin(field, error.message)
end

@testset "errors" begin
    q, k = normal(Float32, 8, 2, 5, 2), normal(Float32, 8, 2, 7, 2)
    says(text, T, f) = @test occursin(text, said(f, T))
    refused(text, reason, field, f) = check_refusal(f, :ERROR_INVALID_ARGUMENT, reason, field, text)

    refused("k has head dimension 4, q has 8", :HEAD_DIM_PAIR, "k", () -> attention(q, k[1:4, :, :, :], k))
    refused("only their first may differ", :SIZE, "v", () -> attention(q, k, k[:, :, 1:3, :]))
    refused("k and v hold 1 sequences, q holds 2", :SIZE, "k",
         () -> attention(q, k[:, :, :, 1:1], k[:, :, :, 1:1]))
    refused("expected 4 dimensions", :SIZE, "q", () -> attention(q[:, :, :, 1], k, k))
    refused("bias has size (5, 7)", :BIAS, "bias", () -> attention(q, k, k; bias = zeros(Float32, 5, 7)))
    refused("o has size", :SIZE, "o", () -> attention!(similar(k), q, k, k))
    refused("lse has size", :SIZE, "lse", () -> attention!(similar(q), q, k, k; lse = zeros(Float32, 5)))
    refused("alibi_slopes has size (3,); expected (2, 2)", :SIZE, "alibi_slopes",
         () -> attention(q, k, k; alibi_slopes = zeros(3)))
    refused("lens_kv has size", :SIZE, "lens_kv", () -> attention(q, k, k; lens_kv = [1]))

    refused("Float64 of q is none of Float32", :DTYPE, "q", () -> attention(Float64.(q), Float64.(k), Float64.(k)))
    refused("they must be the same", :DTYPE, "v", () -> attention(q, Float16.(k), k))
    refused("first dimension", :STRIDE, "q", () -> attention(view(zeros(Float32, 16, 2, 5, 2), 1:2:16, :, :, :), k, k))
    refused("negative stride", :STRIDE, "q", () -> attention(view(q, :, :, 5:-1:1, :), k, k))
    refused("has no strides", :STRIDE, "q", () -> attention(view(q, :, [1, 2], :, :), k, k))
    refused("out of reach", :DTYPE, "q", () -> attention(reshape(1.0f0:160.0f0, 8, 2, 5, 2), k, k))
    refused("layout = :bshd", :LAYOUT, "layout", () -> attention(q, k, k; layout = :bshd))
    refused("scale = 0", :VALUE, "scale", () -> attention(q, k, k; scale = 0))
    refused("scale = 1.0e-50 is 0 in Float32", :VALUE, "scale", () -> attention(q, k, k; scale = 1e-50))
    refused("softcap = 1.0e-50 is 0 in Float32", :SOFTCAP, "softcap", () -> attention(q, k, k; softcap = 1e-50))
    @test attention(q, k, k; softcap = 0) == attention(q, k, k)
    refused("block_q = 2 is given without block_mask", :VALUE, "block_q",
         () -> attention(q, k, k; block_q = 2, block_kv = 2))
    refused("max_seqlen_q = 5 is given without cu_seqlens_q", :VALUE, "max_seqlen_q",
         () -> attention(q, k, k; max_seqlen_q = 5))
    refused("max_seqlen_kv = 9 is given without cu_seqlens_kv or page_table", :VALUE, "max_seqlen_kv",
         () -> attention_varlen(q, k, k, nothing, nothing; max_seqlen_kv = 9))
    refused("seqlen_kv = $(2^31) is past the range", :SIZE, "seqlen_kv",
         () -> dropout_mask(1, 1, 1, 2^31; dropout = 0.5))
    refused("window = \"all\"", :VALUE, "window_left", () -> attention(q, k, k; window = "all"))
    refused("block_kv = 0; block_mask needs it", :SIZE, "block_kv",
         () -> attention(q, k, k; block_mask = trues(1, 1), block_q = 5))
    refused("rng_seed = -1", :VALUE, "rng_seed", () -> attention(q, k, k; dropout = 0.5, rng_seed = -1))
    refused("chunk = $(2^40) is past the range", :SIZE, "chunk", () -> attention(q, k, k; chunk = 2^40))
    refused("window_left = $(2^40) is past", :SIZE, "window_left", () -> attention(q, k, k; window = 2^40))
    refused("splits = 1.5; expected an integer", :DTYPE, "splits", () -> attention(q, k, k; splits = 1.5))
    refused("Float64 of o is none of", :DTYPE, "o", () -> attention!(Float64.(q), q, k, k))
    refused("dout has elements Float16; expected F32", :DTYPE, "dout",
         () -> attention_backward(Float16.(q), q, k, k, q, zeros(Float32, 5, 2, 2)))
    refused("gaps", :STRIDE, "lse",
         () -> attention!(similar(q), q, k, k; lse = view(zeros(Float32, 10, 2, 2), 1:2:10, :, :)))
    refused("Int64 of bias is none of Float32, Float16, BFloat16, Bool", :DTYPE, "bias",
         () -> attention(q, k, k; bias = ones(Int, 7, 5)))
    refused("starts_kv = 3; expected an array", :DTYPE, "starts_kv", () -> attention(q, k, k; starts_kv = 3))
    refused("rng_device has elements Int64; expected UInt64", :DTYPE, "rng_device",
         () -> attention(q, k, k; dropout = 0.5, rng_device = [1, 2]))
    refused("$(2^40) is past the range of Int32", :LENGTHS, "lens_kv",
            () -> attention(q, k, k; lens_kv = [1, 2^40]))
    refused("block_q = -4 is below 0", :SIZE, "block_q",
            () -> attention(q, k, k; block_mask = trues(1, 1), block_q = -4, block_kv = 7))
    refused("parallel = 2; expected true or false", :DTYPE, "parallel",
            () -> attention(q, k, k; parallel = 2))
    refused("parallel = 2; expected true or false", :DTYPE, "parallel",
            () -> FlashAttention.merge([q], [zeros(Float32, 5, 2, 2)]; parallel = 2))
    refused("parallel = 2; expected true or false", :DTYPE, "parallel",
            () -> dropout_mask(1, 1, 8, 8; dropout = 0.5, rng_seed = 1, parallel = 2))
    refused("page numbers are integers", :DTYPE, "page_table", () -> attention_paged(q, k, k, [1.0 2.0], nothing))
    refused("first_page = 2", :VALUE, "page_table",
         () -> attention_paged(q, k, k, [1 2], nothing; first_page = 2))
    blocks = (block_q = 5, block_kv = 7)
    refused("first_block = 2; give 0 or 1", :VALUE, "block_index",
         () -> attention(q, k, k; block_index = [1], first_block = 2, blocks...))
    refused("block and page numbers are integers", :DTYPE, "block_index",
         () -> attention(q, k, k; block_index = [1.0], blocks...))
    refused("block_mask and block_index are both given", :MASK_COMBINATION, "block_mask",
         () -> attention(q, k, k; block_index = [1], block_mask = trues(1, 1), blocks...))
    refused("block_end is given without block_index", :VALUE, "block_end",
         () -> attention(q, k, k; block_end = [1], block_mask = trues(1, 1), blocks...))
    refused("block_q = 0; block_index needs it", :SIZE, "block_q", () -> attention(q, k, k; block_index = [1]))
    refused("block_lens has size (2,); expected (1, 2, 2)", :SIZE, "block_lens",
         () -> attention(q, k, k; block_index = [1], block_lens = [1, 1], blocks...))
    lists = Plan(Float32; heads_q = 2, dim_qk = 8, block_lists = true, blocks...)
    refused("block_q = 0 by the arrays given", :VALUE, "block_q", () -> attention(lists, q, k, k))
    refused("block_q = 5 is given without block_mask or block_index", :VALUE, "block_q",
         () -> attention(lists, q, k, k; blocks...))
    refused("no mask bit BLOCKS, without BLOCK_LISTS", :NULL_POINTER, "block_mask.data",
         () -> attention(lists, q, k, k; block_mask = trues(1, 1), blocks...))

    # Every hint is about options that there are.
    for (name, hint) in FlashAttention.ELSEWHERE
        @test !(name in union(FlashAttention.DESCRIBED, FlashAttention.TAKEN))
        words = Symbol.(split(hint, r"[ ;,]+"))
        @test name === :nheads ||
              any(in(union(FlashAttention.DESCRIBED, FlashAttention.TAKEN, [:return_lse])), words)
    end

    # Options that there are not, that are another's, or no such value.
    plan = Plan(Float32; heads_q = 2, dim_qk = 8)
    for call in ((; options...) -> attention(q, k, k; options...),
                 (; options...) -> attention!(similar(q), q, k, k; options...),
                 (; options...) -> attention_backward(q, q, k, k, q, zeros(Float32, 5, 2, 2); options...),
                 (; options...) -> attention(plan, q, k, k; options...),
                 (; options...) -> Plan(Float32; heads_q = 2, dim_qk = 8, options...),
                 (; options...) -> FlashAttention.supported(Float32; heads_q = 2, dim_qk = 8, options...))
        says("there is no option casual: did you mean causal?", ArgumentError, () -> call(casual = true))
        says("there is no option softmax_scale; here it is scale (?attention", ArgumentError,
             () -> call(softmax_scale = 1))
        says("there is no option attn_mask; here it is bias; of Bool, true = visible (?attention",
             ArgumentError, () -> call(attn_mask = 1))
        says("there is no option nonsense (?attention", ArgumentError, () -> call(nonsense = 1))
    end
    refused("causal = \"yes\"; expected true or false", :DTYPE, "causal", () -> attention(q, k, k; causal = "yes"))
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
        refused("dropout = 0.5 without a seed", :DROPOUT, "rng_seed", call)
        refused("dropout = 0.5 without a seed", :DROPOUT, "rng_seed", () -> call(rng_offset = 1))
        @test said(() -> call(rng_seed = 0), FlashAttentionError) == "nothing was thrown"
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
    refused("layout = :dshb", :HEAD_RATIO, "heads_kv", () -> attention(swap(q), swap(k), swap(k)))
    says("lens_kv[1] = 8 is not within 0 and 7", FlashAttentionError,
         () -> attention(q, k, k; lens_kv = [3, 8]))
    says("LENGTHS", FlashAttentionError, () -> attention(q, k, k; lens_kv = [3, 8]))
    says("OVERLAP", FlashAttentionError, () -> attention!(q, q, k, k))
    says("LENGTHS", FlashAttentionError,
         () -> attention_varlen(q[:, :, :, 1], k[:, :, :, 1], k[:, :, :, 1], [0, 4, 2, 5], [0, 3, 5, 7]))
    refused("max_seqlen_kv = 15, but page_table has 2 pages of 7 tokens for a sequence, 14 in all",
         :SIZE, "seqlen_kv", () -> attention_paged(q, k, k, [1 2; 2 1], nothing; max_seqlen_kv = 15))
    @test size(attention_paged(q, k, k, [1 2; 2 1], nothing; max_seqlen_kv = 14)) == size(q)
    # The pages of the table count from 1.
    says("page_table", FlashAttentionError, () -> attention_paged(q, k, k, [0 1], nothing))
    # The library refuses what the descriptor has no use for, by its name in the header.
    says("descale_k.data is set", FlashAttentionError, () -> attention(q, k, k; descale_k = ones(1, 2, 2)))
    # To the library 0 is a default: arrays without elements were read and written past their end.
    dims = (8, 2, 7, 2)
    for (i, text) in ((1, "heads of 0 elements; give at least 1"), (2, "0 heads by layout = :dhsb"))
        none = zeros(Float32, ntuple(d -> d == i ? 0 : dims[d], 4))
        without = none[:, :, 1:5, :]
        refused(text, :SIZE, "q", () -> attention(without, k, k))
        refused(text, :SIZE, "k", () -> attention(q, none, k))
        refused(text, :SIZE, "v", () -> attention!(without, q, k, none))
        refused(i == 1 ? text : "0 heads by layout = :dht", :SIZE, "k", () -> attention_varlen(
            q[:, :, :, 1], none[:, :, :, 1], k[:, :, :, 1], [0, 5], [0, 7]; layout = :dht))
        refused(i == 1 ? text : "0 heads by layout = :dhsp", :SIZE, "v",
                () -> attention_paged(q, k, none, [1 2], nothing))
        refused(text, :SIZE, "v", () -> attention_backward(without, q, k, none, without, zeros(Float32, 5, 2, 2)))
        refused(text, :SIZE, "part_o", () -> FlashAttention.merge([without], [zeros(Float32, 5, 2 - 2 * (i == 2), 2)]))
        refused(text, :SIZE, "k_cache", () -> append_kv!(none, nothing, [0, 0], k))
    end
    pages = k[:, :, 1:0, :]
    refused("pages of 0 tokens", :PAGE_SIZE, "k", () -> attention_paged(q, pages, pages, [1 2], nothing))
    refused("pages of 0 tokens", :PAGE_SIZE, "k_cache",
            () -> append_kv!(pages, nothing, [0, 0], k; page_table = [1 2]))
    refused("heads_q = 0", :SIZE, "heads_q", () -> dropout_mask(1, 0, 2, 2; dropout = 0.5, rng_seed = 1))
    @test size(attention(q[:, :, :, 1:0], k[:, :, :, 1:0], k[:, :, :, 1:0])) == (8, 2, 5, 0)
    @test all(iszero, attention(q, pages, pages))
    # Errors in one task leave the others' alone.
    sentences = map(fetch, [Threads.@spawn(said(() -> attention(q, k, k; dropout = n), FlashAttentionError))
                            for n in 2:9])
    @test all(occursin("dropout = $n ", sentences[n - 1]) for n in 2:9)
end
