"""The caller's threads in place of the library's: the option parallel."""
from __future__ import annotations

import threading
from typing import Any, Optional

from ._constants import Reason
from ._errors import invalid, wrong_type
from ._library import ffi

_FUNCTION = ffi.typeof("flashattn_parallel_fn")
_VOID = ffi.typeof("void *")
# Their workers cannot call what another process or interpreter has in memory.
_ELSEWHERE = ("ProcessPoolExecutor", "InterpreterPoolExecutor")


class _Loop:
    """The tasks of one parallel loop of the library. Its context goes when the callback returns:
    until then every task that has begun must have ended, and none may begin later."""

    def __init__(self, count: int, task: Any, context: Any) -> None:
        self.count, self.task, self.context = count, task, context
        self.begun = self.running = 0
        self.changed = threading.Condition()

    def take_part(self) -> None:
        """What each of the executor's threads does. It takes a task that no other has taken."""
        with self.changed:
            index = self.begun
            if index >= self.count:
                return
            self.begun += 1
            self.running += 1
        try:
            self.task(self.context, index)
        finally:
            with self.changed:
                self.running -= 1
                self.changed.notify()

    def take_rest(self) -> None:
        """The calling thread takes what nobody has begun: threads that are busy are not waited for,
        and a call on a thread of the executor's own cannot wait for itself."""
        while self.begun < self.count:
            self.take_part()

    def end(self) -> None:
        """Again after an interrupt, which may have lost a number: the library does those itself."""
        with self.changed:
            self.begun = self.count
            while self.running:
                self.changed.wait()


class Pool:
    """An executor of the caller's, for one call. error: what it raised, or an interrupt, to be
    raised when the library has returned."""

    def __init__(self, executor: Any) -> None:
        self.executor = executor
        self.error: Optional[BaseException] = None
        self.handle = ffi.new_handle(self)
        self.loop: Optional[_Loop] = None

    def run(self, count: int, task: Any, context: Any) -> None:
        self.loop = loop = _Loop(count, task, context)
        for _ in range(count - 1):
            self.executor.submit(loop.take_part)
        loop.take_rest()

    def end(self) -> None:
        """Nothing is raised before the loop has ended."""
        while self.loop is not None:
            try:
                self.loop.end()
                self.loop = None
            except BaseException as error:
                self.error = error


def _raised(kind: Any, error: Any, traceback: Any) -> None:
    """What left the callback, of which cffi calls this instead: interrupts come at any place."""
    pool = ffi.from_handle(traceback.tb_frame.f_locals["user"])
    pool.error = error
    pool.end()


@ffi.callback(_FUNCTION, onerror=_raised)
def _run(user: Any, count: int, task: Any, context: Any) -> None:
    pool = ffi.from_handle(user)
    pool.run(count, task, context)
    pool.end()


class Native:
    """A thread pool of C's: a flashattn_parallel_fn and what it is handed."""

    error = None

    def __init__(self, function: Any, handle: Any) -> None:
        self.function, self.handle = function, handle


def pool_of(value: Any) -> Any:
    """The option's value as function, handle and error."""
    kinds = [kind.__name__ for kind in type(value).__mro__]
    if any(kind in _ELSEWHERE for kind in kinds):
        raise wrong_type(f"parallel is a {kinds[0]}, whose workers do not share this program's "
                         "memory; give a ThreadPoolExecutor", "parallel")
    if callable(getattr(value, "submit", None)):
        return Pool(value)
    function, user = value if type(value) is tuple and len(value) == 2 else (value, 0)
    addresses = [_address(function), _address(0 if user is None else user)]
    if None in addresses:
        raise wrong_type(f"parallel = {value!r}; give a concurrent.futures.Executor of threads, or "
                         "the address of a flashattn_parallel_fn, alone or with that of its user: "
                         "(function, user)", "parallel")
    if not addresses[0]:
        raise invalid("parallel = NULL; give the address of a flashattn_parallel_fn, or None for "
                      "the library's own threads", Reason.NULL_POINTER, "parallel")
    return Native(ffi.cast(_FUNCTION, addresses[0]), ffi.cast(_VOID, addresses[1]))


def _address(value: Any) -> Optional[int]:
    """Of a pointer of cffi's, or a number; None: it is neither."""
    if isinstance(value, ffi.CData) and ffi.typeof(value).kind in ("pointer", "function"):
        return int(ffi.cast("uintptr_t", value))
    is_address = type(value) is int and 0 <= value < 2**64
    return value if is_address else None


def put(args: Any, pool: Any) -> None:
    """Into flashattn_args or its like. The pool must outlive the call."""
    args.parallel = _run if type(pool) is Pool else pool.function
    args.parallel_user = pool.handle
