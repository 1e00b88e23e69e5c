"""Exceptions. Each is also the built-in exception that Python users expect, and carries the
sentence, the status, the reason and the field of the C library."""
from __future__ import annotations

import re
from typing import Any, Dict, NoReturn, Optional, Sequence, Type

from ._constants import Reason, Status
from ._library import ffi, lib, text


class FlashAttentionError(RuntimeError):
    """A call was refused or failed; str() is the library's sentence.

    status   flashattn.Status
    reason   flashattn.Reason
    field    the argument it is about, "" when there is none
    """

    def __init__(self, sentence: str, status: int = Status.ERROR_INTERNAL,
                 reason: int = Reason.NONE, field: str = "") -> None:
        super().__init__(sentence)
        # A newer library may know more of them: then they stay numbers.
        self.status = Status(status) if status in Status.__members__.values() else status
        self.reason = Reason(reason) if reason in Reason.__members__.values() else reason
        self.field = field


class InvalidArgumentError(FlashAttentionError, ValueError):
    """An argument that no device could honour."""


class ArrayTypeError(FlashAttentionError, TypeError):
    """Something that is no array of a type the library knows."""


class UnsupportedError(FlashAttentionError, NotImplementedError):
    """A meaningful request that no kernel honours on this device."""


class OutOfMemoryError(FlashAttentionError, MemoryError):
    """Host memory ran out."""


_CLASSES: Dict[int, Type[FlashAttentionError]] = {
    Status.ERROR_INVALID_ARGUMENT: InvalidArgumentError,
    Status.ERROR_UNSUPPORTED: UnsupportedError,
    Status.ERROR_OUT_OF_MEMORY: OutOfMemoryError,
}


# What the header calls otherwise than the functions here.
_NAMES = {
    "heads_q": "heads", "heads_kv": "kv_heads", "dim_qk": "dim", "dtype_o": "out_dtype",
    "window_left": "window[0]", "window_right": "window[1]", "block_q": "block_size[0]",
    "block_kv": "block_size[1]", "bias_dtype": "bias", "determinism": "deterministic",
    "max_seqlen_kv": "max_seqlen_k", "max_total_kv": "max_total_k", "seqlen_kv": "seqlen_k",
    "total_kv": "total_k", "cu_seqlens_kv": "cu_seqlens_k", "lens_q": "q_lens",
    "lens_kv": "kv_lens", "part_o": "outs", "part_lse": "lses", "part_dtype": "outs",
    "FLASHATTN_DEVICE_CPU": "cpu", "FLASHATTN_DEVICE_CUDA": "cuda",
    "FLASHATTN_LAYOUT_VARLEN_Q": "varlen_q", "FLASHATTN_LAYOUT_VARLEN_KV": "varlen_k",
    "FLASHATTN_LAYOUT_PAGED_KV": "page_size", "FLASHATTN_OP_FORWARD": "forward",
    "FLASHATTN_OP_BACKWARD": "backward", "FLASHATTN_DTYPE_F8E4M3": "float8_e4m3fn (F8E4M3)",
    **{prefix + name: known for prefix in ("", "FLASHATTN_DTYPE_")
       for name, known in (("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"))}}
_NAME = re.compile(r"\b(?:inputs\.|shape\.)?(?:(o)(?=\.data|\.stride)|([A-Za-z]\w*))(?:\.data)?\b")


def named(sentence: str, names: Optional[Dict[str, str]] = None) -> str:
    """A sentence of the library in the names that this package has. names: more of them."""
    known = _NAMES if not names else {**_NAMES, **names}

    def replace(found: "re.Match[str]") -> str:
        output, name = found.groups()
        return "out" if output else known.get(name, name)

    return _NAME.sub(replace, sentence).replace("or 0 for 1 / sqrt", "or None for 1 / sqrt")


def fail(status: int, names: Optional[Dict[str, str]] = None) -> NoReturn:
    """Raises what the last call of this thread said. Call it with a status that is not OK."""
    reason, field = ffi.new("int32_t *"), ffi.new("const char **")
    sentence = text(lib.flashattn_last_error(reason, field))
    raise _CLASSES.get(status, FlashAttentionError)(
        named(sentence or text(lib.flashattn_status_name(status)), names), status, reason[0],
        named(text(field[0]), names))


def invalid(sentence: str, reason: int, field: str) -> InvalidArgumentError:
    """What the library would refuse if it could see it: shapes, and strides inside a head."""
    return InvalidArgumentError(sentence, Status.ERROR_INVALID_ARGUMENT, reason, field)


def wrong_type(sentence: str, field: str) -> ArrayTypeError:
    return ArrayTypeError(sentence, Status.ERROR_INVALID_ARGUMENT, Reason.DTYPE, field)


def misfit(ctype: Any, values: Sequence[Any]) -> FlashAttentionError:
    """What to raise when cffi does not get values into the fields of a structure."""
    for (field_name, field), value in zip(ctype.fields, values):
        kind, bits = field.type, 8 * ffi.sizeof(field.type)
        name = named(field_name)
        try:
            ffi.new(ffi.getctype(kind, "*"), value)
        except TypeError:
            return wrong_type(f"{name} = {value!r} is of type {type(value).__name__}; give an "
                              "integer", name)
        except OverflowError:
            low, high = ((-2**(bits - 1), 2**(bits - 1) - 1)
                         if ffi.cast(kind, -1) < ffi.cast(kind, 0) else (0, 2**bits - 1))
            limit = f"at most {high}" if value > high else f"at least {low}"
            return invalid(f"{name} = {value} is past the range of its field; give {limit}",
                           Reason.SIZE, name)
    return invalid("a value does not fit its field", Reason.SIZE, "")
