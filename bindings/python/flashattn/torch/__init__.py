"""FlashAttention for PyTorch: operators with gradients that compile, names of flash-attn and of
SDPA, and this library under F.scaled_dot_product_attention. Imports torch (2.6 or newer).

    import flashattn.torch
    o = flashattn.torch.attention(q, k, v, causal=True)
"""
from .flash_attn import (flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func,
                         flash_attn_varlen_func, flash_attn_varlen_kvpacked_func,
                         flash_attn_varlen_qkvpacked_func, flash_attn_with_kvcache)
from .flex_attention import block_lists
from .functional import append_kv, attention, attention_paged, attention_varlen, merge
from .sdpa import activate, report, restore, scaled_dot_product_attention
from .transformers import register_transformers

__all__ = [
    "activate", "append_kv", "attention", "attention_paged", "attention_varlen", "block_lists",
    "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func", "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache", "merge", "register_transformers", "report", "restore",
    "scaled_dot_product_attention",
]
