# Before Julia 1.11 the type of the package BFloat16s is its own. From then on all are one.
module FlashAttentionBFloat16sExt

import BFloat16s
using FlashAttention: FlashAttention, LibFlashAttn

@static if BFloat16s.BFloat16 !== FlashAttention.BFloat16
    FlashAttention.dtype(::Type{BFloat16s.BFloat16}) = LibFlashAttn.FLASHATTN_DTYPE_BF16
end

end
