# The arrays that forward and backward share, checked against each other: flashattn_inputs.

"q, k, v and everything beside them. It keeps alive what `c` points to."
mutable struct Inputs
    c::C.flashattn_inputs
    shape::C.flashattn_shape
    q::Tensor
    k::Tensor
    v::Tensor
    layout::Symbol
    varlen_q::Bool
    varlen_k::Bool
    ragged::Bool  # some rows may be nobody's: they are not written
    bias::Any
    block_size::Any
    page_size::Int
    keep::Vector{Any}
    made::Vector{Any}  # of keep what is no caller's
end

function Inputs(q::AbstractArray, k::AbstractArray, v::AbstractArray; layout::Symbol = :dhsb,
                cu_seqlens_q = nothing, cu_seqlens_k = nothing,
                max_seqlen_q::Union{Nothing,Integer} = nothing,
                max_seqlen_k::Union{Nothing,Integer} = nothing, q_lens = nothing,
                kv_lens = nothing, page_table = nothing, page_layout::Symbol = :dhsp,
                first_page::Integer = 1, bias = nothing, alibi_slopes = nothing, sink = nothing,
                block_mask = nothing, block_size = nothing,
                seed::Union{Nothing,Integer} = nothing, offset::Integer = 0, unknown...)
    for name in keys(unknown)
        name in keywords(describe) && throw(ArgumentError(
            "$name = $(unknown[name]) is for the plan to say; give it to FlashAttention.Plan"))
        refuse_keyword(name, keywords(Inputs, describe))
    end
    varlen_q, varlen_k, paged = cu_seqlens_q !== nothing, cu_seqlens_k !== nothing,
                                page_table !== nothing
    kv_layout, kv_dims = paged ? page_layout : layout, varlen_k ? 3 : 4
    tq = Tensor(q, layout, varlen_q ? 3 : 4, "q")
    tk, tv = Tensor(k, kv_layout, kv_dims, "k"), Tensor(v, kv_layout, kv_dims, "v")
    check_heads(tq, tk, tv, paged ? "layout and page_layout" : "layout = :$layout")
    keep, made = Any[], Any[]
    # Converts, checks and keeps an array; its address for the library.
    function use(x, convert, wanted, name)
        x === nothing && return C_NULL
        given, x = x, convert(x)
        wanted === nothing || check_size(x, wanted, name)
        push!(keep, check_device(x, tq, name))
        x === given || push!(made, x)
        return address(x)
    end

    batch, seqlen_q, seqlen_k = tq.batch, tq.rows, tk.rows
    if varlen_q
        batch, seqlen_q = sequences(cu_seqlens_q, max_seqlen_q, "_q")
    else
        unused(max_seqlen_q, "max_seqlen_q", "cu_seqlens_q")
    end
    kv_batch = batch
    page_size = 0
    if varlen_k
        kv_batch, seqlen_k = sequences(cu_seqlens_k, max_seqlen_k, "_k")
    elseif paged
        page_size = tk.rows
        ndims(page_table) == 2 ||
            throw(DimensionMismatch("page_table has size $(size(page_table)); expected " *
                                    "(pages of a sequence, batch)"))
        kv_batch = size(page_table, 2)
        pages, held = size(page_table, 1), size(page_table, 1) * page_size
        seqlen_k = something(max_seqlen_k, held)
        seqlen_k <= held || throw(ArgumentError(
            "max_seqlen_k = $seqlen_k, but page_table has $pages pages of $page_size tokens for " *
            "a sequence, $held in all; give at most that, or a page_table with more rows"))
    else
        unused(max_seqlen_k, "max_seqlen_k", "cu_seqlens_k or page_table")
        kv_batch = tk.batch
    end
    batch == kv_batch || throw(DimensionMismatch(
        "k and v hold $kv_batch sequences, q holds $batch; give as many: repeat(k, outer = ...) " *
        "where all read the same keys"))
    heads = tq.heads
    bias, bias_strides = bias_of(bias, (seqlen_k, seqlen_q, heads, batch))
    block_mask === nothing && unused(block_size, "block_size", "block_mask")
    mask, mask_strides = blocks_of(block_mask, block_size, seqlen_q, seqlen_k, heads, batch)
    slopes = alibi_slopes === nothing || ndims(alibi_slopes) == 1 ? (heads,) : (heads, batch)
    c = C.flashattn_inputs(
        q = tq.c, k = tk.c, v = tv.c,
        cu_seqlens_q = use(cu_seqlens_q, int32, nothing, "cu_seqlens_q"),
        cu_seqlens_kv = use(cu_seqlens_k, int32, nothing, "cu_seqlens_k"),
        lens_q = use(q_lens, int32, (batch,), "q_lens"),
        lens_kv = use(kv_lens, int32, (batch,), "kv_lens"),
        page_table = use(page_table, x -> pages_from_0(x, first_page), nothing, "page_table"),
        page_table_stride = paged ? size(page_table, 1) : 0, pages = paged ? tk.batch : 0,
        bias = use(bias, identity, nothing, "bias"), bias_stride_row = bias_strides[1],
        bias_stride_head = bias_strides[2], bias_stride_batch = bias_strides[3],
        alibi_slopes = use(alibi_slopes, singles, slopes, "alibi_slopes"),
        alibi_stride_batch = length(slopes) == 2 ? heads : 0,
        sink = use(sink, singles, (heads,), "sink"),
        block_mask = use(mask, identity, nothing, "block_mask"),
        block_mask_stride_row = mask_strides[1], block_mask_stride_head = mask_strides[2],
        block_mask_stride_batch = mask_strides[3],
        rng_seed = word(something(seed, 0), "seed"), rng_offset = word(offset, "offset"))
    shape = C.flashattn_shape(
        batch = size32(batch, "batch"),
        seqlen_q = size32(seqlen_q, "the length of a query sequence"),
        seqlen_kv = size32(seqlen_k, "the length of a key sequence"),
        total_q = varlen_q ? tq.rows : 0, total_kv = varlen_k ? tk.rows : 0)
    ragged = varlen_q || varlen_k || q_lens !== nothing || kv_lens !== nothing
    return Inputs(c, shape, tq, tk, tv, layout, varlen_q, varlen_k, ragged, bias,
                  mask === nothing ? nothing : block_size, page_size, keep, made)
end

function check_heads(q::Tensor, k::Tensor, v::Tensor, layout::String)
    types = map(t -> eltype(t.array), (q, k, v))
    foreach(dtype, types, ("q", "k", "v"))
    types[1] === types[2] === types[3] || throw(ArgumentError(
        "q, k, v have elements $(join(types, ", ")); they must be the same: convert two of them"))
    device(q) == device(k) == device(v) ||
        throw(ArgumentError("q, k, v lie on different devices; move them to one"))
    q.dim == k.dim || throw(DimensionMismatch(
        "k has head dimension $(k.dim), q has $(q.dim); give both the same first dimension"))
    Base.tail(size(k.array)) == Base.tail(size(v.array)) || throw(DimensionMismatch(
        "k has size $(size(k.array)), v has $(size(v.array)); only their first may differ"))
    k.heads == 0 || q.heads % k.heads == 0 || throw(DimensionMismatch(
        "q has $(q.heads) heads, which is no multiple of the $(k.heads) heads of k and v, by " *
        "$layout; (dim, head, sequence, batch) is layout = :dhsb, (dim, sequence, head, batch) is " *
        "layout = :dshb"))
end

unused(::Nothing, name::String, needed::String) = nothing
unused(x, name::String, needed::String) = throw(ArgumentError(
    "$name = $x is given without $needed, and would be ignored; leave it out, or give $needed"))

"How many sequences offsets bound, and how long the longest is."
function sequences(cu::AbstractVector, longest::Union{Nothing,Integer}, side::String)
    isempty(cu) && throw(ArgumentError(
        "cu_seqlens$side is empty; it holds one number more than there are sequences"))
    if longest === nothing
        storage(cu) isa Array || cu isa AbstractRange || throw(ArgumentError(
            "max_seqlen$side is needed where cu_seqlens$side lies on a device"))
        # What decreases is the library's to refuse.
        longest = reduce(max, diff(Int64.(cu)); init = 0)
    end
    return length(cu) - 1, longest
end
sequences(cu, longest, side::String) =
    throw(DimensionMismatch("cu_seqlens$side must be a vector of batch + 1 integers"))

"Sizes with trailing ones, and the strides of rows, heads, sequences: 0 where it is broadcast."
function broadcast_of(x::AbstractArray, wanted::NTuple{4,Int}, name::String, order::String)
    n = ntuple(d -> size(x, d), 4)
    ndims(x) <= 4 && n[1] == wanted[1] && all(d -> n[d] in (1, wanted[d]), 2:4) ||
        throw(DimensionMismatch("$name has size $(size(x)); expected $order = $wanted, 1 in any " *
                                "place but the first to repeat it"))
    device(storage(x))
    s = steps(x)
    wanted[1] <= 1 || s[1] == 1 ||
        throw(ArgumentError("$name has stride $(s[1]) in its first dimension; copy it"))
    strides = ntuple(d -> n[d + 1] == 1 ? 0 : s[d + 1], 3)
    any(strides .< 0) && throw(ArgumentError("$name has a negative stride; copy it"))
    return strides
end

bias_of(::Nothing, wanted) = (nothing, (0, 0, 0))
function bias_of(bias::AbstractArray, wanted::NTuple{4,Int})
    bias = bytes(bias)
    dtype(eltype(bias), "bias"; mask = true)
    return bias, broadcast_of(bias, wanted, "bias", "(keys, queries, heads, batch)")
end

function blocks_of(mask, block_size, seqlen_q, seqlen_k, heads, batch)
    mask === nothing && return nothing, (0, 0, 0)
    block_size isa Tuple{Integer,Integer} && all(block_size .>= 1) || throw(ArgumentError(
        "block_size = $block_size; a block_mask needs block_size = (queries, keys), both at " *
        "least 1"))
    mask = bytes(mask)
    eltype(mask) in (Bool, UInt8) || throw(ArgumentError(
        "block_mask has elements $(eltype(mask)); give Bool, or UInt8 with 0 = hidden"))
    rows, columns = cld(seqlen_q, block_size[1]), cld(seqlen_k, block_size[2])
    strides = broadcast_of(mask, (columns, rows, heads, batch), "block_mask",
                           "(key blocks, query blocks, heads, batch)")
    # Rows cannot repeat: to the library a stride of 0 is a packed one.
    size(mask, 2) == rows || throw(DimensionMismatch(
        "block_mask has size $(size(mask)); expected $rows query blocks"))
    return mask, strides
end

"Page numbers as the library counts them. They are copied unless they are that already."
function pages_from_0(table::AbstractMatrix, first_page::Integer)
    first_page in (0, 1) || throw(ArgumentError(
        "first_page = $first_page; give 0 or 1, the number that page_table has for the first page"))
    table isa AbstractMatrix{<:Integer} || return int32(table)  # which says what is wrong
    return first_page == 0 ? int32(table) : (page -> Int32(page - 1)).(table)
end

"Dropout must not drop the same weights in every call without being told."
check_seed(dropout::Real, seed) = dropout == 0 || seed !== nothing || throw(ArgumentError(
    "dropout = $dropout without a seed would drop the same weights in every call; give seed = " *
    "rand(UInt64), or a seed with an offset of its own for each call, and in attention_backward " *
    "those of its forward call"))

function word(x::Integer, name::String)
    0 <= x <= typemax(UInt64) || throw(ArgumentError("$name = $x is not in [0, 2^64)"))
    return UInt64(x)
end

"The fields of a descriptor that follow from the arrays, as keywords of `describe`."
function facts(x::Inputs)
    kind, index = device(x.q)
    return (heads = x.q.heads, kv_heads = x.k.heads, dim = x.q.dim, dim_v = x.v.dim,
            varlen_q = x.varlen_q, varlen_k = x.varlen_k, page_size = x.page_size,
            bias = x.bias === nothing ? nothing : eltype(x.bias),
            alibi = x.c.alibi_slopes != C_NULL, sink = x.c.sink != C_NULL,
            block_size = x.block_size,
            device = kind == C.FLASHATTN_DEVICE_CPU ? :cpu : :cuda, device_index = index)
end
