"""FlashAttention for JAX: functions with gradients, under jit, vmap and shardings, and one with the
signature of jax.nn.dot_product_attention. Imports jax (0.6 or newer).

    import flashattn.jax
    o = flashattn.jax.dot_product_attention(q, k, v, is_causal=True)
"""
from .functional import attention, attention_varlen
from .nn import dot_product_attention

__all__ = ["attention", "attention_varlen", "dot_product_attention"]
