"""The options of a call, each in one spelling, so that equal calls find the same plan."""
from __future__ import annotations

import operator
from typing import Any, Callable, Dict, Optional, Sequence, Tuple, Union

import numpy as np

from . import _gpu
from ._constants import Determinism, Reason
from ._errors import invalid, wrong_type

Window = Union[None, int, Sequence[Optional[int]]]
DETERMINISM = {False: int(Determinism.DEFAULT), True: int(Determinism.RUN_TO_RUN),
               "batch_invariant": int(Determinism.BATCH_INVARIANT)}
_BOOLS = (bool, np.bool_)


def flag(value: Any, name: str) -> bool:
    """True or False, NumPy's or as 1 and 0. Any other value is more likely to be a mistake."""
    if value is True or value is False:
        return value
    if type(value) is np.bool_ or (isinstance(value, (int, np.integer)) and value in (0, 1)):
        return bool(value)
    raise _wrong(value, name, "give True or False")


def integer(value: Any, name: str, entry: Optional[int] = None) -> int:
    """Whatever counts, but for booleans and what lies on a GPU. entry: which one of name."""
    if type(value) is int:
        return value
    name = name if entry is None else f"{name}[{entry}]"
    _stays_on_host(value, name)
    if not isinstance(value, _BOOLS):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise _wrong(value, name, "give an integer")


def real(value: Any, name: str) -> float:
    """A number, or an array of one number without dimensions."""
    if type(value) is float:
        return value
    if type(value) is not int:
        _stays_on_host(value, name)
    if isinstance(value, (*_BOOLS, str, bytes)) or getattr(value, "ndim", None):
        raise _wrong(value, name, "give a number")
    try:
        return float(value)
    except OverflowError:
        raise invalid(f"{name} = {value} is past the range of its field; give a magnitude of at "
                      "most 3.4028234663852886e+38", Reason.SIZE, name) from None
    except (TypeError, ValueError):
        raise _wrong(value, name, "give a number") from None


def pair(value: Any, name: str, expected: str) -> Any:
    """Of two entries: a tuple, list or array."""
    if not isinstance(value, (tuple, list, np.ndarray)) or len(value) != 2:
        raise invalid(f"{name} = {value!r}; expected {expected}", Reason.VALUE, name)
    return value


def window(value: Window, name: str = "window") -> Optional[Tuple[int, int]]:
    """n: n keys to either side. (left, right): -1 or None is open. None: no window."""
    if value is None:
        return None
    if isinstance(value, (tuple, list)) or getattr(value, "ndim", None):
        left, right = pair(value, name, "a number of keys or (left, right)")
        left = -1 if left is None else integer(left, name, 0)
        right = -1 if right is None else integer(right, name, 1)
    else:
        left = right = integer(value, name)
    return None if left == right == -1 else (left, right)


def chunk(value: Any, name: str) -> Optional[int]:
    if value is None:
        return None
    tokens = integer(value, name)
    if tokens < 1:
        raise invalid(f"{name} = {tokens}; expected the tokens of a chunk, at least 1, or None",
                      Reason.SIZE, name)
    return tokens


def block_size(value: Any, name: str) -> Tuple[int, int]:
    queries, keys = pair(value, name, "(queries, keys) a block")
    queries, keys = integer(queries, name, 0), integer(keys, name, 1)
    if min(queries, keys) < 1:
        raise invalid(f"{name} = {value!r}; expected (queries, keys) a block, both at least 1",
                      Reason.SIZE, name)
    return queries, keys


def scale(value: Any, name: str) -> Optional[float]:
    if value is None:
        return None
    factor = real(value, name)
    if _is_zero(factor):
        raise invalid(f"scale = {value} is 0 in float32, which would make every weight equal; for "
                      "1/sqrt(dim) give None", Reason.VALUE, name)
    return factor


def softcap(value: Any, name: str) -> float:
    cap = 0.0 if value is None else real(value, name)
    if cap and _is_zero(cap):
        raise invalid(f"softcap = {value} is 0 in float32, which would turn it off; for that give "
                      "0 or None", Reason.SOFTCAP, name)
    return cap


def deterministic(value: Any, name: str) -> Union[bool, str]:
    try:
        if value in DETERMINISM:
            return value if type(value) is str else bool(value)
    except TypeError:  # it does not hash
        pass
    raise invalid(f"{name} = {value!r} is none of False, True, \"batch_invariant\"", Reason.VALUE,
                  name)


def _same(value: Any, name: str) -> Any:
    return value


# Each option that a descriptor holds: what makes it uniform, and its default.
_UNIFORM: Dict[str, Tuple[Callable[[Any, str], Any], Any]] = {
    "causal": (flag, False), "window": (window, None), "chunk": (chunk, None),
    "top_left": (flag, False), "softcap": (softcap, 0.0), "scale": (scale, None),
    "dropout": (real, 0.0), "splits": (integer, 0), "deterministic": (deterministic, False),
    "threads": (integer, 0), "device": (_same, "cpu"), "out_dtype": (_same, None),
    "return_lse": (flag, False), "forward": (flag, True), "backward": (flag, False),
    "dlse": (flag, False), "return_dbias": (flag, False), "return_dsink": (flag, False),
    "varlen_q": (flag, False),
}


def uniform(options: Dict[str, Any]) -> Tuple[Tuple[str, Any], ...]:
    """What is not left at its default: equal for equal calls, and it hashes."""
    chosen = []
    for name, value in options.items():
        convert, default = _UNIFORM[name]
        value = convert(value, name)
        if value != default:
            chosen.append((name, value))
    chosen.sort()  # by name: each is there once
    return tuple(chosen)


def _is_zero(value: float) -> bool:
    """Whether the library would see 0, in float32."""
    return abs(value) <= 2.0**-150


def _wrong(value: Any, name: str, remedy: str) -> Exception:
    return wrong_type(f"{name} = {value!r} is of type {type(value).__name__}; {remedy}", name)


def _stays_on_host(value: Any, name: str) -> None:
    """A number on a GPU would be waited for."""
    if _gpu.is_array(value) and _gpu.index_of(value) is not None:
        raise invalid(f"{name} lies on a GPU, where a call reads nothing; give a number of "
                      f"Python's, {name}.item()", Reason.VALUE, name)
