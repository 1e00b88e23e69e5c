# New keys and values into a cache: flashattn_append_kv.

const APPEND = C.ARRAYS.flashattn_append_kv_args
"All keywords of append_kv!: the arrays of the header's table but one, and others."
const APPENDED = union([:rotary_base, :rotary_dim, :rotary_interleaved, :first_page, :max_seqlen_q,
                        :max_seqlen_kv, :layout, :cache_layout, :descale_block, :update_descales, :q_out,
                        :threads, :multiprocessors, :parallel],
                       filter(!=(:lens_kv), map(field -> field.name, APPEND)))

"""
    append_kv!(k_cache, v_cache, lens_kv, k = nothing, v = nothing, q = nothing; options...)

Writes new keys and values behind those in a cache, and rotates them and q:

    q, lens = append_kv!(k_cache, v_cache, lens, k, v, q; rotary_base = 10000)
    o = attention(q, k_cache, v_cache; lens_kv = lens, causal = true)

Returns `(q = ..., lens_kv = ...)`: q rotated, `nothing` without q; and the tokens that the cache now
holds, `nothing` without k and v.

- `k_cache`, `v_cache`: (dim, heads_kv, capacity, batch), written from token lens_kv[b] + 1 on; with
  `page_table` (dim, heads_kv, page_size, pages), with `cu_seqlens_kv` (dim, heads_kv, total). Elements
  of k, `F8E4M3` or `Int8`. `nothing` without k or v
- `lens_kv`: (batch,) integers, tokens in the cache
- `k`, `v`, `q`: (dim, heads, tokens, batch), or with `cu_seqlens_q` (dim, heads, total); each may be
  `nothing`. Float32, Float16 or BFloat16
- `rotary_cos`, `rotary_sin`: (rotary_dim / 2, positions), column p + 1 for position p: rotate the
  first rotary_dim elements of q and k (Su et al. 2021). Or `rotary_base`, usually 10000, for angles
  position · rotary_base^(-2c / rotary_dim) of pair c; `rotary_dim`: all of a head, if not given
- `rotary_interleaved = false`: the halves of the rotated part are pairs; `true`: neighbours are
- `positions`: (batch,) integers, the position of each sequence's first new token, from 0; if not
  given lens_kv - starts_kv
- `cu_seqlens_q`, `cu_seqlens_kv`, `lens_q`, `starts_kv`, `page_table`, `first_page`, `max_seqlen_q`,
  `max_seqlen_kv`, `threads`, `multiprocessors`, `parallel`: as in [`attention`](@ref) and its relatives
- `layout = :dhsb`, `cache_layout`: the order of q, k, v, and of the caches (that of q, k, v; pages
  `:dhsp`)
- `descale_k`, `descale_v`, `descale_block`: Float32 (blocks, heads_kv, batch) of a cache of F8E4M3 or Int8:
  k times 1 / descale_k is rounded
- `update_descales = false`: `true` makes descale_k and descale_v, Arrays of that size in full, for the
  new tokens: a block's largest magnitude over 448 (Int8: 127), with `descale_block` > 1 the next power
  of two. Where a block grows beyond its descale, what it held is rounded again: its pages must be of
  this sequence alone
- `q_out`: written and returned as q; q itself will do
- `lens_out`: (batch,) Int32, written and returned; lens_kv itself is incremented in place

Throws as [`attention`](@ref) does; on a CPU also for tokens that have no room or no page. On a GPU
those are left out.
"""
append_kv!(k_cache, v_cache, lens_kv, k = nothing, v = nothing, q = nothing; options...) =
    append_tokens(Dict{Symbol,Any}(:q => q, :k => k, :v => v),
                  Dict{Symbol,Any}(:k => k_cache, :v => v_cache), lens_kv,
                  Dict{Symbol,Any}(options))

"New tokens and their cache: the arrays of q, k and v that are given, and what all agree in."
struct Appending
    tensors::Dict{Symbol,Tensor}
    caches::Dict{Symbol,Tensor}
    model::Tensor  # of the new tokens
    cache::Tensor
    packed::Bool
    packed_cache::Bool
    layout::Symbol
    dims::Dict{Symbol,Int}
end

# By dictionaries, so that Julia compiles one method for whatever is given.
function append_tokens(given::Dict{Symbol,Any}, caches::Dict{Symbol,Any}, @nospecialize(lens_kv),
                       options::Dict{Symbol,Any})
    for name in keys(options)
        name in APPENDED || refuse_keyword(name, APPENDED, "append_kv!")
    end
    option(name, default = nothing) = get(options, name, default)
    parallel = is_parallel(option(:parallel, false))
    updates = option(:update_descales, false)
    updates isa Bool || refuse(:DTYPE, :update_descales,
        "update_descales = $(repr(updates)); expected true or false")
    x = appending(given, caches, options)
    sizes = sizes_appended(x, options)
    lens_kv === nothing && refuse(:NULL_POINTER, :lens_kv, "lens_kv is nothing; give the tokens that " *
        "the cache holds of each sequence, zeros(Int32, batch) at first")

    stored, narrow = eltype(x.cache.array), eltype(x.cache.array) in CACHE_8BIT
    wide = stored === Int8 ? eltype(x.model.array) : stored  # no queries of Int8
    plan = cached_plan(describe(wide, Dict{Symbol,Any}(x.dims..., :dtype_kv => stored,
        :dtype_o => narrow ? Float32 : nothing, :varlen_q => x.packed,
        :varlen_kv => x.packed_cache, :page_size => sizes[:page_size], :descale_block => narrow ? sizes[:descale_block] : 0,
        :threads => option(:threads, 0), :multiprocessors => option(:multiprocessors, 0),
        pairs(device_of(x.cache.array))...)))
    args = Ref(C.flashattn_append_kv_args(
        batch = sizes[:batch], seqlen_q = sizes[:seqlen_q], seqlen_kv = sizes[:seqlen_kv],
        total_q = x.packed ? x.model.rows : 0, total_kv = x.packed_cache ? x.cache.rows : 0,
        dtype = dtype(eltype(x.model.array)),
        pages = sizes[:page_size] > 0 ? x.cache.batch : 0, update_descales = updates))
    made, read = Any[], Any[]
    set_rotary!(args, x, sizes, options)
    options[:lens_kv] = lens_kv
    options[:lens_out] = lens = lens_after(x, option(:lens_out), sizes[:batch])
    for field in APPEND
        name, array = field.name, option(field.name)
        array === nothing && continue
        written = field.role === :output || (updates && name in (:descale_k, :descale_v))
        push!(read, about(name) do
            field.role === :output ? array :
            name === :page_table ? from_0(array, option(:first_page, 1), :first_page) : readable(field, array)
        end)
        written && read[end] !== array && refuse(:DTYPE, name,
            "$name is a $(typeof(array)), of which a copy would be written; give an Array{Float32}")
        read[end] === array || push!(made, read[end])
        place!(args, field, read[end], sizes, x.cache, x.packed)
    end
    for (name, member, cache) in ((:q, :q, :q), (:k, :k, :k_cache), (:v, :v, :v_cache))
        haskey(x.tensors, name) || continue
        set!(args, member, x.tensors[name].c)
        name === :q || set!(args, cache, x.caches[name].c)
    end
    turned = rotated_q(x, option(:q_out), x.packed || option(:lens_q) !== nothing)
    turned === nothing || set!(args, :q_out, turned.c)
    GC.@preserve x turned lens read options begin
        run_on(C.flashattn_append_kv, args, parallel) do f
            checked(() -> f(plan, args, stream(storage(x.cache.array))), args)
        end
    end
    foreach(release, made)
    return (q = turned === nothing ? nothing : turned.array, lens_kv = lens)
end

"Those arrays that are given, as Tensors."
named_tensors(arrays::Dict{Symbol,Any}, layout::Symbol, n::Int, suffix = "") =
    Dict{Symbol,Tensor}(name => Tensor(x, layout, n, "$name$suffix")
                        for (name, x) in arrays if x !== nothing)

"Those of q, k and v that are there, with their names."
in_order(tensors, names = (:q, :k, :v)) =
    [(name, tensors[name]) for name in names if haskey(tensors, name)]

function appending(given::Dict{Symbol,Any}, caches::Dict{Symbol,Any}, options::Dict{Symbol,Any})
    paged, packed, packed_cache = (get(options, name, nothing) !== nothing for name in
                                   (:page_table, :cu_seqlens_q, :cu_seqlens_kv))
    layout = get(options, :layout, :dhsb)
    order = something(get(options, :cache_layout, nothing),
                      paged ? :dhsp : packed && !packed_cache ? :dhsb : layout)
    tensors = named_tensors(given, layout, packed ? 3 : 4)
    caches = named_tensors(caches, order, packed_cache ? 3 : 4, "_cache")
    isempty(caches) && refuse(:NULL_POINTER, :k_cache, "k_cache and v_cache are nothing; give one")
    isempty(tensors) && refuse(:NULL_POINTER, :k, "k, v and q are nothing; give one")
    (first_name, model), (_, cache) = first(in_order(tensors)), first(in_order(caches))
    T, stored = eltype(model.array), eltype(cache.array)
    for (name, t) in in_order(caches)
        paged && check_pages(t, "$(name)_cache")
        eltype(t.array) in (T, CACHE_8BIT...) && eltype(t.array) === stored || refuse(:DTYPE, "$(name)_cache",
            "$(name)_cache has elements $(eltype(t.array)), new tokens $T; give caches of $T, or both " *
            "of F8E4M3 or Int8")
        check_device(t.array, cache, "$(name)_cache")
        (t.heads, t.rows, t.batch) == (cache.heads, cache.rows, cache.batch) ||
            refuse(:SIZE, "$(name)_cache", "$(name)_cache has size $(size(t.array)), k_cache " *
                                           "$(size(cache.array)); only their first may differ")
    end
    # An array that is left out counts as one of those that are given.
    dim_qk = first(in_order(Base.merge(tensors, caches), (:k, :q, :v)))[2].dim
    dims = Dict(:dim_qk => dim_qk, :dim_v => haskey(caches, :v) ? caches[:v].dim : dim_qk,
                :heads_q => haskey(tensors, :q) ? tensors[:q].heads : cache.heads,
                :heads_kv => cache.heads)
    for (name, t) in in_order(tensors)
        name === :q || haskey(caches, name) || refuse(:NULL_POINTER, "$(name)_cache",
            "$name is given without $(name)_cache, where it is to be written; give both")
        dtype(eltype(t.array), String(name))
        eltype(t.array) === T || refuse(:DTYPE, name,
            "$name has elements $(eltype(t.array)), $first_name $T; give both of one type")
        check_device(t.array, cache, String(name))
        dim = dims[name === :v ? :dim_v : :dim_qk]
        (t.batch, t.rows, t.dim) == (model.batch, model.rows, dim) &&
            (name === :q || t.heads == cache.heads) || refuse(:SIZE, name,
            "$name has size $(size(t.array)); expected $(model.rows) tokens of $(model.batch) " *
            "sequences by layout = :$layout, with $(cache.heads) heads (q: any multiple) of $dim " *
            "elements, as the cache and the other arrays have")
    end
    return Appending(tensors, caches, model, cache, packed, packed_cache, layout, dims)
end

"Sizes, by the header's names."
function sizes_appended(x::Appending, options::Dict{Symbol,Any})
    option(name) = get(options, name, nothing)
    batch, seqlen_q = x.packed ? sequences(option(:cu_seqlens_q), option(:max_seqlen_q), "_q") :
                      (x.model.batch, x.model.rows)
    x.packed || unused(option(:max_seqlen_q), "max_seqlen_q", "cu_seqlens_q")
    table = option(:page_table)
    longest = option(:max_seqlen_kv)
    held, seqlen_kv = table !== nothing ? pages(table, longest, x.cache.rows) :
                      x.packed_cache ? sequences(option(:cu_seqlens_kv), longest, "_kv") :
                      (x.cache.batch, x.cache.rows)
    table === nothing && !x.packed_cache &&
        unused(longest, "max_seqlen_kv", "page_table or cu_seqlens_kv")
    holder = table !== nothing ? :page_table : x.packed_cache ? :cu_seqlens_kv : :k_cache
    held == batch || refuse(:SIZE, holder,
        "$holder holds $held sequences, the new tokens are of $batch; give as many")
    block = get(options, :descale_block, 0)
    block == 0 || any(name -> option(name) !== nothing, (:descale_k, :descale_v)) ||
        unused(block, "descale_block", "descale_k or descale_v")
    return Dict{Symbol,Int}(:batch => size32(batch, "batch"), :seqlen_q => size32(seqlen_q, "seqlen_q"),
        :seqlen_kv => size32(seqlen_kv, "seqlen_kv"), :heads_kv => x.cache.heads,
        :page_size => table === nothing ? 0 : x.cache.rows,
        :descale_block => size32(block, "descale_block"))
end

function set_rotary!(args, x::Appending, sizes::Dict{Symbol,Int}, options::Dict{Symbol,Any})
    cos, sin, base, dim = (get(options, name, nothing) for name in
                           (:rotary_cos, :rotary_sin, :rotary_base, :rotary_dim))
    interleaved = get(options, :rotary_interleaved, false)
    interleaved isa Bool || refuse(:DTYPE, :rotary,
        "rotary_interleaved = $(repr(interleaved)), of which rotary is made; expected true or false")
    (cos === nothing) == (sin === nothing) && (cos === nothing || base === nothing) ||
        refuse(:NULL_POINTER, :rotary_cos, "rotary_cos and rotary_sin go together, and not with " *
               "rotary_base; give both tables or a base")
    if cos === nothing && base === nothing
        dim === nothing && !interleaved || refuse(:VALUE, :rotary_base,
            "rotary_dim or rotary_interleaved is given without rotary_base or tables, and would be " *
            "ignored; give rotary_base = 10000, or leave it out")
        return nothing
    end
    interleaved && set!(args, :rotary, C.FLASHATTN_ROTARY_INTERLEAVED)
    if cos === nothing
        base isa Real || refuse(:DTYPE, :rotary_base,
            "rotary_base = $(repr(base)); expected a number")
        set!(args, :rotary_base, Float32(base))
        set!(args, :rotary_dim, size32(something(dim, x.dims[:dim_qk]), "rotary_dim"))
        return nothing
    end
    wanted = size(cos)
    length(wanted) == 2 && (dim === nothing || 2 * wanted[1] == dim) ||
        refuse(:SIZE, :rotary_cos, "rotary_cos has size $wanted; expected (rotary_dim / 2, positions)")
    for (name, table) in ((:rotary_cos, cos), (:rotary_sin, sin))
        check_size(table, wanted, String(name))
        eltype(table) === eltype(cos) && eltype(table) in (Float32, Float16, BFloat16) ||
            refuse(:DTYPE, name, "$name has elements $(eltype(table)); expected Float32, Float16 or " *
                                 "BFloat16, as the other table")
    end
    set!(args, :dtype_rotary, dtype(eltype(cos)))
    for (name, n) in ((:rotary_positions, wanted[2]), (:rotary_dim, 2 * wanted[1]))
        sizes[name] = size32(n, String(name))
        set!(args, name, sizes[name])
    end
    return nothing
end

"The array for q rotated; `nothing` without q."
function rotated_q(x::Appending, @nospecialize(given), ragged::Bool)
    if !haskey(x.tensors, :q)
        given === nothing || refuse(:NULL_POINTER, :q_out, "q_out is given without q; give both")
        return nothing
    end
    q = x.tensors[:q].array
    if given === nothing
        given = similar(storage(q), eltype(q), size(q))
        ragged && fill!(given, reinterpret(eltype(q), zero(bits_of(eltype(q)))))
    end
    eltype(given) === eltype(q) || refuse(:DTYPE, :q_out,
        "q_out has elements $(eltype(given)); expected $(eltype(q)), as q has")
    check_size(given, size(q), "q_out")
    check_device(given, x.tensors[:q], "q_out")
    return Tensor(given, x.layout, ndims(q), "q_out")
end

"The array for the lengths after the call; `nothing` without k and v."
function lens_after(x::Appending, @nospecialize(given), batch::Int)
    if !haskey(x.tensors, :k) && !haskey(x.tensors, :v)
        given === nothing || refuse(:NULL_POINTER, :lens_out,
            "lens_out is given without k and v, which would change it; leave it out")
        return nothing
    end
    given === nothing && return similar(storage(x.cache.array), Int32, (batch,))
    given isa AbstractArray || refuse(:DTYPE, :lens_out,
        "lens_out = $(repr(given)); expected an array of Int32")
    return given
end
