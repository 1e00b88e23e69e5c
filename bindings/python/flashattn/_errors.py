"""Exceptions. Each is also the built-in exception that Python users expect, and carries the
sentence, the status, the reason and the field of the C library."""
from __future__ import annotations

from typing import Any, Dict, NoReturn, Sequence, Type

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


def fail(status: int) -> NoReturn:
    """Raises what the last call of this thread said. Call it with a status that is not OK."""
    reason, field = ffi.new("int32_t *"), ffi.new("const char **")
    sentence = text(lib.flashattn_last_error(reason, field))
    raise _CLASSES.get(status, FlashAttentionError)(
        sentence or text(lib.flashattn_status_name(status)), status, reason[0], text(field[0]))


def invalid(sentence: str, reason: int, field: str) -> InvalidArgumentError:
    """What the library would refuse if it could see it: shapes, and strides inside a head."""
    return InvalidArgumentError(sentence, Status.ERROR_INVALID_ARGUMENT, reason, field)


def wrong_type(sentence: str, field: str) -> ArrayTypeError:
    return ArrayTypeError(sentence, Status.ERROR_INVALID_ARGUMENT, Reason.DTYPE, field)


def misfit(ctype: Any, values: Sequence[Any], prefix: str = "") -> FlashAttentionError:
    """What to raise when cffi does not get values into the fields of a structure. They are those of
    the header, so its names are said."""
    for (name, field), value in zip(ctype.fields, values):
        kind, bits = field.type, 8 * ffi.sizeof(field.type)
        real = kind.cname == "float"
        try:
            ffi.new(ffi.getctype(kind, "*"), value)
        except TypeError:
            return wrong_type(f"{prefix}{name} = {value!r} is of type {type(value).__name__}; give "
                              f"{'a number' if real else 'an integer'}", prefix + name)
        except OverflowError:
            if real:
                low, high = -3.4028234663852886e38, 3.4028234663852886e38
            elif ffi.cast(kind, -1) < ffi.cast(kind, 0):
                low, high = -2**(bits - 1), 2**(bits - 1) - 1
            else:
                low, high = 0, 2**bits - 1
            limit = f"at most {high}" if value > high else f"at least {low}"
            return invalid(f"{prefix}{name} = {value} is past the range of its field; give {limit}",
                           Reason.SIZE, prefix + name)
    return invalid("a value does not fit its field", Reason.SIZE, "")
