"""Time and peak memory of one layer's attention as the sequence grows: flash and materialised."""
from __future__ import annotations

import ctypes
import re
import time
from typing import Callable, List, NamedTuple, Optional, Tuple

import numpy as np

from .encoder import HEADS, Attention, flash, materialised

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
LIMIT = 4e9  # bytes of scores at which the materialised one stops


class Cost(NamedTuple):
    seconds: float
    peak: float  # bytes above what was in use before the call; NaN: not known on this system


class Row(NamedTuple):
    length: int
    flash: Cost
    materialised: Optional[Cost]  # None: its scores would pass the limit, or the machine's memory
    deviation: Optional[float]    # largest, between the two


def _memory(name: str) -> float:
    with open("/proc/self/status", encoding="ascii") as status:
        found = re.search(rf"{name}:\s+(\d+) kB", status.read())
    return 1024.0 * int(found.group(1)) if found else float("nan")


def peak_of(work: Callable[[], object]) -> float:
    """Bytes of memory that a call needs at its worst, its result included."""
    try:
        # Else memory freed before and kept by malloc would serve the call unseen.
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/clear_refs", "w", encoding="ascii") as marks:
            marks.write("5")  # sets the high-water mark back: proc(5)
        before = _memory("VmRSS")
        work()
        return max(0.0, _memory("VmHWM") - before)
    except (OSError, AttributeError):
        work()
        return float("nan")


def cost_of(attention: Attention, qkv: List[np.ndarray]) -> Tuple[Cost, np.ndarray]:
    cu_seqlens = np.array([0, len(qkv[0])], np.int32)
    kept: List[np.ndarray] = []
    start = time.perf_counter()
    peak = peak_of(lambda: kept.append(attention(*qkv, cu_seqlens)))
    seconds = time.perf_counter() - start
    for _ in range(4 if seconds < 0.5 else 1 if seconds < 5 else 0):
        start = time.perf_counter()
        attention(*qkv, cu_seqlens)
        seconds = min(seconds, time.perf_counter() - start)
    return Cost(seconds, peak), kept[0]


def available() -> float:
    """Bytes of memory the machine has to spare."""
    try:
        with open("/proc/meminfo", encoding="ascii") as info:
            found = re.search(r"MemAvailable:\s+(\d+) kB", info.read())
        return 1024.0 * int(found.group(1)) if found else LIMIT
    except OSError:
        return LIMIT


def measure(qkv_of: Callable[[int], List[np.ndarray]]) -> List[Row]:
    """qkv_of(length): float32 q, k, v, each (length, heads, dim)."""
    rows = []
    cost_of(flash, qkv_of(64))  # starts the threads
    for length in LENGTHS:
        qkv = [np.ascontiguousarray(x) for x in qkv_of(length)]
        fast, out = cost_of(flash, qkv)
        slow = deviation = None
        scores = 4.0 * HEADS * length * length
        if scores < LIMIT and 1.2 * scores < available():
            slow, truth = cost_of(materialised, qkv)
            deviation = float(np.abs(out - truth).max())
        rows.append(Row(length, fast, slow, deviation))
    return rows
