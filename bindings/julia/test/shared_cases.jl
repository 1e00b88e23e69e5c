# tests/data/cases.txt and cases.bin: small cases with float64 results that every language runs, and
# refusals.txt: what they refuse alike. An installed package has not got them.

const DATA = get(ENV, "FLASHATTN_CASES", joinpath(@__DIR__, "..", "..", "..", "tests", "data"))
const ELEMENTS = Dict("f32" => Float32, "f16" => Float16, "bf16" => BFloat16, "i32" => Int32,
                      "u8" => UInt8, "f64" => Float64)

"(name, fields of desc and args, arrays, expect); numbers by the C header's names."
function read_cases(folder)
    bytes = read(joinpath(folder, "cases.bin"))
    array(type, dims, offset) = begin
        # C's last index is the fastest, Julia's the first: the sizes turn around.
        T, sizes = ELEMENTS[type], Tuple(reverse(parse.(Int, split(dims, ","))))
        from = parse(Int, offset)
        return reshape(collect(reinterpret(T, bytes[from + 1:from + sizeof(T) * prod(sizes)])), sizes)
    end
    map(split(strip(read(joinpath(folder, "cases.txt"), String)), r"\n\n+")) do text
        fields = Dict{String,Dict{String,Float64}}()
        whole = Dict{String,UInt64}()
        arrays, expect, name = Dict{String,Array}(), Dict{String,Tuple{Array,Float64}}(), ""
        for line in split(text, "\n")
            word, rest = split(line * " ", " ", limit = 2)
            words = split(rest)
            if word == "case"
                name = words[1]
            elseif word == "array"
                arrays[words[1]] = array(words[2:4]...)
            elseif word == "expect"
                expect[words[1]] = (array(words[2:4]...), parse(Float64, words[5]))
            else
                pairs = split.(words, "=")
                fields[word] = Dict(p[1] => parse(Float64, p[2]) for p in pairs)
                # 64-bit seeds do not fit in a Float64.
                merge!(whole, Dict(p[1] => parse(UInt64, p[2]) for p in pairs if startswith(p[1], "rng_")))
            end
        end
        return (name = name, fields = fields, whole = whole, arrays = arrays, expect = expect)
    end
end

"The options of attention that a descriptor stands for."
function options_of(case)
    desc, arrays, args = case.fields["desc"], case.arrays, case.fields["args"]
    number(name) = get(desc, name, 0.0)
    whole(name) = Int(number(name))
    has(field, bit) = UInt32(number(field)) & bit != 0
    options = Dict{Symbol,Any}(
        :causal => has("mask", LibFlashAttn.FLASHATTN_MASK_CAUSAL),
        :top_left => has("mask", LibFlashAttn.FLASHATTN_MASK_TOP_LEFT),
        :softcap => number("softcap"), :dropout => number("dropout"), :splits => whole("splits"),
        :chunk => whole("chunk"), :block_q => whole("block_q"), :block_kv => whole("block_kv"),
        :rng_seed => get(case.whole, "rng_seed", 0), :rng_offset => get(case.whole, "rng_offset", 0))
    has("mask", LibFlashAttn.FLASHATTN_MASK_WINDOW) &&
        (options[:window] = (whole("window_left"), whole("window_right")))
    haskey(desc, "scale") && (options[:scale] = number("scale"))
    for field in FlashAttention.BESIDE
        name = String(field.name)
        haskey(arrays, name) && (options[field.name] = arrays[name])
    end
    haskey(arrays, "cu_seqlens_q") && (options[:max_seqlen_q] = Int(args["seqlen_q"]))
    if haskey(arrays, "cu_seqlens_kv") || haskey(arrays, "page_table")
        options[:max_seqlen_kv] = Int(get(args, "seqlen_kv", 0))
    end
    haskey(arrays, "page_table") && (options[:first_page] = 0)
    haskey(arrays, "block_index") && (options[:first_block] = 0)
    return options
end

"How many elements lie farther from their expected value than they may."
function wrong((wanted, tolerance), given)
    size(wanted) == size(given) || return "size $(size(given)), expected $(size(wanted))"
    return count(zip(wanted, given)) do (w, g)
        g = Float64(float32(g))
        !(isnan(w) || w == g || abs(w - g) <= tolerance)
    end
end

nan(T::Type, dims) = fill!(Array{T}(undef, dims), T === BFloat16 ? bfloat16(NaN32) : T(NaN))

function run_case(case)
    desc, arrays, expect = case.fields["desc"], case.arrays, case.expect
    options, q, k, v = options_of(case), (arrays[name] for name in ("q", "k", "v"))...
    T = get(desc, "dtype_o", 0) == LibFlashAttn.FLASHATTN_DTYPE_F32 ? Float32 : eltype(q)
    out = nan(T, (size(v, 1), Base.tail(size(q))...))
    lse = haskey(expect, "lse") ? nan(Float32, size(expect["lse"][1])) : nothing
    attention!(out, q, k, v; lse = lse, options...)
    @test wrong(expect["o"], out) == 0
    lse === nothing || @test wrong(expect["lse"], lse) == 0
    haskey(expect, "dq") || return false
    asked(name) = haskey(expect, name) ? nan(Float32, size(expect[name][1])) : nothing
    grads = (dq = nan(eltype(q), size(q)), dk = nan(eltype(k), size(k)), dv = nan(eltype(v), size(v)),
             dbias = asked("dbias"), dsink = asked("dsink"))
    attention_backward!(grads.dq, grads.dk, grads.dv, arrays["dout"], q, k, v, out, lse;
                        dlse = get(arrays, "dlse", nothing), dbias = grads.dbias,
                        dsink = grads.dsink, options...)
    for (name, given) in pairs(grads)
        given === nothing || @test wrong(expect[String(name)], given) == 0
    end
    return true
end

"A paragraph of refusals.txt: a case with some fields and values changed is refused as it says."
function run_refusal(text, cases)
    lines = map(split, split(text, "\n"))
    base = only(filter(case -> case.name == lines[1][3], cases))
    case = (name = lines[1][2], fields = deepcopy(base.fields), whole = base.whole,
            arrays = copy(base.arrays), expect = base.expect)
    for words in lines[2:end - 1]
        if words[1] == "desc"
            pairs = split.(words[2:end], "=")
            merge!(case.fields["desc"], Dict(p[1] => parse(Float64, p[2]) for p in pairs))
        else
            @assert words[1] == "values"
            case.arrays[words[2]] = parse.(Int32, split(words[3], ","))
        end
    end
    word, status, reason, field = lines[end]
    @assert word == "expect"
    check_refusal(() -> run_case(case), Symbol("ERROR_", status), Symbol(reason), String(field))
end

if isfile(joinpath(DATA, "cases.txt"))
    @testset "shared cases" begin
        cases = read_cases(DATA)
        backward = 0
        @testset "$(case.name)" for case in cases
            backward += run_case(case)
        end
        println("shared cases: $(length(cases)) forward, $backward backward")
        refusals = split(strip(read(joinpath(DATA, "refusals.txt"), String)), r"\n\n+")
        @testset "$(split(text)[2])" for text in refusals
            run_refusal(text, cases)
        end
        println("shared refusals: $(length(refusals))")
    end
else
    println("shared cases: skipped, there is no $(joinpath(DATA, "cases.txt"))")
end
