# flashattn_desc with Julia's values.

# Keywords of describe that set a bit whose name is another one: what comes with the bit, or what
# comes back.
const KEYWORDS = (WINDOW = :window, CHUNK = :chunk, BLOCKS = :block_q, TREE = :tree,
                  PAGES = :hidden_pages, PAGED_KV = :page_size, DENSE = :dtype_bias, LSE = :return_lse,
                  DBIAS = :return_dbias, DSINK = :return_dsink)

"(keyword, member of the descriptor, bit)"
const BITS = [(get(KEYWORDS, name, Symbol(lowercase(String(name)))), member, bit)
              for (member, enum) in ((:ops, C.flashattn_op), (:layout, C.flashattn_layout),
                                     (:mask, C.flashattn_mask), (:bias, C.flashattn_bias),
                                     (:features, C.flashattn_feature))
              for (name, bit) in pairs(enum)]
"Those that are true or false."
const FLAGS = setdiff(map(first, BITS), (:window, :chunk, :block_q, :tree, :page_size, :dtype_bias))
"Members of the descriptor that stand for themselves."
const MEMBERS = setdiff(fieldnames(C.flashattn_desc),
                        (:struct_size, :ops, :layout, :mask, :bias, :features, :window_left,
                         :window_right, :dtype))
"All keywords of describe."
const DESCRIBED = union([:window], FLAGS, MEMBERS)

"""
    FlashAttention.describe(T; heads_q, dim_qk, options...)

A `flashattn_desc`: what is computed, for [`Plan`](@ref FlashAttention.Plan), `check_supported` and
`supported`. Names are those of the C header and of its bits.

- `T`: element type of q, k, v: Float32, Float16 or BFloat16
- `heads_q`, `dim_qk`: query heads, elements of a query and a key
- `heads_kv`, `dim_v`, `dtype_kv`, `dtype_o`: where they differ; types are Julia's
- `block_q`, `block_kv`: queries and keys a block, when there is a block mask
- `dtype_bias`: element type of the dense bias, Bool for a mask; `nothing`: no bias
- `alibi = false`, `sink = false`: whether there are such inputs
- `forward = true`, `backward = false`: the operations
- `return_lse`, `dlse`, `return_dbias`, `return_dsink`: further inputs and outputs, all `false`
- `varlen_q = false`, `varlen_kv = false`: packed sequences, found by `cu_seqlens`
- `page_size = 0`: tokens a page of a paged KV cache; 0: not paged
- `hidden_pages = false`: whether page numbers may hide keys
- `block_lists = false`, `block_lens = false`: whether `block_index` is given in the place of
  `block_mask`; whether `block_lens` is
- `max_batch`, `max_seqlen_q`, `max_seqlen_kv`, `max_total_q`, `max_total_kv`: maxima, 0: none
- `device = :cpu` or `:cuda`, `device_index = 0`, `multiprocessors = 0`, `workspace_limit = 0`,
  `tree = 0`, `descale_block = 0`, `latent_kv = false`, `descale_dim = 0`: see `LibFlashAttn.flashattn_desc`

The rest is explained at [`attention`](@ref). Throws a [`FlashAttentionError`](@ref) for what it
cannot write down; whether a device can do it is for `Plan` to find out.
"""
describe(T::Type; options...) = describe(T, Dict{Symbol,Any}(options))

function describe(@nospecialize(T::Type), options::Dict{Symbol,Any})
    desc = Ref(C.flashattn_desc(dtype = dtype(T, "dtype")))
    for (name, value) in options
        if name in MEMBERS
            set_number!(desc, name, in_header(name, value))
        elseif name in FLAGS
            # Julia's own error does not say which Bool keyword it is about.
            value isa Bool ||
                refuse(:DTYPE, name, "$name = $(repr(value)); expected true or false")
        elseif name !== :window
            refuse_keyword(name, union(DESCRIBED, TAKEN))
        end
    end
    # One descriptor, and so one plan, for every spelling: of an open window, of the default scale.
    window = get(options, :window, nothing)
    left, right = window_sides(window)
    windowed = window !== nothing && (left, right) != (-1, -1)
    if windowed
        set_number!(desc, :window_left, left)
        set_number!(desc, :window_right, right)
    end
    desc[].dim_qk > 0 && desc[].scale == Float32(1 / sqrt(Float64(desc[].dim_qk))) &&
        set!(desc, :scale, 0)
    for (keyword, field, bit) in BITS
        value = get(options, keyword, keyword === :forward)
        wanted = keyword === :window ? windowed : !(value in (nothing, false, 0))
        wanted && set!(desc, field, getfield(desc[], field) | bit)
    end
    return desc[]
end

function set_number!(desc, name::Symbol, value)
    try
        return set!(desc, name, value)
    catch error
        error isa InexactError || rethrow()
        refuse(:SIZE, name, "$name = $value is past the range of its field in flashattn_desc")
    end
end

"A value of Julia's as the header has it."
function in_header(name::Symbol, value)
    if name === :device
        devices = (cpu = C.FLASHATTN_DEVICE_CPU, cuda = C.FLASHATTN_DEVICE_CUDA)
        value isa Symbol && haskey(devices, value) && return devices[value]
        refuse(:VALUE, name, "device = $(repr(value)); expected :cpu or :cuda")
    end
    name === :determinism && return determinism(value)
    if startswith(String(name), "dtype_")
        value === nothing && return C.FLASHATTN_DTYPE_DEFAULT
        value isa Type && return dtype(value, String(name); mask = name === :dtype_bias)
        refuse(:DTYPE, name, "$name = $(repr(value)); expected a type of elements")
    end
    if fieldtype(C.flashattn_desc, name) === Cfloat
        value === nothing && name !== :dropout && return 0.0f0
        value isa Real || refuse(:DTYPE, name, "$name = $(repr(value)); expected a number")
        return single(name, value)
    end
    value === nothing && name === :chunk && return 0
    value isa Integer && !(value isa Bool) ||
        refuse(:DTYPE, name, "$name = $(repr(value)); expected an integer")
    return value
end

"A number as the library sees it: what is too small for a Float32 is 0."
function single(name::Symbol, value::Real)
    x = Float32(value) + 0.0f0  # there is one zero
    name === :scale && x == 0 && refuse(:VALUE, name,
        "scale = $value is 0 in Float32, which would make every weight equal; for 1/sqrt(dim_qk) " *
        "give nothing")
    name === :softcap && x == 0 && value != 0 && refuse(:SOFTCAP, name,
        "softcap = $value is 0 in Float32, which would turn it off; for that give 0 or nothing")
    return x
end

function determinism(wanted)
    wanted === false && return C.FLASHATTN_DETERMINISM_DEFAULT
    (wanted === true || wanted === :run_to_run) && return C.FLASHATTN_DETERMINISM_RUN_TO_RUN
    wanted === :batch_invariant && return C.FLASHATTN_DETERMINISM_BATCH_INVARIANT
    refuse(:VALUE, :determinism,
           "determinism = $(repr(wanted)); expected false, true, :run_to_run or :batch_invariant")
end

window_sides(::Nothing) = (0, 0)
window_sides(n::Integer) = (n, n)
window_sides(::Bool) = window_sides("Bool")
window_sides(sides::Tuple{Any,Any}) = map(side -> side === nothing ? -1 : side, sides)
window_sides(window) = refuse(:VALUE, :window_left,
    "window = $(repr(window)), of which window_left and window_right are made; expected a number " *
    "of keys or (left, right)")
