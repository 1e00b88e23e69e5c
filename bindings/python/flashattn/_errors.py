"""Exceptions. Each is also the built-in exception that Python users expect, and carries the
message, the status, the reason and the field of the C library."""
from __future__ import annotations

from typing import Any, Dict, Iterable, NoReturn, Tuple, Type

from ._constants import Reason, Status
from ._library import ffi, lib, text


class FlashAttentionError(RuntimeError):
    """A call was refused or failed; str() is the library's message.

    status   flashattn.Status
    reason   flashattn.Reason
    field    the structure member it is about, named as in flashattn.h: "heads_kv", "q.stride_seq";
             "" when there is none
    """

    def __init__(self, message: str, status: int = Status.ERROR_INTERNAL,
                 reason: int = Reason.NONE, field: str = "") -> None:
        super().__init__(message)
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
    message = text(lib.flashattn_last_error(reason, field))
    raise _CLASSES.get(status, FlashAttentionError)(
        message or text(lib.flashattn_status_name(status)), status, reason[0], text(field[0]))


def invalid(message: str, reason: int, field: str) -> InvalidArgumentError:
    """What the library would refuse if it could see it: shapes, and strides inside a head."""
    return InvalidArgumentError(message, Status.ERROR_INVALID_ARGUMENT, reason, field)


def wrong_type(message: str, field: str) -> ArrayTypeError:
    return ArrayTypeError(message, Status.ERROR_INVALID_ARGUMENT, Reason.DTYPE, field)


def counted(n: int, what: str) -> str:
    return f"{n} {what}" + ("" if n == 1 else "s")


def misfit(members: Iterable[Tuple[str, Any, Any]]) -> FlashAttentionError:
    """What to raise when cffi does not get values into a structure: (name, C type, value)."""
    for name, kind, value in members:
        bits = 8 * ffi.sizeof(kind)
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
