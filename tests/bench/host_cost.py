"""What a call costs the host: time until the C function returns."""
from __future__ import annotations

import statistics
import time
from typing import Any, Callable, Dict, NamedTuple

from cases import Case
from memory import Memory
from ours import FlashAttn, Refused, descriptor

TARGET = 5e-6  # seconds a launch
_CALLS = 200  # fewer than a stream's queue holds, so that the host never waits for the device


def _median(driver: Any, call: Callable[[], Any], rounds: int = 40) -> float:
    call()
    driver.synchronize()
    each = range(_CALLS)
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in each:
            call()
        times.append((time.perf_counter() - start) / _CALLS)
        driver.synchronize()
    return statistics.median(times)


class Cost(NamedTuple):
    seconds: float  # a call
    launches: int


def measure(ours: FlashAttn, memory: Memory) -> Dict[str, Cost]:
    """By what is called. The loop is Python's, through cffi; what these take, by a call with the
    same arguments of a function that ignores them, is shown and not part of the others."""
    lib, driver, ffi = ours.lib, memory.driver, ours.ffi
    found: Dict[str, Cost] = {}
    bindings = 0.0
    shapes = {"forward": Case("forward", "bf16", 1, 1, seqlen_q=64, dim=64),
              "forward with options": Case("forward", "bf16", 1, 2, 1, seqlen_q=64, dim=64,
                                           causal=True, softcap=10.0, alibi=True),
              "forward of many tiles": Case("forward", "bf16", 1, 16, seqlen_q=2048, dim=128),
              "split forward and merge": Case("forward", "bf16", 1, 8, 1, seqlen_q=1,
                                              seqlen_kv=4096, dim=64),
              "backward": Case("backward", "bf16", 1, 1, seqlen_q=64, dim=64)}
    for name, case in shapes.items():
        arrays = {key: memory.normal(shape, case.dtype) for key, shape in case.shapes().items()}
        try:
            prepared = ours.prepare(case, arrays)
        except Refused:
            continue
        function, plan, args, address, size = prepared.work.raw  # type: ignore[attr-defined]
        nothing = ffi.cast(ffi.typeof(function), lib.flashattn_version)
        total, bindings = (_median(driver, lambda f=f, p=plan, a=args, w=address, n=size:
                                   f(p, a, w, n, ffi.NULL)) for f in (function, nothing))
        found[name] = Cost(total - bindings, driver.capture(prepared.work).nodes)
    # What a launch is made of: a call that launches one small kernel without arrays to check, a
    # call that launches nothing, and what the driver itself takes to enqueue the least there is.
    plan = ours.plan({**descriptor(Case("forward", "bf16", 1, 1, dim=64)), "dropout": 0.5})
    keep = memory.empty((64,), "u8")
    args = ours.args(1, dict(batch=1, seqlen_q=8, seqlen_kv=8))
    out, null = ours.pointer(keep, "uint8_t *"), ffi.NULL
    found["dropout_mask"] = Cost(_median(
        driver, lambda: lib.flashattn_dropout_mask(plan, args, out, null)) - bindings, 1)
    size = ffi.new("int64_t *")
    sizes = ours.sizes(args)
    found["workspace_size"] = Cost(_median(
        driver, lambda: lib.flashattn_workspace_size(plan, 1, sizes, size)) - bindings, 0)
    found["Python and cffi"] = Cost(bindings, 0)
    found["a memset through the driver and ctypes"] = Cost(_median(
        driver, lambda: driver.fill(keep.address, 0, 1, stream=0)), 1)
    return found


def line(found: Dict[str, Cost]) -> str:
    times = ", ".join(
        f"{name} {cost.seconds * 1e6:.1f}" + (f" ({cost.launches} launches)"
                                              if cost.launches != 1 else "")
        for name, cost in found.items())
    slow = [name for name, cost in found.items() if cost.seconds > TARGET * max(cost.launches, 1)]
    verdict = f"above {TARGET * 1e6:.0f} a launch: {', '.join(slow)}" if slow else \
        f"none above {TARGET * 1e6:.0f} a launch"
    return f"host, us a call: {times}; {verdict}"
