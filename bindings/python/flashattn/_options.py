"""The options of a call, each in one spelling, so that equal calls find the same plan."""
from __future__ import annotations

import operator
from typing import Any, Callable, Dict, Optional, Sequence, Tuple, Union

import numpy as np

from . import _gpu
from ._arrays import I8, dtype_code
from ._constants import Determinism, Reason
from ._errors import invalid, wrong_type

Window = Union[None, int, Sequence[Optional[int]]]
Determinisms = Union[bool, str, Determinism]
_DETERMINISM: Dict[Any, int] = {False: 0, True: int(Determinism.RUN_TO_RUN)}
for _level in Determinism:
    _DETERMINISM[int(_level)] = _DETERMINISM[_level.name.lower()] = int(_level)
_BOOLS = (bool, np.bool_)


def flag(value: Any, name: str) -> bool:
    """True or False, NumPy's or as 1 and 0. Any other value is more likely to be a mistake."""
    if value is True or value is False:
        return value
    if type(value) is np.bool_ or (isinstance(value, (int, np.integer)) and value in (0, 1)):
        return bool(value)
    raise _wrong(value, name, "give True or False")


def integer(value: Any, name: str) -> int:
    """Whatever counts, but for booleans and what lies on a GPU."""
    if type(value) is int:
        return value
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


def window(value: Any, name: str = "window") -> Optional[Tuple[int, int]]:
    """n: n keys to either side. (left, right): -1 or None is open. None: no window."""
    if value is None:
        return None
    if isinstance(value, (tuple, list)) or getattr(value, "ndim", None):
        if len(value) != 2:
            raise invalid(f"{name} = {value!r}; expected a number of keys or (left, right)",
                          Reason.VALUE, "window_left")
        left, right = value
        left = -1 if left is None else integer(left, "window_left")
        right = -1 if right is None else integer(right, "window_right")
    else:
        left = right = integer(value, "window_left")
    return None if left == right == -1 else (left, right)


def chunk(value: Any, name: str) -> Optional[int]:
    if value is None:
        return None
    tokens = integer(value, name)
    if tokens < 1:
        raise invalid(f"{name} = {tokens}; expected the tokens of a chunk, at least 1, or None",
                      Reason.SIZE, name)
    return tokens


def scale(value: Any, name: str) -> Optional[float]:
    if value is None:
        return None
    factor = real(value, name)
    if _is_zero(factor):
        raise invalid(f"scale = {value} is 0 in float32, which would make every weight equal; for "
                      "1/sqrt(dim_qk) give None", Reason.VALUE, name)
    return factor


def softcap(value: Any, name: str) -> float:
    cap = 0.0 if value is None else real(value, name)
    if cap and _is_zero(cap):
        raise invalid(f"softcap = {value} is 0 in float32, which would turn it off; for that give "
                      "0 or None", Reason.SOFTCAP, name)
    return cap


def determinism(value: Any, name: str) -> int:
    try:
        if value in _DETERMINISM:
            return _DETERMINISM[value]
    except TypeError:  # it does not hash
        pass
    raise invalid(f"{name} = {value!r} is none of False, True (run_to_run), \"run_to_run\", "
                  "\"batch_invariant\"", Reason.VALUE, name)


def device(value: Any, name: str) -> Tuple[int, int]:
    """enum flashattn_device and the index."""
    del name
    if type(value) is tuple:
        return value
    kind, index = _gpu.device_of(value)
    return int(kind), index or 0


def dtype(value: Any, name: str) -> int:
    """enum flashattn_dtype; None: 0, the field's default."""
    return 0 if value is None else dtype_code(value, name)


def computed(value: Any, name: str) -> int:
    """dtype() of what is not in a cache."""
    code = dtype(value, name)
    if code == I8:
        raise invalid(f"{name} = 'int8' is for k and v alone, dtype_kv; give float32, float16 or "
                      "bfloat16", Reason.DTYPE, name)
    return code


# The keywords of describe(): what converts the value, and once more to itself; and its default.
OPTIONS: Dict[str, Tuple[Callable[[Any, str], Any], Any]] = {
    "dtype": (computed, None), "window": (window, None), "chunk": (chunk, None),
    "softcap": (softcap, 0.0), "scale": (scale, None), "dropout": (real, 0.0),
    "determinism": (determinism, 0), "device": (device, (0, 0)), "forward": (flag, True),
}
OPTIONS.update({name: (dtype, 0) for name in ("dtype_kv", "dtype_bias")})
OPTIONS.update({name: (computed, 0) for name in ("dtype_o", "dtype_grad")})
OPTIONS.update({name: (flag, False) for name in (
    "causal", "top_left", "alibi", "sink", "return_lse", "backward", "dlse", "return_dbias",
    "return_dsink", "varlen_q", "varlen_kv", "hidden_pages", "latent_kv", "block_lists",
    "block_lens")})
OPTIONS.update({name: (integer, None) for name in ("heads_q", "dim_qk")})  # without a default
OPTIONS.update({name: (integer, 0) for name in (
    "heads_kv", "dim_v", "block_q", "block_kv", "tree", "page_size",
    "descale_block", "descale_dim", "splits", "threads", "max_batch", "max_seqlen_q",
    "max_seqlen_kv", "max_total_q", "max_total_kv", "multiprocessors", "workspace_limit")})


def uniform(options: Dict[str, Any]) -> Tuple[Tuple[str, Any], ...]:
    """What is not left at its default: equal for equal calls, and it hashes."""
    chosen = []
    for name, value in options.items():
        convert, default = OPTIONS[name]
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
