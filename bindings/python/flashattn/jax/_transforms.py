"""A call under vmap and over many devices.

vmap folds the mapped axis into the batch where that says the same, and loops where it does not.
Over the devices of a mesh batch and heads are split, without communication but for the sums of
gradients that sequences share.
"""
from __future__ import annotations

from functools import lru_cache
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from ._call import Spec, call

# Dimensions by letter: b sequence, h query head, k KV head; any other is never split. Of packed
# sequences b is left out, and each array of an entry a sequence is whole on each device.
_DIMS = {"q": "bshd", "k": "btkd", "v": "btke", "o": "bshe", "dout": "bshe", "dq": "bshd",
         "dk": "btkd", "dv": "btke", "lse": "bhs", "dlse": "bhs", "bias": "bhst", "dbias": "bhst",
         "sink": "h", "dsink": "h", "alibi_slopes": "bh", "lens_q": "b", "lens_kv": "b",
         "starts_kv": "b", "cu_seqlens_q": "c", "cu_seqlens_kv": "c", "rng_device": "r"}


@lru_cache(maxsize=1024)
def operation(spec: Spec) -> Callable[..., Tuple[Any, ...]]:
    """call() with these transforms, of arrays in the order of spec.names. alibi_slopes and bias
    have all their dimensions, 1 where they repeat."""
    mapped = custom_vmap(_partitioned(spec))

    @mapped.def_vmap
    def rule(axis_size: int, batched: Any, *arrays: Any) -> Any:
        where = dict(zip(spec.names, batched))
        fold = _folded if _folds(spec, where) else _looped
        results = fold(spec, axis_size, where, arrays)
        return results, (True,) * len(results)

    return mapped


def _folds(spec: Spec, batched: Dict[str, bool]) -> bool:
    """Sequences are numbered by the batch, and so are the weights that dropout drops; a sink, and
    its gradient, belong to all of them."""
    return not (spec.packed or "rng_device" in spec.names or batched.get("sink") or spec.dsink)


def _looped(spec: Spec, size: int, batched: Dict[str, bool], arrays: Sequence[Any]) -> Any:
    mapped = {name: x for name, x in zip(spec.names, arrays) if batched[name]}

    def one(some: Dict[str, Any]) -> Any:
        return operation(spec)(*[some.get(name, x) for name, x in zip(spec.names, arrays)])
    return jax.lax.map(one, mapped)


def _folded(spec: Spec, size: int, batched: Dict[str, bool], arrays: Sequence[Any]) -> Any:
    batch = arrays[0].shape[1 if batched["q"] else 0]

    def fold(name: str, x: Any) -> Any:
        if not _DIMS[name].startswith("b"):
            return x
        if not batched[name]:
            if x.shape[0] == 1 and name in ("bias", "alibi_slopes") and not spec.dbias:
                return x  # it repeats
            x = jnp.broadcast_to(x, (size, *x.shape))
        if x.shape[1] != batch:
            x = jnp.broadcast_to(x, (size, batch, *x.shape[2:]))
        return x.reshape(size * batch, *x.shape[2:])

    results = operation(spec)(*[fold(name, x) for name, x in zip(spec.names, arrays)])
    results = [x.reshape(size, batch, *x.shape[1:]) for x in results]
    if spec.dbias:
        i = spec.names.index("bias")
        if arrays[i].shape[1 if batched["bias"] else 0] == 1:  # of all its sequences
            j = spec.results.index("dbias")
            results[j] = results[j].sum(axis=1, keepdims=True)
    return tuple(results)


def _dims(name: str, spec: Spec) -> str:
    """Of an array of a call, by letter."""
    dims = _DIMS[name]
    if not spec.packed:
        return dims
    if name in ("bias", "dbias", "alibi_slopes", "lens_q", "lens_kv"):
        return dims.replace("b", "c")
    return dims.replace("b", "")


class _Split(NamedTuple):
    """Axes of a mesh, over which sequences and heads are split."""

    batch: Tuple[str, ...]
    heads: Tuple[str, ...]
    shared: bool  # one KV head serves every query head, and is on every device

    def of(self, name: str, shape: Sequence[int], spec: Spec) -> PartitionSpec:
        by = {"b": self.batch, "h": self.heads, "k": () if self.shared else self.heads}
        return PartitionSpec(*[by.get(letter) or None if extent > 1 else None
                               for letter, extent in zip(_dims(name, spec), shape)])


def _split(spec: Spec, mesh: Any, q: Any, k: Any) -> _Split:
    """What q's sharding asks for, as far as it divides. Dropout numbers sequences and heads: its
    calls are the same on each device."""
    asked = getattr(q.sharding, "spec", None)
    if asked is None or "rng_device" in spec.names:
        return _Split((), (), False)
    asked = dict(zip(_dims("q", spec), asked))
    heads_q, heads_kv = q.shape[-2], k.shape[-2]

    def axes(letter: str, extent: int) -> Tuple[str, ...]:
        found = asked.get(letter) or ()
        found = (found,) if isinstance(found, str) else tuple(found)
        parts = 1
        for axis in found:
            parts *= mesh.shape[axis]
        return found if parts and extent % parts == 0 else ()

    batch = () if spec.packed else axes("b", q.shape[0])
    return _Split(batch, axes("h", heads_q if heads_kv == 1 else heads_kv), heads_kv == 1)


def _rule(spec: Spec, shapes: Dict[str, Sequence[int]]) -> Tuple[str, Dict[str, Any]]:
    """For Shardy: which dimensions go together, in its notation."""
    heads_q, heads_kv = shapes["q"][-2], shapes["k"][-2]
    grouped = 1 < heads_kv < heads_q
    spelled: List[str] = []
    others: List[str] = []
    for name, shape in shapes.items():
        letters = []
        for letter, extent in zip(_dims(name, spec), shape):
            together = letter == "b" or letter == "h" or (letter == "k" and heads_kv > 1)
            if extent == 1 or not together:
                letter = f"x{len(others)}"
                others.append(letter)
            elif grouped and letter == "h":
                letter = "(k g)"
                others += [] if "g" in others else ["g"]
            else:
                letter = letter if grouped or letter == "b" else "h"
            letters.append(letter)
        spelled.append(" ".join(letters))
    n = len(spec.names)
    more: Dict[str, Any] = {"need_replication_factors": tuple(others)}
    if grouped:
        more["g"] = heads_q // heads_kv
    return f"{', '.join(spelled[:n])} -> {', '.join(spelled[n:])}", more


def _partitioned(spec: Spec) -> Callable[..., Tuple[Any, ...]]:
    names = (*spec.names, *spec.results)

    def compute(*arrays: Any) -> Tuple[Any, ...]:
        return call(spec, *arrays)

    def shardings(mesh: Any, split: _Split, some: Sequence[str], arrays: Any) -> Tuple[Any, ...]:
        return tuple([NamedSharding(mesh, split.of(name, x.shape, spec))
                      for name, x in zip(some, arrays)])

    def infer(mesh: Any, arrays: Any, results: Any) -> Any:
        return shardings(mesh, _split(spec, mesh, *arrays[:2]), spec.results, results)

    def partition(mesh: Any, arrays: Any, results: Any) -> Any:
        split = _split(spec, mesh, *arrays[:2])
        sums = _sums(spec, split, arrays)

        def local(*arrays: Any) -> Tuple[Any, ...]:
            return tuple([jax.lax.psum(x, axes) if axes else x for x, axes in
                          zip(call(spec, *arrays), sums)])

        return (mesh, local, shardings(mesh, split, spec.results, results),
                shardings(mesh, split, spec.names, arrays))

    def rule(mesh: Any, arrays: Any, results: Any) -> Any:
        del mesh
        return _rule(spec, dict(zip(names, [x.shape for x in (*arrays, *results)])))

    made = custom_partitioning(compute)
    made.def_partition(partition=partition, infer_sharding_from_operands=infer, sharding_rule=rule)
    return made


def _sums(spec: Spec, split: _Split, arrays: Sequence[Any]) -> List[Tuple[str, ...]]:
    """By result: the axes of the mesh whose devices hold parts of a sum."""
    bias: Optional[Any] = arrays[spec.names.index("bias")] if spec.dbias else None
    found = {"dsink": split.batch, "dk": split.heads if split.shared else (),
             "dv": split.heads if split.shared else ()}
    if bias is not None:
        found["dbias"] = ((split.batch if bias.shape[0] == 1 else ())
                          + (split.heads if bias.shape[1] == 1 else ()))
    return [found.get(name, ()) for name in spec.results]
