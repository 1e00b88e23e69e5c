"""From arrays to calls of XLA: what handler.c finds in the attributes of a call site.

Everything is checked, described and sized when a program is traced, from shapes and types alone; a
call then only fills pointers in.
"""
from __future__ import annotations

from functools import lru_cache
from typing import Any, Dict, FrozenSet, List, NamedTuple, Sequence, Tuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from .. import _arrays, _plan
from .._arrays import BF16, F16, F32, NAMES, View
from .._constants import Op, Reason
from .._describe import describe
from .._errors import FlashAttentionError, fail, invalid
from .._inputs import BESIDE, FACTS, Inputs
from .._library import ffi, lib
from .._options import uniform
from ._handler import TARGET

Aval = Tuple[Tuple[int, ...], str]  # shape, name of the type
_WORKSPACE, _UNUSED = -1, -2  # of handler.c, in place of a word
# Bytes of workspace that a thread of the CPU keeps; where more is needed, XLA plans for it.
_KEPT = 4 << 20
_PACKED = (ffi.NULL, -1, -1, -1)
# Read by backward besides the inputs of forward.
AT_RESULTS = ("o", "lse", "dout", "dlse")


class Spec(NamedTuple):
    """What a call computes, of arrays of any size."""

    names: Tuple[str, ...]  # of the arrays given, members of flashattn_args; q, k, v first
    options: Tuple[Tuple[str, Any], ...]  # of describe(), as uniform() puts them
    max_seqlen_q: int = -1  # of packed sequences
    max_seqlen_kv: int = -1
    backward: bool = False
    lse: bool = False  # forward: lse is returned
    dbias: bool = False  # backward: they are returned
    dsink: bool = False

    @property
    def packed(self) -> bool:
        return "cu_seqlens_q" in self.names

    @property
    def results(self) -> Tuple[str, ...]:
        if not self.backward:
            return ("o", "lse") if self.lse else ("o",)
        more = (("dbias",) if self.dbias else ()) + (("dsink",) if self.dsink else ())
        return ("dq", "dk", "dv", *more)


class _Site(NamedTuple):
    """A call site on one device."""

    attributes: Dict[str, Any]
    filled: Tuple[Aval, ...]  # zeros that are given and returned where not all is written
    results: Tuple[Aval, ...]  # the workspace last
    aliases: Dict[int, int]


def aval(array: Any) -> Aval:
    return tuple(array.shape), array.dtype.name


def _view(name: str, seen: Aval) -> View:
    """An array without an address."""
    shape, dtype = seen
    if name == "rng_device":  # two numbers of 64 bits, which JAX may not have
        shape, code, size = (2,), 0, 8
    elif name in BESIDE and BESIDE[name].type != "dtype_bias":
        code, size = 0, 4
    else:
        kind = _arrays.BIAS if name == "bias" else _arrays.TENSOR
        if dtype not in kind.names:
            raise kind.refusal(name, dtype)
        code = kind.names[dtype]
        size = _arrays._SIZES[code]
        if code not in (F32, F16, BF16) and name != "bias":
            raise invalid(f"{name} has dtype {dtype}, which flashattn.jax does not take; convert "
                          "it to float32, float16 or bfloat16, or call flashattn.attention, which "
                          "does", Reason.DTYPE, "dtype")
    steps, step = [], size
    for extent in reversed(shape):
        steps.append(step)
        step *= extent
    return View(ffi.NULL, code, shape, tuple(reversed(steps)), size, False, None,
                "copy it with jax.numpy.copy")


class _Inputs(Inputs):
    """Their order of dimensions is fixed."""

    __slots__ = ()

    def _other_order(self, heads: int, heads_kv: int, paged: bool = False) -> str:
        said = super()._other_order(heads, heads_kv, paged)
        return said and ("; if heads stand where tokens are looked for (PyTorch's order), swap the "
                         "two with .swapaxes(-3, -2)")


def inputs_of(spec: Spec, avals: Sequence[Aval]) -> Inputs:
    """Shapes and types checked against each other. Raises what flashattn.attention() does."""
    views = {name: _view(name, seen) for name, seen in zip(spec.names, avals)}
    given: Dict[str, Any] = {name: view for name, view in views.items() if name not in AT_RESULTS}
    if spec.packed:
        given.update(max_seqlen_q=spec.max_seqlen_q, max_seqlen_kv=spec.max_seqlen_kv)
    inputs = _Inputs(given.pop("q"), given.pop("k"), given.pop("v"), **given)
    inputs.check_seed(dict(spec.options).get("dropout", 0.0))
    return inputs


def _results(spec: Spec, inputs: Inputs, avals: Dict[str, Aval]) -> List[Tuple[str, Aval, bool]]:
    """Name, shape and type, and whether something may stay unwritten."""
    q, ragged = inputs.q, inputs.ragged
    shapes: Dict[str, Tuple[Aval, bool]] = {
        "o": ((q.like(inputs.v.dim), NAMES[q.view.dtype]), ragged),
        "lse": ((inputs.lse_shape(), "float32"), ragged),
        "dsink": (((q.heads,), "float32"), False)}
    for name in ("q", "k", "v"):
        shapes["d" + name] = avals[name], ragged
    if spec.dbias:
        shapes["dbias"] = (avals["bias"][0], "float32"), True
    return [(name, *shapes[name]) for name in spec.results]


def _words(structure: Any) -> np.ndarray:
    return np.frombuffer(bytes(ffi.buffer(structure)), np.int64)


def _word(member: str) -> int:
    return ffi.offsetof("flashattn_args", member) // 8


@lru_cache(maxsize=1024)
def _site(spec: Spec, avals: Tuple[Aval, ...], device: str) -> _Site:
    inputs, by_name = inputs_of(spec, avals), dict(zip(spec.names, avals))
    results = _results(spec, inputs, by_name)
    args = _plan.new_args(inputs.sizes)
    inputs.fill(args)
    for name in ("o", "dout", "dq", "dk", "dv"):
        setattr(args, name, _PACKED)
    if spec.dbias:
        args.dbias = (ffi.NULL, *_plan.dbias_strides(by_name["bias"][0]))
    op = Op.BACKWARD if spec.backward else Op.FORWARD
    options = dict(spec.options, device=device)
    options.update(dict(forward=False, backward=True, dlse="dlse" in spec.names,
                        return_dbias=spec.dbias, return_dsink=spec.dsink) if spec.backward
                   else dict(return_lse=spec.lse))
    workspace = _workspace(inputs, uniform(options), int(op), args, device)
    filled = [i for i, (_, _, partly) in enumerate(results) if partly]
    zeros = tuple([results[i][1] for i in filled])
    kept = workspace if device == "cpu" and workspace <= _KEPT else 0
    made = (*[seen for _, seen, _ in results], ((workspace - kept,), "uint8"))
    words = [*map(_word, spec.names), *[_UNUSED] * len(filled),
             *[_word(name) for name, _, _ in results], _WORKSPACE]
    counts = [int(np.prod(shape, dtype=np.int64)) for shape, _ in (*avals, *zeros, *made)]
    description = describe(**dict(zip(FACTS, inputs.facts())), **options)
    attributes = {"args": _words(args), "desc": _words(_plan.c_descriptor(description)),
                  "elements": np.array(counts, np.int64), "op": np.int64(op),
                  "words": np.array(words, np.int64), "workspace": np.int64(kept)}
    return _Site(attributes, zeros, made, {len(avals) + i: out for i, out in enumerate(filled)})


def _workspace(inputs: Inputs, options: Any, op: int, args: Any, device: str) -> int:
    try:
        plan = _plan.cached_plan(inputs.facts(), options)
    except FlashAttentionError:
        # Programs are traced for every kind of device. On a GPU the library says the same when the
        # program is made there; on the CPU it is always asked, by the checks before this.
        if device == "cpu":
            raise
        return 0
    needed = ffi.new("int64_t *")
    status = lib.flashattn_workspace_size(plan._plan, op, args, needed)
    if status:
        fail(status)
    return needed[0]


def check(spec: Spec, avals: Tuple[Aval, ...]) -> None:
    """Raises what is wrong with a call."""
    _site(spec, avals, "cpu")


def varying(array: Any) -> FrozenSet[str]:
    """Inside a shard_map: the axes over which it differs."""
    seen = jax.typeof(array)
    manual = getattr(seen, "manual_axis_type", None)
    return getattr(seen, "vma", frozenset()) if manual is None else manual.varying


def _result(seen: Aval, like: Any) -> Any:
    """Differs over the axes over which the array like differs."""
    shape, dtype = seen
    axes = varying(like)
    if not axes:
        return jax.ShapeDtypeStruct(shape, dtype)
    manual = getattr(jax.sharding, "ManualAxisType", None)
    if manual is None:
        return jax.ShapeDtypeStruct(shape, dtype, vma=axes)
    mesh = jax.typeof(like).sharding.mesh
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()),
                                manual_axis_type=manual(varying=axes))


def call(spec: Spec, *arrays: Any) -> Tuple[Any, ...]:
    """spec.results of arrays as they are, on whatever device the program will run."""
    avals = tuple([aval(array) for array in arrays])

    def on(device: str) -> Any:
        site = _site(spec, avals, device)

        def compute(*arrays: Any) -> Tuple[Any, ...]:
            zeros = [jax.lax.full_like(arrays[0], 0, dtype, shape) for shape, dtype in site.filled]
            run = jax.ffi.ffi_call(TARGET, [_result(seen, arrays[0]) for seen in site.results],
                                   input_output_aliases=site.aliases)
            return tuple(run(*arrays, *zeros, **site.attributes)[:-1])
        return compute

    return jax.lax.platform_dependent(*arrays, cpu=on("cpu"), cuda=on("cuda:0"))
