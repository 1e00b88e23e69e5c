# tests/data/quantized.txt: the bits that all languages make of the same numbers.

const QUANTIZED_SIZES = Dict(:q => (32, 4, 5, 2), :k => (32, 2, 9, 2), :v => (8, 2, 9, 2))
quantized_input(name) = reshape(
    Float32[((n * 37 + findfirst(==(name), (:q, :k, :v)) * 11) % 101 - 50) / 16
            for n in 0:(prod(QUANTIZED_SIZES[name]) - 1)], QUANTIZED_SIZES[name])

"FNV-1a of an array's bytes."
fnv(x) = string(foldl((hash, byte) -> (hash ⊻ byte) * 0x01000193, reinterpret(UInt8, vec(x));
                      init = 0x811c9dc5); base = 16, pad = 8)

@testset "quantize" begin
    path = joinpath(get(ENV, "FLASHATTN_CASES", joinpath(@__DIR__, "..", "..", "..", "tests", "data")),
                    "quantized.txt")
    paragraphs = isfile(path) ? split(strip(read(path, String)), r"\n\n+") : String[]
    isfile(path) || println("shared quantisations: skipped, there is no $path")
    for text in paragraphs
        lines = map(split, split(text, "\n"))
        names = Symbol.(lines[1][3:end])
        said = Dict(words[1] => Dict(Symbol(p[1]) => p[2] for p in split.(words[2:end], "="))
                    for words in lines[2:end])
        options = Dict{Symbol,Any}(
            name => name === :dtype_kv ? Int8 : name in (:cache, :smooth_k) ? value == "1" :
                    parse(Int, value) for (name, value) in get(said, "options", Dict()))
        made = quantize((name in names ? quantized_input(name) : nothing for name in (:q, :k, :v))...;
                        options...)
        sums = get(said, "sums", Dict())
        @test Set(keys(filter(((_, x),) -> x !== nothing, Dict(pairs(made))))) ==
              Set(union(keys(said["bits"]), keys(sums)))
        for (name, hash) in said["bits"]
            @test fnv(made[name]) == hash
        end
        for (name, wanted) in sums
            @test sum(x -> abs(Float64(x)), made[name]) ≈ parse(Float64, wanted) rtol = 1e-4
        end
    end

    # As arguments of attention; in other layouts, packed, on Julia's threads.
    q, k, v = normal(Float32, 16, 4, 9, 2), normal(Float32, 16, 2, 70, 2), normal(Float32, 16, 2, 70, 2)
    exact = attention(q, k, v)
    made = quantize(q, k, v; descale_block = 64, rotation_seed = 3)
    o = attention(made.q, made.k, made.v; dtype_o = Float32, descale_block = 64,
                  descale_q = made.descale_q, descale_k = made.descale_k, descale_v = made.descale_v)
    @test o ≈ exact rtol = 0.07
    same = quantize(swap(q), swap(k), swap(v); descale_block = 64, rotation_seed = 3, layout = :dshb,
                    parallel = true)
    @test reinterpret(UInt8, swap(same.k)) == reinterpret(UInt8, made.k)
    @test same.descale_q == made.descale_q
    flat = reshape(k, 16, 2, 140)
    packed = quantize(nothing, flat, nothing; cu_seqlens_q = [0, 3, 5], cu_seqlens_kv = [0, 70, 140],
                      descale_block = 64)
    @test fnv(packed.k) == fnv(quantize(nothing, k; descale_block = 64).k)
    @test packed.q === packed.v === packed.descale_q === nothing
    short = quantize(nothing, k, v; lens_kv = [70, 1], dtype_kv = Int8)
    @test all(iszero, short.k[:, :, 2:70, 2]) && any(!iszero, short.k[:, :, 2:70, 1])
    @test quantize(q; cache = true).q === q

    refused(text, reason, field, f) = check_refusal(f, :ERROR_INVALID_ARGUMENT, reason, field, text)
    refused("q, k and v are nothing", :NULL_POINTER, "q", () -> quantize())
    refused("k has elements Float16, q Float32", :DTYPE, "k", () -> quantize(q, Float16.(k)))
    refused("q has elements F8E4M3", :DTYPE, "q", () -> quantize(made.q))
    refused("only their first may differ", :SIZE, "v", () -> quantize(nothing, k, v[:, :, 1:9, :]))
    refused("give both the same first dimension", :HEAD_DIM_PAIR, "k", () -> quantize(q[1:8, :, :, :], k))
    refused("k holds 1 sequences, q is of 2", :SIZE, "k", () -> quantize(q, k[:, :, :, 1:1]))
    refused("has more than 8 bits", :DTYPE, "dtype_kv", () -> quantize(q, k; dtype_kv = Float16))
    refused("smooth_k = 1; expected true or false", :DTYPE, "smooth_k", () -> quantize(q, k; smooth_k = 1))
    refused("lens_kv has size (3,); expected (2,)", :SIZE, "lens_kv", () -> quantize(q, k; lens_kv = [1, 2, 3]))
    refused("max_seqlen_kv = 9 is given without cu_seqlens_kv", :VALUE, "max_seqlen_kv",
            () -> quantize(q, k; max_seqlen_kv = 9))
    @test occursin("there is no option causal", said(() -> quantize(q; causal = true), ArgumentError))
end
