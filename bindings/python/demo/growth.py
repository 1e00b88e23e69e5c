"""Time and peak memory of one layer's attention as the sequence grows: flash and materialised."""
from __future__ import annotations

import time
from typing import Any, Callable, List, NamedTuple, Optional, Tuple

import numpy as np

from .encoder import HEADS
from .places import HOST, Attention, Host

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


def cost_of(attention: Attention, qkv: List[Any], place: Host) -> Tuple[Cost, np.ndarray]:
    cu_seqlens = np.array([0, len(qkv[0])], np.int32)
    kept: List[Any] = []
    start = time.perf_counter()
    peak = place.peak_of(lambda: kept.append(attention(*qkv, cu_seqlens)))
    seconds = time.perf_counter() - start
    for _ in range(4 if seconds < 0.5 else 1 if seconds < 5 else 0):
        start = time.perf_counter()
        attention(*qkv, cu_seqlens)
        place.wait()
        seconds = min(seconds, time.perf_counter() - start)
    return Cost(seconds, peak), place.to_host(kept[0])


def measure(qkv_of: Callable[[int], List[np.ndarray]], place: Host = HOST) -> List[Row]:
    """qkv_of(length): float32 q, k, v, each (length, heads, dim)."""
    rows = []

    def arrays(length: int) -> List[Any]:
        return [place.array(np.ascontiguousarray(x)) for x in qkv_of(length)]

    cost_of(place.flash, arrays(64), place)  # starts the threads
    for length in LENGTHS:
        qkv = arrays(length)
        fast, out = cost_of(place.flash, qkv, place)
        slow = deviation = None
        scores = 4.0 * HEADS * length * length
        if scores < LIMIT and 1.2 * scores < place.available():
            slow, truth = cost_of(place.materialised, qkv, place)
            deviation = float(np.abs(out - truth).max())
        rows.append(Row(length, fast, slow, deviation))
    return rows
