# New keys and values into a cache: flashattn_append_kv.

const APPENDED = (:rotary_cos, :rotary_sin, :rotary_base, :rotary_dim, :rotary_interleaved, :positions,
                  :starts_kv, :cu_seqlens_q, :lens_q, :page_table, :first_page, :max_seqlen_q,
                  :max_seqlen_kv, :layout, :cache_layout, :descale_k, :descale_v, :descale_block,
                  :q_out, :lens_out, :threads, :multiprocessors, :parallel)

"""
    append_kv!(k_cache, v_cache, lens_kv, k = nothing, v = nothing, q = nothing; options...)

Writes new keys and values behind those in a cache, and rotates them and q:

    q, lens = append_kv!(k_cache, v_cache, lens, k, v, q; rotary_base = 10000)
    o = attention(q, k_cache, v_cache; lens_kv = lens, causal = true)

Returns `(q = ..., lens_kv = ...)`: q rotated, `nothing` without q; and the tokens that the cache now
holds, `nothing` without k and v.

- `k_cache`, `v_cache`: (dim, heads_kv, capacity, batch), written from token lens_kv[b] + 1 on; with
  `page_table` (dim, heads_kv, page_size, pages). Elements of k, or `F8E4M3`. `nothing` without k or v
- `lens_kv`: (batch,) integers, tokens in the cache
- `k`, `v`, `q`: (dim, heads, tokens, batch), or with `cu_seqlens_q` (dim, heads, total); each may be
  `nothing`. Float32, Float16 or BFloat16
- `rotary_cos`, `rotary_sin`: (rotary_dim / 2, positions), column p + 1 for position p: rotate the
  first rotary_dim elements of q and k (Su et al. 2021). Or `rotary_base`, usually 10000, for angles
  position · rotary_base^(-2c / rotary_dim) of pair c; `rotary_dim`: all of a head, if not given
- `rotary_interleaved = false`: the halves of the rotated part are pairs; `true`: neighbours are
- `positions`: (batch,) integers, the position of each sequence's first new token, from 0; if not
  given lens_kv - starts_kv
- `cu_seqlens_q`, `lens_q`, `starts_kv`, `page_table`, `first_page`, `max_seqlen_q`, `max_seqlen_kv`,
  `threads`, `multiprocessors`, `parallel`: as in [`attention`](@ref) and its relatives
- `layout = :dhsb`, `cache_layout`: the order of q, k, v, and of the caches (that of q, k, v; pages
  `:dhsp`)
- `descale_k`, `descale_v`, `descale_block`: Float32 (blocks, heads_kv, batch) of a cache of F8E4M3:
  k / descale_k is rounded
- `q_out`: written and returned as q; q itself will do
- `lens_out`: (batch,) Int32, written and returned; lens_kv itself is incremented in place

Throws as [`attention`](@ref) does; on a CPU also for tokens that have no room or no page. On a GPU
those are left out.
"""
function append_kv!(k_cache, v_cache, lens_kv, k = nothing, v = nothing, q = nothing;
                    layout::Symbol = :dhsb, cache_layout = nothing, cu_seqlens_q = nothing,
                    lens_q = nothing, starts_kv = nothing, positions = nothing,
                    page_table = nothing, first_page = 1, max_seqlen_q = nothing,
                    max_seqlen_kv = nothing, descale_k = nothing, descale_v = nothing,
                    descale_block = 0, q_out = nothing, lens_out = nothing, threads = 0,
                    multiprocessors = 0, parallel = false, options...)
    for name in keys(options)
        name in APPENDED || refuse_keyword(name, APPENDED, "append_kv!")
    end
    parallel = is_parallel(parallel)
    packed = cu_seqlens_q !== nothing
    order = something(cache_layout, page_table !== nothing ? :dhsp : packed ? :dhsb : layout)
    tensors = named_tensors((q = q, k = k, v = v), layout, packed ? 3 : 4)
    caches = named_tensors((k_cache = k_cache, v_cache = v_cache), order, 4)
    check_appended(tensors, caches)
    tokens, cache = first(tensors), first(caches)
    T, stored = eltype(tokens.array), eltype(cache.array)

    # What is left out is as what is given.
    dim_qk = first(t.dim for t in (get(caches, :k_cache, nothing), get(tensors, :q, nothing), cache)
                   if t !== nothing)
    dim_v = haskey(caches, :v_cache) ? caches.v_cache.dim : dim_qk
    heads_q = haskey(tensors, :q) ? tensors.q.heads : cache.heads
    for (name, t) in pairs(tensors)
        dim = name === :v ? dim_v : dim_qk
        (t.batch, t.rows, t.dim) == (tokens.batch, tokens.rows, dim) &&
            (name === :q || t.heads == cache.heads) || refuse(:SIZE, name,
            "$name has size $(size(t.array)); expected $(tokens.rows) tokens of $(tokens.batch) " *
            "sequences by layout = :$layout, with $(cache.heads) heads (q: any multiple) of $dim " *
            "elements, as the cache and the other arrays have")
    end
    batch, seqlen_q = packed ? sequences(cu_seqlens_q, max_seqlen_q, "_q") :
                      (tokens.batch, tokens.rows)
    packed || unused(max_seqlen_q, "max_seqlen_q", "cu_seqlens_q")
    paged = page_table !== nothing
    cached, seqlen_kv = paged ? pages(page_table, max_seqlen_kv, cache.rows) :
                        (cache.batch, cache.rows)
    paged || unused(max_seqlen_kv, "max_seqlen_kv", "page_table")
    cached == batch || refuse(:SIZE, paged ? :page_table : :k_cache,
        "the cache holds $cached sequences, the new tokens are of $batch; give as many")
    block = size32(descale_block, "descale_block")
    sizes = Dict{Symbol,Int}(:batch => batch, :seqlen_q => size32(seqlen_q, "seqlen_q"),
        :seqlen_kv => size32(seqlen_kv, "seqlen_kv"), :heads_kv => cache.heads,
        :heads_q => heads_q, :page_size => paged ? cache.rows : 0, :descale_block => block)
    block == 0 || descale_k !== nothing || descale_v !== nothing ||
        unused(descale_block, "descale_block", "descale_k or descale_v")

    narrow = stored === F8E4M3
    plan = cached_plan(describe(stored; heads_q = heads_q, heads_kv = cache.heads, dim_qk = dim_qk,
        dim_v = dim_v, dtype_kv = stored, dtype_o = narrow ? Float32 : nothing, varlen_q = packed,
        page_size = sizes[:page_size], descale_block = narrow ? block : 0, threads = threads,
        multiprocessors = multiprocessors, device_of(cache.array)...))
    args = Ref(C.flashattn_append_kv_args(
        batch = size32(batch, "batch"), seqlen_q = sizes[:seqlen_q], seqlen_kv = sizes[:seqlen_kv],
        total_q = packed ? tokens.rows : 0, dtype = dtype(T), pages = paged ? cache.batch : 0))
    made = Any[]
    for (name, x) in pairs((lens_kv = lens_kv, lens_q = lens_q, starts_kv = starts_kv,
                            cu_seqlens_q = cu_seqlens_q, page_table = page_table,
                            descale_k = descale_k, descale_v = descale_v))
        x === nothing && (name === :lens_kv ? refuse(:NULL_POINTER, name, "lens_kv is nothing; give " *
            "the tokens that the cache holds of each sequence, zeros(Int32, batch) at first") :
            continue)
        field = field_of(name)
        read = about(() -> name === :page_table ? pages_from_0(x, first_page) : readable(field, x),
                     name)
        read === x || push!(made, read)
        place!(args, field, read, sizes, cache, packed)
        # An argument, which GC.@preserve below keeps, is not in `made`.
    end
    if positions !== nothing
        read = about(() -> int32(check_size(positions, (batch,), "positions")), :positions)
        read === positions || push!(made, read)
        place_numbers!(args, :positions, read, batch, cache)
    end
    set_rotary!(args, made, cache, dim_qk; options...)
    for (name, other) in ((:q, nothing), (:k, :k_cache), (:v, :v_cache))
        haskey(tensors, name) || continue
        set!(args, name, tensors[name].c)
        other === nothing || set!(args, other, caches[other].c)
    end
    turned = rotated_q(q_out, tensors, layout, packed || lens_q !== nothing)
    turned === nothing || set!(args, :q_out, turned.c)
    writes = haskey(tensors, :k) || haskey(tensors, :v)
    writes || lens_out === nothing || refuse(:NULL_POINTER, :lens_out,
        "lens_out is given without k and v, which would change it; leave it out")
    lens = !writes ? nothing : lens_out !== nothing ? lens_out :
           similar(storage(cache.array), Int32, (batch,))
    lens === nothing || place_numbers!(args, :lens_out, lens, batch, cache)
    kept = (tensors, caches, turned, lens, made, lens_kv, lens_q, starts_kv, cu_seqlens_q,
            page_table, descale_k, descale_v, positions, values(options))
    GC.@preserve kept begin
        run_on(C.flashattn_append_kv, args, parallel) do f
            checked(() -> f(plan, args, stream(storage(cache.array))), args)
        end
    end
    foreach(release, made)
    return (q = turned === nothing ? nothing : turned.array, lens_kv = lens)
end

"Those arrays of a named tuple that are given, as Tensors."
function named_tensors(arrays::NamedTuple, layout::Symbol, n::Int)
    there = Tuple(name for name in keys(arrays) if arrays[name] !== nothing)
    return NamedTuple{there}(map(name -> Tensor(arrays[name], layout, n, String(name)), there))
end

function check_appended(tensors::NamedTuple, caches::NamedTuple)
    isempty(caches) && refuse(:NULL_POINTER, :k_cache, "k_cache and v_cache are nothing; give one")
    isempty(tensors) && refuse(:NULL_POINTER, :k, "k, v and q are nothing; give one")
    for (name, other) in ((:k, :k_cache), (:v, :v_cache))
        haskey(tensors, name) && !haskey(caches, other) && refuse(:NULL_POINTER, other,
            "$name is given without $other, where it is to be written; give both")
    end
    cache, T = first(caches), eltype(first(tensors).array)
    for (name, t) in pairs(tensors)
        dtype(eltype(t.array), String(name))
        eltype(t.array) === T || refuse(:DTYPE, name,
            "$name has elements $(eltype(t.array)), $(first(keys(tensors))) $T; give both of one type")
        check_device(t.array, cache, String(name))
    end
    for (name, t) in pairs(caches)
        eltype(t.array) in (T, F8E4M3) && eltype(t.array) === eltype(cache.array) ||
            refuse(:DTYPE, name, "$name has elements $(eltype(t.array)), new tokens $T; give caches " *
                                 "of $T, or both of F8E4M3")
        check_device(t.array, cache, String(name))
        (t.heads, t.rows, t.batch) == (cache.heads, cache.rows, cache.batch) || refuse(:SIZE, name,
            "$name has size $(size(t.array)), k_cache $(size(cache.array)); only their first may differ")
    end
end

"Writes the address of (batch,) Int32, which are the library's to read or write."
function place_numbers!(args, name::Symbol, x, batch::Int, model::Tensor)
    x isa AbstractArray{Int32} || refuse(:DTYPE, name, "$name = $(repr(x)); expected an array of Int32")
    check_size(x, (batch,), String(name))
    check_device(x, model, String(name))
    about(() -> isdense(x), name) || refuse(:STRIDE, name, "$name has gaps; copy it")
    return set!(args, name, address(x))
end

function set_rotary!(args, made, cache::Tensor, dim_qk::Int; rotary_cos = nothing,
                     rotary_sin = nothing, rotary_base = nothing, rotary_dim = nothing,
                     rotary_interleaved = false)
    rotary_interleaved isa Bool || refuse(:DTYPE, :rotary,
        "rotary_interleaved = $(repr(rotary_interleaved)), of which rotary is made; expected true or false")
    tables = rotary_cos !== nothing || rotary_sin !== nothing
    (rotary_cos === nothing) == (rotary_sin === nothing) && !(tables && rotary_base !== nothing) ||
        refuse(:NULL_POINTER, :rotary_cos, "rotary_cos and rotary_sin go together, and not with " *
               "rotary_base; give both tables or a base")
    if !tables && rotary_base === nothing
        rotary_dim === nothing && !rotary_interleaved || refuse(:VALUE, :rotary_base,
            "rotary_dim or rotary_interleaved is given without rotary_base or tables, and would be " *
            "ignored; give rotary_base = 10000, or leave it out")
        return nothing
    end
    rotary_interleaved && set!(args, :rotary, C.FLASHATTN_ROTARY_INTERLEAVED)
    if !tables
        rotary_base isa Real || refuse(:DTYPE, :rotary_base,
            "rotary_base = $(repr(rotary_base)); expected a number")
        set!(args, :rotary_base, Float32(rotary_base))
        set!(args, :rotary_dim, size32(something(rotary_dim, dim_qk), "rotary_dim"))
        return nothing
    end
    wanted = size(rotary_cos)
    length(wanted) == 2 && (rotary_dim === nothing || 2 * wanted[1] == rotary_dim) ||
        refuse(:SIZE, :rotary_cos, "rotary_cos has size $wanted; expected (rotary_dim / 2, positions)")
    for (name, x) in ((:rotary_cos, rotary_cos), (:rotary_sin, rotary_sin))
        check_size(x, wanted, String(name))
        eltype(x) === eltype(rotary_cos) && eltype(x) in (Float32, Float16, BFloat16) ||
            refuse(:DTYPE, name, "$name has elements $(eltype(x)); expected Float32, Float16 or " *
                                 "BFloat16, as the other table")
        check_device(x, cache, String(name))
        s = about(() -> steps(x), name)
        (s[1] == 1 || wanted[1] <= 1) && s[2] >= 0 ||
            refuse(:STRIDE, name, "$name has strides $s; copy it")
        set!(args, name, C.flashattn_tensor(data = address(x), stride_seq = s[2]))
    end
    set!(args, :dtype_rotary, dtype(eltype(rotary_cos)))
    set!(args, :rotary_positions, size32(wanted[2], "rotary_positions"))
    set!(args, :rotary_dim, size32(2 * wanted[1], "rotary_dim"))
    return nothing
end

"The array for q rotated; `nothing` without q."
function rotated_q(given, tensors::NamedTuple, layout::Symbol, ragged::Bool)
    if !haskey(tensors, :q)
        given === nothing || refuse(:NULL_POINTER, :q_out, "q_out is given without q; give both")
        return nothing
    end
    q = tensors.q.array
    if given === nothing
        given = similar(storage(q), eltype(q), size(q))
        ragged && fill!(given, reinterpret(eltype(q), zero(bits_of(eltype(q)))))
    end
    eltype(given) === eltype(q) || refuse(:DTYPE, :q_out,
        "q_out has elements $(eltype(given)); expected $(eltype(q)), as q has")
    check_size(given, size(q), "q_out")
    check_device(given, tensors.q, "q_out")
    return Tensor(given, layout, ndims(q), "q_out")
end
