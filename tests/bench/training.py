"""Transformers of the kinds of GPT-2 and BERT, a step of their training, and text to train on.

The attention is a function of q, k, v of (batch, tokens, heads, dim) and of causal.
"""
from __future__ import annotations

import json
import pathlib
from typing import Callable, Iterator, NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = pathlib.Path(__file__).resolve().parents[2]
Attention = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


class Shape(NamedTuple):
    """A transformer and its batch."""

    name: str
    claim: str  # the literature's
    layers: int
    width: int
    heads: int
    tokens: int
    batch: int
    causal: bool = True
    vocabulary: int = 50257
    autocast: bool = True  # to bfloat16


class Block(nn.Module):
    def __init__(self, shape: Shape, attention: Attention) -> None:
        super().__init__()
        self.shape, self.attention = shape, attention
        self.norms = nn.ModuleList(nn.LayerNorm(shape.width) for _ in range(2))
        self.qkv, self.out, self.up, self.down = (
            nn.Linear(a * shape.width, b * shape.width)
            for a, b in ((1, 3), (1, 1), (1, 4), (4, 1)))

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.shape.heads, -1))
        x = x + self.out(self.attention(*qkv.unbind(2), self.shape.causal).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))


class Transformer(nn.Module):
    """Of GPT-2's kind; not causal, of BERT's."""

    def __init__(self, shape: Shape, attention: Attention) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.tokens, shape.width)
        self.blocks = nn.Sequential(*[Block(shape, attention) for _ in range(shape.layers)])
        self.norm = nn.LayerNorm(shape.width)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[:ids.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight)


class Step:
    """A model, and what a step of its training is: forward, backward, AdamW."""

    def __init__(self, shape: Shape, attention: Attention, device: str, seed: int = 0) -> None:
        torch.manual_seed(seed)
        with torch.device(device):  # a GPU draws 0.35e9 weights in no time, a CPU in seconds
            self.model = Transformer(shape, attention)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)
        self.device, self.autocast = device, shape.autocast
        self.ids = torch.randint(shape.vocabulary, (shape.batch, shape.tokens + 1), device=device)

    def __call__(self, ids: Optional[Tensor] = None) -> Tensor:
        ids = self.ids if ids is None else ids
        with torch.autocast(self.device, torch.bfloat16, enabled=self.autocast):
            logits = self.model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def batches(shape: Shape, steps: int, device: str, seed: int = 0) -> Iterator[Tensor]:
    """Bytes of the passages, the same places for every runner."""
    passages = json.loads((ROOT / "tests" / "data" / "passages.json").read_text(encoding="utf-8"))
    data = torch.tensor(list(json.dumps(passages, ensure_ascii=False).encode()))
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(data) - shape.tokens - 1, (shape.batch,), generator=generator)
        yield torch.stack([data[i:i + shape.tokens + 1] for i in starts.tolist()]).to(device)
