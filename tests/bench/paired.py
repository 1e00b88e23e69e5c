"""Ratios of times that were taken in turns.

Runners that take turns meet the same clock, power and neighbours in each round. The ratio of a
round is therefore steadier than the times, and the median of all rounds steadier still.
"""
from __future__ import annotations

import math
import statistics
from typing import List, NamedTuple, Sequence


class Ratio(NamedTuple):
    """The median over rounds, and an interval that holds the true median in 95 of 100 runs, or in
    as many as the number of rounds allows."""
    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


def _outside(rounds: int) -> int:
    """How many of the smallest, and of the largest, ratios lie outside the interval: the largest
    k with P(Binomial(rounds, 1/2) < k) <= 2.5 % (order statistics: no distribution is assumed)."""
    below, k = 0.0, 0
    while k < rounds:
        below += math.comb(rounds, k) / 2.0 ** rounds
        if below > 0.025:
            break
        k += 1
    return min(k, (rounds - 1) // 2)


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """How many times as fast ours is, of seconds by round."""
    if not ours or len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} rounds beside {len(theirs)}; both runners take every turn")
    found: List[float] = sorted(other / own for own, other in zip(ours, theirs))
    k = _outside(len(found))
    # The k-th smallest and largest are the ends.
    return Ratio(statistics.median(found), found[max(k - 1, 0)], found[-max(k, 1)])
