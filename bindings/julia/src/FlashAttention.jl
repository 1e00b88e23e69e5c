"""
FlashAttention for Julia arrays: the Julia layer of libflashattn.

    o = attention(q, k, v; causal = true)

Arrays are (dim, head, sequence, batch), or any other order with `dim` first, named by `layout`.
Start with [`attention`](@ref). The C header, name by name, is in `FlashAttention.LibFlashAttn`.
"""
module FlashAttention

using Libdl

include("LibFlashAttn.jl")

include("library.jl")
include("errors.jl")
include("bfloat16.jl")
include("float8.jl")
include("arrays.jl")
include("tensor.jl")
include("describe.jl")
include("inputs.jl")
include("plan.jl")
include("parallel.jl")
include("run.jl")
include("attention.jl")
include("backward.jl")
include("append.jl")
include("quantize.jl")
include("frameworks.jl")
include("tools.jl")

export append_kv!, attention, attention!, attention_backward, attention_backward!, attention_paged,
    attention_paged!, attention_varlen, attention_varlen!, dropout_mask, quantize, BFloat16, F8E4M3,
    FlashAttentionError

end
