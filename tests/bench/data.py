"""The numbers that the bench measures with."""
from __future__ import annotations

import dataclasses
from typing import Dict

import numpy as np

from cases import Case
from memory import Array, Memory, View

NORMAL = "normal"  # the runner that computes a case with a first token on normal data


def draw(memory: Memory, case: Case) -> Dict[str, Array]:
    """Random normal numbers of the case's shapes; latent: v is a view of k. With a first token, q
    and k are as trained models have them: each query scores the first key of its sequence
    `first_token` nats, the others around 0."""
    dtype = "f32" if case.parts else case.dtype
    if case.latent and case.dtype_kv:
        q, k = (case.shapes()[name] for name in "qk")
        return {"q": memory.normal(q, dtype), **memory.records(k[:-1], dtype)}
    types = {"bias": case.bias, "k": case.kv_dtype, "v": case.kv_dtype}
    arrays = {name: memory.normal(shape, types.get(name, dtype))
              for name, shape in case.shapes().items()
              if not (case.first_token and name in "qk" or case.latent and name == "v")}
    if case.latent:
        arrays["v"] = View(arrays["k"], case.value_dim)
    if not case.first_token:
        return arrays
    q, k = (memory.numbers(case.shapes()[name]) for name in "qk")
    # Channel 0 holds the score of the first token, and nothing of the others'.
    q[..., 0], k[..., 0] = 1, 0
    firsts = case.starts()[1][:-1] if case.uneven else [0]
    k[:, firsts] = 0
    k[:, firsts, :, 0] = case.first_token * case.dim ** 0.5
    return {"q": memory.of(q, dtype), "k": memory.of(k, dtype), **arrays}


def on_normal_data(case: Case) -> Case:
    """The same case without its first token."""
    return dataclasses.replace(case, first_token=0.0)
