"""Block masks of torch.nn.attention.flex_attention, which need not be imported."""
from __future__ import annotations

from typing import Any, Dict

import torch
from torch import Tensor

from .._errors import wrong_type


def block_lists(block_mask: Any) -> Dict[str, Any]:
    """A BlockMask as keywords of attention(): block_index, block_end, block_q and block_kv.

        o = attention(q, k, v, layout="bhsd", causal=True, **block_lists(block_mask))

    The blocks of both of its lists are on: the full ones, and the partial ones, inside of which
    FlexAttention asks mask_mod about every pair. mask_mod is a function of Python's, which is
    neither called nor compiled: what it hides inside of partial blocks must be said by causal,
    window, chunk or bias, and without that is visible. Its positions count from the first query and
    key: with causal and other numbers of queries than of keys give top_left=True.

    block_index holds both lists of a row one behind the other, -1 where they end; without full
    blocks it is kv_indices itself, and block_end kv_num_blocks. Nothing is waited for on a GPU.
    (Dong et al. 2024)
    """
    try:
        count, index = block_mask.kv_num_blocks, block_mask.kv_indices
        full_count, full_index = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
        block_q, block_kv = block_mask.BLOCK_SIZE
    except AttributeError:
        raise wrong_type(f"block_mask is of type {type(block_mask).__name__}; give a BlockMask of "
                         "torch.nn.attention.flex_attention", "block_mask") from None
    sizes = {"block_q": int(block_q), "block_kv": int(block_kv)}
    if full_index is None:
        return dict(block_index=index, block_end=count, **sizes)
    both = [_padded(index, count), _padded(full_index, full_count)]
    return dict(block_index=torch.cat(both, -1), **sizes)


def _padded(index: Tensor, count: Tensor) -> Tensor:
    """-1 behind the entries that count."""
    places = torch.arange(index.shape[-1], device=index.device)
    return index.where(places < count.unsqueeze(-1), -1)
