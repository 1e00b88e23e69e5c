"""What is called otherwise here than elsewhere."""
from __future__ import annotations

import difflib
import functools
import inspect
from typing import Any, Callable, Collection, Dict, TypeVar

# Options by the names that version 0.1, FlashAttention and PyTorch give them: the names here.
_NAMES: Dict[str, str] = dict(
    q_lens="lens_q", kv_lens="lens_kv", cu_seqlens_k="cu_seqlens_kv", max_seqlen_k="max_seqlen_kv",
    out="o", out_dtype="dtype_o", seed="rng_seed", offset="rng_offset",
    block_size="block_q and block_kv", deterministic="determinism", softmax_scale="scale",
    window_size="window", window_left="window, (left, right)", dropout_p="dropout",
    is_causal="causal", attn_mask="bias", enable_gqa="not needed: k and v may have fewer heads")
_F = TypeVar("_F", bound=Callable[..., Any])


def unexpected(kind: str, name: str, known: Collection[str], why: str = "",
               beside: Collection[str] = ()) -> TypeError:
    """A keyword that there is not: what it is called here, or was meant, and all that there are.
    beside: others that are not listed."""
    said = _NAMES.get(name, "")
    if said and (said.startswith("not ") or said.replace(",", "").split()[0] in (*known, *beside)):
        why = f"; here it is {said}"
    elif not why:
        meant = difflib.get_close_matches(name, known, 1, 0.75)
        why = f", perhaps {meant[0]}" if meant else ""
    return TypeError(f"unexpected {kind} {name!r}{why}; the {kind}s are {', '.join(known)}")


def says_options(function: _F) -> _F:
    """Of a function without **options: says of an option that it has not what unexpected() does."""
    return _says(function, inspect.signature(function))


def takes(options: type) -> Callable[[_F], _F]:
    """The same of a function whose **arrays are those of a TypedDict, which help() and editors
    show one by one."""
    def decorate(function: _F) -> _F:
        signature = inspect.signature(function)
        shown = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        shown += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None,
                                    annotation="Any") for name in options.__annotations__]
        return _says(function, signature.replace(parameters=shown))
    return decorate


def _says(function: _F, signature: inspect.Signature) -> _F:
    known = tuple(signature.parameters)
    taken = frozenset(known)

    @functools.wraps(function)
    def call(*arrays: Any, **options: Any) -> Any:
        if not taken >= options.keys():
            raise unexpected("option", next(name for name in options if name not in taken), known)
        return function(*arrays, **options)
    call.__signature__ = signature  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]
