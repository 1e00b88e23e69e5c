"""A clock that repeats.

A GPU is bound by power under long load: what ran before changes what runs next. Kernels therefore
take turns in short bursts with pauses between them, in rotating order. Decoding, whose keys are
read once, is timed call by call, with the caches cleared before each.
"""
from __future__ import annotations

import statistics
import time
from typing import Any, Callable, Dict, List

Work = Callable[[], Any]
_BURST = 6e-3  # seconds
_PAUSE = 10e-3
_FLUSH = 512 << 20  # bytes: its time covers the host's for the call behind it


class Clock:
    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.events = driver.new_event(), driver.new_event()
        self.flush = driver.allocate(_FLUSH)

    def elapsed(self, work: Work, times: int = 1) -> float:
        """Seconds a call, by the device's clock."""
        start, end = self.events
        self.driver.record(start)
        for _ in range(times):
            work()
        self.driver.record(end)
        return self.driver.elapsed(start, end) / times

    def bursts(self, works: Dict[str, Work], rounds: int) -> Dict[str, List[float]]:
        """Seconds of each in every round."""
        one = {}
        for name, work in works.items():
            work()
            one[name] = self.elapsed(work, 2)
        # Long calls fill a burst alone, and need fewer rounds.
        rounds = max(3, min(rounds, int(2.0 / (max(one.values()) + 1e-9))))
        times: Dict[str, List[float]] = {name: [] for name in works}
        order = list(works)
        for _ in range(rounds):
            for name in order:
                if one[name] < _BURST:
                    works[name]()  # warm up
                times[name].append(self.elapsed(works[name],
                                                max(1, round(_BURST / (one[name] + 1e-9)))))
                time.sleep(_PAUSE)
            order.append(order.pop(0))
        return times

    def flushed(self, works: Dict[str, Work], rounds: int) -> Dict[str, List[float]]:
        """Seconds of single calls, each with the L2 cache cleared before it."""
        times: Dict[str, List[float]] = {name: [] for name in works}
        order = list(works)
        for work in works.values():
            work()
        for _ in range(2 * rounds + 1):
            for name in order:
                self.driver.fill(self.flush, 0, _FLUSH, stream=0)
                times[name].append(self.elapsed(works[name]))
            order.append(order.pop(0))
        return times

    def sustained(self, work: Work, seconds: float) -> float:
        """Seconds a call when one kernel runs for so long without a pause."""
        batch = max(1, round(0.05 / (self.elapsed(work, 2) + 1e-9)))
        end, times = time.perf_counter() + seconds, []
        while time.perf_counter() < end:
            times.append(self.elapsed(work, batch))
        return statistics.median(times[len(times) // 2:])

    def copy(self, size: int = 2 << 30) -> float:
        """Bytes a second that a copy on the device reads and writes."""
        source, to = self.driver.allocate(size), self.driver.allocate(size)
        times = [self.elapsed(lambda: self.driver.copy(to, source, size)) for _ in range(12)]
        self.driver.free(source)
        self.driver.free(to)
        return 2 * size / statistics.median(times)
