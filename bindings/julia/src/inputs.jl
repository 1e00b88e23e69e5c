# The arrays that forward and backward share, checked against each other, in flashattn_args.

"The arrays of the header's table that are read beside q, k and v."
const BESIDE = filter(field -> field.role === :input, C.ARRAYS.flashattn_args)
"Results of forward beside o: those that a feature asks for, and the names of those that may be given."
const RESULTS = filter(field -> field.role === :output && field.field === :features,
                       C.ARRAYS.flashattn_args)
const OUTPUTS = [field.name for field in C.ARRAYS.flashattn_args
                 if field.role === :output && startswith(field.condition, "optional")]
"Numbers of the descriptor that say how such an array is read, and which ones."
const NUMBERS = [:block_q, :block_kv, :tree, :descale_block, :descale_dim]
"All keywords of Inputs."
const TAKEN = union([:layout, :page_layout, :first_page, :first_block, :max_seqlen_q, :max_seqlen_kv,
                     :rng_seed, :rng_offset, :parallel], map(field -> field.name, BESIDE), NUMBERS)
"Arrays that count entries of block_index."
const COUNTING = (:block_begin, :block_end)

"q, k, v and everything beside them. It keeps alive what `args` points to."
mutable struct Inputs
    args::Base.RefValue{C.flashattn_args}
    q::Tensor
    k::Tensor
    v::Tensor
    layout::Symbol
    ragged::Bool  # padding rows are not written
    parallel::Bool  # on Julia's threads
    arrays::Dict{Symbol,Any}  # those beside, as the library reads them
    sizes::Dict{Symbol,Int}   # by the header's names
    made::Vector{Any}         # copies that a call made for itself
end

Inputs(q::AbstractArray, k::AbstractArray, v::AbstractArray; options...) =
    Inputs(q, k, v, Dict{Symbol,Any}(options))

function Inputs(q::AbstractArray, k::AbstractArray, v::AbstractArray, options::Dict{Symbol,Any})
    for (name, value) in options
        name in TAKEN && continue
        name in DESCRIBED && throw(ArgumentError(
            "$name = $value is for the plan to say; give it to FlashAttention.Plan"))
        refuse_keyword(name, union(TAKEN, DESCRIBED))
    end
    given(name) = get(options, name, nothing)
    layout = get(options, :layout, :dhsb)
    varlen_q, varlen_kv, paged = given(:cu_seqlens_q) !== nothing,
                                 given(:cu_seqlens_kv) !== nothing, given(:page_table) !== nothing
    kv_layout, kv_dims = paged ? get(options, :page_layout, :dhsp) : layout, varlen_kv ? 3 : 4
    tq = Tensor(q, layout, varlen_q ? 3 : 4, "q")
    tk, tv = Tensor(k, kv_layout, kv_dims, "k"), Tensor(v, kv_layout, kv_dims, "v")
    paged && check_pages(tk, "k")
    check_heads(tq, tk, tv, paged ? "layout and page_layout" : "layout = :$layout",
                given(:descale_latent) !== nothing)

    batch, seqlen_q = varlen_q ? sequences(given(:cu_seqlens_q), given(:max_seqlen_q), "_q") :
                      (tq.batch, tq.rows)
    varlen_q || unused(given(:max_seqlen_q), "max_seqlen_q", "cu_seqlens_q")
    if varlen_kv
        kv_batch, seqlen_kv = sequences(given(:cu_seqlens_kv), given(:max_seqlen_kv), "_kv")
    elseif paged
        kv_batch, seqlen_kv = pages(given(:page_table), given(:max_seqlen_kv), tk.rows)
    else
        unused(given(:max_seqlen_kv), "max_seqlen_kv", "cu_seqlens_kv or page_table")
        kv_batch, seqlen_kv = tk.batch, tk.rows
    end
    batch == kv_batch || refuse(:SIZE, paged ? :page_table : varlen_kv ? :cu_seqlens_kv : :k,
        "k and v hold $kv_batch sequences, q holds $batch; give as many: repeat(k, outer = ...) " *
        "where all read the same keys")

    sizes = Dict{Symbol,Int}(
        :batch => size32(batch, "batch"), :seqlen_q => size32(seqlen_q, "seqlen_q"),
        :seqlen_kv => size32(seqlen_kv, "seqlen_kv"), :total_q => varlen_q ? tq.rows : 0,
        :total_kv => varlen_kv ? tk.rows : 0, :heads_q => tq.heads, :heads_kv => tk.heads,
        :dim_qk => tq.dim, :dim_v => tv.dim, :page_size => paged ? tk.rows : 0,
        :block_entries => block_entries(given))
    for name in NUMBERS
        sizes[name] = size32(get(options, name, 0), String(name))
        users = name in (:block_q, :block_kv) ? [:block_mask, :block_index] :
                [field.name for field in BESIDE if any(e -> name in (e.size, e.by), field.sizes)]
        sizes[name] == 0 || any(user -> given(user) !== nothing, users) ||
            unused(sizes[name], String(name), join(users, " or "))
    end
    args = Ref(C.flashattn_args(
        batch = batch, seqlen_q = seqlen_q, seqlen_kv = seqlen_kv, total_q = sizes[:total_q],
        total_kv = sizes[:total_kv], q = tq.c, k = tk.c, v = tv.c, pages = paged ? tk.batch : 0,
        block_entries = sizes[:block_entries],
        rng_seed = word(something(given(:rng_seed), 0), "rng_seed"),
        rng_offset = word(get(options, :rng_offset, 0), "rng_offset")))
    ragged = any(name -> given(name) !== nothing,
                 (:cu_seqlens_q, :cu_seqlens_kv, :lens_q, :lens_kv, :starts_kv))
    parallel = is_parallel(get(options, :parallel, false))
    inputs = Inputs(args, tq, tk, tv, layout, ragged, parallel, Dict{Symbol,Any}(), sizes, Any[])
    for field in BESIDE
        x = given(field.name)
        x === nothing && continue
        read = about(field.name) do
            field.name === :page_table ? from_0(x, get(options, :first_page, 1), :first_page) :
            field.name === :block_index ? from_0(x, get(options, :first_block, 1), :first_block) :
            readable(field, x)
        end
        read === x || push!(inputs.made, read)
        inputs.arrays[field.name] = read
        if field.name === :descale_latent
            set!(args, field.name, latent_descales(read, kv_layout, kv_dims, inputs))
            continue
        end
        place!(args, field, read, inputs)
    end
    return inputs
end

"An array that is read, with elements as the library has them: a copy, unless it is that already."
function readable(field::C.ArrayField, x)
    x isa AbstractArray || refuse(:DTYPE, field.name, "$(field.name) = $(repr(x)); expected an array")
    field.type === :i32 && return int32(x)
    field.type === :f32 && return singles(x)
    return bytes(x)
end

const ELEMENT_TYPES = (i32 = (Int32,), f32 = (Float32,), u8 = (Bool, UInt8), u32 = (UInt32,),
                       u64 = (UInt64,))

"""
Writes an array of the header's table where the library reads it. Where it has strides, sizes of 1
but the first are repeated, or summed over when they are written.
"""
place!(args, field::C.ArrayField, x::AbstractArray, inputs::Inputs) =
    place!(args, field, x, inputs.sizes, inputs.q, haskey(inputs.arrays, :cu_seqlens_q))

place!(args, field::C.ArrayField, x::AbstractArray, sizes::Dict{Symbol,Int}, model::Tensor,
       varlen::Bool) =
    about(() -> place_named!(args, field, x, sizes, model, varlen), field.name)

function place_named!(args, field::C.ArrayField, x::AbstractArray, sizes::Dict{Symbol,Int},
                      model::Tensor, varlen::Bool)
    name = String(field.name)
    if haskey(ELEMENT_TYPES, field.type)
        known = ELEMENT_TYPES[field.type]
        eltype(x) in known || refuse(:DTYPE, name,
            "$name has elements $(eltype(x)); expected $(join(known, " or "))" *
            (field.type === :u8 ? ", 0 = hidden" : ""))
    else
        dtype(eltype(x), name; mask = field.type === :dtype_bias)
    end
    check_device(x, model, name)
    extents = varlen && !isempty(field.varlen) ? field.varlen : field.sizes
    wanted = full_size(field, sizes, varlen)
    # Rows of a page table may be longer than a call needs them.
    field.name === :page_table && (wanted = (size(x, 1), wanted[2]))
    if field.tensor
        steps = broadcast_of(x, wanted, name)
        strides = Dict(e.stride => step for (e, step) in zip(extents[2:end], steps))
        set!(args, field.name, C.flashattn_tensor(; data = address(x), strides...))
    else
        isdense(check_size(x, wanted, name)) || refuse(:STRIDE, name, "$name has gaps; copy it")
        set!(args, field.name, address(x))
    end
    return x
end

"The size of an array of the header's table in full."
full_size(field::C.ArrayField, sizes::Dict{Symbol,Int}, varlen::Bool) =
    Tuple(extent(e, field, sizes)
          for e in (varlen && !isempty(field.varlen) ? field.varlen : field.sizes))

"A size of the header's table."
function extent(e::C.Extent, field::C.ArrayField, sizes::Dict{Symbol,Int})
    number(x::Symbol) = sizes[x]
    number(x::Int) = x
    whole = number(e.size) + e.more
    e.by === nothing && return whole
    by = number(e.by)
    # 0 is all of it where the array can do without, as descale_block.
    by == 0 && field.field !== nothing && refuse(:SIZE, e.by,
        "$(e.by) = 0; $(field.name) needs it, the tokens of a block, at least 1")
    return by == 0 ? Int(whole > 0) : cld(whole, by)
end

"The factors of a latent cache, which lie as v does."
function latent_descales(x::AbstractArray, layout::Symbol, n::Int, inputs::Inputs)
    step = inputs.sizes[:descale_dim]
    step > 0 || refuse(:SIZE, "descale_dim",
        "descale_dim = 0; descale_latent needs it, the elements of v that share a factor, at least 1")
    t = Tensor(x, layout, n, "descale_latent")
    check_size(x, like(inputs.v, cld(inputs.v.dim, step)), "descale_latent")
    check_device(x, inputs.q, "descale_latent")
    return t.c
end

"latent: a key is a row of v, of 8 bits, and behind it one of k, of the type of q."
function check_heads(q::Tensor, k::Tensor, v::Tensor, layout::String, latent::Bool)
    types = map(t -> eltype(t.array), (q, k, v))
    foreach(dtype, types, ("q", "k", "v"))
    latent && (types[2] !== types[1] || !(types[3] in CACHE_8BIT)) && refuse(:DTYPE, "k",
        "q, k, v have elements $(join(types, ", ")); with descale_latent k must be as q, and v " *
        "F8E4M3 or Int8: convert them")
    latent || types[2] === types[3] && types[2] in (types[1], CACHE_8BIT...) ||
        refuse(:DTYPE, types[2] === types[3] ? "k" : "v",
            "q, k, v have elements $(join(types, ", ")); they must be the same, or k and v F8E4M3 or Int8: " *
            "convert two of them")
    device(q) == device(k) == device(v) || refuse(:NO_DEVICE, device(q) == device(k) ? "v" : "k",
        "q, k, v lie on different devices; move them to one")
    latent && q.dim != k.dim + v.dim && refuse(:HEAD_DIM_PAIR, "k",
        "k has head dimension $(k.dim), v has $(v.dim), q has $(q.dim); with descale_latent those of k " *
        "and v must add up to that of q")
    latent || q.dim == k.dim || refuse(:HEAD_DIM_PAIR, "k",
        "k has head dimension $(k.dim), q has $(q.dim); give both the same first dimension")
    Base.tail(size(k.array)) == Base.tail(size(v.array)) || refuse(:SIZE, "v",
        "k has size $(size(k.array)), v has $(size(v.array)); only their first may differ")
    q.heads % k.heads == 0 || refuse(:HEAD_RATIO, "heads_kv",
        "q has $(q.heads) heads, which is no multiple of heads_kv = $(k.heads), the heads of k and " *
        "v, by $layout; (dim, head, sequence, batch) is layout = :dhsb, (dim, sequence, head, " *
        "batch) is layout = :dshb")
end

unused(::Nothing, name::String, needed::String) = nothing
unused(x, name::String, needed::String) = refuse(:VALUE, name,
    "$name = $x is given without $needed, and would be ignored; leave it out, or give $needed")

"How many sequences offsets bound, and how long the longest is."
function sequences(cu::AbstractVector, longest::Union{Nothing,Integer}, side::String)
    isempty(cu) && refuse(:LENGTHS, "cu_seqlens$side",
        "cu_seqlens$side is empty; it holds one number more than there are sequences")
    if longest === nothing
        storage(cu) isa Array || cu isa AbstractRange || refuse(:LENGTHS, "seqlen$side",
            "max_seqlen$side is needed where cu_seqlens$side lies on a device")
        # The library refuses sums that decrease.
        longest = reduce(max, diff(Int64.(cu)); init = 0)
    end
    return length(cu) - 1, longest
end
sequences(cu, longest, side::String) =
    refuse(:SIZE, "cu_seqlens$side", "cu_seqlens$side must be a vector of batch + 1 integers")

"How many sequences a page table has, and what bounds their length."
function pages(table::AbstractMatrix, longest, page_size::Int)
    rows, held = size(table, 1), size(table, 1) * page_size
    seqlen_kv = something(longest, held)
    seqlen_kv <= held || refuse(:SIZE, "seqlen_kv",
        "max_seqlen_kv = $seqlen_kv, but page_table has $rows pages of $page_size tokens for a " *
        "sequence, $held in all; give at most that, or a page_table with more rows")
    return size(table, 2), seqlen_kv
end
pages(table, longest, page_size::Int) = refuse(:SIZE, "page_table",
    "page_table has size $(size(table)); expected (pages of a sequence, batch)")

"The strides of all indices but the first; 0 where a size of 1 stands for all."
function broadcast_of(x::AbstractArray, wanted::Tuple, name::String)
    rank = length(wanted)
    n = ntuple(d -> size(x, d), rank)
    ndims(x) <= rank && n[1] == wanted[1] && all(d -> n[d] in (1, wanted[d]), 2:rank) ||
        refuse(name == "bias" ? :BIAS : :SIZE, name, "$name has size $(size(x)); expected " *
               "$wanted, 1 in any place but the first to repeat it")
    s = steps(x)
    wanted[1] <= 1 || s[1] == 1 ||
        refuse(:STRIDE, name, "$name has stride $(s[1]) in its first dimension; copy it")
    strides = ntuple(d -> n[d + 1] == 1 ? 0 : s[d + 1], rank - 1)
    any(strides .< 0) && refuse(:STRIDE, name, "$name has a negative stride; copy it")
    return strides
end

"""
Numbers of pages or blocks as the library counts them. They are copied unless they are that already.
`option` has the number of the first.
"""
function from_0(numbers::AbstractArray, first::Integer, option::Symbol)
    first in (0, 1) || refuse(:VALUE, "",
        "$option = $first; give 0 or 1, the number that the first of them has")
    numbers isa AbstractArray{<:Integer} || return int32(numbers)  # which says what is wrong
    # What is no Int32 is the number of none as well.
    return first == 0 ? int32(numbers) :
           (n -> n < 1 ? Int32(-1) : n > typemax(Int32) ? typemax(Int32) : Int32(n - 1)).(numbers)
end

"The entries of a list of blocks. `given`: what is given by a name, or nothing."
function block_entries(given)
    index = given(:block_index)
    if index === nothing
        for name in COUNTING
            given(name) === nothing || refuse(:VALUE, name,
                "$name is given without block_index, whose entries it counts; give that, too, or " *
                "leave it out")
        end
        return 0
    end
    given(:block_mask) === nothing || refuse(:MASK_COMBINATION, "block_mask",
        "block_mask and block_index are both given, but each says alone which blocks are on; leave " *
        "one out")
    index isa AbstractArray || refuse(:DTYPE, "block_index",
        "block_index = $(repr(index)); expected an array")
    return size(index, 1)
end

"Dropout must not drop the same weights in every call without being told."
check_seed(dropout::Real, seeded::Bool) = dropout == 0 || seeded || refuse(:DROPOUT, "rng_seed",
    "dropout = $dropout without a seed would drop the same weights in every call; give rng_seed = " *
    "rand(UInt64), or a seed with an rng_offset of its own for each call, and in " *
    "attention_backward those of its forward call")

function word(x::Integer, name::String)
    0 <= x <= typemax(UInt64) || refuse(:VALUE, name, "$name = $x is not in [0, 2^64)")
    return UInt64(x)
end

"The keywords of `describe` that follow from the arrays."
function plan_key(x::Inputs)
    kind, index = device(x.q)
    key = Dict{Symbol,Any}(name => x.sizes[name] for name in
                           (:heads_q, :heads_kv, :dim_qk, :dim_v, :page_size, NUMBERS...))
    key[:dtype_kv] = eltype(x.v.array)
    key[:device] = kind == C.FLASHATTN_DEVICE_CPU ? :cpu : :cuda
    key[:device_index] = index
    for field in BESIDE
        haskey(x.arrays, field.name) || continue
        # The bit that the array belongs to, unless a number says it.
        for (keyword, member, bit) in BITS
            member === field.field && bit == field.bit && keyword in FLAGS && (key[keyword] = true)
        end
        startswith(String(field.type), "dtype_") && (key[field.type] = eltype(x.arrays[field.name]))
    end
    return key
end
