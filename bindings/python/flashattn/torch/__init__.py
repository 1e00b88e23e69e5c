"""FlashAttention for PyTorch: operators with gradients that compile, names of flash-attn and of
SDPA, and this library under F.scaled_dot_product_attention. Imports torch (2.6 or newer).

    import flashattn.torch
    o = flashattn.torch.attention(q, k, v, causal=True)
"""
from .functional import attention, attention_paged, attention_varlen, merge

__all__ = ["attention", "attention_paged", "attention_varlen", "merge"]
