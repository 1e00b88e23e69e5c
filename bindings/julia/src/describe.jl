# flashattn_desc with Julia's names.

"""
    FlashAttention.describe(T; heads, dim, options...)

A `flashattn_desc`: what is computed, for [`Plan`](@ref FlashAttention.Plan), `check_supported` and
`supported`.

- `T`: element type of q, k, v: Float32, Float16 or BFloat16
- `heads`, `dim`: query heads, elements of a query and a key
- `kv_heads = heads`, `dim_v = dim`, `out_type = T`
- `block_size = nothing`: (queries, keys) a block, when there is a block mask
- `bias = nothing`: element type of the dense bias, Bool for a mask
- `alibi = false`, `sink = false`: whether there are such inputs
- `forward = true`, `backward = false`: the operations
- `return_lse`, `dlse`, `return_dbias`, `return_dsink`: further inputs and outputs, all `false`
- `varlen_q = false`, `varlen_k = false`: packed sequences, found by `cu_seqlens`
- `page_size = 0`: tokens a page of a paged KV cache; 0: not paged
- `max_batch`, `max_seqlen_q`, `max_seqlen_k`, `max_total_q`, `max_total_k`: promised maxima,
  0: none
- `device = :cpu` or `:cuda`, `device_index = 0`, `sm_limit = 0`, `workspace_limit = 0`

The rest is explained at [`attention`](@ref). Throws an `ArgumentError` for what it cannot write
down; whether a device can do it is for `Plan` to find out.
"""
function describe(T::Type; heads::Integer, dim::Integer, kv_heads::Integer = heads,
                  dim_v::Integer = dim, out_type::Type = T, causal = false,
                  window = nothing, chunk::Union{Nothing,Integer} = nothing,
                  top_left = false, block_size = nothing,
                  bias::Union{Nothing,Type} = nothing, alibi = false, sink = false,
                  softcap::Union{Nothing,Real} = nothing, scale::Union{Nothing,Real} = nothing,
                  dropout::Real = 0, forward = true, backward = false,
                  return_lse = false, dlse = false, return_dbias = false, return_dsink = false,
                  varlen_q = false, varlen_k = false, page_size::Integer = 0, splits::Integer = 0,
                  deterministic::Union{Bool,Symbol} = false, threads::Integer = 0,
                  device::Symbol = :cpu, device_index::Integer = 0, max_batch::Integer = 0,
                  max_seqlen_q::Integer = 0, max_seqlen_k::Integer = 0, max_total_q::Integer = 0,
                  max_total_k::Integer = 0, sm_limit::Integer = 0, workspace_limit::Integer = 0,
                  unknown...)
    foreach(name -> refuse_keyword(name, keywords(describe, Inputs)), keys(unknown))
    for (name, x) in pairs((
            causal = causal, top_left = top_left, alibi = alibi, sink = sink, forward = forward,
            backward = backward, return_lse = return_lse, dlse = dlse, return_dbias = return_dbias,
            return_dsink = return_dsink, varlen_q = varlen_q, varlen_k = varlen_k))
        # Of Bool keywords, Julia's own error does not say which.
        x isa Bool || throw(ArgumentError("$name = $(repr(x)); expected true or false"))
    end
    # As the library sees them: what is too small for a Float32 is 0.
    scale === nothing || Float32(scale) != 0 || throw(ArgumentError(
        "scale = $scale is 0 in Float32, which would make every weight equal; for 1/sqrt(dim) " *
        "give nothing"))
    softcap === nothing || softcap == 0 || Float32(softcap) != 0 || throw(ArgumentError(
        "softcap = $softcap is 0 in Float32, which would turn it off; for that give 0 or " *
        "nothing"))
    left, right = window_sides(window)
    # One descriptor, and so one plan, for every spelling: of an open window, of the default scale.
    windowed = window !== nothing && (left, right) != (-1, -1)
    windowed || ((left, right) = (0, 0))
    dim > 0 && Float32(something(scale, 0)) == Float32(1 / sqrt(Float64(dim))) && (scale = nothing)
    block_q, block_kv = block_size === nothing ? (0, 0) : block_size
    devices = (cpu = C.FLASHATTN_DEVICE_CPU, cuda = C.FLASHATTN_DEVICE_CUDA)
    haskey(devices, device) || throw(ArgumentError("device = :$device; expected :cpu or :cuda"))
    when(condition, bit) = condition ? bit : UInt32(0)
    mask = when(causal, C.FLASHATTN_MASK_CAUSAL) | when(top_left, C.FLASHATTN_MASK_TOP_LEFT) |
           when(windowed, C.FLASHATTN_MASK_WINDOW) |
           when(chunk !== nothing, C.FLASHATTN_MASK_CHUNK) |
           when(block_size !== nothing, C.FLASHATTN_MASK_BLOCKS)
    features = when(return_lse, C.FLASHATTN_FEATURE_LSE) | when(sink, C.FLASHATTN_FEATURE_SINK) |
               when(dlse, C.FLASHATTN_FEATURE_DLSE) |
               when(return_dbias, C.FLASHATTN_FEATURE_DBIAS) |
               when(return_dsink, C.FLASHATTN_FEATURE_DSINK)
    layout = when(varlen_q, C.FLASHATTN_LAYOUT_VARLEN_Q) |
             when(varlen_k, C.FLASHATTN_LAYOUT_VARLEN_KV) |
             when(page_size != 0, C.FLASHATTN_LAYOUT_PAGED_KV)
    try
        return C.flashattn_desc(
            device = devices[device], device_index = device_index,
            ops = when(forward, C.FLASHATTN_OP_FORWARD) | when(backward, C.FLASHATTN_OP_BACKWARD),
            dtype = dtype(T, "q, k, v"), dtype_o = dtype(out_type, "the output"),
            heads_q = heads, heads_kv = kv_heads, dim_qk = dim, dim_v = dim_v, layout = layout,
            page_size = page_size, mask = mask,
            window_left = left, window_right = right, chunk = something(chunk, 0),
            block_q = block_q, block_kv = block_kv,
            bias = when(alibi, C.FLASHATTN_BIAS_ALIBI) |
                   when(bias !== nothing, C.FLASHATTN_BIAS_DENSE),
            bias_dtype = bias === nothing ? C.FLASHATTN_DTYPE_DEFAULT :
                         dtype(bias, "bias"; mask = true),
            features = features, determinism = determinism(deterministic),
            # + 0: there is one zero, too.
            scale = something(scale, 0), softcap = Float32(something(softcap, 0)) + 0.0f0,
            dropout = Float32(dropout) + 0.0f0,
            splits = splits, max_batch = max_batch, max_seqlen_q = max_seqlen_q,
            max_seqlen_kv = max_seqlen_k, sm_limit = sm_limit, threads = threads,
            max_total_q = max_total_q, max_total_kv = max_total_k,
            workspace_limit = workspace_limit)
    catch error
        error isa InexactError || rethrow()
        throw(ArgumentError("$(error.val) is past the range of its field in flashattn_desc"))
    end
end

window_sides(::Nothing) = (0, 0)
window_sides(n::Integer) = (n, n)
window_sides(::Bool) = window_sides("Bool")
window_sides(sides::Tuple{Any,Any}) = map(side -> side === nothing ? -1 : side, sides)
window_sides(window) = throw(ArgumentError(
    "window = $(repr(window)); expected a number of keys or (left, right)"))

function determinism(wanted::Union{Bool,Symbol})
    wanted === false && return C.FLASHATTN_DETERMINISM_DEFAULT
    wanted === true && return C.FLASHATTN_DETERMINISM_RUN_TO_RUN
    wanted === :batch_invariant && return C.FLASHATTN_DETERMINISM_BATCH_INVARIANT
    throw(ArgumentError("deterministic = :$wanted; expected false, true or :batch_invariant"))
end
